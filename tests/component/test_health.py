"""The prober: what it does to the breakers."""

import pytest

from gateway.backends.scripted import ScriptedBackend
from gateway.core.attempts import CONSEQUENCES
from gateway.core.breaker import BreakerBoard
from gateway.core.errors import BackendError, Fault, FaultKind
from gateway.core.rules import RuleSet, parse_rules
from gateway.core.types import Place
from gateway.health import Prober, places
from gateway.stores.memory import MemoryRuleSource
from tests.kit.app import DEFAULT_RULES, embedding
from tests.kit.wait import until


class Told:
    def __init__(self) -> None:
        self.breakers, self.revision, self.sizes = {}, 0, {}

    def health(self, breakers, revision):
        self.breakers, self.revision = breakers, revision

    def batch_sizes(self, backend, counts):
        self.sizes[backend] = counts


TRITON = Place(backend="triton", model="text_embedding")
LOCAL = Place(backend="local", model="text_embedding")
RULES = RuleSet(revision=3, rules=parse_rules(DEFAULT_RULES))


async def test_a_start_probes_every_target_once():
    down = Fault(kind=FaultKind.UNAVAILABLE, message="refused")
    triton = ScriptedBackend("triton", [embedding()], probe_fault=down)
    local = ScriptedBackend("local", [embedding()])
    board, told = BreakerBoard(), Told()
    prober = Prober(
        backends={"triton": triton, "local": local},
        rules=MemoryRuleSource(RULES),
        board=board,
        clock=lambda: 5,
        observer=told,
    )
    await prober.start()
    await prober.close()
    assert sorted(triton.probes) == [("image_classification", ""), ("text_embedding", "")]
    assert board.of(TRITON).why_not(5) is not None
    assert board.of(LOCAL).why_not(5) is None
    assert told.revision == 3


async def test_a_backend_that_returns_is_used_again(monkeypatch):
    monkeypatch.setattr("gateway.health.INTERVAL_S", 0.005)
    triton = ScriptedBackend("triton", [embedding()], probe_fault=Fault(kind=FaultKind.UNAVAILABLE, message="x"))
    board = BreakerBoard()
    prober = Prober(
        backends={"triton": triton}, rules=MemoryRuleSource(RULES), board=board, clock=lambda: 5, observer=Told()
    )
    await prober.start()
    assert board.of(TRITON).why_not(5) is not None
    triton.probe_fault = None
    await until(lambda: board.of(TRITON).why_not(5) is None)
    await prober.close()


@pytest.mark.parametrize("kind", FaultKind)
async def test_a_probe_counts_only_what_a_request_would(kind):
    triton = ScriptedBackend("triton", [embedding()], probe_fault=Fault(kind=kind, message="x"))
    board = BreakerBoard()
    prober = Prober(
        backends={"triton": triton}, rules=MemoryRuleSource(RULES), board=board, clock=lambda: 5, observer=Told()
    )
    await prober.start()
    await prober.close()
    assert board.of(TRITON).probe_failures == int(CONSEQUENCES[kind].blames_backend)


async def test_a_version_that_is_not_there_does_not_take_its_sibling_along():
    class OneVersion(ScriptedBackend):
        async def probe(self, model, version):
            if version == "2":
                raise BackendError(Fault(kind=FaultKind.UNAVAILABLE, message="not ready"))

    split = [{"backend": "triton", "model": "m", "version": v} for v in ("1", "2")]
    rules = RuleSet(revision=1, rules=parse_rules([{"name": "canary", "split": split}]))
    board = BreakerBoard()
    prober = Prober(
        backends={"triton": OneVersion("triton", [embedding()])},
        rules=MemoryRuleSource(rules),
        board=board,
        clock=lambda: 5,
        observer=Told(),
    )
    await prober.start()
    await prober.close()
    assert board.of(Place(backend="triton", model="m", version="1")).why_not(5) is None
    assert board.of(Place(backend="triton", model="m", version="2")).why_not(5) is not None


async def test_a_probe_that_fails_in_an_unforeseen_way_does_not_end_probing(monkeypatch):
    monkeypatch.setattr("gateway.health.INTERVAL_S", 0.005)
    triton = ScriptedBackend("triton", [embedding()])
    prober = Prober(
        backends={"triton": triton},
        rules=MemoryRuleSource(RULES),
        board=BreakerBoard(),
        clock=lambda: 5,
        observer=Told(),
    )
    await prober.start()

    async def explode(model, version):
        triton.probes.append((model, version))
        raise UnicodeError("surprise")

    monkeypatch.setattr(triton, "probe", explode)
    count = len(triton.probes)
    await until(lambda: len(triton.probes) > count + 4)
    await prober.close()


def test_places_are_those_of_enabled_rules():
    rules = parse_rules([{**DEFAULT_RULES[0], "enabled": False}, DEFAULT_RULES[2]])
    assert {str(t) for t in places(RuleSet(revision=1, rules=rules))} == {"llm/smollm2", "llm2/other"}
