"""Each symptom just below and above its bound; and how documents and pages become facts."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from gateway.core.doctor import SYMPTOMS, examine
from gateway.core.doctor.counting import counted
from gateway.core.doctor.facts import Facts, Gate, Gpu, Latency, Limiting, Request, Server, Setup, Task, Traffic
from gateway.core.doctor.looks import Look, Sample
from gateway.core.doctor.reading import (
    gates_of,
    gpus_of,
    latencies_of,
    limit_words,
    requests_of,
    setup_of,
    tasks_of,
)
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


# --- reading ---------------------------------------------------------------------------------------------


def test_a_configuration_of_triton():
    config = {
        "name": "m",
        "max_batch_size": 8,
        "dynamic_batching": {
            "preferred_batch_size": [4],
            "max_queue_delay_microseconds": "500",
            "default_queue_policy": {"default_timeout_microseconds": "100"},
        },
        "instance_group": [{"count": 2}, {}],
    }
    found = setup_of(config, backend="triton", file="f")
    assert found == Setup(
        backend="triton",
        model="m",
        file="f",
        max_batch_size=8,
        is_batching=True,
        delay_us=500,
        preferred=(4,),
        queue_timeout_us=100,
        instances=3,
    )
    config["dynamic_batching"]["preferred_batch_size"] = [8]  # what a server fills in
    assert setup_of(config, backend="triton").preferred == ()


def test_tasks_and_their_places():
    rules = [
        {
            "match": {"task": "t"},
            "split": [{"backend": "a", "model": "m"}],
            "fallback": [{"backend": "b", "model": "m"}],
        },
        {"match": {"task": "other"}, "split": [{"backend": "c", "model": "m"}]},
        {"split": [{"backend": "d", "model": "*"}]},
        {"enabled": False, "split": [{"backend": "e", "model": "m"}]},
    ]
    (found,) = tasks_of({"t": (5, 3)}, rules, frozenset({"t"}))
    places = (("a", "m"), ("b", "m"), ("d", "*"))
    assert found == Task(name="t", timeout_ms=5, attempt_timeout_ms=3, is_sequence=True, places=places)


def page(**values: float) -> tuple[Sample, ...]:
    model = {"backend": "triton", "model": "m", "version": "1"}
    more = {"requests": {"outcome": "ok"}, "queue": {"stage": "queue"}, "infer": {"stage": "compute_infer"}}
    names = {"queue": "seconds", "infer": "seconds"}
    found = [
        Sample(name=f"gateway_model_{names.get(name, name)}", labels=model | more.get(name, {}), value=value)
        for name, value in values.items()
        if not name.startswith("of_")
    ]
    sizes = {"backend": "triton", "model": "m"}
    found += [
        Sample(name="gateway_model_batch_executions", labels=sizes | {"batch_size": name[3:]}, value=value)
        for name, value in values.items()
        if name.startswith("of_")
    ]
    return tuple(found)


BEFORE = Look(at_s=5, samples=page(requests=10, inferences=20, executions=5, queue=1.0, infer=2.0, of_4=5))
AFTER = Look(at_s=15, samples=page(requests=30, inferences=60, executions=15, queue=1.5, infer=4.0, of_4=15, of_8=1))


def test_traffic_is_what_has_come_between_the_looks():
    (found,) = counted(BEFORE, AFTER).traffic.values()
    sizes = {4: 10, 8: 1}
    assert found == Traffic(
        window_s=10, requests=20, rows=40, executions=10, queue_s=0.5, compute_s=2.0, batch_sizes=sizes
    )
    assert (found.joined, found.mean_batch, found.queue_share, found.present, found.waiting) == (2, 4, 0.2, 0.25, 0.05)
    assert found.busy == pytest.approx(10 * 0.1 / 10)
    assert counted(AFTER, replace(AFTER, at_s=20)).traffic == {}


def model(**requests: int) -> tuple[dict, ...]:
    """What servers tell the control plane; a server for each name."""
    figures = [{"replica": name, "requests": count} for name, count in requests.items()]
    return ({"backend": "triton", "model": "m", "figures": figures},)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (AFTER, BEFORE),  # a server was started again
        (replace(BEFORE, samples=page(requests=10, queue=1.6)), AFTER),  # one of two was: some counters are higher
        (replace(BEFORE, samples=page(requests=10, of_2=1)), AFTER),  # one is not there any more
        (replace(BEFORE, samples=()), AFTER),  # the page was not there: what it has is of the server's whole life
        (replace(BEFORE, models=model(a=5)), replace(AFTER, models=model(a=6, b=7))),  # one more server counts
        (replace(BEFORE, models=model(a=5, b=7)), replace(AFTER, models=model(a=6))),
        (replace(BEFORE, models=model(a=5, b=7)), replace(AFTER, models=model(a=9, b=6))),
    ],
)
def test_what_began_anew_is_not_compared_and_said(before, after):
    found = counted(before, after)
    assert found.traffic == {}
    assert found.unseen[0].startswith("queues and batches of m on 'triton': their counters began anew")


def test_a_thousand_models_that_began_anew_are_one_line():
    def look(first: int) -> Look:
        fields = {"backend": "triton", "version": "1", "outcome": "ok"}
        return Look(
            at_s=0,
            samples=[
                Sample(name="gateway_model_requests", labels={**fields, "model": f"m{i:04}"}, value=first)
                for i in range(1000)
            ],
        )

    assert len(counted(look(1), look(2)).traffic) == 1000
    (line,) = counted(look(2), look(1)).unseen
    assert line.startswith("queues and batches of m0000, m0001, m0002 and 997 more on 'triton'")


def test_requests_of_the_window():
    document = {"at_ms": 10, "key": "k", "priority": "batch", "code": "ok", "place": "triton/m:1@a:1", "total_ms": 2}
    found = requests_of([document, {**document, "at_ms": 9}], since_ms=10)
    assert [(one.backend, one.model, one.priority, one.stands_for) for one in found] == [("triton", "m", "batch", 1)]


def test_servers_and_gates():
    def look(at_s: float, a: int, waiting: int | None) -> Look:
        figures = [{"replica": "a", "requests": a}, {"replica": "b", "requests": 7}]
        states = [
            {"replica": "a", "live": True, "in_flight": 3, "shut": [], "switches": []},
            {"replica": "b", "live": False, "in_flight": None, "shut": ["breaker open"], "switches": ["s1"]},
        ]
        backend = {"backend": "triton", "is_on": True, "waiting": waiting, "replicas": states}
        overview = {"workers": {"live": 2}, "by": []}
        models = [{"backend": "triton", "model": "m", "figures": figures}]
        return Look(at_s=at_s, models=models, backends=[backend], overview=overview)

    first, second = look(0, 10, None), look(10, 30, 4)
    assert counted(first, second).servers == [
        Server(backend="triton", replica="a", requests=20),
        Server(backend="triton", replica="b", requests=0, is_live=False, shut=("breaker open", "switch s1")),
    ]
    (gate,) = gates_of((first, second), {"triton": 16, "off": 16})
    assert gate == Gate(backend="triton", max_in_flight=16, waiting=4, in_flight=3, workers=2, servers=2)
    assert gate.use == 3 / 64


def test_shares_of_servers_one_of_which_counts_anew_are_not_seen():
    def shares(before: tuple[dict, ...], after: tuple[dict, ...]) -> tuple[list[int], list[str]]:
        found = counted(Look(at_s=0, models=before), Look(at_s=1, models=after))
        return [server.requests for server in found.servers], list(found.unseen)

    line = "shares of the servers of 'triton': one of them counts anew"
    assert shares(model(a=5, b=5), model(a=9, b=6)) == ([4, 1], [])
    assert shares(model(a=5, b=5), model(a=9, b=4)) == ([0, 0], [line])
    assert shares(model(a=5), model(a=9, b=400)) == ([0, 0], [line])
    assert shares(model(a=5, b=5), model(a=9)) == ([4], [])  # it is away, and took nothing


def test_a_server_without_the_model_is_why_the_other_is_hot():
    def look(requests: int) -> Look:
        replicas = [{"replica": name, "ready": name == "a", "error": ""} for name in ("a", "b")]
        idle = {"backend": "triton", "model": "idle", "figures": [], "replicas": replicas}
        backend = {"backend": "triton", "is_on": True, "replicas": [{"replica": name} for name in ("a", "b")]}
        return Look(at_s=0, models=({**model(a=requests)[0], "replicas": replicas}, idle), backends=[backend])

    (found,) = examine(facts(servers=counted(look(0), look(200)).servers))
    assert found.cause == "requests are kept away from b (m is not loaded there)"


def test_limits():
    def look(ok: int, refused: int) -> Look:
        counts = [
            Sample(name="gateway_requests_total", labels={"code": code}, value=value)
            for code, value in (("ok", ok), ("rate_limited", refused), ("queue_full", 1))
        ]
        hit = Sample(name="gateway_limited_total", labels={"kind": "requests", "window": "minute"}, value=refused)
        return Look(at_s=0, samples=(*counts, hit))

    def limiting(before: Look, after: Look) -> Limiting | None:
        return counted(before, after, limits=["60 requests per minute"]).limiting

    found = limiting(look(10, 2), look(20, 7))
    assert found == Limiting(requests=15, refused=5, limits=("60 requests per minute",), hit={"requests per minute": 5})
    assert limiting(Look(at_s=0), look(20, 7)) is None  # the first page was not there
    assert limiting(look(20, 7), Look(at_s=1)) is None
    assert limiting(look(10, 8), look(20, 7)) is None  # the gateway was started again
    words = limit_words([{"per": "day", "usd": 2.5}, {"concurrent": 4, "task": "t"}, {"concurrent": 4, "task": "t"}])
    assert words == ["2.5 usd per day", "4 concurrent of t"]


def test_gpus_and_times():
    memory = [
        Sample(name=f"nv_gpu_memory_{name}_bytes", labels={"gpu_uuid": "G"}, value=value)
        for name, value in (("used", 5), ("total", 9))
    ]
    assert gpus_of(Look(at_s=0, servers={"http://a": memory})) == [Gpu(name="GPU G of http://a", used=5, total=9)]
    series = {"task": "t", "backend": "b", "model": "m", "requests": 3, "p99_ms": 2.5}
    found = latencies_of({"by": [series, {**series, "backend": ""}, {**series, "p99_ms": None}]})
    assert found == [Latency(task="t", backend="b", model="m", requests=3, p99_ms=2.5)]
