"""Metrics and logs of one request each."""

import json
import logging

from prometheus_client import CollectorRegistry

from gateway.core.breaker import BreakerBoard
from gateway.core.errors import Fault, FaultKind, InternalError, Unauthorized
from gateway.core.record import RequestRecord
from gateway.core.routing import Plan
from gateway.core.types import Place, Route, Timing, Usage
from gateway.telemetry.logs import AccessLog, JsonLines
from gateway.telemetry.metrics import Metrics

ROUTE = Route(backend="triton", model="m", version="1", rule="r", attempts=2)
RECORD = RequestRecord(
    id="abc",
    task="t",
    tenant="acme",
    key_id="k1",
    total_us=12_000,
    route=ROUTE,
    timing=Timing(total_us=12_000, admit_us=1000, backend_us=9000),
    usage=Usage(input_tokens=3, output_tokens=5),
    faults=(Fault(kind=FaultKind.TIMEOUT, message="slow"),),
    plan=Plan(rule="r", revision=4, candidates=()),
)


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
    assert value(registry, "gateway_requests_total", task="t", backend="triton", code="ok") == 1
    assert value(registry, "gateway_request_duration_seconds_sum", task="t", backend="triton") == 0.012
    assert value(registry, "gateway_tokens_total", task="t", direction="output") == 5
    assert value(registry, "gateway_failed_attempts_total", task="t") == 1


def test_refusals_at_the_door_have_no_task_of_the_callers_choosing():
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    metrics.refused(refused())
    assert value(registry, "gateway_requests_total", task="none", backend="none", code="unauthorized") == 1


def test_health_and_batches():
    registry = CollectorRegistry()
    metrics, board = Metrics(registry), BreakerBoard()
    board.probed(Place(backend="triton", model="m"), now_us=1, fault=FaultKind.UNAVAILABLE)
    metrics.health(board.all(), 4)
    metrics.batch_sizes("triton", {"encoder": {1: 5, 8: 2}})
    assert value(registry, "gateway_breaker_open", backend="triton", model="m", version="") == 1
    board.keep_only([])
    metrics.health(board.all(), 4)
    assert value(registry, "gateway_breaker_open", backend="triton", model="m", version="") == 0
    assert value(registry, "gateway_rules_revision") == 4
    assert value(registry, "gateway_model_batch_executions", backend="triton", model="encoder", batch_size="8") == 2
    metrics.batch_sizes("local", {})
    assert value(registry, "gateway_model_batch_executions", backend="triton", model="encoder", batch_size="8") == 2
    metrics.batch_sizes("triton", {"encoder": {1: 1}})
    assert value(registry, "gateway_model_batch_executions", backend="triton", model="encoder", batch_size="8") == 0
    assert value(registry, "gateway_model_batch_executions", backend="triton", model="encoder", batch_size="1") == 1


def lines(caplog):
    return [json.loads(JsonLines().format(record)) for record in caplog.records]


def test_a_request_is_one_json_line(caplog):
    with caplog.at_level(logging.INFO):
        AccessLog().ended(RECORD)
    (line,) = lines(caplog)
    assert line["request_id"] == "abc"
    assert line["route"] == "triton/m:1"
    assert line["total_ms"] == 12.0
    assert line["output_tokens"] == 5
    assert line["event"] == "request"
    assert (line["rule"], line["revision"]) == ("r", 4)
    assert line["reasons"] == ["attempt: timeout: slow"]


def test_an_internal_error_brings_its_trace_and_stays_one_line(caplog):
    error = InternalError("failed")
    error.__cause__ = ZeroDivisionError("a\nb")
    with caplog.at_level(logging.INFO):
        AccessLog().ended(refused(error=error))
        AccessLog().refused(refused())
    first, second = lines(caplog)
    assert "ZeroDivisionError" in first["exception"]
    assert first["level"] == "error"
    assert second["detail"] == "a\nb\x1b\ud83d"
    assert all("\n" not in JsonLines().format(record) for record in caplog.records)
