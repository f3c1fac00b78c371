"""Keys that are made, changed and revoked while two workers serve, over a real Redis."""

import asyncio
import contextlib
import hashlib
import json
import logging

import pytest
from websockets.asyncio.client import connect as websocket

from gateway.api.auth import KeyRing
from gateway.backends.scripted import ScriptedBackend
from gateway.core.types import Caller
from gateway.stores import redis_keys
from gateway.stores.redis_script import connect
from gateway.telemetry.logs import JsonLines
from tests.component.test_stream import closed, told
from tests.kit import stateful
from tests.kit.app import KEY, LIMITED_KEY, embedding, running
from tests.kit.keys import EMBED, TEXT, made, worker
from tests.kit.redis_switch import RedisSwitch
from tests.kit.stateful import StatefulBackend
from tests.kit.wait import until

pytest_plugins = ["tests.kit.redis", "tests.kit.key_fixtures"]

THREE = [{"requests": 3, "per": "minute"}]


@pytest.fixture
async def two(redis_client, redis_prefix):
    async with worker(redis_client, redis_prefix) as first, worker(redis_client, redis_prefix) as second:
        yield first, second


# --- coming and going ----------------------------------------------------------------------------


async def test_a_new_key_is_good_everywhere_at_once(admin, two):
    key = await made(admin)
    for each in two:
        assert (await each.embed(key["key"])).status_code == 200
        record = each.gw.seen.records[0]
        assert (record.key_id, record.tenant) == (key["id"], "acme")


async def test_a_revoked_key_is_out_everywhere_within_a_second(admin, two):
    key = await made(admin)
    for each in two:
        await each.becomes(200, key["key"])
    await admin.patch(f"/keys/{key['id']}", json={"disabled": True})
    await asyncio.gather(*(each.becomes(401, key["key"]) for each in two))
    await admin.patch(f"/keys/{key['id']}", json={"disabled": False})
    await asyncio.gather(*(each.becomes(200, key["key"]) for each in two))
    assert (await admin.delete(f"/keys/{key['id']}")).status_code == 204
    await asyncio.gather(*(each.becomes(401, key["key"]) for each in two))


async def test_the_same_where_no_message_comes_through(admin, redis_client, redis_prefix, monkeypatch):
    async def deaf(*_):
        await asyncio.Event().wait()

    monkeypatch.setattr(redis_keys, "listen", deaf)
    async with worker(redis_client, redis_prefix) as first, worker(redis_client, redis_prefix) as second:
        key = await made(admin)
        for each in (first, second):
            await each.becomes(200, key["key"])
        await admin.patch(f"/keys/{key['id']}", json={"disabled": True})
        await asyncio.gather(*(each.becomes(401, key["key"]) for each in (first, second)))


async def test_a_rotated_key_has_its_old_secret_for_the_grace_time_alone(admin, one):
    old = await made(admin)
    await one.becomes(200, old["key"])
    new = (await admin.post(f"/keys/{old['id']}/rotate", json={"grace_s": 3600})).json()
    assert new["id"] == old["id"]
    assert new["key"] != old["key"]
    for key in (old, new):
        await one.becomes(200, key["key"])
    newest = (await admin.post(f"/keys/{old['id']}/rotate")).json()
    await one.becomes(401, new["key"])
    await one.becomes(401, old["key"])
    await one.becomes(200, newest["key"])


async def test_without_redis_a_known_key_works_and_another_is_not_called_unknown(redis_server, admin, redis_prefix):
    async with RedisSwitch(redis_server.port) as switch:
        client = connect(switch.url)
        async with worker(client, redis_prefix) as cut:
            known, other = await made(admin), await made(admin)
            await cut.becomes(200, known["key"])
            await switch.refuse()
            refused = await cut.embed(other["key"])
            assert (refused.status_code, refused.json()["code"]) == (503, "keys_unavailable")
            assert refused.headers["retry-after"] == "1"
            assert (await cut.embed(known["key"])).status_code == 200
            assert (await cut.embed("not-even-a-key")).status_code == 401  # for that nobody needs to be asked
            await switch.restore()
            await cut.becomes(200, other["key"], within_s=5)
        await client.aclose()


@contextlib.asynccontextmanager
async def with_sockets(redis, prefix):
    """A worker with a task that keeps state."""
    options = {"backends": [StatefulBackend("stateful")], "more_tasks": stateful.TASKS}
    rules = [{**rule, "split": [{**rule["split"][0], "backend": "stateful"}]} for rule in stateful.RULES]
    async with worker(redis, prefix, rules=rules, **options) as one:
        yield one


def opened(one, key, **headers):
    url = one.gw.url.replace("http", "ws") + "/v1/tasks/total/stream"
    protocols = ["gateway.v1", f"bearer.{key['key']}"]
    return websocket(url, subprotocols=protocols, additional_headers=headers, proxy=None)


@pytest.mark.parametrize("asked", [{}, {"x-priority": "interactive"}])
async def test_an_open_socket_is_not_more_urgent_than_its_key(admin, redis_client, redis_prefix, asked):
    limit = {"requests": 1, "per": "minute", "priority": "batch"}
    async with with_sockets(redis_client, redis_prefix) as one:
        key = await made(admin, limits=[limit])
        async with opened(one, key, **asked) as socket:
            await socket.send(json.dumps({"input": {"number": 1}}))
            assert (await told(socket))["output"] == {"total": 1}
            await admin.patch(f"/keys/{key['id']}", json={"priority": "batch"})
            await until(lambda: key["id"] not in one.keys._known, timeout_s=1)
            answers = []
            for _ in range(2):
                await socket.send(json.dumps({"input": {"number": 1}}))
                answers.append(await told(socket))
            codes = [one.get("error", {}).get("code") for one in answers]
            assert codes == (["forbidden", "forbidden"] if asked else [None, "rate_limited"])


async def test_an_open_socket_ends_with_its_key(admin, redis_client, redis_prefix):
    async with with_sockets(redis_client, redis_prefix) as one:
        key = await made(admin)
        async with opened(one, key) as socket:
            await socket.send(json.dumps({"input": {"number": 1}}))
            assert (await told(socket))["output"] == {"total": 1}
            await admin.delete(f"/keys/{key['id']}")
            await until(lambda: key["id"] not in one.keys._known, timeout_s=1)
            await socket.send(json.dumps({"input": {"number": 2}}))
            assert (await told(socket))["error"]["code"] == "unauthorized"
            assert (await closed(socket))[0] == 4401


# --- what a key may --------------------------------------------------------------------------------


async def test_a_key_has_its_own_limits(admin, one):
    key = await made(admin, limits=THREE)
    answers = [await one.embed(key["key"]) for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers[:3]] == ["2", "1", "0"]


async def test_a_key_is_for_its_tasks(admin, one):
    key = await made(admin, tasks=["general_llm"])
    refused = await one.embed(key["key"])
    assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")


async def test_a_key_is_for_its_models(admin, redis_client, redis_prefix):
    async with worker(redis_client, redis_prefix) as one:
        key = await made(admin, models=["minilm"])
        headers = {"authorization": f"Bearer {key['key']}"}
        names = (await one.gw.http.get("/v1/models", headers=headers)).json()["data"]
        assert {name["id"] for name in names} == {"text-embedding", "image-classification", "general_llm", "minilm"}
        body = {"model": "org/smollm2", "messages": [{"role": "user", "content": "x"}]}
        refused = await one.gw.http.post("/v1/chat/completions", json=body, headers=headers)
        assert (refused.status_code, refused.json()["error"]["param"]) == (403, "model")
        answer = await one.gw.http.post("/v1/embeddings", json={"model": "minilm", "input": "x"}, headers=headers)
        assert answer.status_code == 200


async def test_a_key_for_batches_is_not_interactive(admin, one):
    key = await made(admin, priority="batch", limits=[{"requests": 1, "per": "minute", "priority": "batch"}])
    refused = await one.embed(key["key"], **{"x-priority": "interactive"})
    assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
    assert "x-priority" in refused.text
    # Without the header it is served as a batch: the limit for batches counts it.
    assert (await one.embed(key["key"])).status_code == 200
    assert (await one.embed(key["key"])).status_code == 429


async def test_a_key_may_be_for_some_pages(admin, one):
    key = await made(admin, origins=["https://app.example"])
    for origin, status in ((None, 200), ("https://app.example", 200), ("https://evil.example", 403), ("null", 403)):
        answer = await one.embed(key["key"], **({"origin": origin} if origin else {}))
        assert answer.status_code == status, origin


async def test_only_an_admin_key_may_control_models(admin, one):
    for is_admin, status in ((False, 403), (True, 404)):  # 404: no such task is configured here
        key = await made(admin, admin=is_admin)
        answer = await one.gw.http.post(
            "/v2/repository/index", json={}, headers={"authorization": f"Bearer {key['key']}"}
        )
        assert answer.status_code == status, answer.text


# --- at the door -----------------------------------------------------------------------------------


async def test_whatever_is_wrong_with_a_key_the_answer_is_the_same(admin, one):
    key, disabled = await made(admin), await made(admin, disabled=True)
    expired = await made(admin, expires_at="2001-01-01T00:00:00Z")
    gone = await made(admin)
    await admin.delete(f"/keys/{gone['id']}")
    good = key["key"]
    wrong = good[:-4] + ("AAAA" if not good.endswith("AAAA") else "BBBB")
    bad = {
        "none": {},
        "empty": {"authorization": "Bearer"},
        "another scheme": {"authorization": f"Basic {good}"},
        "malformed": {"authorization": "Bearer gw_x"},
        "no prefix": {"authorization": f"Bearer {good[3:]}"},
        "unknown": {"authorization": f"Bearer {gone['key']}"},
        "wrong": {"authorization": f"Bearer {wrong}"},
        "disabled": {"authorization": f"Bearer {disabled['key']}"},
        "expired": {"authorization": f"Bearer {expired['key']}"},
        "no token": {"authorization": "Bearer gwt_e30.AAAA"},
        "two places": {"authorization": f"Bearer {good}", "x-api-key": disabled["key"]},
        "x-api-key": {"x-api-key": expired["key"]},
        "empty beside": {"authorization": f"Bearer {good}", "x-api-key": ""},
        "not ASCII": {"authorization": "Bearer gw_ü".encode("latin-1")},
    }
    seen = set()
    for name, headers in bad.items():
        answer = await one.embed(**headers)
        assert answer.status_code == 401, name
        told = {k: v for k, v in answer.headers.items() if k not in ("x-request-id", "date")}
        seen.add((answer.text, json.dumps(told)))
    assert len(seen) == 1
    assert (await one.embed(good)).status_code == 200


async def test_a_key_may_come_as_x_api_key_but_never_in_the_address(admin, one):
    key = (await made(admin))["key"]
    assert (await one.embed(**{"x-api-key": key})).status_code == 200
    assert (await one.embed(key, **{"x-api-key": key})).status_code == 200
    for name in ("key", "api_key", "api-key", "access_token", "x-api-key"):
        answer = await one.gw.http.post(f"{EMBED}?{name}={key}", json=TEXT, headers={"authorization": ""})
        assert answer.status_code == 401


@pytest.mark.parametrize("name", ["authorization", "x-api-key"])
async def test_two_keys_are_none(admin, one, name):
    first, second = (await made(admin))["key"], (await made(admin))["key"]
    prefix = "Bearer " if name == "authorization" else ""
    for other in (first, second):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(one.gw.url.rpartition(":")[2]))
        body = json.dumps(TEXT)
        fields = f"{name}: {prefix}{first}\r\n{name}: {prefix}{other}\r\n"
        head = f"POST {EMBED} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{fields}"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
        assert b" 401 " in await reader.readline()
        writer.close()
        await writer.wait_closed()


async def test_no_header_makes_a_caller_somebody_else():
    """Nothing is limited by address, so no claim about the address helps or hurts."""
    claims = ("x-forwarded-for", "x-real-ip", "forwarded", "x-client-ip", "true-client-ip")
    async with running([ScriptedBackend("triton", [embedding()])]) as gw:
        shown = {"authorization": f"Bearer {LIMITED_KEY}"}
        statuses = []
        for n in range(50):
            claimed = dict.fromkeys(claims, f"10.0.0.{n}") | {"forwarded": f"for=10.0.0.{n}"}
            statuses.append((await gw.http.post(EMBED, json=TEXT, headers={**shown, **claimed})).status_code)
        assert statuses == [200] * 3 + [429] * 47
        # And whoever has no key has none, wherever it says it comes from.
        claimed = {"x-forwarded-for": "127.0.0.1", "authorization": ""}
        assert (await gw.http.post(EMBED, json=TEXT, headers=claimed)).status_code == 401


async def test_no_secret_is_told_anywhere(admin, redis_client, redis_prefix, caplog):
    caplog.set_level(logging.DEBUG)
    async with worker(redis_client, redis_prefix) as one:
        key = await made(admin, limits=THREE)
        minted = await one.gw.http.post("/v1/client-tokens", json={}, headers={"authorization": f"Bearer {key['key']}"})
        token = minted.json()["token"]
        outputs = []
        for shown in (key["key"], token):
            for headers in ({"x-api-key": shown}, {"authorization": f"Bearer {shown}"}, {"x-priority": "x"}):
                answer = await one.embed(**{"x-api-key": shown, **headers})
                outputs += [answer.text, str(answer.headers)]
        for method, path, body in (
            ("GET", "/keys", None),
            ("GET", f"/keys/{key['id']}", None),
            ("PATCH", f"/keys/{key['id']}", {"disabled": True}),
            ("PATCH", f"/keys/{key['id']}", {"name": key["key"], "more": key["key"]}),
            ("GET", f"/keys/{key['key']}", None),
        ):
            outputs.append((await admin.request(method, path, json=body)).text)
        await one.becomes(401, key["key"])
        outputs += [(await one.embed(shown)).text for shown in (key["key"], token)]
        outputs += [repr(record) for record in (*one.gw.seen.records, *one.gw.seen.at_the_door)]
    form = JsonLines()
    outputs += [form.format(record) for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    async for name in redis_client.scan_iter(f"{redis_prefix}*"):
        outputs += [repr(name), repr(await redis_client.dump(name))]
    secret, signature = key["key"].rpartition(key["id"])[2].strip("_"), token.partition(".")[2]
    assert len(outputs) > 30
    for output in outputs:
        assert secret not in output
        assert signature not in output


async def test_the_configurations_keys_need_no_redis(redis_prefix, redis_server):
    async with RedisSwitch(redis_server.port) as switch:
        await switch.refuse()
        client = connect(switch.url)
        digests = {hashlib.sha256(KEY.encode()).hexdigest(): Caller(key_id="one", tenant="t1")}
        async with worker(client, redis_prefix, callers=digests) as one:
            assert (await one.embed(KEY)).status_code == 200
        await client.aclose()


async def test_a_ring_without_redis_knows_no_other_keys():
    async with running([ScriptedBackend("triton", [embedding()])], key_ring=KeyRing({})) as gw:
        key = f"gw_{'a' * 13}_{'b' * 43}"
        answer = await gw.http.post(EMBED, json=TEXT, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 401
