"""Metrics and logs of one request each."""

import json
import logging
import time
from dataclasses import replace

from prometheus_client import CollectorRegistry

from gateway import __version__
from gateway.core.breaker import Breaker, BreakerBoard
from gateway.core.errors import Fault, FaultKind, InternalError, Unauthorized
from gateway.core.models import ModelFigures
from gateway.core.routing import Plan
from gateway.core.rules import RuleSet
from gateway.core.switches import ACTIONS, Scope, Switch, Switches
from gateway.core.trace import Trace
from gateway.core.types import EngineLoad, Place, Route, Timing, Usage
from gateway.core.watching.record import RequestRecord
from gateway.telemetry.labels import MAX_NAMES
from gateway.telemetry.logs import MAX_LINES, AccessLog, JsonLines
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.state_metrics import MAX_PLACES
from tests.kit.wait import until

ROUTE = Route(backend="triton", model="m", version="1", rule="r", attempts=2)
RECORD = RequestRecord(
    rule="r",
    revision=4,
    id="abc",
    task="t",
    tenant="acme",
    key_id="k1",
    total_us=12_000,
    route=ROUTE,
    timing=Timing(total_us=12_000, admit_us=1000, backend_us=9000),
    usage=Usage(input_tokens=3, output_tokens=5),
    faults=(Fault(kind=FaultKind.TIMEOUT, message="slow", place=Place(backend="b", model="m")),),
    plan=Plan(rule="r", revision=4, candidates=()),
)


PRICED = Usage(
    input_tokens=30, output_tokens=5, cached_tokens=20, reasoning_tokens=2, is_estimated=True, cost_nano_usd=2_100_000
)
LONG = replace(RECORD, usage=PRICED, stream=True, first_token_us=70_000)


def refused(**changes) -> RequestRecord:
    door = {"id": "x", "task": "", "tenant": "", "key_id": "", "error": Unauthorized("a\nb\x1b\ud83d"), "total_us": 5}
    return RequestRecord(**door | changes)


def value(registry, name, **labels):
    return registry.get_sample_value(name, labels)


def test_a_request_is_counted_once_with_its_parts():
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    metrics.began("t")
    assert value(registry, "gateway_requests_in_flight", task="t") == 1
    metrics.ended(RECORD)
    assert value(registry, "gateway_requests_in_flight", task="t") == 0
    labels = {"task": "t", "backend": "triton", "model": "m", "version": "1", "rule": "r", "code": "ok"}
    assert value(registry, "gateway_requests_total", **labels) == 1
    assert value(registry, "gateway_request_duration_seconds_sum", task="t", backend="triton") == 0.012
    assert value(registry, "gateway_tokens_total", task="t", direction="output") == 5
    assert value(registry, "gateway_failed_attempts_total", task="t") == 1


def test_what_a_request_used_up():
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    for record in (LONG, LONG, replace(LONG, usage=Usage(cost_nano_usd=0, input_tokens=-3), first_token_us=None)):
        metrics.ended(record)
    for direction, count in {"input": 60, "output": 10, "cached": 40, "reasoning": 4}.items():
        assert value(registry, "gateway_tokens_total", task="t", direction=direction) == count
    assert value(registry, "gateway_estimated_usage_total", task="t") == 2
    assert value(registry, "gateway_cost_usd_total", task="t", backend="triton") == 0.0042
    first = {"task": "t", "backend": "triton"}
    assert value(registry, "gateway_first_token_seconds_count", **first) == 2
    assert value(registry, "gateway_first_token_seconds_sum", **first) == 0.14


def test_what_is_not_known_has_no_series():
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    metrics.ended(RECORD)
    assert value(registry, "gateway_cost_usd_total", task="t", backend="triton") is None
    assert value(registry, "gateway_estimated_usage_total", task="t") is None
    assert value(registry, "gateway_first_token_seconds_count", task="t", backend="triton") is None
    metrics.ended(replace(RECORD, usage=Usage(cost_nano_usd=0)))
    assert value(registry, "gateway_cost_usd_total", task="t", backend="triton") == 0


def test_engines():
    registry = CollectorRegistry()
    metrics = Metrics(registry)

    def shown(replica, backend="vllm"):
        place = {"backend": backend, "replica": replica}
        states = (value(registry, "gateway_engine_requests", **place, state=s) for s in ("running", "waiting"))
        return (*states, value(registry, "gateway_engine_kv_used_ratio", **place))

    metrics.engines("llm", {"": EngineLoad(running=1, waiting=0)})
    metrics.engines(
        "vllm", {"a:1": EngineLoad(running=3, waiting=2, kv_used=0.5), "b:1": EngineLoad(running=1, waiting=0)}
    )
    assert shown("a:1") == (3, 2, 0.5)
    assert shown("b:1") == (1, 0, None)
    metrics.engines("vllm", {"b:1": EngineLoad(running=2, waiting=0, kv_used=0.25)})  # the other tells no more
    assert shown("a:1") == (0, 0, 0)
    assert shown("b:1") == (2, 0, 0.25)
    metrics.engines("vllm", {"b:1": EngineLoad(running=2, waiting=0)})
    assert shown("b:1") == (2, 0, 0)
    assert shown("", "llm") == (1, 0, None)


def test_refusals_at_the_door_have_no_task_of_the_callers_choosing():
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    metrics.refused(refused())
    labels = dict.fromkeys(("task", "backend", "model", "version", "rule"), "none")
    assert value(registry, "gateway_requests_total", **labels, code="unauthorized") == 1


def test_health():
    registry = CollectorRegistry()
    metrics, board = Metrics(registry), BreakerBoard()
    board.probed(Place(backend="triton", model="m", replica="r:1"), now_us=1, fault=FaultKind.UNAVAILABLE)
    metrics.health(board.all(), RuleSet(revision=4, rules=()))
    labels = {"backend": "triton", "model": "m", "version": "", "replica": "r:1"}
    assert value(registry, "gateway_breaker_open", **labels) == 1
    board.keep_only([], now_us=1)
    metrics.health(board.all(), RuleSet(revision=4, rules=()))
    assert value(registry, "gateway_breaker_open", **labels) == 0
    for name in ("gateway_rules_revision", "gateway_rules_revision_max", "gateway_worker_rules_revision"):
        assert value(registry, name) == 4


def test_switches_in_force():
    registry = CollectorRegistry()
    metrics, now_ms = Metrics(registry), time.time_ns() // 1_000_000

    def switch(action: str, expires_ms: int) -> Switch:
        scope = Scope(kind="everything")
        told = {"reason": "r", "owner": "o", "created_ms": 0, "expires_ms": expires_ms}
        return Switch(id="s", action=action, scope=scope, **told)

    items = (switch("drain", 2 * now_ms), switch("drain", 2 * now_ms), switch("block", now_ms - 1))
    metrics.health({}, RuleSet(revision=4, rules=(), switches=Switches(revision=1, items=items)))
    held = {action: value(registry, "gateway_switches_in_force", action=action) for action in ACTIONS}
    assert held == {"block": 0, "drain": 2, "force_backend": 0, "force_fallback": 0, "freeze": 0}
    metrics.health({}, RuleSet(revision=4, rules=()))
    assert value(registry, "gateway_switches_in_force", action="drain") == 0


def test_redis():
    registry = CollectorRegistry()
    redis = Metrics(registry).redis
    assert value(registry, "gateway_redis_up") == 1
    redis("rules", None)
    redis("admit", 0.002)
    assert value(registry, "gateway_redis_up") == 0
    redis("rules", 0.001)
    assert value(registry, "gateway_redis_up") == 1
    assert value(registry, "gateway_redis_seconds_sum", operation="admit") == 0.002
    assert value(registry, "gateway_redis_seconds_count", operation="rules") == 1


async def test_a_process_tells_of_itself():
    registry = CollectorRegistry()
    process = Metrics(registry).process
    process.start()
    await until(lambda: value(registry, "gateway_event_loop_lag_seconds_count") >= 2)
    await process.close()
    assert value(registry, "gateway_worker_memory_bytes") > 2**20
    assert value(registry, "gateway_worker_open_fds") > 2
    assert 0 < value(registry, "gateway_worker_cpu_seconds_total") <= time.process_time()
    assert value(registry, "gateway_build_info", version=__version__) == 1


def test_the_gap_between_tokens_is_of_whole_streams():
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    record = replace(RECORD, stream=True, first_token_us=4_000, usage=Usage(output_tokens=5))
    metrics.ended(record)
    metrics.ended(replace(record, usage=Usage(output_tokens=1)))
    metrics.ended(replace(record, error=InternalError("broke")))
    gap = {"task": "t", "backend": "triton"}
    assert value(registry, "gateway_inter_token_seconds_sum", **gap) == 0.002
    assert value(registry, "gateway_inter_token_seconds_count", **gap) == 1


def test_names_are_bounded_though_operators_change_them_all_the_time():
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    for number in range(2 * MAX_NAMES):
        route = replace(ROUTE, model=f"m{number}", version="")
        metrics.ended(replace(RECORD, route=route, rule=f"r{number}"))
    shown = [sample for family in registry.collect() for sample in family.samples]
    requests = [sample.labels for sample in shown if sample.name == "gateway_requests_total"]
    assert len({labels["model"] for labels in requests}) <= MAX_NAMES + 1
    assert len({labels["rule"] for labels in requests}) == MAX_NAMES + 1


def count(number):
    times = {"queue_us": 0, "compute_input_us": 0, "compute_infer_us": 0, "compute_output_us": 0}
    counts = {"requests": 1, "failures": 0, "inferences": 1, "executions": 1, "batch_sizes": {1: 1}, **times}
    return ModelFigures(replica="a", model="m", version=str(number), **counts)


def test_what_servers_tell_is_bounded_though_models_and_replicas_come_and_go():
    registry = CollectorRegistry()
    metrics, rules, many = Metrics(registry), RuleSet(revision=1, rules=()), 2 * MAX_PLACES
    places = [Place(backend="triton", model="m", replica=f"10.0.0.1:{number}") for number in range(many)]
    metrics.health(dict.fromkeys(places, Breaker(open_until_us=1)), rules)
    metrics.health(
        {place: Breaker(open_until_us=1 if n >= MAX_PLACES else None) for n, place in enumerate(places)}, rules
    )
    metrics.engines(
        "llm", dict.fromkeys((place.replica for place in places[:MAX_NAMES]), EngineLoad(running=1, waiting=2))
    )
    metrics.figures("triton", [count(number) for number in range(many)])
    for number in range(many):
        metrics.healed(replace(places[0], model=f"m{number}"), "failed")
    shown = [sample for family in registry.collect() for sample in family.samples]
    assert len(shown) < MAX_PLACES + 20 * MAX_NAMES
    other = {"backend": "triton", "model": "other"}
    assert value(registry, "gateway_breaker_open", **other, version="other", replica="other") == 1
    assert value(registry, "gateway_breaker_open", backend="triton", model="m", version="", replica="10.0.0.1:0") == 0
    assert value(registry, "gateway_model_requests", **other, version="other", outcome="ok") == many - MAX_NAMES
    assert value(registry, "gateway_model_heals_total", **other, outcome="failed") == many - MAX_NAMES
    metrics.health({}, rules)
    assert value(registry, "gateway_breaker_open", **other, version="other", replica="other") == 0
    told = {
        name: EngineLoad(running=1, waiting=2, kv_used=used) for name, used in (("x", 0.5), ("y", 0.9), ("z", None))
    }
    metrics.engines("llm", told)
    of_others = {"backend": "llm", "replica": "other"}
    assert value(registry, "gateway_engine_requests", **of_others, state="waiting") == 6
    assert value(registry, "gateway_engine_kv_used_ratio", **of_others) == 0.9


def test_waiting():
    registry = CollectorRegistry()
    Metrics(registry).waiting({"triton": 3})
    assert value(registry, "gateway_requests_waiting", backend="triton") == 3


def test_heals():
    registry = CollectorRegistry()
    Metrics(registry).healed(Place(backend="triton", model="m", replica="r:1"), "healed")
    assert value(registry, "gateway_model_heals_total", backend="triton", model="m", outcome="healed") == 1


def figures(replica="", model="encoder", **changes):
    counts = {
        "requests": 10,
        "failures": 1,
        "inferences": 21,
        "executions": 7,
        "queue_us": 500_000,
        "compute_input_us": 1_000_000,
        "compute_infer_us": 2_000_000,
        "compute_output_us": 3_000_000,
        "batch_sizes": {1: 5, 8: 2},
    }
    return ModelFigures(replica=replica, model=model, version="1", **counts | changes)


def test_figures_are_sums_over_the_replicas():
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    metrics.figures("triton", [figures("a"), figures("b", requests=5, batch_sizes={8: 1}), figures("a", "other")])
    model = {"backend": "triton", "model": "encoder", "version": "1"}
    assert value(registry, "gateway_model_requests", **model, outcome="ok") == 15
    assert value(registry, "gateway_model_requests", **model, outcome="failed") == 2
    assert value(registry, "gateway_model_inferences", **model) == 42
    assert value(registry, "gateway_model_executions", **model) == 14
    seconds = {"queue": 1.0, "compute_input": 2.0, "compute_infer": 4.0, "compute_output": 6.0}
    for stage, spent in seconds.items():
        assert value(registry, "gateway_model_seconds", **model, stage=stage) == spent
    batches = {"backend": "triton", "model": "encoder"}
    assert value(registry, "gateway_model_batch_executions", **batches, batch_size="8") == 3
    metrics.figures("local", [])
    assert value(registry, "gateway_model_batch_executions", **batches, batch_size="8") == 3
    metrics.figures("triton", [figures("a", batch_sizes={1: 1})])
    assert value(registry, "gateway_model_batch_executions", **batches, batch_size="8") == 0
    assert value(registry, "gateway_model_batch_executions", **batches, batch_size="1") == 1
    assert value(registry, "gateway_model_requests", **model, outcome="ok") == 10
    assert value(registry, "gateway_model_requests", **model | {"model": "other"}, outcome="ok") == 0


def test_a_request_is_one_json_line():
    written = []
    AccessLog(written.append).ended(RECORD)
    line = json.loads(written[0])
    assert line["request_id"] == "abc"
    assert line["route"] == "triton/m:1"
    assert line["total_ms"] == 12.0
    assert line["output_tokens"] == 5
    assert line["event"] == "request"
    assert (line["rule"], line["revision"]) == ("r", 4)
    assert line["reasons"] == ["attempt at b/m: timeout: slow"]
    assert "trace_id" not in line


def test_a_line_names_the_trace_at_the_door_too():
    written, trace = [], Trace(trace_id="0af7651916cd43dd8448eb211c80319c", span_id="b7ad6b7169203331")
    log = AccessLog(written.append)
    log.ended(replace(RECORD, trace=trace))
    log.refused(refused(trace=trace))
    assert [json.loads(line)["trace_id"] for line in written] == [trace.trace_id] * 2


def test_a_line_tells_what_was_used_up():
    written = []
    log = AccessLog(written.append)
    log.ended(LONG)
    log.ended(RECORD)
    line, plain = (json.loads(text) for text in written)
    told = {"input_tokens": 30, "output_tokens": 5, "cached_tokens": 20, "reasoning_tokens": 2, "estimated": True}
    assert line.items() >= (told | {"cost_usd": 0.0021, "first_token_ms": 70.0}).items()
    assert not {"cached_tokens", "reasoning_tokens", "estimated", "cost_usd", "first_token_ms"} & plain.keys()


def test_an_internal_error_brings_its_trace_and_stays_one_line():
    error = InternalError("failed")
    error.__cause__ = ZeroDivisionError("a\nb")
    written = []
    log = AccessLog(written.append)
    log.ended(refused(error=error))
    log.refused(refused())
    first, second = (json.loads(line) for line in written)
    assert "ZeroDivisionError" in first["exception"]
    assert first["level"] == "error"
    assert second["detail"] == "a\nb\x1b\ud83d"
    assert all(line.count("\n") == 1 and line.isascii() for line in written)


async def test_lines_are_written_together_and_none_is_lost():
    written = []
    log = AccessLog(written.append)
    for _ in range(2 * MAX_LINES):
        log.ended(RECORD)
    assert [text.count("\n") for text in written] == [MAX_LINES, MAX_LINES]
    log.ended(RECORD)
    assert len(written) == 2
    await until(lambda: len(written) == 3)
    log.ended(RECORD)
    log.flush()
    assert written[-1].count("\n") == 1


def test_other_lines_have_the_same_form():
    record = logging.makeLogRecord({"msg": "it\u2028happened", "levelname": "INFO", "name": "n", "place": ROUTE})
    line = JsonLines().format(record)
    assert line.isascii()
    assert json.loads(line)["event"] == "it\u2028happened"
