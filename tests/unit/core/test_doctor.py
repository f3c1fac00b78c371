"""Each symptom just below and above its bound."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from gateway.core.doctor import SYMPTOMS, examine
from gateway.core.doctor.facts import Facts, Gate, Gpu, Latency, Limiting, Request, Server, Setup, Task, Traffic
from gateway.core.memory_plan import GIB, Model, plan

NAME = ("triton", "m")
SETUP = Setup(backend="triton", model="m", file="m/config.pbtxt", max_batch_size=8, is_batching=True, delay_us=1000)
# 10 s, 100 batches of 4 requests of 10 ms each: a tenth of an instance, little waiting.
TRAFFIC = Traffic(window_s=10, requests=400, rows=400, executions=100, queue_s=0.4, compute_s=4.0, batch_sizes={4: 100})
TASK = Task(name="t", timeout_ms=10_000, attempt_timeout_ms=3_000, places=(NAME,))


def facts(setup: Setup = SETUP, traffic: Traffic | None = TRAFFIC, **more) -> Facts:
    return Facts(window_s=10, setups=(setup,), traffic={NAME: traffic} if traffic else {}, **{"tasks": (TASK,), **more})


def symptoms(seen: Facts) -> list[str]:
    return [finding.symptom for finding in examine(seen)]


def traffic(**changes) -> Traffic:
    return replace(TRAFFIC, **changes)


def setup(**changes) -> Setup:
    return replace(SETUP, **changes)


def test_silent_on_what_is_well():
    assert examine(facts()) == []
    assert examine(Facts(window_s=10)) == []
    assert len(SYMPTOMS) == 11


# The load is low, and each waits the delay for nobody: 109 in 100 batches, a third of the time.
LONELY = traffic(requests=109, rows=109, executions=100, queue_s=0.5, compute_s=1.0)
PATIENT = setup(delay_us=4587)  # the mean wait


@pytest.mark.parametrize(
    ("one", "seen", "cause"),
    [
        (PATIENT, LONELY, "the load is too low"),
        (PATIENT, replace(LONELY, requests=110, rows=110), ""),
        (PATIENT, replace(LONELY, executions=29, requests=29, rows=29), ""),
        (PATIENT, replace(LONELY, queue_s=0.49), ""),
        (setup(delay_us=2294), LONELY, "the load is too low"),
        (setup(delay_us=2293), LONELY, ""),  # the smaller half of the wait: two callers that take turns
        (setup(delay_us=0), LONELY, ""),
        (setup(is_batching=False, delay_us=4587), LONELY, ""),
        (PATIENT, replace(LONELY, rows=109 * 4 + 1), ""),  # above half of the largest batch: two do not fit into one
        (setup(delay_us=0), replace(LONELY, queue_s=20.0), "do not have the same shapes"),
        (setup(delay_us=0), replace(LONELY, queue_s=19.9), ""),
    ],
)
def test_single_batches(one, seen, cause):
    found = [finding for finding in examine(facts(one, seen)) if finding.symptom == "single-batches"]
    assert bool(found) == bool(cause)
    assert all(cause in finding.cause for finding in found)


LATE = Latency(task="t", backend="triton", model="m", requests=400, p99_ms=300.1)


@pytest.mark.parametrize(
    ("latency", "seen", "one", "cause"),
    [
        (LATE, traffic(queue_s=4.0), setup(delay_us=5000), "the delay: 5000 us"),
        (LATE, traffic(queue_s=3.99), setup(delay_us=5000), ""),
        (replace(LATE, p99_ms=300), traffic(queue_s=4.0), SETUP, ""),
        (replace(LATE, requests=29), traffic(queue_s=4.0), SETUP, ""),
        (LATE, traffic(queue_s=64.0, compute_s=32.0), SETUP, "batches of 80.0 ms are too large"),
        (LATE, traffic(queue_s=64.0, compute_s=31.9), SETUP, "requests at once"),
        (replace(LATE, task="other"), traffic(queue_s=4.0), SETUP, ""),
    ],
)
def test_late_by_queue(latency, seen, one, cause):
    found = examine(facts(one, seen, latencies=(latency,), target_p99_ms=300.0))
    found = [finding for finding in found if finding.symptom == "late-by-queue"]
    assert bool(found) == bool(cause)
    assert all(cause in finding.cause for finding in found)


def test_without_a_target_it_is_the_attempts_time_limit():
    seen = facts(traffic=traffic(queue_s=4.0), latencies=(replace(LATE, p99_ms=3000),))
    assert symptoms(seen) == []
    assert symptoms(replace(seen, latencies=(replace(LATE, p99_ms=3000.1),))) == ["late-by-queue"]


def test_of_an_ensemble_the_step_at_which_requests_wait():
    ensemble = Setup(backend="triton", model="e", steps=("m",))
    seen = facts(traffic=traffic(queue_s=8.0), latencies=(replace(LATE, model="e"),), target_p99_ms=300.0)
    (found,) = examine(replace(seen, setups=(ensemble, SETUP)))
    assert found.subject == "t at triton/m"


@pytest.mark.parametrize(
    ("one", "task", "is_found"),
    [
        (SETUP, replace(TASK, is_sequence=True), True),
        (SETUP, TASK, False),
        (setup(is_batching=False), replace(TASK, is_sequence=True), False),
        (setup(is_batching=False, is_sequence=True), replace(TASK, is_sequence=True), False),
        (setup(faults={"sequence_batching": "both"}), TASK, True),
    ],
)
def test_stateful_batched(one, task, is_found):
    assert symptoms(facts(one, tasks=(task,))) == ["stateful-batched"] * is_found


@pytest.mark.parametrize(("faults", "is_found"), [({"dynamic_batching": "an LLM"}, True), ({}, False)])
def test_llm_batched(faults: Mapping[str, str], is_found):
    found = examine(facts(setup(faults=faults)))
    assert [(one.symptom, one.cause) for one in found] == [("llm-batched", "an LLM")] * is_found


GATE = Gate(backend="triton", max_in_flight=17, waiting=0, in_flight=10)
QUEUED = traffic(queue_s=4.0)


def asked(count: int, priority: str = "interactive", key: str = "k") -> Request:
    fields = {"code": "ok", "backend": "triton", "model": "m", "total_ms": 5.0}
    return Request(key=key, priority=priority, stands_for=count, **fields)


@pytest.mark.parametrize(
    ("gate", "seen", "requests", "is_found"),
    [
        (GATE, QUEUED, (asked(5), asked(5, "batch")), True),
        (GATE, QUEUED, (asked(4), asked(5, "batch")), False),
        (GATE, QUEUED, (asked(5), asked(4, "batch")), False),
        (replace(GATE, max_in_flight=16), QUEUED, (asked(5), asked(5, "batch")), False),
        (replace(GATE, waiting=1), QUEUED, (asked(5), asked(5, "batch")), False),
        (replace(GATE, waiting=None), QUEUED, (asked(5), asked(5, "batch")), False),
        (GATE, traffic(queue_s=3.9), (asked(5), asked(5, "batch")), False),
        (GATE, QUEUED, (asked(80, key="bulk"), asked(20)), True),
        (GATE, QUEUED, (asked(79, key="bulk"), asked(21)), False),
        (GATE, QUEUED, (asked(80, key="bulk"), asked(4)), False),
    ],
)
def test_interactive_behind_batch(gate, seen, requests, is_found):
    found = examine(facts(traffic=seen, gates=(gate,), requests=requests))
    assert [one.symptom for one in found] == ["interactive-behind-batch"] * is_found
    assert all("  triton: {max_in_flight: 16}" in one.lines for one in found)


# Three instances, of which 2.5 run batches of 1.24.
SPREAD = traffic(requests=372, rows=372, executions=300, queue_s=2.0, compute_s=31.0)
# 80 % of one instance's time, batches of 7.2 rows, six tenths of the time waiting.
FULL = traffic(requests=720, rows=720, executions=100, queue_s=86.4, compute_s=57.6)


@pytest.mark.parametrize(
    ("one", "seen", "is_found"),
    [
        (setup(instances=3), SPREAD, True),
        (setup(instances=2), SPREAD, False),
        (setup(instances=3), replace(SPREAD, compute_s=30.9), False),
        (setup(instances=3, max_batch_size=4), SPREAD, False),
        (setup(instances=3), replace(SPREAD, requests=375, compute_s=31.3), False),
        (SETUP, FULL, True),
        (SETUP, replace(FULL, rows=719), False),
        (SETUP, replace(FULL, queue_s=86.3), False),
        (SETUP, replace(FULL, compute_s=57.5), False),
        (setup(is_batching=False), FULL, False),
    ],
)
def test_instances_against_batches(one, seen, is_found):
    assert ("instances-and-batches" in symptoms(facts(one, seen))) == is_found


@pytest.mark.parametrize(
    ("preferred", "sizes", "queue_s", "is_found"),
    [
        ((8,), {4: 30}, 2.0, True),
        ((8,), {4: 30}, 1.99, False),  # below a third of the time, the delay is nothing to speak of
        ((8,), {4: 29}, 2.0, False),
        ((8,), {4: 30, 8: 1}, 2.0, False),
        ((3, 8), {4: 30}, 2.0, True),
        ((2, 4), {4: 30}, 2.0, False),
        ((), {4: 30}, 2.0, False),
        ((3,), {4: 30}, 30.0, True),  # three wait at once
        ((3,), {4: 30}, 29.9, False),
    ],
)
def test_preferred_never_reached(preferred, sizes, queue_s, is_found):
    found = symptoms(facts(setup(preferred=preferred, delay_us=2500), traffic(batch_sizes=sizes, queue_s=queue_s)))
    assert found == ["preferred-never-reached"] * is_found


ENDED = Request(
    key="k", priority="interactive", code="deadline_exceeded", backend="triton", model="m", total_ms=1.0, stands_for=5
)


@pytest.mark.parametrize(
    ("one", "more", "is_found"),
    [
        (setup(delay_us=3_000_000), {}, True),
        (setup(delay_us=2_999_999), {}, False),
        (setup(queue_timeout_us=1000), {}, True),
        (setup(queue_timeout_us=1001), {}, False),
        (SETUP, {"requests": (ENDED,)}, True),
        (SETUP, {"requests": (replace(ENDED, stands_for=4),)}, False),
        (SETUP, {"requests": (replace(ENDED, total_ms=1.1),)}, False),
        (SETUP, {"requests": (replace(ENDED, code="ok"),)}, False),
        (setup(delay_us=3_000_000), {"tasks": ()}, False),
        (setup(delay_us=3_000_000), {"tasks": (replace(TASK, places=(("triton", "*"),)),)}, True),
    ],
)
def test_timeout_below_delay(one, more, is_found):
    assert symptoms(facts(one, **more)) == ["timeout-below-delay"] * is_found


def server(replica: str, requests: int, **more) -> Server:
    return Server(backend="triton", replica=replica, requests=requests, **more)


@pytest.mark.parametrize(
    ("counts", "is_found"),
    [
        ((76, 24), True),
        ((75, 25), False),  # half as much again
        ((75, 24), False),  # 99 requests
        ((51, 25, 24), True),
        ((50, 25, 25), False),
        ((33, 17, 17, 17, 16), True),
        ((32, 17, 17, 17, 17), False),  # above half as much again (30), and within what chance does (32)
        ((100,), False),
    ],
)
def test_hot_replica(counts, is_found):
    servers = tuple(server(f"s{i}", count) for i, count in enumerate(counts))
    assert symptoms(facts(servers=servers)) == ["hot-replica"] * is_found


def test_a_replica_is_hot_as_the_other_is_kept_out():
    (found,) = examine(facts(servers=(server("a", 100), server("b", 0, shut=("breaker open",)))))
    assert "kept away from b (breaker open)" in found.cause


LIMITING = Limiting(requests=200, refused=10, limits=("2 requests per second",))
IDLE = (Gate(backend="triton", max_in_flight=16, waiting=0),)
HALF_BUSY = traffic(compute_s=20.0)  # 100 batches of 50 ms in 10 s


@pytest.mark.parametrize(
    ("limiting", "seen", "gates", "is_found"),
    [
        (LIMITING, TRAFFIC, IDLE, True),
        (LIMITING, TRAFFIC, (), False),  # no worker tells of its queues
        (LIMITING, TRAFFIC, (replace(IDLE[0], waiting=None),), False),
        (replace(LIMITING, refused=9), TRAFFIC, IDLE, False),
        (replace(LIMITING, requests=201), TRAFFIC, IDLE, False),
        (LIMITING, HALF_BUSY, IDLE, False),
        (LIMITING, traffic(compute_s=19.9), IDLE, True),
        (LIMITING, TRAFFIC, (Gate(backend="llm", max_in_flight=16, waiting=0, in_flight=7),), True),
        (LIMITING, TRAFFIC, (Gate(backend="llm", max_in_flight=16, waiting=0, in_flight=8),), False),
        (LIMITING, TRAFFIC, (Gate(backend="llm", max_in_flight=16, waiting=1, in_flight=7),), False),
        (LIMITING, None, (), False),  # of whose capacity nothing is known
        (None, TRAFFIC, IDLE, False),
    ],
)
def test_refused_below_capacity(limiting, seen, gates, is_found):
    assert symptoms(facts(traffic=seen, limiting=limiting, gates=gates)) == ["refused-below-capacity"] * is_found


SMALL = plan([Model(name="m", weight_bytes=10 * GIB)], gpu_bytes=16 * GIB)
LARGE = plan([Model(name="m", weight_bytes=14 * GIB, instances=1)], gpu_bytes=16 * GIB)


@pytest.mark.parametrize(
    ("used", "planned", "severity"),
    [
        (15.21, None, "error"),
        (15.19, None, ""),
        (15.19, SMALL, ""),
        (8.0, LARGE, "warning"),
        (15.21, LARGE, "error"),
    ],
)
def test_gpu_memory(used, planned, severity):
    gpu = Gpu(name="GPU 0", used=int(used * GIB), total=16 * GIB, plan=planned)
    assert [(one.symptom, one.severity) for one in examine(facts(gpus=(gpu,)))] == [("gpu-memory", severity)] * bool(
        severity
    )


def test_what_is_wrong_with_a_file_is_told_once_errors_first():
    wrong = setup(faults={"dynamic_batching": "an LLM"})
    seen = facts(wrong, servers=(server("a", 100), server("b", 0)))
    found = examine(replace(seen, setups=(wrong, replace(wrong, backend="local"))))
    assert [(one.symptom, one.subject) for one in found] == [("llm-batched", "triton/m"), ("hot-replica", "triton@a")]
