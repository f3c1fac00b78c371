"""What one tenant does under a name, another does under the same: each case with both stores, each with all its paths.

`HERS` and `HIS` are keys of two tenants; one of these is called `all`, as the gateway calls what everybody shares.
"""

import asyncio
import hashlib
import json

import pytest

from gateway.api.auth import KeptSecret, KeyRing
from gateway.backends.scripted import ScriptedBackend
from gateway.core.types import Caller, Limit, Message, Usage
from gateway.stores.memory_admissions import MemoryAdmissions
from gateway.stores.memory_answers import MemoryAnswers
from gateway.stores.redis_admissions import RedisAdmissions
from gateway.stores.redis_answers import RedisAnswers
from gateway.wiring import monotonic_us, wall_us
from tests.kit.app import embedding, running
from tests.kit.wait import until

pytest_plugins = ["tests.kit.redis"]

HERS, HIS, NARROW = "secret-hers", "secret-his", "secret-narrow"
LIMITS = (Limit(kind="requests", amount=40, per="day", burst=40, shared_by="tenant"),)
CALLERS = {
    HERS: Caller(key_id="hers", tenant="all", limits=LIMITS),
    HIS: Caller(key_id="his", tenant="his", limits=LIMITS),
    NARROW: Caller(key_id="narrow", tenant="all", tasks=frozenset({"general_llm"})),  # of her tenant, for less
}
EMBED, CHAT, INFER, BATCH = "/v1/tasks/text-embedding", "/v1/chat/completions", "/v1/infer", "/v1/infer/batch"
TEXT = {"input": {"text": "hello"}}
ASK = {"model": "general_llm", "messages": [{"role": "user", "content": "hi"}]}
BODIES = {
    EMBED: TEXT,
    CHAT: ASK,
    INFER: {"task": "text-embedding", **TEXT},
    BATCH: {"requests": [{"task": "text-embedding", **TEXT}]},
}
OTHERS = {
    EMBED: {"input": {"text": "other"}},
    CHAT: {**ASK, "max_tokens": 7},
    INFER: {"task": "text-embedding", "input": {"text": "other"}},
    BATCH: {"requests": [{"task": "text-embedding", "input": {"text": "other"}}]},
}


def rules(**policies):
    places = {"text-embedding": ("triton", "m"), "general_llm": ("llm", "smol")}
    return [
        {"name": task, "match": {"task": task}, "split": [{"backend": backend, "model": model}], **policies}
        for task, (backend, model) in places.items()
    ]


def said():
    message = {"role": "assistant", "content": "hi"}
    body = {"id": "up", "object": "chat.completion", "created": 1, "model": "smol"}
    body["choices"] = [{"index": 0, "message": message, "finish_reason": "stop"}]
    return Message(body=json.dumps(body).encode(), usage=Usage(input_tokens=1, output_tokens=1))


def backends():
    return [ScriptedBackend("triton", [embedding()]), ScriptedBackend("llm", [said()])]


@pytest.fixture(params=["memory", "redis"])
async def stores(request, redis_client, redis_prefix):
    """What is shared by workers."""
    local = MemoryAdmissions(wall_us)
    if request.param == "memory":
        yield {"answers": MemoryAnswers(monotonic_us, max_bytes=2**26), "admissions": local}
        return
    answers = RedisAnswers(redis_client, redis_prefix, max_bytes=2**26, timeout_s=5)
    admissions = RedisAdmissions(redis_client, redis_prefix, local, timeout_s=5)
    admissions.start()
    yield {"answers": answers, "admissions": admissions}
    await admissions.close()
    await answers.close()


def gateway(stores, *, tokens=False, **options):
    ring = KeyRing(
        {hashlib.sha256(key.encode()).hexdigest(): caller for key, caller in CALLERS.items()},
        signing=KeptSecret(b"s" * 32).signing if tokens else None,
    )
    return running(backends(), key_ring=ring, **stores, **options)


async def ask(gw, key, path, body=None, **headers):
    return await gw.post(path, body or BODIES[path], authorization=f"Bearer {key}", **headers)


def calls(gw) -> int:
    return sum(len(backend.calls) for backend in gw.backends.values())


@pytest.mark.parametrize("path", BODIES)
async def test_an_idempotency_key_is_a_tenants_own(stores, path):
    once = {"idempotency-key": '"k"'}
    async with gateway(stores, rules=rules()) as gw:
        hers = await ask(gw, HERS, path, **once)
        his = await ask(gw, HIS, path, **once)
        assert (hers.status_code, his.status_code, calls(gw)) == (200, 200, 2)
        assert "idempotency-replayed" not in his.headers
        more = {"idempotency-key": '"l"'}
        hers = await ask(gw, HERS, path, **more)
        his = await ask(gw, HIS, path, OTHERS[path], **more)  # a conflict would tell him of her request
        assert (hers.status_code, his.status_code, calls(gw)) == (200, 200, 4)
        assert (await ask(gw, HERS, path, **once)).status_code == 200
        assert calls(gw) == 4


@pytest.mark.parametrize("path", [EMBED, INFER, CHAT])
async def test_what_is_cached_for_a_tenant_is_for_it_alone(stores, path):
    async with gateway(stores, rules=rules(cache={"ttl_s": 60})) as gw:
        for key, made in ((HERS, 1), (HERS, 1), (HIS, 2), (HIS, 2), (HERS, 2)):
            answer = await ask(gw, key, path)
            assert (answer.status_code, calls(gw)) == (200, made)


async def test_what_everybody_shares_is_no_tenants_whatever_that_is_called(stores):
    async with gateway(stores, rules=rules(cache={"ttl_s": 60})) as gw:
        assert (await ask(gw, HERS, EMBED)).status_code == 200  # kept for the tenant `all`
    async with gateway(stores, rules=rules(cache={"ttl_s": 60, "shared_by": "all"})) as gw:
        assert (await ask(gw, HIS, EMBED)).status_code == 200
        assert calls(gw) == 1  # not hers
        assert (await ask(gw, HERS, EMBED)).status_code == 200
        assert calls(gw) == 1  # shared, as the rule says


@pytest.mark.parametrize("policies", [{}, {"cache": {"ttl_s": 60}}, {"cache": {"ttl_s": 60, "shared_by": "all"}}])
async def test_a_key_that_may_not_ask_is_given_nothing_that_is_kept(stores, policies):
    async with gateway(stores, rules=rules(**policies)) as gw:
        for path in (EMBED, INFER):
            for headers in ({}, {"idempotency-key": f'"{path}"'}):
                assert (await ask(gw, HERS, path, **headers)).status_code == 200
                assert (await ask(gw, NARROW, path, **headers)).status_code == 403


@pytest.mark.parametrize("path", [CHAT, EMBED, BATCH])
async def test_an_ordering_key_is_a_tenants_own(stores, path):
    go, ordered = asyncio.Event(), {"x-ordering-key": "k"}
    async with gateway(stores, rules=rules(ordering={"mode": "serial"})) as gw:
        for backend in gw.backends.values():
            backend.scripts.insert(0, [go, *backend.scripts[0]])  # the first call waits, all others do not
        hers = []
        for number in (1, 2):
            hers.append(asyncio.create_task(ask(gw, HERS, path, **ordered)))
            await until(lambda count=number: len(gw.seen.began_tasks) == count and calls(gw) == 1)
        his = await ask(gw, HIS, path, **ordered)
        assert (his.status_code, [one.done() for one in hers]) == (200, [False, False])
        go.set()
        told = [await one for one in hers]
        assert [one.status_code for one in told] == [200, 200]
        if path != BATCH:
            assert [one.headers["x-ordering-ticket"] for one in (*told, his)] == ["1", "2", "1"]


async def test_a_limit_of_a_tenant_is_used_up_for_it_alone(stores):
    async with gateway(stores, rules=rules()) as gw:
        statuses = [(await ask(gw, HERS, EMBED)).status_code for _ in range(41)]
        assert statuses == [200] * 40 + [429]
        assert (await ask(gw, HIS, EMBED)).status_code == 200


async def test_a_client_token_is_of_its_keys_tenant_and_of_no_other(stores):
    async with gateway(stores, rules=rules(), tokens=True) as gw:
        made = [(await ask(gw, key, "/v1/client-tokens", {"tasks": ["text-embedding"]})).json() for key in (HERS, HIS)]
        tokens = [one["token"] for one in made]
        mixed = [f"{one.partition('.')[0]}.{other.partition('.')[2]}" for one, other in (tokens, tokens[::-1])]
        for token, status in ((tokens[0], 200), (tokens[1], 200), (mixed[0], 401), (mixed[1], 401)):
            answer = await ask(gw, token, EMBED, **{"idempotency-key": '"k"'})
            assert (answer.status_code, "idempotency-replayed" in answer.headers) == (status, False)
        await until(lambda: len(gw.seen.records) >= 2)
        assert [one.tenant for one in gw.seen.records if one.status == 200] == ["all", "his"]


@pytest.mark.parametrize(
    "path", ["/admin/v1/requests", "/admin/v1/usage", "/admin/v1/keys", "/admin/v1/audit", "/metrics"]
)
async def test_nothing_of_other_tenants_can_be_asked_for_on_the_data_plane(stores, path):
    async with gateway(stores, rules=rules()) as gw:
        answer = await gw.http.get(path, headers={"authorization": f"Bearer {HERS}"})
    assert answer.status_code == 404
