"""Sequences in simulated worlds: they keep order and replica, wait for slots, and are lost with their server."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.tuning.report import OK, Report, parse_report
from gateway.tuning.simulation.run import simulate
from gateway.tuning.simulation.servers import SimulatedInstance, SimulatedReplica
from gateway.tuning.simulation.world import WorldError, parse_world

ONE_MS = {"curve": {"compute_us": {"1": 1000}}}


def run(batching: dict[str, Any], *, size: int = 8, model: dict[str, Any] = ONE_MS, **sections: Any) -> Report:
    """A world with one model that keeps sequences."""
    models = {"m": model | {"max_batch_size": size, "sequence_batching": batching}}
    return simulate(parse_world({"models": models, "backends": {"triton": {}}, "duration_s": 2.0} | sections))


# --- of every world ----------------------------------------------------------------------------------------


@dataclass
class Seen:
    """Looks on at every batch of every replica."""

    requests: defaultdict[int | str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    places: defaultdict[int | str, list[SimulatedReplica]] = field(default_factory=lambda: defaultdict(list))
    running: dict[int | str, SimulatedReplica] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def submit(self, replica: SimulatedReplica, members: Any, done: Any) -> Any:
        """What of a batch must never be; the `done` that hears of its end."""
        ids = [one.source.sequence_id for one in members if one.source.sequence_id]
        if len(set(ids)) < len(ids):
            self.faults.append(f"twice in a batch: {ids}")
        self.faults += [f"at once: {one}" for one in ids if one in self.running and not self.running[one].is_dead]
        for one in members:
            if one.source.sequence_id:
                self.requests[one.source.sequence_id].append(one.source)
                self.places[one.source.sequence_id].append(replica)
                self.running[one.source.sequence_id] = replica

        def ended(executed: Any) -> None:
            for one in ids:
                if self.running.get(one) is replica:
                    del self.running[one]
            done(executed)

        return ended


def watched(world: dict[str, Any], seed: int) -> tuple[Report, Seen]:
    seen, really = Seen(), SimulatedInstance.submit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            SimulatedInstance,
            "submit",
            lambda self, members, done: really(self, members, seen.submit(self._replica, members, done)),
        )
        return simulate(parse_world(world), seed=seed), seen


_batchings = st.sampled_from(
    [
        {"direct": {}},
        {"direct": {"max_queue_delay_microseconds": 3000, "minimum_slot_utilization": 0.7}},
        {"direct": {}, "max_sequence_idle_microseconds": 15_000},
        {"oldest": {"max_candidate_sequences": 3}},
        {"oldest": {"max_candidate_sequences": 16, "max_queue_delay_microseconds": 2000, "preferred_batch_size": [2]}},
        {"oldest": {"max_candidate_sequences": 6, "preserve_ordering": True}, "max_sequence_idle_microseconds": 15_000},
    ]
)
_classes = st.builds(
    lambda much, length, gap: much | {"sequence_length": length, "sequence_gap_ms": gap},
    st.sampled_from([{"rate": 40.0}, {"rate": 150.0, "arrivals": "bursty"}, {"concurrency": 9}, {"trace": [0.0] * 12}]),
    st.integers(1, 6),
    st.sampled_from([0.0, 4.0, 20.0]),
)
_failures = st.lists(
    st.builds(
        lambda at_s, for_s, replica, kind: {
            "backend": "triton",
            "at_s": at_s,
            "for_s": for_s,
            "replica": replica,
            "kind": kind,
        },
        st.sampled_from([0.05, 0.2]),
        st.sampled_from([0.01, 0.3]),
        st.integers(0, 1),
        st.sampled_from(["dead", "refusing"]),
    ),
    max_size=2,
)
_worlds = st.builds(
    lambda batching, classes, failures, instances, size: {
        "models": {
            "m": {
                "curve": {"compute_us": {"1": [900, 1000, 4000], "8": [2000, 7000]}, "overhead_us": 200},
                "max_batch_size": size,
                "sequence_batching": batching,
                "instances": instances,
            }
        },
        "backends": {"triton": {"replicas": 2}},
        "traffic": [one | {"name": f"c{place}"} for place, one in enumerate(classes)],
        "failures": failures,
        "tasks": {"t": {"timeout_ms": 300, "attempt_timeout_ms": 300}},
        "duration_s": 0.5,
    },
    _batchings,
    st.lists(_classes, min_size=1, max_size=2),
    _failures,
    st.integers(1, 2),
    st.sampled_from([2, 5]),
)


@settings(max_examples=12)
@given(world=_worlds, seed=st.integers(0, 5))
def test_sequences_keep_their_order_and_their_replica(world: dict[str, Any], seed: int) -> None:
    found, seen = watched(world, seed)
    for one in (found.whole, *found.classes):
        assert one.sent == sum(one.codes.values())  # each ends once
        assert one.unfinished == 0
    own = {"sequence_lost", "sequence_unknown"}
    assert set(found.whole.codes) - own <= {OK, "deadline_exceeded", "no_healthy_backend", "backend_error"}
    assert seen.faults == []
    assert seen.requests
    length = {one["name"]: one["sequence_length"] for one in world["traffic"]}
    for number, requests in seen.requests.items():
        names, counts = zip(*(one.request_id.rsplit("-", 1) for one in requests), strict=True)
        assert len(set(names)) == 1
        order = [int(one) for one in counts]
        assert order == sorted(order)
        after = [one for one in requests if not one.sequence_start]
        assert len(set(order)) == len(after) + 1  # a start alone is tried again: elsewhere, where its server died
        assert len(after) <= length[names[0]] - 1
        assert [one.sequence_end for one in after[:-1]] == [False] * len(after[:-1])
        begun = len(requests) - len(after)
        assert len(set(map(id, seen.places[number][begun - 1 :]))) == 1
    assert simulate(parse_world(world), seed=seed) == found
    assert parse_report(found.as_json()) == found


# --- slots -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batching", [{"direct": {}}, {"oldest": {"max_candidate_sequences": 2}}])
def test_where_all_slots_are_taken_a_sequence_waits_until_another_has_ended(batching: dict[str, Any]) -> None:
    """Two run at 0, 11 and 22 ms; what comes third begins at 23 ms."""
    traffic = [{"trace": [0.1] * 3, "sequence_length": 3, "sequence_gap_ms": 10.0}]
    found = run(batching, size=2, traffic=traffic)
    assert found.whole.codes == {OK: 9}
    assert found.whole.latency.max == pytest.approx(24.0)
    assert found.whole.latency.p50 == pytest.approx(1.0)
    more = run(batching, size=2, traffic=traffic, backends={"triton": {"replicas": 2}})
    assert more.whole.latency.max == pytest.approx(1.0)


def test_a_silent_sequence_loses_its_slot_to_one_that_waits() -> None:
    """The first is silent from 1 ms on and its slot free at 21 ms; what it then asks belongs to no sequence."""
    batching = {"direct": {}, "max_sequence_idle_microseconds": 20_000}
    traffic = [{"trace": [0.0, 0.0], "sequence_length": 2, "sequence_gap_ms": 50.0}]
    found = run(batching, size=1, traffic=traffic)
    assert found.whole.codes == {OK: 2, "sequence_unknown": 2}
    assert found.whole.latency.max == pytest.approx(22.0)
    assert not any("lost" in note for note in found.notes)


def test_direct_computes_the_empty_rows_too_and_oldest_none() -> None:
    """Of two sequences the first ends at once: its row, below that of the other, stays empty."""
    model = {"curve": {"compute_us": {"1": 1000, "2": 3000}}}
    traffic = [
        {"name": "short", "trace": [0.0], "sequence_length": 1},
        {"name": "long", "trace": [0.0], "sequence_length": 2, "sequence_gap_ms": 10.0},
    ]
    direct = run({"direct": {}}, model=model, traffic=traffic)
    assert direct.servers[0].batch_sizes == {2: 2}
    assert direct.whole.latency.max == pytest.approx(3.0)
    oldest = run({"oldest": {"max_candidate_sequences": 4}}, model=model, traffic=traffic)
    assert oldest.servers[0].batch_sizes == {1: 1, 2: 1}


# --- servers that die ----------------------------------------------------------------------------------------

STREAMS = {"rate": 40.0, "arrivals": "constant", "sequence_length": 10, "sequence_gap_ms": 20.0}


@pytest.mark.parametrize("for_s", [0.005, 1.0], ids=["back at once", "away"])
def test_what_a_server_kept_is_lost_with_it_and_told(for_s: float) -> None:
    failure = {"at_s": 1.0, "for_s": for_s, "backend": "triton", "replica": 1}
    found = run({"direct": {}}, traffic=[STREAMS], backends={"triton": {"replicas": 2}}, failures=[failure])
    lost = found.whole.codes["sequence_lost"]
    assert set(found.whole.codes) == {OK, "sequence_lost"}  # those that begin meanwhile begin elsewhere
    assert 2 <= lost <= 8  # about eight are alive, and half of them there
    assert f"sequences lost with the server that kept them, in the whole run: triton/1 {lost}" in found.notes
    assert sum(second.failed for second in found.timeline if second.at_s == 1.0) == lost


def test_where_a_model_is_not_ready_its_sequences_are_taken_for_lost_and_where_it_is_slow_they_are_not() -> None:
    """As by the gateway: a model that is not ready any more was unloaded."""
    failure = {"at_s": 1.0, "for_s": 0.2, "backend": "triton", "kind": "refusing"}
    found = run({"direct": {}}, traffic=[STREAMS], failures=[failure])
    assert set(found.whole.codes) == {OK, "sequence_lost", "no_healthy_backend"}
    slow = run({"direct": {}}, traffic=[STREAMS], failures=[failure | {"kind": "slow", "times": 10.0}])
    assert set(slow.whole.codes) == {OK}


# --- files ---------------------------------------------------------------------------------------------------


def test_a_model_that_keeps_nothing_takes_sequences_as_any_requests() -> None:
    world = {
        "models": {"m": ONE_MS},
        "backends": {"triton": {"replicas": 3}},
        "traffic": [{"concurrency": 2, "sequence_length": 5}],
        "duration_s": 0.5,
    }
    found = simulate(parse_world(world))
    assert set(found.whole.codes) == {OK}
    assert found.whole.sent == pytest.approx(1000, abs=2)


@pytest.mark.parametrize(
    ("model", "traffic", "words"),
    [
        ({}, {}, "traffic.0.sequence_length: the model 'm' keeps sequences"),
        ({}, {"sequence_length": 2, "rows": 2}, "traffic.0.rows: the model 'm' takes 1 at most"),
        ({}, {"sequence_gap_ms": 2.0}, "all.sequence_gap_ms: there is none without a sequence_length"),
        ({}, {"sequence_length": -1}, "all.sequence_length: must be a number from 0 on"),
        ({"dynamic_batching": {}}, {}, "models.m.sequence_batching: a model has either this or dynamic_batching"),
        ({"sequence_batching": {"newest": {}}}, {}, "models.m: failed to read 'sequence_batching' of m"),
    ],
)
def test_what_cannot_be_is_told_with_its_field(model: dict[str, Any], traffic: dict[str, Any], words: str) -> None:
    models = {"m": ONE_MS | {"max_batch_size": 4, "sequence_batching": {"direct": {}}} | model}
    with pytest.raises(WorldError) as refused:
        parse_world({"models": models, "backends": {"triton": {}}, "traffic": [{"rate": 1.0} | traffic]})
    assert words in str(refused.value)
