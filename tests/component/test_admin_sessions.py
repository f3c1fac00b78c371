"""Log-ins of the console, and how often one may fail to."""

import asyncio

import pytest

from gateway.admin.access import door, failures
from gateway.admin.access.entry import AdminKey, Entry
from gateway.admin.access.failures import MAX_ADDRESSES, MAX_FAILURES, WINDOW_S, Counts, network
from gateway.stores.control.audit import RedisAuditLog
from tests.kit.admin_plane import KEYS, SECRETS, bearing, client, logged_in, whole_app

pytest_plugins = ["tests.kit.redis"]

SHORT = "short-but-right"


@pytest.fixture
def app(redis_client, redis_prefix):
    keys = (*KEYS, AdminKey.of_secret("weak", SHORT, "admin"))
    return whole_app(redis_client, redis_prefix, entry=Entry(keys=keys, session_ttl_s=3600))


async def test_a_log_in_from_its_begin_to_its_end(app):
    async with client(app) as browser:
        answer = await browser.post("/session", json={"token": SECRETS["operator"]})
        told = answer.json()
        assert (told["actor"], told["role"], told["kind"]) == ("key-operator", "operator", "session")
        assert told["expires_at"].endswith("Z")
        assert answer.headers["cache-control"] == "no-store"
        flags = {part.strip().lower() for part in answer.headers["set-cookie"].split(";")[1:]}
        assert flags == {"httponly", "max-age=3600", "path=/", "samesite=strict"}
        assert (await browser.get("/session")).json() == told
        assert (await browser.delete("/session")).status_code == 403
        kept = dict(browser.cookies)
        ended = await browser.delete("/session", headers={"x-csrf-token": told["csrf"]})
        assert (ended.status_code, dict(browser.cookies)) == (204, {})
        browser.cookies.update(kept)
        assert (await browser.get("/session")).status_code == 401


async def test_who_comes_by_a_key_is_told_so(app):
    async with bearing(app, SECRETS["viewer"]) as script:
        told = (await script.get("/session")).json()
    assert told == {"actor": "key-viewer", "role": "viewer", "kind": "key", "csrf": None, "expires_at": None}


@pytest.mark.parametrize("url", ["https://gateway.example/admin/v1/session", "http://gateway.example/admin/v1/session"])
async def test_over_tls_the_cookie_stays_there(app, url):
    async with client(app) as browser:
        headers = {"origin": "https://gateway.example"}  # of the page, also where a proxy ends TLS
        answer = await browser.post(url, json={"token": SECRETS["viewer"]}, headers=headers)
    assert "; Secure" in answer.headers["set-cookie"]


async def test_no_other_site_logs_anybody_in(app):
    async with client(app) as browser:
        body = {"token": SECRETS["viewer"]}
        answer = await browser.post("/session", json=body, headers={"origin": "https://evil.example"})
    assert (answer.status_code, "set-cookie" in answer.headers) == (403, False)


async def test_a_new_log_in_takes_the_place_of_the_one_before(app):
    async with logged_in(app, SECRETS["viewer"]) as browser:
        before = dict(browser.cookies)
        await browser.post("/session", json={"token": SECRETS["operator"]})
        assert dict(browser.cookies) != before
        assert (await browser.get("/session")).json()["actor"] == "key-operator"
        browser.cookies.update(before)
        browser.cookies = {**before}
        assert (await browser.get("/session")).status_code == 401


async def test_a_log_in_ends_with_its_key_and_has_its_role_of_now(redis_client, redis_prefix, app):
    async with logged_in(app, SECRETS["admin"]) as browser:
        cookies = dict(browser.cookies)
    lowered = AdminKey.of_secret("key-admin", SECRETS["admin"], "viewer")
    rotated = AdminKey.of_secret("key-admin", "another secret of the same key", "admin")
    for keys, status, role in (((lowered,), 200, "viewer"), ((rotated,), 401, None), (KEYS[:2], 401, None)):
        later = whole_app(redis_client, redis_prefix, entry=Entry(keys=keys))
        async with client(later) as browser:
            browser.cookies.update(cookies)
            answer = await browser.get("/session")
        assert (answer.status_code, answer.json().get("role")) == (status, role)


async def test_all_control_planes_know_a_log_in_and_redis_knows_no_cookie(redis_client, redis_prefix, app):
    async with logged_in(app, SECRETS["viewer"]) as browser:
        (cookie,) = browser.cookies.values()
        other = whole_app(redis_client, redis_prefix)
        async with client(other) as elsewhere:
            elsewhere.cookies.update(browser.cookies)
            assert (await elsewhere.get("/session")).status_code == 200
    names = [name async for name in redis_client.scan_iter(f"{redis_prefix}session:*")]
    written = b" ".join([*names, *[await redis_client.get(name) for name in names]])
    assert len(names) == 1
    assert cookie.encode() not in written
    assert SECRETS["viewer"].encode() not in written
    assert 3590 <= await redis_client.ttl(names[0]) <= 3600


# --- how often one may fail ------------------------------------------------------------------------


async def test_ten_failures_of_an_address_are_enough_for_a_minute(app):
    async with client(app) as guesser:
        statuses = [(await guesser.post("/session", json={"token": f"guess-{n}"})).status_code for n in range(12)]
        assert statuses == [401] * MAX_FAILURES + [429] * 2
        answer = await guesser.post("/session", json={"token": SHORT})
        assert (answer.status_code, answer.json()["code"]) == (429, "rate_limited")
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        shown = await guesser.get("/rules", headers={"authorization": f"Bearer {SHORT}"})
        assert (shown.status_code, "retry-after" in shown.headers) == (429, True)
    async with client(app, address="192.0.2.2") as other:
        assert (await other.post("/session", json={"token": SHORT})).status_code == 200


async def test_bearer_tokens_and_log_ins_are_counted_together(app):
    for n in range(MAX_FAILURES):
        async with bearing(app, f"guess-{n}") as guesser:
            assert (await guesser.get("/rules")).status_code == 401
    async with client(app) as guesser:
        assert (await guesser.post("/session", json={"token": "guess"})).status_code == 429


async def test_a_long_key_and_a_log_in_are_never_kept_out_by_others(app):
    async with logged_in(app, SECRETS["viewer"]) as browser:
        for n in range(MAX_FAILURES + 5):
            async with bearing(app, f"a-guess-of-more-than-thirty-two-characters-{n}") as guesser:
                answer = await guesser.get("/session")
                assert answer.status_code == (401 if n < MAX_FAILURES else 429)
        assert (await browser.get("/session")).status_code == 200
        async with bearing(app, SECRETS["operator"]) as script:
            assert (await script.get("/session")).status_code == 200


async def test_nobody_fills_redis_and_the_audit_log_with_log_ins(redis_client, redis_prefix, app, monkeypatch):
    monkeypatch.setattr(door, "MAX_LOG_INS", 2)
    async with client(app) as http:
        answers = [await http.post("/session", json={"token": SECRETS["viewer"]}) for _ in range(4)]
        assert [answer.status_code for answer in answers] == [200, 200, 429, 429]
        assert 0 < int(answers[-1].headers["retry-after"]) <= 60
        assert (await http.get("/session")).status_code == 200  # the last log-in goes on
        assert (await http.post("/session", json={"token": SECRETS["operator"]})).status_code == 200
    async with bearing(app, SECRETS["viewer"]) as http:
        for _ in range(3):
            assert (await http.delete("/session")).status_code == 204  # there is none to end
    entries = [entry.action async for entry in RedisAuditLog(redis_client, redis_prefix).all()]
    assert entries == ["session.begin", "session.begin", "session.refused", "session.begin"]


async def test_whoever_shows_nothing_has_not_failed(app):
    async with client(app) as passer_by:
        passer_by.cookies.set("gateway_session", "x" * 43)
        answers = [(await passer_by.get("/rules")).status_code for _ in range(MAX_FAILURES + 2)]
    assert answers == [401] * (MAX_FAILURES + 2)


async def test_guesses_at_the_same_time_are_all_counted(app):
    async with client(app) as guesser:
        await asyncio.gather(*(guesser.post("/session", json={"token": f"g{n}"}) for n in range(MAX_FAILURES)))
        assert (await guesser.post("/session", json={"token": SHORT})).status_code == 429


def test_a_count_is_over_after_its_minute():
    counts, began_s = Counts(), 1000.0
    for n in range(MAX_FAILURES):
        assert counts.left_s("a", began_s + n, most=MAX_FAILURES) == 0
        assert counts.add("a", began_s + n) == n + 1
    assert counts.left_s("a", began_s + 20, most=MAX_FAILURES) == WINDOW_S - 20
    assert counts.left_s("b", began_s + 20, most=MAX_FAILURES) == 0
    assert counts.left_s("a", began_s + WINDOW_S, most=MAX_FAILURES) == 0
    assert counts.add("a", began_s + WINDOW_S) == 1


def test_so_many_addresses_are_remembered_and_no_more(monkeypatch):
    monkeypatch.setattr(failures, "MAX_ADDRESSES", 100)
    counts = Counts()
    for n in range(1000):
        counts.add("steady", 1.0)
        counts.add(f"passing {n}", 1.0)
    assert len(counts._began) == 100 < MAX_ADDRESSES
    assert counts.left_s("steady", 1.0, most=1000) > 0


@pytest.mark.parametrize(
    ("one", "other", "are_same"),
    [
        ("192.0.2.1", "192.0.2.2", False),
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("fe80::1%eth0", "fe80::2%eth1", True),
        ("", "testclient", False),
    ],
)
def test_what_one_caller_may_have_all_of_is_one_name(one, other, are_same):
    assert (network(one) == network(other)) is are_same


def test_the_mark_of_a_key_is_of_its_secret_and_does_not_tell_it():
    one, other = (AdminKey.of_secret("k", secret, "admin") for secret in ("a", "b"))
    assert one.mark == AdminKey.of_secret("k", "a", "viewer").mark != other.mark
    assert one.digest[:8] not in one.mark
    assert one.digest not in repr(Entry(keys=(one,)))
