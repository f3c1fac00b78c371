"""Cases of limits and of keys that go wrong elsewhere, on three gateway processes over one Redis.

Each has a key, and so counters, of its own; all share the processes, which each have a switch before Redis.
"""

import asyncio
import contextlib
import json
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

import httpx
import pytest
import pytest_asyncio
from redis.asyncio import Redis

from gateway.core.keys import ID_BYTES, SALT_BYTES, SECRET_BYTES, ApiKey, new_id, new_secret
from gateway.stores.redis_key_store import RedisKeyStore
from gateway.stores.redis_script import connect
from tests.kit.otlp import Receiver, receiving
from tests.kit.redis import RedisServer
from tests.kit.redis_switch import RedisSwitch
from tests.kit.replica_runs import MAX_TOKENS, NANO_PER_TOKEN, at_rest, keys, prices, prompt, redis_us, reserved
from tests.kit.replicas import Replica, Rounds, Workshop, all_know_all, all_workers, replicas
from tests.kit.serving import control_plane
from tests.kit.upstream import Upstream, error_reply
from tests.kit.wait import until, until_async

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.alone]

CHAT: Final = "/v1/chat/completions"
PREFIX: Final = "cases:"
SECOND_US: Final = 1_000_000
BACK_S: Final = 10.0  # a Redis that is there again, and a busy machine
LASTS: Final = " ms=1000"  # so that all of a burst are there before the first has ended
RESERVE: Final = reserved(prompt("case-00", used_in=0, used_out=0) + LASTS)
AT_ONCE: Final = 10  # of the 20 that come
TOKENS: Final = AT_ONCE * RESERVE
SLOWEST: Final = 20  # requests a minute, so that one comes back in 3 s
PER_DAY: Final = 6
COOLS_S: Final = 7
SETTLED_S: Final = 0.1  # tokens and money that were not used come back 2 ms after an answer, and machines are busy
LIMITS: Final[dict[str, list[dict[str, Any]]]] = {
    "tokens": [{"per": "day", "tokens": TOKENS}],
    "tokens-over": [{"per": "day", "tokens": TOKENS}],
    "usd": [{"per": "month", "usd": TOKENS * NANO_PER_TOKEN / 1e9}],
    "places": [{"concurrent": 2}],
    "waits": [{"per": "minute", "requests": SLOWEST, "burst": 3}],
    "lives": [{"per": "second", "requests": 2}, {"concurrent": 4}, {"per": "second", "tokens": 1000}],
    "outage": [{"per": "day", "requests": 86_400}],
    "outage-refuses": [{"per": "day", "requests": PER_DAY}],
    "outage-hangs": [{"per": "day", "requests": PER_DAY}],
    "address": [{"per": "day", "requests": 5}],
    "cooling": [{"per": "day", "requests": 1000}],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Three:
    """Three processes, a client for the door of each, and their switches before Redis."""

    running: list[Replica]
    doors: list[httpx.AsyncClient]
    switches: list[RedisSwitch]
    workshop: Workshop
    cooling: Upstream
    receiver: Receiver
    client: Redis

    async def ask(
        self, door: int, text: str = "hello", *, key: str, task: str = "general_llm", **headers: str
    ) -> httpx.Response:
        """One chat at a door; doors are counted on and on."""
        body = {"model": task, "messages": [{"role": "user", "content": text}], "max_tokens": MAX_TOKENS}
        given = {"authorization": f"Bearer {key}", **{name.replace("_", "-"): each for name, each in headers.items()}}
        return await self.doors[door % 3].post(CHAT, json=body, headers=given)

    def executed(self, mark: str) -> int:
        """How many requests of that mark the upstream has had."""
        return sum(one.mark == mark for one in self.workshop.log)

    async def restore(self) -> None:
        """Redis is there for all, and every process has found it: alone, it would refuse this task."""
        for switch in self.switches:
            await switch.restore()
        for door in range(3):

            async def serves(door: int = door) -> bool:
                return (await self.ask(door, key="outage", task="strict")).status_code == 200

            await until_async(serves, timeout_s=BACK_S)

    async def passed_us(self, length_us: int) -> None:
        """Wait until so much of Redis's time has passed."""
        end_us = await redis_us(self.client) + length_us

        async def is_over() -> bool:
            return await redis_us(self.client) >= end_us

        await until_async(is_over, timeout_s=length_us / SECOND_US + BACK_S)


def code(answer: httpx.Response) -> str:
    """Status and code."""
    return "200" if answer.status_code == 200 else f"{answer.status_code} {answer.json()['error']['code']}"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def three(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Three]:
    folder, rounds = tmp_path_factory.mktemp("three"), Rounds()
    async with contextlib.AsyncExitStack() as stack:
        server = stack.enter_context(RedisServer())
        client = await stack.enter_async_context(connect(server.url))
        wait = error_reply(429, {"message": "later"}, {"retry-after": str(COOLS_S)})
        cooling = await stack.enter_async_context(Upstream(wait))
        receiver = stack.enter_context(receiving())
        workshop = await stack.enter_async_context(Workshop(rounds))
        switches = [await stack.enter_async_context(RedisSwitch(server.port)) for _ in range(3)]
        tasks = ("general_llm", "strict", "frail", "cooling")
        backends = {"general_llm": "llm", "strict": "llm", "frail": "frail", "cooling": "cooling"}
        sections: dict[str, Any] = {
            "keys": keys(LIMITS),
            "prices": prices(folder),
            "telemetry": {"traces": {"endpoint": receiver.url, "sample_ratio": 0}},  # of callers who ask for it alone
            "rounds": rounds,
            "tasks": {task: {"contract": "chat"} for task in tasks},
            "backends": {
                name: {"kind": "openai", "base_url": each.base_url}
                for name, each in (("llm", workshop), ("frail", workshop), ("cooling", cooling))
            },
            "rules": [
                {
                    "name": task,
                    "match": {"task": task},
                    "split": [{"backend": backends[task], "model": "m"}],
                    "on_store_down": "closed" if task == "strict" else "local",
                }
                for task in tasks
            ],
        }
        urls = [switch.url for switch in switches]
        running = await stack.enter_async_context(replicas(folder, workshop.base_url, urls, PREFIX, **sections))
        await all_workers(client, PREFIX, 3)
        doors = [
            await stack.enter_async_context(httpx.AsyncClient(base_url=one.serving.url, timeout=30, trust_env=False))
            for one in running
        ]
        yield Three(
            running=running,
            doors=doors,
            switches=switches,
            workshop=workshop,
            cooling=cooling,
            receiver=receiver,
            client=client,
        )


# --- RL-01: bursts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "used", "hit"),
    [
        ("tokens", RESERVE // 2, f"{TOKENS} tokens per day"),
        ("tokens-over", 2 * RESERVE, f"{TOKENS} tokens per day"),
        ("usd", RESERVE // 2, "USD per month"),
    ],
)
async def test_a_burst_over_three_doors_spends_no_more_than_there_is(three: Three, key: str, used: int, hit: str):
    """RL-01: what is admitted is what can be reserved, and then what was really used counts."""
    mark = f"case-{list(LIMITS).index(key):02d}"
    text = prompt(mark, used_in=used // 2, used_out=used - used // 2) + LASTS
    answers = await asyncio.gather(*(three.ask(number, text, key=key) for number in range(20)))
    refused = [answer for answer in answers if answer.status_code != 200]
    assert Counter(map(code, answers)) == {"200": AT_ONCE, "429 rate_limited": 20 - AT_ONCE}
    assert all(hit in answer.json()["error"]["message"] for answer in refused)
    assert three.executed(mark) == AT_ONCE
    left = TOKENS - AT_ONCE * used
    await at_rest(three.client, PREFIX)
    after = []
    for door in range(3):
        await asyncio.sleep(SETTLED_S)
        after.append(await three.ask(door, text.replace("1000", "0000"), key=key))
    if left < 0:  # owed, by every door
        assert {code(answer) for answer in after} == {"429 rate_limited"}
        assert three.executed(mark) == AT_ONCE
        return
    assert {code(answer) for answer in after} == {"200"}
    expected = [left - number * used - RESERVE for number in range(3)]
    if key == "usd":
        told = [round(float(answer.headers["x-ratelimit-remaining-usd"]) * 1000) for answer in after]
        assert told == expected
    else:  # some hundred a day: one may have come back
        told = [int(answer.headers["x-ratelimit-remaining-tokens"]) for answer in after]
        assert all(one <= each <= one + 1 for each, one in zip(told, expected, strict=True)), (told, expected)


# --- RL-03: places come back --------------------------------------------------------------------------------


async def test_a_place_comes_back_however_a_request_ends(three: Three):
    """RL-03: two of each, by two doors; no lease (10 s) is waited for."""
    key, bodies = "places", ("{", '{"model": "general_llm", "messages": 7}')
    ends = Counter[str]()
    for door in (0, 1):
        ends[code(await three.ask(door, "late ms=60000", key=key, x_timeout_ms="150"))] += 1
        ends[code(await three.ask(door, key=key, task="no-such-model"))] += 1
        head = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        ends[code(await three.doors[door].post(CHAT, content=bodies[door], headers=head))] += 1
        ends[code(await three.ask(door, "late cut", key=key, task="frail"))] += 1
        ends[code(await three.ask(door, "late status=400", key=key))] += 1
        leaving = asyncio.ensure_future(three.ask(door, "leaves ms=60000", key=key))
        await until_async(lambda door=door: _has_begun(three, "leaves", door + 1))
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
    assert ends == {
        "504 deadline_exceeded": 2,
        "404 model_not_found": 2,
        "400 malformed_request": 1,
        "422 invalid_input": 1,
        "502 backend_error": 2,
        "400 invalid_input": 2,
    }
    await at_rest(three.client, PREFIX)
    good = [asyncio.ensure_future(three.ask(door, "good ms=60000", key=key)) for door in (1, 2)]
    await until_async(lambda: _has_begun(three, "good", 2))
    third = await three.ask(0, "third", key=key)
    assert code(third) == "429 rate_limited"
    assert "2 requests at once" in third.json()["error"]["message"]
    for each in good:
        each.cancel()
    await asyncio.gather(*good, return_exceptions=True)
    await at_rest(three.client, PREFIX)
    assert [code(await three.ask(door, key=key)) for door in range(3)] == ["200"] * 3


async def _has_begun(three: Three, mark: str, count: int) -> bool:
    return three.executed(mark) == count


# --- RL-06: a refusal that can be used ----------------------------------------------------------------------


async def test_what_is_left_falls_to_nothing_and_retry_after_holds(three: Three):
    """RL-06: by each door in turn; the window is 9 s, one request comes back in 3."""
    answers = [await three.ask(door, key="waits") for door in range(6)]
    assert [code(each) for each in answers] == ["200"] * 3 + ["429 rate_limited"] * 3
    assert [each.headers["x-ratelimit-remaining-requests"] for each in answers] == ["2", "1", "0", "0", "0", "0"]
    for each in answers[3:]:
        after_s = int(each.headers["retry-after"])
        assert 1 <= after_s <= 60 // SLOWEST
        assert (after_s - 1) * 1000 < int(each.headers["retry-after-ms"]) <= after_s * 1000
        assert each.headers["ratelimit"].endswith(f";r=0;t={after_s}")
        assert each.headers["ratelimit-policy"].endswith(";q=3;w=9")
        assert f"{SLOWEST} requests per minute" in each.json()["error"]["message"]
    await three.passed_us(after_s * SECOND_US)
    assert code(await three.ask(2, key="waits")) == "200"


async def test_all_backends_cooling_down_is_told_as_such(three: Three):
    """RL-06: the backend's own 429 is no quota of the caller's, and says when to come back."""
    for door in range(3):
        first = await three.ask(door, key="cooling", task="cooling")
        sent = _asked(three.cooling)
        again = await three.ask(door, key="cooling", task="cooling")
        assert [code(first), code(again)] == ["429 queue_full"] * 2, (first.text, again.text)
        assert 1 <= int(again.headers["retry-after"]) <= COOLS_S
        assert "asked to wait" in again.json()["error"]["message"]
        assert _asked(three.cooling) == sent


def _asked(upstream: Upstream) -> int:
    return sum(seen.method == "POST" for seen in upstream.requests)


# --- RL-08: no counter lives for ever -----------------------------------------------------------------------


async def test_no_counter_is_without_an_end_after_cut_connections(three: Three):
    """RL-08: the connection is cut right after Redis has run the first counting command of a window."""
    await at_rest(three.client, PREFIX)  # so that the first command of each is that of its request
    for number in range(6):
        switch = three.switches[number % 3]
        accepted = switch.accepted
        switch.cut_after(1, b"EVALSHA")
        answer = await three.ask(number, key="lives")
        assert answer.status_code in (200, 429), answer.text
        await _all_end(three)
        await until_async(lambda switch=switch, accepted=accepted: _has_come_again(switch, accepted))
    await three.restore()

    async def is_refused() -> bool:
        return code(await three.ask(1, key="lives")) == "429 rate_limited"

    await until_async(is_refused)
    await _all_end(three)
    await three.passed_us(2 * SECOND_US)
    assert code(await three.ask(2, key="lives")) == "200"
    await at_rest(three.client, PREFIX)
    await _all_end(three)


async def _has_come_again(switch: RedisSwitch, accepted: int) -> bool:
    return switch.accepted > accepted


async def _all_end(three: Three) -> None:
    names = [name async for name in three.client.scan_iter(f"{PREFIX}adm:*", count=1000)]
    assert names
    ends = {name: await three.client.pttl(name) for name in names}
    assert not [name for name, end in ends.items() if end == -1], "no end"


# --- RL-09: Redis is away -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["refuses", "hangs"])
async def test_a_redis_that_is_away_is_no_quota_and_no_crash(three: Three, fault: str):
    """RL-09: twenty calls; the rule that decides alone answers all, the closed one refuses by a 503 of its own."""
    await all_know_all(three.client, PREFIX, 3)
    for switch in three.switches:
        if fault == "refuses":
            await switch.refuse()
        else:
            switch.pause()
    before = [await _degraded(one) for one in three.running]
    async with asyncio.timeout(20 * 1.0):  # a second each
        answers = [await three.ask(number, key="outage") for number in range(20)]
    assert {code(each) for each in answers} == {"200"}
    async with asyncio.timeout(20 * 1.0):
        closed = [await three.ask(number, key="outage", task="strict") for number in range(20)]
    assert {code(each) for each in closed} == {"503 limits_unavailable"}
    assert all("retry-after" in each.headers and "Traceback" not in each.text for each in closed)
    # A limit is divided by the three, and so still one: no more passes than with Redis, and what is refused says why.
    small = [await three.ask(number, key=f"outage-{fault}") for number in range(12)]
    assert Counter(map(code, small)) == {"200": PER_DAY, "429 rate_limited": 12 - PER_DAY}
    refused = [each for each in small if each.status_code != 200]
    assert all(f"{PER_DAY} requests per day" in each.json()["error"]["message"] for each in refused)
    for one, count in zip(three.running, before, strict=True):
        assert await _degraded(one) > count
    await three.restore()
    async with asyncio.timeout(20 * 1.0):
        normal = [await three.ask(number, key="outage", task="strict") for number in range(20)]
    assert {code(each) for each in normal} == {"200"}


async def _degraded(replica: Replica) -> float:
    lines = (await _metrics(replica)).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("gateway_limiter_degraded_total"))


async def _metrics(replica: Replica) -> str:
    async with httpx.AsyncClient(base_url=replica.serving.ops_url, timeout=30, trust_env=False) as ops:
        return (await ops.get("/metrics")).text


# --- RL-12: who somebody is ---------------------------------------------------------------------------------


async def test_an_address_that_a_caller_names_changes_nothing(three: Three):
    """RL-12: limits go by key; fifty requests, each from elsewhere by its own word."""
    seen = Counter[str]()
    for number in range(50):
        named = {"x_forwarded_for": f"10.0.0.{number}", "x_real_ip": f"10.1.0.{number}"}
        seen[code(await three.ask(number, key="address", forwarded=f"for=10.2.0.{number}", **named))] += 1
    assert seen == {"200": 5, "429 rate_limited": 45}
    assert code(await three.ask(0, key="nobody", x_forwarded_for="127.0.0.1")).startswith("401")


# --- SC-01: keys --------------------------------------------------------------------------------------------


async def _stored(store: RedisKeyStore, **fields: Any) -> tuple[ApiKey, str]:
    """A key in the shared store, and its text."""
    key_id = new_id(secrets.token_bytes(ID_BYTES))
    text, secret = new_secret(key_id, secrets.token_bytes(SECRET_BYTES), secrets.token_bytes(SALT_BYTES))
    key = ApiKey(id=key_id, tenant="shop", name="case", secrets=(secret,), created_s=1, **fields)
    await store.create(key)
    return key, text


async def test_all_doors_refuse_every_bad_key_alike(three: Three):
    """SC-01: and none of them says the secret, nor do logs, metrics and traces."""
    store = RedisKeyStore(three.client, PREFIX)
    _, good = await _stored(store)
    _, expired = await _stored(store, expires_s=2)
    _, disabled = await _stored(store, is_disabled=True)
    unknown, _ = new_secret(new_id(b"12345678"), secrets.token_bytes(SECRET_BYTES), b"1" * SALT_BYTES)
    wrong = good[:-43] + secrets.token_urlsafe(SECRET_BYTES)
    bad = [wrong, unknown, expired, disabled, good.removeprefix("gw_"), good[:-1], good + "x"]
    shown: list[dict[str, str]] = [{"authorization": f"Bearer {one}"} for one in bad]
    shown += [{"x-api-key": one} for one in bad]
    shown += [{"authorization": good}, {"authorization": f"Basic {good}"}, {}]
    shown += [{"authorization": f"Bearer {good}", "x-api-key": unknown}]
    body = {"model": "general_llm", "messages": [{"role": "user", "content": "never"}]}
    trace_id = secrets.token_hex(16)
    traced = {"traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-01"}
    answers, told = [], set()
    for door in three.doors:
        assert (await door.post(CHAT, json=body, headers={"x-api-key": good, **traced})).status_code == 200
        refusals = [await door.post(CHAT, json=body, headers={**each, **traced}) for each in shown]
        refusals.append(await door.post(CHAT, json=body, params={"api_key": good, "key": good}, headers=traced))
        twice = [*traced.items(), *[("authorization", f"Bearer {good}")] * 2]
        refusals.append(await door.post(CHAT, json=body, headers=twice))
        told |= {(each.status_code, each.text, each.headers.get("www-authenticate")) for each in refusals}
        answers += refusals
    assert len(told) == 1, told
    assert {each.status_code for each in answers} == {401}
    written = [f"{each.text} {each.headers}" for each in answers]
    written += [await _metrics(one) for one in three.running]
    written += [one.serving.log.read_text() for one in three.running]

    def are_traced() -> bool:
        spans = [one for one in three.receiver.spans if (one.trace_id, one.kind) == (trace_id, "SERVER")]
        return len(spans) == len(answers) + len(three.doors)

    await until(are_traced, timeout_s=30)
    written += [body.decode("latin-1") for body in three.receiver.bodies]
    for secret in (good, *bad):
        assert not any(secret[-43:] in text for text in written)


async def test_a_key_that_is_disabled_is_refused_by_all_within_a_second(three: Three):
    """SC-01: and is good again as soon as it is enabled. The audit log has both, and no key; nor has a wrong door's."""
    config = three.running[0].serving.config
    async with control_plane(config) as admin:
        made = (await admin.post("/keys", json={"tenant": "shop", "name": "case"})).json()
        text = made["key"]
        assert [code(await three.ask(door, key=text)) for door in range(3)] == ["200"] * 3
        for is_disabled, status in ((True, 401), (False, 200)):
            changed = await admin.patch(f"/keys/{made['id']}", json={"disabled": is_disabled})
            assert changed.status_code == 200

            async def has_become(door: int, status: int = status) -> bool:
                return (await three.ask(door, key=text)).status_code == status

            async with asyncio.TaskGroup() as doors:
                for door in range(3):
                    waits = until_async(lambda door=door, check=has_become: check(door), timeout_s=1.0)
                    doors.create_task(waits)
        at_the_wrong_door = await admin.get("/rules", headers={"authorization": f"Bearer {text}"})
        assert at_the_wrong_door.status_code == 401
        audited = (await admin.get("/audit/export")).text
    actions = [json.loads(line)["action"] for line in audited.splitlines()]
    assert actions == ["key.create", "key.change", "key.change", "session.refused"]
    written = (audited, changed.text, at_the_wrong_door.text, config.with_suffix(".admin.log").read_text())
    assert not any(text[-43:] in each for each in written)
