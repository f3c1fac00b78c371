"""Metrics of requests as they really go: labels that callers cannot multiply, waits, attempts and refusals."""

import asyncio
import random
from urllib.parse import quote

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.backends.scripted import ScriptedBackend, ScriptedServer
from gateway.core.errors import Fault, FaultKind
from gateway.core.models import ModelFigures
from gateway.core.rules import RuleSet, parse_rules
from gateway.core.switches import Scope, Switch, Switches
from gateway.core.tensors import from_numpy
from gateway.core.types import Caller, InferenceRequest, Place, Route, Tensors, Timing
from gateway.core.watching.record import RequestRecord, Tried
from gateway.tasks.tensor import TensorTask
from gateway.telemetry.metrics import Metrics
from tests.kit.app import DEFAULT_RULES, LIMITED_KEY, embedding, running
from tests.kit.wait import until

TENSORS = {"name": "tensors", "match": {"task": "tensor"}, "split": [{"backend": "triton", "model": "*"}]}
RULES = [*DEFAULT_RULES, TENSORS]
EMBED = "/v1/tasks/text-embedding"
TEXT = {"input": {"text": "a"}}
SERVED = ModelFigures(
    replica="",
    model="served",
    version="3",
    requests=0,
    failures=0,
    inferences=0,
    executions=0,
    queue_us=0,
    compute_input_us=0,
    compute_infer_us=0,
    compute_output_us=0,
)
NASTY = 'quote" new\nline back\\slash'


def answer() -> Tensors:
    return Tensors(outputs=(from_numpy("Y", np.zeros(1, np.float32)),), version="3")


def asked() -> dict:
    return {"inputs": [{"name": "X", "shape": [1], "datatype": "FP32", "data": [1.0]}]}


def samples(registry: CollectorRegistry) -> dict[str, list]:
    """Every sample of the page as Prometheus reads it, by name."""
    found: dict[str, list] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def series(registry: CollectorRegistry) -> int:
    return sum(len(of_one) for of_one in samples(registry).values())


def requests_by(registry: CollectorRegistry, *labels: str) -> dict[tuple[str, ...], float]:
    found: dict[tuple[str, ...], float] = {}
    for sample in samples(registry).get("gateway_requests_total", []):
        key = tuple(sample.labels[label] for label in labels)
        found[key] = found.get(key, 0) + sample.value
    return found


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"gateway_{name}", {"task": "text-embedding", **labels})


def parts(registry: CollectorRegistry, name: str) -> float:
    """The seconds of all requests together."""
    return sum(sample.value for sample in samples(registry)[f"gateway_{name}_seconds_sum"])


async def test_names_of_callers_choosing_add_a_constant_number_of_series():  # MT-01
    registry, draw = CollectorRegistry(), random.Random(1)  # noqa: S311 - names that are new, not secret
    metrics = Metrics(registry)
    gone = Fault(kind=FaultKind.NO_SUCH_MODEL, message="no such model")
    triton = ScriptedServer("triton", (gone,))
    backends = [triton, ScriptedBackend("llm", (gone,))]
    async with running(backends, rules=RULES, more_tasks={"tensor": TensorTask()}, observers=[metrics]) as gw:
        metrics.health({}, gw.rules.current())

        async def one(name: str) -> None:
            await gw.http.post(f"/v2/models/{quote(name, safe='')}/infer", json=asked())
            await gw.http.post(f"/v2/models/m/versions/{draw.randrange(10**6)}/infer", json=asked())
            await gw.http.post(f"/{quote(name, safe='')}", json=asked())
            body = {"model": name, "user": name, "messages": [{"role": "user", "content": "hi"}]}
            await gw.http.post("/v1/chat/completions", json=body)
            await gw.http.post("/v1/chat/completions", json={**body, "model": "general_llm"})

        await one(NASTY)
        few = series(registry)
        for _ in range(100):
            await one(f"name-{draw.randrange(10**9)}")
        assert len(gw.seen.records) + len(gw.seen.at_the_door) >= 4 * 101
    assert series(registry) == few
    page = generate_latest(registry).decode()
    assert "name-" not in page
    assert "quote" not in page
    assert {model for (model,) in requests_by(registry, "model")} == {"none", "other", "smollm2"}


def test_a_hundred_thousand_names_and_tenants_leave_few_series():
    registry, draw = CollectorRegistry(), random.Random(2)  # noqa: S311 - the same
    metrics = Metrics(registry)
    metrics.health({}, RuleSet(revision=1, rules=parse_rules(RULES)))
    outcomes = [kind.value for kind in FaultKind] + ["ok", "left"]
    for number in range(100_000):
        name, tenant = f"m{draw.getrandbits(64)}", f"t{draw.getrandbits(64)}"
        caller = Caller(key_id=f"k{number}", tenant=tenant)
        request = InferenceRequest(
            id="",
            task="tensor",
            caller=caller,
            input=None,
            received_us=0,
            deadline_us=0,
            model=name,
            version=str(number),
        )
        place = Place(backend="triton", model=name, version=str(number))
        sent = number % 3
        metrics.began("tensor")
        metrics.ended(
            RequestRecord(
                id=str(number),
                task="tensor",
                tenant=tenant,
                key_id=caller.key_id,
                total_us=10,
                request=request,
                rule="tensors",
                timing=Timing(total_us=10, admit_us=1, backend_us=1),
                tried=(Tried(place, outcomes[number % len(outcomes)], number % 2),) if sent else (),
                route=Route(backend="triton", model=name, version=str(number), rule="tensors", attempts=1)
                if sent == 2
                else None,
            )
        )
    assert series(registry) < 2000
    assert requests_by(registry, "task", "model") == {("tensor", "other"): 100_000}


async def test_what_servers_serve_and_rules_name_keeps_its_name():
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    triton = ScriptedServer("triton", (answer(),))
    async with running([triton], rules=RULES, more_tasks={"tensor": TensorTask()}, observers=[metrics]) as gw:
        metrics.health({}, gw.rules.current())
        await gw.http.post("/v2/models/served/infer", json=asked())  # nobody knows it yet
        metrics.figures("triton", [SERVED])
        await gw.http.post("/v2/models/served/infer", json=asked())
        await gw.http.post("/v2/models/served/versions/3/infer", json=asked())
        await gw.http.post("/v2/models/served/versions/8/infer", json=asked())
        triton.scripts = [(embedding(),)]
        await gw.http.post(EMBED, json=TEXT)
    assert requests_by(registry, "backend", "model", "version", "rule") == {
        ("triton", "other", "other", "tensors"): 1,
        ("triton", "served", "3", "tensors"): 3,
        ("triton", "text_embedding", "1", "embeddings"): 1,
    }


async def test_a_failed_request_is_told_of_the_place_that_failed_it_last():
    registry = CollectorRegistry()
    down = Fault(kind=FaultKind.UNAVAILABLE, message="down")
    slow = Fault(kind=FaultKind.TIMEOUT, message="slow")
    backends = [ScriptedBackend("triton", (down,)), ScriptedBackend("local", (slow,), (embedding(),))]
    async with running(backends, observers=[Metrics(registry)]) as gw:
        assert (await gw.post(EMBED, TEXT)).status_code == 504
        assert (await gw.post(EMBED, TEXT)).status_code == 200
    assert requests_by(registry, "backend", "code") == {("local", "deadline_exceeded"): 1, ("local", "ok"): 1}
    tried = {(s.labels["backend"], s.labels["outcome"]): s.value for s in samples(registry)["gateway_attempts_total"]}
    assert tried == {("triton", "unavailable"): 2, ("local", "timeout"): 1, ("local", "ok"): 1}


async def test_waits_are_told_apart_from_the_gateways_own_time():
    registry, go = CollectorRegistry(), asyncio.Event()
    triton = ScriptedBackend("triton", (go, embedding()), (embedding(),))
    async with running([triton], max_in_flight=1, observers=[Metrics(registry)]) as gw:
        first = asyncio.create_task(gw.post(EMBED, TEXT))
        await until(lambda: triton.calls)
        second = asyncio.create_task(gw.post(EMBED, TEXT))
        await until(lambda: gw.loads["triton"] == 2)
        third = asyncio.create_task(gw.http.post(EMBED, json=TEXT))
        await until(lambda: gw.loads["triton"] == 3)
        third.cancel()  # it has waited in vain
        await until(lambda: gw.loads["triton"] == 2)
        go.set()
        await asyncio.gather(first, second)
    assert value(registry, "queue_wait_seconds_count", backend="triton") == 2
    assert value(registry, "attempts_total", backend="triton", outcome="left") == 1
    assert value(registry, "overhead_seconds_count") == 3
    assert parts(registry, "queue_wait") > 0
    whole = parts(registry, "request_duration")
    told = sum(parts(registry, name) for name in ("queue_wait", "backend_duration", "overhead"))
    assert told == pytest.approx(whole)


async def test_an_ordering_wait_is_no_overhead():
    registry, go = CollectorRegistry(), asyncio.Event()
    triton = ScriptedBackend("triton", (go, embedding()), (embedding(),))
    key = {"X-Ordering-Key": "k"}
    async with running([triton], observers=[Metrics(registry)]) as gw:
        first = asyncio.create_task(gw.post(EMBED, TEXT, **key))
        await until(lambda: triton.calls)
        second = asyncio.create_task(gw.post(EMBED, TEXT, **key))
        await until(lambda: len(gw.pipeline.under_way) == 2)
        go.set()
        assert {reply.status_code for reply in await asyncio.gather(first, second)} == {200}
    assert parts(registry, "ordering_wait") > 0
    whole = parts(registry, "request_duration")
    told = sum(parts(registry, name) for name in ("ordering_wait", "backend_duration", "overhead"))
    assert told == pytest.approx(whole)


async def test_refusals_by_limits_and_switches():
    registry = CollectorRegistry()
    async with running([ScriptedBackend("triton", (embedding(),))], observers=[Metrics(registry)]) as gw:
        limited = {"authorization": f"Bearer {LIMITED_KEY}"}  # it may ask three times a minute
        codes = [(await gw.post(EMBED, TEXT, **limited)).status_code for _ in range(5)]
        assert codes == [200] * 3 + [429] * 2
        block = Switch(
            id="s1",
            action="block",
            scope=Scope(kind="task", name="text-embedding"),
            reason="r",
            owner="o",
            created_ms=0,
            expires_ms=2**50,
        )
        rules = gw.rules.current()
        gw.rules.replace(RuleSet(revision=8, rules=rules.rules, switches=Switches(revision=1, items=(block,))))
        assert (await gw.post(EMBED, TEXT)).status_code == 503
    found = samples(registry)
    [hit] = found["gateway_limited_total"]
    assert (hit.labels, hit.value) == ({"task": "text-embedding", "kind": "requests", "window": "minute"}, 2)
    [kept_out] = found["gateway_blocked_total"]
    assert (kept_out.labels, kept_out.value) == ({"task": "text-embedding", "scope": "task"}, 1)
