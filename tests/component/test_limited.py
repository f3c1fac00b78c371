"""What the limited are told: the same from every refusal, on every path that a request can come in by."""

import asyncio
import json
import math
from dataclasses import dataclass, field
from typing import Any

import pytest

from gateway.backends.scripted import ScriptedServer, Told
from gateway.core.errors import Fault, FaultKind
from gateway.core.models import ModelFacts, TensorFacts
from gateway.core.types import Caller, Delta, Limit, Message
from gateway.tasks.tensor import TensorTask
from tests.kit.app import DEFAULT_RULES, embedding, running
from tests.kit.wait import until

OWN_KEY = "secret-own"
LIMITS = {
    "requests": Limit(kind="requests", amount=1, per="hour", burst=1),
    "concurrent": Limit(kind="concurrent", amount=1),
    "tokens": Limit(kind="tokens", amount=20, per="hour", burst=20),
    "usd": Limit(kind="usd", amount=10, per="month"),
}
TENSORS = {"inputs": [{"name": "X", "shape": [1], "datatype": "FP32", "data": [1]}]}
ASK = {"model": "general_llm", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
FACTS = {"m": ModelFacts(name="m", inputs={"X": TensorFacts(datatype="FP32", shape=(1,))})}
WHOLE = Message(body=b'{"choices": [{"message": {"role": "assistant", "content": "hi"}}]}')


@dataclass(frozen=True, kw_only=True)
class Way:
    """A path, what is sent there, and where in its body the words of an error are."""

    path: str
    body: dict[str, Any]
    backend: str
    headers: dict[str, str] = field(default_factory=dict)

    def words(self, reply) -> str:
        document = reply.json()
        if self.path.startswith("/v2"):
            assert list(document) == ["error"]
            return document["error"]
        if "error" in document:
            assert document["error"]["type"] == "rate_limit_error"
            assert set(document["error"]) == {"message", "type", "param", "code"}
            return document["error"]["message"]
        assert reply.headers["content-type"] == "application/problem+json"
        assert document["limit"]["name"]
        assert document.get("retry_after_s", 0) == int(reply.headers.get("retry-after", 0))
        return document["detail"]


WAYS = {
    "task": Way(path="/v1/tasks/text-embedding", body={"input": {"text": "a"}}, backend="triton"),
    "infer": Way(path="/v1/infer", body={"task": "text-embedding", "input": {"text": "a"}}, backend="triton"),
    "chat": Way(path="/v1/chat/completions", body=ASK, backend="llm"),
    "stream": Way(path="/v1/chat/completions", body={**ASK, "stream": True}, backend="llm"),
    "embeddings": Way(path="/v1/embeddings", body={"model": "minilm", "input": "a"}, backend="triton"),
    "v2": Way(path="/v2/models/m/infer", body=TENSORS, backend="triton"),
    "v2-stream": Way(path="/v2/models/m/generate_stream", body={"X": 1}, backend="triton"),
}
GENERATIVE = [name for name, way in WAYS.items() if way.backend == "llm"]
RULES = [
    {**rule, "fallback": [], "ordering": {"max_queue_size": 1}}
    for rule in [
        *DEFAULT_RULES,
        {"name": "tensors", "match": {"task": "tensor"}, "split": [{"backend": "triton", "model": "*"}]},
    ]
]


class Scene:
    """The gateway and its two backends, which answer when `go` is set, or fail with `fault`."""

    def __init__(self, way: Way, *limits: str, fault: Fault | None = None, **options: Any) -> None:
        self.way = way
        self.go = asyncio.Event()
        last: Any = fault or (Delta(data=b"{}") if way.body.get("stream") else WHOLE)
        tensors: Any = fault or embedding()
        triton = ScriptedServer("triton", (self.go, tensors), told=Told(facts=FACTS))
        llm = ScriptedServer("llm", (self.go, last))
        self.servers = {"triton": triton, "llm": llm}
        caller = Caller(key_id="own", tenant="t9", limits=tuple(LIMITS[name] for name in limits))
        self._running = running(
            [triton, llm],
            rules=RULES,
            more_tasks={"tensor": TensorTask()},
            more_callers={OWN_KEY: caller},
            prices={"smollm2": {"input": 1, "output": 1}},
            **options,
        )

    async def __aenter__(self):
        self.gw = await self._running.__aenter__()
        self.gw.http.headers["authorization"] = f"Bearer {OWN_KEY}"
        return self

    async def __aexit__(self, *ended: object) -> None:
        self.go.set()
        await self._running.__aexit__(*ended)

    async def post(self, **headers: str):
        return await self.gw.post(self.way.path, self.way.body, **self.way.headers, **headers)

    async def begin(self, **headers: str) -> asyncio.Task:
        """Send one that stays at its backend."""
        server = self.servers[self.way.backend]
        seen = len(server.calls)
        asking = asyncio.create_task(self.post(**headers))
        await until(lambda: len(server.calls) > seen)
        return asking


@pytest.mark.parametrize("name", list(WAYS))
async def test_a_limit_of_its_own(name):
    async with Scene(WAYS[name], "requests") as at:
        at.go.set()
        passed, refused = await at.post(), await at.post()
    assert passed.headers["x-ratelimit-remaining-requests"] == "0"
    assert (
        passed.headers["ratelimit-policy"] == refused.headers["ratelimit-policy"] == '"1-requests-per-hour";q=1;w=3600'
    )
    assert passed.headers["ratelimit"].startswith('"1-requests-per-hour";r=0;t=')
    assert refused.status_code == 429
    assert WAYS[name].words(refused) == "limit reached: 1 requests per hour"
    told = refused.headers
    assert told["x-ratelimit-remaining-requests"] == "0"
    assert 3590 <= int(told["retry-after"]) <= 3600
    assert told["ratelimit"] == f'"1-requests-per-hour";r=0;t={told["retry-after"]}'
    assert math.ceil(int(told["retry-after-ms"]) / 1000) == int(told["retry-after"])
    assert "x-should-retry" not in told


@pytest.mark.parametrize("name", list(WAYS))
async def test_places(name):
    async with Scene(WAYS[name], "concurrent") as at:
        first = await at.begin()
        refused = await at.post()
        at.go.set()
        await first
        again = await at.post()
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert WAYS[name].words(refused) == "limit reached: 1 requests at once"
    assert refused.headers["ratelimit"] == '"1-concurrent";r=0'
    assert again.status_code != 429


@pytest.mark.parametrize("name", GENERATIVE)
async def test_tokens(name):
    async with Scene(WAYS[name], "tokens") as at:
        first = await at.begin()
        refused = await at.post()
        at.go.set()
        passed = await first
    assert refused.status_code == 429
    assert WAYS[name].words(refused) == "limit reached: 20 tokens per hour"
    assert passed.headers["x-ratelimit-limit-tokens"] == "20"
    left = int(passed.headers["x-ratelimit-remaining-tokens"])
    assert 0 < left < 12
    assert abs(int(refused.headers["x-ratelimit-remaining-tokens"]) - left) <= 1
    assert 1 <= int(refused.headers["retry-after"]) <= 3600
    assert "ratelimit" not in refused.headers  # a unit that the fields do not have


@pytest.mark.parametrize("name", GENERATIVE)
async def test_money(name):
    async with Scene(WAYS[name], "usd") as at:
        refused = await at.post()
    assert refused.status_code == 429
    assert WAYS[name].words(refused).startswith("limit reached: 1e-08 USD per month")
    assert refused.headers["x-should-retry"] == "false"
    assert refused.headers["x-ratelimit-remaining-usd"] == "0.00000001"
    assert "retry-after" not in refused.headers  # more than there ever is


@pytest.mark.parametrize("name", list(WAYS))
async def test_a_full_queue(name):
    async with Scene(WAYS[name], max_in_flight=1, max_queue_size=0) as at:
        first = await at.begin()
        refused = await at.post()
        at.go.set()
        await first
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert "queue is full" in WAYS[name].words(refused)


@pytest.mark.parametrize("name", list(WAYS))
async def test_every_place_has_asked_to_wait(name):
    fault = Fault(kind=FaultKind.OVERLOADED, message="busy", retry_after_us=7_300_000)
    async with Scene(WAYS[name], "requests", fault=fault) as at:
        at.go.set()
        at.gw.http.headers["authorization"] = "Bearer secret-one"
        one, other = await at.post(), await at.post()
        calls = len(at.servers[at.way.backend].calls)
    assert calls == 1  # the second was not sent
    assert (one.status_code, one.headers["retry-after"], one.headers["retry-after-ms"]) == (429, "8", "7300")
    assert (other.status_code, other.headers["retry-after"]) == (429, "8")
    assert 7000 < int(other.headers["retry-after-ms"]) <= 7300
    assert "asked to wait" in WAYS[name].words(other)


@pytest.mark.parametrize("name", list(WAYS))
async def test_an_ordering_key_with_too_many(name):
    async with Scene(WAYS[name]) as at:
        first = await at.begin(**{"x-ordering-key": "k"})
        refused = await at.post(**{"x-ordering-key": "k"})
        other = await at.begin(**{"x-ordering-key": "other"})
        at.go.set()
        assert (await first).headers["x-ordering-ticket"] == (await other).headers["x-ordering-ticket"] == "1"
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert "ordering key" in WAYS[name].words(refused)
    if name in ("task", "infer"):
        assert refused.json()["limit"] == {"name": "ordering_queue", "kind": "ordering_queue"}


async def test_in_a_batch_the_words_are_the_items_own():
    way = Way(path="/v1/infer/batch", body={"requests": [WAYS["infer"].body] * 2}, backend="triton")
    async with Scene(way, "requests") as at:
        at.go.set()
        reply = await at.post()
    passed, refused = reply.json()["responses"]
    assert (passed["status"], refused["status"]) == (200, 429)
    assert refused["body"]["limit"]["name"] == "1-requests-per-hour"
    assert 3590 <= refused["body"]["retry_after_s"] <= 3600
    assert json.dumps(refused["body"]).count("1-requests-per-hour") == 2
