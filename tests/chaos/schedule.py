"""Which faults are made, in which order and for how long: drawn from a seed. Pure."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

PARTS: Final = ("redis", "triton-0", "triton-1", "llm", "worker", "control")
ACTIONS: Final = ("kill", "pause", "cut", "swallow", "slow", "restart")
"""What can be done to each part.

- `kill`: SIGKILL; what does not come back by itself is started again when the fault ends;
- `pause`: SIGSTOP, and SIGCONT when the fault ends;
- `cut`: a partition that is seen: connections end, new ones are refused;
- `swallow`: a partition that is not: whatever is sent vanishes until the fault ends;
- `slow`: everything that is said to it and by it comes late;
- `restart`: SIGTERM, and a new start as soon as it has ended.
"""
LASTS_S: Final = (2.0, 5.0)
QUICK: Final = (
    ("redis", "kill"),
    ("triton-0", "kill"),
    ("llm", "pause"),
    ("worker", "kill"),
    ("redis", "swallow"),
    ("worker", "restart"),
    ("llm", "cut"),
)
"""The small set: each of the data plane's parts once, by what has found the most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something to do to a part, `after_s` after the strike begins, undone `lasts_s` later."""

    part: str
    action: str
    lasts_s: float
    after_s: float = 0.0
    late_s: float = 0.0


Strike = tuple[Fault, ...]
"""What overlaps: one fault, or two."""


def suite(seed: int, *, pairs: int) -> list[Strike]:
    """Every fault of every part by itself, in an order where the same part does not follow itself; then some pairs."""
    draw = random.Random(seed)
    strikes: list[Strike] = [(fault(draw, part, action),) for part, action in _spread(draw)]
    return [*strikes, *(pair(draw) for _ in range(pairs))]


def quick(seed: int) -> list[Strike]:
    """A small fixed set, and one pair."""
    draw = random.Random(seed)
    both = (fault(draw, "redis", "cut"), fault(draw, "worker", "kill", after_s=0.5))
    return [*((fault(draw, part, action, most_s=3.0),) for part, action in QUICK), both]


def soak(seed: int) -> Iterator[Strike]:
    """Without end: now one, now two."""
    draw = random.Random(seed)
    while True:
        yield pair(draw) if draw.random() < 0.3 else (fault(draw, draw.choice(PARTS), draw.choice(ACTIONS)),)


def fault(draw: random.Random, part: str, action: str, *, after_s: float = 0.0, most_s: float = LASTS_S[1]) -> Fault:
    """One, of a drawn length."""
    late_s = draw.choice((0.05, 0.4)) if action == "slow" else 0.0
    return Fault(part=part, action=action, lasts_s=draw.uniform(LASTS_S[0], most_s), after_s=after_s, late_s=late_s)


def pair(draw: random.Random) -> Strike:
    """Two parts at once: the second begins while the first is away."""
    first, second = draw.sample(PARTS, 2)
    return (
        fault(draw, first, draw.choice(ACTIONS)),
        fault(draw, second, draw.choice(ACTIONS), after_s=draw.uniform(0.2, 1.5)),
    )


def _spread(draw: random.Random) -> list[tuple[str, str]]:
    """All faults; one round over the parts for each action, the Tritons never after one another."""
    found = []
    actions = {part: draw.sample(ACTIONS, len(ACTIONS)) for part in PARTS}
    for number in range(len(ACTIONS)):
        found += [
            (part, actions[part][number]) for part in ("redis", "triton-0", "llm", "worker", "triton-1", "control")
        ]
    return found
