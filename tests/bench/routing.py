"""`python -m tests.bench.routing`: what it costs to find a request's rule among many, and to plan by it.

Microseconds of one core, the best of five rounds. `find` is `RuleSet.rule_of`; `plan` is `routing.plan_by` over a split
of two versions and a fallback, with every place healthy: on backends with one server, and with two replicas each.
"""

import random
import timeit
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from gateway.core import routing
from gateway.core.rules import RuleSet, parse_rules
from gateway.core.types import Caller, InferenceRequest

ROUNDS: Final = 5
CALLS: Final = 20_000
SPLIT: Final = [{"backend": "triton", "model": "m", "version": v, "weight": w} for v, w in (("1", 90), ("2", 10))]
FALLBACK: Final = [{"backend": "local", "model": "m"}]
MATCHES: Final[Mapping[str, Callable[[int], Mapping[str, Any]]]] = {
    "ten tasks": lambda i: {"task": f"t{i % 10}", "tenant": f"acme-{i}" if i < 100 else "*"},
    "one task, a tenant each": lambda i: {"task": "t0", "tenant": f"acme-{i}"},
    "one task, a value of one header each": lambda i: {"task": "t0", "headers": {"x-beta": str(i)}},
    "one task, the beginning of a header each": lambda i: {"task": "t0", "headers": {"x-beta": f"v{i}*"}},
    "one task, a size each": lambda i: {"task": "t0", "max_input_bytes": i + 1},
}
REQUEST: Final = InferenceRequest(
    id="i",
    task="t0",
    caller=Caller(key_id="k", tenant="acme-none"),
    input=None,
    received_us=0,
    deadline_us=1,
    headers={"x-beta": "none", "host": "h"},
    input_bytes=5000,
)


def best_us(call: Callable[[], object]) -> float:
    """Microseconds of one call."""
    return min(timeit.repeat(call, number=CALLS, repeat=ROUNDS)) / CALLS * 1e6


def state(replicas: Mapping[str, int]) -> routing.State:
    """Everything is healthy; `replicas` are those of each backend."""
    return routing.State(why_not=lambda _: None, loads=lambda _: replicas, draw=random.random)


def measure(rules: Annotated[int, typer.Option(min=1, max=999)] = 200) -> None:
    """Print the table."""
    table = Table("rules that differ by", "find", "plan", "plan, 2 replicas", title=f"us a decision, {rules} rules")
    alone, two = state({}), state({"a:8001": 1, "b:8001": 2})
    for name, match in MATCHES.items():
        made = [{"name": f"r{i}", "match": match(i), "split": SPLIT, "fallback": FALLBACK} for i in range(rules)]
        last = {"name": "last", "split": SPLIT, "fallback": FALLBACK}
        found = RuleSet(revision=1, rules=parse_rules([*made, last]))
        rule = found.rule_of(REQUEST)
        assert rule is not None
        times = (
            best_us(lambda found=found: found.rule_of(REQUEST)),
            best_us(lambda rule=rule: routing.plan_by(rule, 1, REQUEST, alone)),
            best_us(lambda rule=rule: routing.plan_by(rule, 1, REQUEST, two)),
        )
        table.add_row(name, *(f"{time:.2f}" for time in times))
    Console().print(table)


if __name__ == "__main__":
    typer.run(measure)
