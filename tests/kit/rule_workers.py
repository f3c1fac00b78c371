"""Rules for workers that follow them, and what those workers can run."""

from gateway.core.rules import RuleSet, check_targets, parse_rules

BOUND_S = 5.0  # no test waits for this; a hang would


def rules(*names: str, backend: str = "triton"):
    return parse_rules([{"name": n, "split": [{"backend": backend, "model": "m"}]} for n in names])


SEED = RuleSet(revision=0, rules=rules("seed"))


def validate(candidates) -> None:
    check_targets(candidates, backends=("triton", "local"), tasks=())
