"""The prober: what it does to the breakers."""

from gateway.backends.scripted import ScriptedBackend
from gateway.core.breaker import BreakerBoard
from gateway.core.errors import Fault, FaultKind
from gateway.core.routing import RuleSet, parse_rules
from gateway.health import Prober, targets
from gateway.stores.memory import MemoryRules
from tests.kit.app import DEFAULT_RULES, embedding
from tests.kit.wait import until


class Told:
    def __init__(self) -> None:
        self.breakers, self.revision, self.sizes = {}, 0, {}

    def health(self, breakers, revision):
        self.breakers, self.revision = breakers, revision

    def batch_sizes(self, backend, counts):
        self.sizes[backend] = counts


RULES = RuleSet(revision=3, rules=parse_rules(DEFAULT_RULES))


async def test_a_start_probes_every_target_once():
    down = Fault(kind=FaultKind.UNAVAILABLE, message="refused")
    triton = ScriptedBackend("triton", [embedding()], probe_fault=down)
    local = ScriptedBackend("local", [embedding()])
    board, told = BreakerBoard(), Told()
    prober = Prober(
        backends={"triton": triton, "local": local},
        rules=MemoryRules(RULES),
        board=board,
        clock=lambda: 5,
        observer=told,
    )
    await prober.start()
    await prober.close()
    assert sorted(triton.probes) == [("image_classification", ""), ("text_embedding", "")]
    assert board.of("triton", "text_embedding").why_not(5) is not None
    assert board.of("local", "text_embedding").why_not(5) is None
    assert told.revision == 3


async def test_a_backend_that_returns_is_used_again(monkeypatch):
    monkeypatch.setattr("gateway.health.INTERVAL_S", 0.005)
    triton = ScriptedBackend("triton", [embedding()], probe_fault=Fault(kind=FaultKind.UNAVAILABLE, message="x"))
    board = BreakerBoard()
    prober = Prober(
        backends={"triton": triton}, rules=MemoryRules(RULES), board=board, clock=lambda: 5, observer=Told()
    )
    await prober.start()
    assert board.of("triton", "text_embedding").why_not(5) is not None
    triton.probe_fault = None
    await until(lambda: board.of("triton", "text_embedding").why_not(5) is None)
    await prober.close()


def test_targets_are_those_of_enabled_rules():
    rules = parse_rules([{**DEFAULT_RULES[0], "enabled": False}, DEFAULT_RULES[2]])
    assert {str(t) for t in targets(RuleSet(revision=1, rules=rules))} == {"llm/smollm2", "llm2/other"}
