"""The order in which the places of a pool are tried: which is least busy, fastest, cheapest, or knows the prompt.

Each strategy gives a whole order, best first: what follows is where to go on when the first fails.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from gateway.core.loads import Standing
from gateway.core.replicas import Draw
from gateway.core.rules import Strategy
from gateway.core.types import EngineLoad, Place

TYPICAL_TOKENS: Final = 500
"""A request of others, which waits in an engine's queue: 161 tokens of prompt and 338 of answer is the mean of the
ShareGPT conversations ("Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023)."""
KV_FULL: Final = 0.95  # of the KV cache: above it, engines preempt running requests and compute them anew
EXPLORATION: Final = 0.02  # of requests go to another place than the fastest, to see whether it still is
RETRY_UNMEASURED_US: Final = 1_000_000  # an unmeasured place goes first once in that time at most: it may be broken
LOAD_BOUND: Final = 1.25
"""Of the mean load: Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads", 2016."""
FREE_LOAD: Final = 4  # requests that any engine takes into one batch: below it, a cached prefix is worth more than room


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A place that may be chosen.

    Attributes:
        engine: what its engine says of itself, all gateways' requests included; None where it does not tell.
        expected_nano_usd: what the request will cost there; None where no price is known.
    """

    place: Place
    standing: Standing
    engine: EngineLoad | None = None
    expected_nano_usd: int | None = None


def ordered(strategy: Strategy, options: Sequence[Option], *, prefix: bytes, draw: Draw) -> tuple[int, ...]:
    """All indices into `options`, best first. What is equal is in random order, so that gateways do not run together.

    - `least_in_flight`: the fewest tokens; what the engine has from others counts too. An engine that has requests
      waiting, or whose KV cache is nearly full, comes after those that have not: whatever our own count, it can not
      begin at once.
    - `fastest`: the shortest mean time to the first token, with saturated engines last. One that is not measured goes
      first, but a single request and no herd: while that is under way, or for a second after it brought no
      measurement, it comes directly behind the best. Two in a hundred requests go to another than the best. With
      nothing measured, as `least_in_flight`.
    - `cheapest`: the lowest expected cost, then as `least_in_flight`; what has no price last.
    - `prefix_affinity`: prompts that begin alike go to one place, whose prefix cache then has it: rendezvous hashing
      (Thaler and Ravishankar, 1998), so a place that comes or goes moves its own share alone. Places that would have
      more than four requests, and than 1.25 times the mean, come after the others, in the same order. No prefix: as
      `least_in_flight`.

    `prefix` is the digest of `core.tokens.prefix_of`. `weighted` and `ordered` do not look at places; their order is
    the written one.
    """
    order = _ORDERS.get(strategy)
    return tuple(range(len(options))) if order is None else tuple(order(options, prefix, draw))


def _least_in_flight(options: Sequence[Option], _prefix: bytes, draw: Draw) -> list[int]:
    chances = [draw() for _ in options]
    return sorted(range(len(options)), key=lambda i: (_is_saturated(options[i]), _tokens(options[i]), chances[i]))


def _cheapest(options: Sequence[Option], prefix: bytes, draw: Draw) -> list[int]:
    def price(i: int) -> tuple[bool, int]:
        expected = options[i].expected_nano_usd
        return expected is None, expected or 0

    return sorted(_least_in_flight(options, prefix, draw), key=price)


def _fastest(options: Sequence[Option], prefix: bytes, draw: Draw) -> list[int]:
    calm = _least_in_flight(options, prefix, draw)
    measured = sorted(
        (i for i in calm if options[i].standing.is_measured),
        key=lambda i: (_is_saturated(options[i]), options[i].standing.first_token_us),
    )
    if not measured:
        return calm
    unmeasured = [i for i in calm if not options[i].standing.is_measured]
    to_try = [i for i in unmeasured if _is_due(options[i].standing) and not _is_saturated(options[i])][:1]
    behind = [i for i in unmeasured if i not in to_try]
    order = [measured[0], *behind, *measured[1:]]
    if not to_try and len(order) > 1 and draw() < EXPLORATION:
        other = order.pop(1 + int(draw() * (len(order) - 1)))
        order.insert(0, other)
    return to_try + order


def _prefix_affinity(options: Sequence[Option], prefix: bytes, draw: Draw) -> list[int]:
    if not prefix:
        return _least_in_flight(options, prefix, draw)
    loads = [_requests(option) for option in options]
    bound = max(FREE_LOAD, math.ceil(LOAD_BOUND * (sum(loads) + 1) / max(1, len(options))))
    return sorted(
        range(len(options)),
        key=lambda i: (loads[i] + 1 > bound, -_score(prefix, options[i].place), str(options[i].place)),
    )


_ORDERS: Final[dict[Strategy, Callable[[Sequence[Option], bytes, Draw], list[int]]]] = {
    "least_in_flight": _least_in_flight,
    "fastest": _fastest,
    "cheapest": _cheapest,
    "prefix_affinity": _prefix_affinity,
}


def _is_due(standing: Standing) -> bool:
    """Whether an unmeasured place may be tried first."""
    since_us = standing.since_sent_us
    return not standing.own_requests and (since_us is None or since_us >= RETRY_UNMEASURED_US)


def _is_saturated(option: Option) -> bool:
    engine = option.engine
    return engine is not None and (engine.waiting > 0 or (engine.kv_used is not None and engine.kv_used >= KV_FULL))


def _tokens(option: Option) -> int:
    """In flight from here, and what the engine has from others."""
    return option.standing.tokens + _of_others(option) * TYPICAL_TOKENS


def _requests(option: Option) -> int:
    return option.standing.requests + _of_others(option)


def _of_others(option: Option) -> int:
    """Requests that the engine has and this process did not send; of seconds ago, so a little wrong."""
    engine = option.engine
    return max(0, engine.running + engine.waiting - option.standing.requests) if engine else 0


def _score(prefix: bytes, place: Place) -> int:
    """The same in every process: whoever scores highest has the prefix."""
    key = hashlib.blake2b(prefix, digest_size=16).digest()
    return int.from_bytes(hashlib.blake2b(str(place).encode(), key=key, digest_size=8).digest(), "big")
