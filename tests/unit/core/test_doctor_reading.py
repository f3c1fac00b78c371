"""How documents, configurations and pages, as looked at twice, become facts."""

from dataclasses import replace

import pytest

from gateway.core.doctor import examine
from gateway.core.doctor.counting import counted
from gateway.core.doctor.facts import Facts, Gate, Gpu, Latency, Limiting, Server, Setup, Task, Traffic
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

    (found,) = examine(Facts(window_s=10, servers=counted(look(0), look(200)).servers))
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
