"""The prober: what it does to the breakers."""

import asyncio
from dataclasses import replace

import pytest

from gateway.backends.scripted import ScriptedBackend
from gateway.core.attempts import CONSEQUENCES
from gateway.core.breaker import Breaker, BreakerBoard
from gateway.core.errors import BackendError, Fault, FaultKind
from gateway.core.models import ModelFigures
from gateway.core.rules import RuleSet, parse_rules
from gateway.core.types import ANY, Place
from gateway.gate import Gate
from gateway.health import SILENCE_US, Prober, places
from gateway.stores.memory import MemoryRuleSource
from tests.kit.app import DEFAULT_RULES, embedding
from tests.kit.wait import until


class Told:
    def __init__(self) -> None:
        self.breakers, self.revision, self.counts, self.heals, self.waits = {}, 0, {}, [], {}

    def health(self, breakers, rules):
        self.breakers, self.revision = breakers, rules.revision

    def figures(self, backend, figures):
        self.counts[backend] = figures

    def waiting(self, counts):
        self.waits = counts

    def healed(self, place, outcome):
        self.heals.append((place, outcome))


class Clock:
    def __init__(self) -> None:
        self.now_us = 5

    def __call__(self):
        return self.now_us


TRITON = Place(backend="triton", model="text_embedding")
LOCAL = Place(backend="local", model="text_embedding")
RULES = RuleSet(revision=3, rules=parse_rules(DEFAULT_RULES))
DOWN = Fault(kind=FaultKind.UNAVAILABLE, message="refused")


class Round:
    """A prober over one scripted backend called `triton`; `probe` is one round of it."""

    def __init__(self, rules=RULES, *, backend=None, replicas=(), healer=None, gates=None) -> None:
        self.triton = backend or ScriptedBackend("triton", [embedding()])
        self.triton.replica_names = replicas
        self.board, self.told, self.clock = BreakerBoard(), Told(), Clock()
        self.rules = MemoryRuleSource(rules)
        self.prober = Prober(
            backends={"triton": self.triton},
            rules=self.rules,
            board=self.board,
            clock=self.clock,
            observer=self.told,
            healer=healer,
            gates=gates,
        )

    async def probe(self):
        """The places that were probed."""
        self.triton.probes.clear()
        await self.prober._probe_all()
        return set(self.triton.probes)

    def fail(self, place, kind=FaultKind.BROKEN, times=3, **fields):
        for _ in range(times):
            self.board.failed(place, now_us=self.clock(), fault=Fault(kind=kind, message="x", **fields))


def split(*targets):
    listed = [{"backend": "triton", "model": model, "version": version} for model, version in targets]
    return RuleSet(revision=1, rules=parse_rules([{"name": "r", "split": listed}]))


ANY_MODEL = RuleSet(revision=1, rules=parse_rules([{"name": "r", "split": [{"backend": "triton", "model": "*"}]}]))


async def test_a_start_probes_every_target_once():
    local = ScriptedBackend("local", [embedding()])
    triton = ScriptedBackend("triton", [embedding()], probe_fault=DOWN)
    board, told = BreakerBoard(), Told()
    prober = Prober(
        backends={"triton": triton, "local": local},
        rules=MemoryRuleSource(RULES),
        board=board,
        clock=Clock(),
        observer=told,
    )
    await prober.start()
    await prober.close()
    assert sorted(place.model for place in triton.probes) == ["image_classification", "text_embedding"]
    assert board.of(TRITON).why_not(5) is not None
    assert board.of(LOCAL).why_not(5) is None
    assert told.revision == 3


async def test_a_backend_that_returns_is_used_again(monkeypatch):
    monkeypatch.setattr("gateway.health.INTERVAL_S", 0.005)
    one = Round()
    one.triton.probe_fault = DOWN
    await one.prober.start()
    assert one.board.of(TRITON).why_not(5) is not None
    one.triton.probe_fault = None
    await until(lambda: one.board.of(TRITON).why_not(5) is None)
    await one.prober.close()


@pytest.mark.parametrize("kind", FaultKind)
async def test_a_probe_counts_only_what_a_request_would(kind):
    one = Round()
    one.triton.probe_fault = Fault(kind=kind, message="x")
    await one.probe()
    assert one.board.of(TRITON).probe_failures == int(CONSEQUENCES[kind].blames_backend)


class OnlyAt(ScriptedBackend):
    """Down but for the places that `is_up` is true of."""

    def __init__(self, is_up) -> None:
        super().__init__("triton", [embedding()])
        self.is_up = is_up

    async def probe(self, place):
        await super().probe(place)
        if not self.is_up(place):
            raise BackendError(DOWN)


async def test_a_version_that_is_not_there_does_not_take_its_sibling_along():
    one = Round(split(("m", "1"), ("m", "2")), backend=OnlyAt(lambda place: place.version == "1"))
    await one.probe()
    assert one.board.of(Place(backend="triton", model="m", version="1")).why_not(5) is None
    assert one.board.of(Place(backend="triton", model="m", version="2")).why_not(5) is not None


async def test_a_probe_that_fails_in_an_unforeseen_way_does_not_end_probing(monkeypatch):
    monkeypatch.setattr("gateway.health.INTERVAL_S", 0.005)
    one = Round()
    await one.prober.start()

    async def explode(place):
        one.triton.probes.append(place)
        raise UnicodeError("surprise")

    monkeypatch.setattr(one.triton, "probe", explode)
    count = len(one.triton.probes)
    await until(lambda: len(one.triton.probes) > count + 4)
    await one.prober.close()


async def test_figures_are_passed_on(monkeypatch):
    monkeypatch.setattr("gateway.health.INTERVAL_S", 0.005)
    one = Round()
    counts = dict.fromkeys(ModelFigures.__dataclass_fields__, 0) | {"model": "m", "batch_sizes": {}}
    one.triton.counts = [ModelFigures(**counts)]
    await one.prober.start()
    await until(lambda: one.told.counts.get("triton"))
    await one.prober.close()
    assert one.told.counts == {"triton": one.triton.counts}


async def test_the_length_of_queues_is_told():
    gate = Gate(max_in_flight=1, max_queue_size=5)
    one = Round(gates={"triton": gate})
    await gate.enter("a:1", tenant="t", priority="interactive", within_us=1, work=lambda: 1)
    waiting = asyncio.create_task(gate.enter("a:1", tenant="t", priority="batch", within_us=5_000_000, work=lambda: 1))
    await until(gate.waiting)
    await one.probe()
    assert one.told.waits == {"triton": 1}
    gate.leave("a:1")
    await waiting
    await one.probe()
    assert one.told.waits == {"triton": 0}


# --- replicas -------------------------------------------------------------------------------------


async def test_each_replica_has_its_own_health():
    one = Round(split(("m", "")), backend=OnlyAt(lambda place: place.replica == "a:1"), replicas=("a:1", "b:1"))
    place = Place(backend="triton", model="m")
    assert await one.probe() == {replace(place, replica="a:1"), replace(place, replica="b:1")}
    assert one.board.of(replace(place, replica="a:1")).why_not(5) is None
    assert one.board.of(replace(place, replica="b:1")).why_not(5) is not None
    one.triton.replica_names = ("a:1",)
    await one.probe()
    assert {at.replica for at in one.board.all()} <= {"a:1"}
    assert {at.replica for at in one.told.breakers} <= {"a:1"}


async def test_a_server_that_requests_found_away_is_probed_until_it_returns():
    one = Round(split(("m", "")), replicas=("a:1",))
    server = Place(backend="triton", model=ANY, replica="a:1")
    one.fail(Place(backend="triton", model="m", replica="a:1"), FaultKind.UNAVAILABLE, is_server=True)
    assert one.board.why_not(Place(backend="triton", model="other", replica="a:1"), 5) is not None
    one.triton.probe_fault = DOWN
    assert server in await one.probe()
    one.triton.probe_fault = None
    await one.probe()
    assert one.board.of(server).why_not(5) is None
    assert server not in await one.probe()


# --- models that callers name themselves ----------------------------------------------------------


CALLED = Place(backend="triton", model="called", replica="a:1")


async def test_where_callers_name_models_the_server_is_probed():
    one = Round(ANY_MODEL, replicas=("a:1", "b:1"))
    assert await one.probe() == {Place(backend="triton", model=ANY, replica=name) for name in ("a:1", "b:1")}


async def test_what_is_well_is_told_and_leaves_nothing_on_the_board():
    one = Round(ANY_MODEL, replicas=("a:1",))
    server = Place(backend="triton", model=ANY, replica="a:1")
    one.fail(server)
    await one.probe()
    assert one.told.breakers[server].failures
    one.board.answered(server)
    await one.probe()
    assert one.told.breakers == {server: Breaker()}
    assert one.board.all() == {}


async def test_a_called_model_that_is_out_is_probed_too():
    one = Round(ANY_MODEL, replicas=("a:1",))
    one.fail(CALLED)
    assert CALLED in await one.probe()
    assert CALLED in one.told.breakers
    one.board.answered(CALLED)
    assert CALLED not in await one.probe()
    assert CALLED not in one.board.all()


async def test_failures_in_a_row_are_not_forgotten_between_rounds():
    one = Round(ANY_MODEL, replicas=("a:1",))
    for _ in range(3):
        one.fail(CALLED, times=1)
        assert CALLED in one.board.all()
        await one.probe()
    assert one.board.of(CALLED).open_until_us is not None


async def test_names_of_callers_fill_neither_memory_nor_metrics():
    one = Round(ANY_MODEL, backend=OnlyAt(lambda place: place.model == ANY), replicas=("a:1",))
    for number in range(20):
        one.fail(replace(CALLED, model=f"random{number}"))
    await one.probe()
    assert not any(place.model.startswith("random") for place in one.told.breakers)
    one.clock.now_us += SILENCE_US - 1
    one.fail(replace(CALLED, model="random0"))
    await one.probe()
    one.clock.now_us += 1
    await one.probe()
    assert [place.model for place in one.board.all() if place.model != ANY] == ["random0"]
    one.clock.now_us += SILENCE_US
    await one.probe()
    assert not [place for place in one.board.all() if place.model != ANY]


async def test_a_version_that_a_caller_named_is_kept_like_a_model():
    one = Round(split(("m", "")))
    place = Place(backend="triton", model="m", version="7")
    one.fail(place)
    assert place in await one.probe()
    assert one.board.of(place).open_until_us is not None


async def test_a_dead_model_waits_for_its_healing():
    one = Round(ANY_MODEL, replicas=("a:1",))
    one.fail(CALLED, FaultKind.DEAD, times=1, dead_model="part")
    await one.probe()
    one.clock.now_us += 2 * SILENCE_US
    await one.probe()
    assert one.board.of(CALLED).dead_model == "part"
    one.triton.replica_names = ("b:1",)
    await one.probe()
    assert CALLED not in one.board.all()


async def test_every_round_heals():
    class Healer:
        count, is_closed = 0, False

        def heal(self):
            self.count += 1

        async def close(self):
            self.is_closed = True

    one = Round(healer=Healer())
    await one.probe()
    await one.probe()
    await one.prober.close()
    assert (one.prober._healer.count, one.prober._healer.is_closed) == (2, True)


def test_places_are_those_of_enabled_rules():
    rules = parse_rules([{**DEFAULT_RULES[0], "enabled": False}, DEFAULT_RULES[2]])
    assert {str(t) for t in places(RuleSet(revision=1, rules=rules))} == {"llm/smollm2", "llm2/other"}


async def test_a_place_of_a_backend_that_is_switched_off_is_not_probed():
    one = Round(RuleSet(revision=1, rules=parse_rules([DEFAULT_RULES[2]])))
    assert await asyncio.wait_for(one.probe(), 1) == set()
