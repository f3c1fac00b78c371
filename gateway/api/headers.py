"""Response headers: the limits' state, the route taken, and what the answer cost.

The limits are told twice: in OpenAI's `x-ratelimit-*`, the nearest limit of each kind, which its clients read; and in
`RateLimit-Policy` and `RateLimit` (draft-ietf-httpapi-ratelimit-headers-10), every limit in a unit that the draft
knows: requests, and requests at once. Tokens have no unit there, money has none either: `x-ratelimit-*` alone has them.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from gateway.core.cost import NANO_USD_PER_USD
from gateway.core.rate_limit import PERIODS_US
from gateway.core.types import ANY, Limit, LimitState, Recalled, Route, Usage, Verdict

_SECOND_US: Final = 1_000_000
_AS_THEY_ARE = " !\"#$&'()*+,/:;<=>?@[\\]^`{|}~%"
_UNITS: Final = {"requests": "", "concurrent": ';qu="concurrent-requests"'}  # the draft's own; requests by default


def limit_headers(verdict: Verdict) -> dict[str, str]:
    """How the limits stand after this request; nothing where no limit applies."""
    headers: dict[str, str] = {}
    states = verdict.states
    if states:
        told = _told(tuple([state.limit for state in states]))
        for kind, place in told.kinds:
            state = _nearest(verdict, kind) if place is None else states[place]
            amount, shown, limit_name, remaining_name, reset_name = _KINDS[kind]
            headers[limit_name] = shown(amount(state.limit))
            headers[remaining_name] = shown(state.remaining)
            headers[reset_name] = go_duration(state.reset_us)
        if told.policy:
            is_refused = not verdict.allowed
            left = [item + _left(states[place], is_refused=is_refused) for place, item in told.items]
            headers["ratelimit-policy"], headers["ratelimit"] = told.policy, ", ".join(left)
    if verdict.ticket is not None:
        headers["x-ordering-ticket"] = str(verdict.ticket)
    return headers


def _nearest(verdict: Verdict, kind: str) -> LimitState:
    """Of several limits of a kind the one that is told of: that which refused, else the one nearest to its end."""
    hit = verdict.refused_by
    state = hit if hit is not None and hit.limit.kind == kind else verdict.nearest(kind)
    assert state is not None  # noqa: S101 - there are several
    return state


@functools.lru_cache(maxsize=10_000)
def policy_name(limit: Limit) -> str:
    """A short name that never changes and that no other limit has: `60-requests-per-minute`, `5-usd-per-day-tenant`."""
    amount = usd(limit.amount) if limit.kind == "usd" else str(limit.amount)
    parts = [amount, limit.kind, *(("per", limit.per) if limit.per else ())]
    if limit.burst not in (0, limit.amount):
        parts += ["burst", str(limit.burst)]
    if limit.shared_by != "key":
        parts.append(limit.shared_by)
    for name, value in (("task", limit.task), ("model", limit.model), ("priority", limit.priority)):
        if value != ANY:
            parts += [name, quote(value, safe=_AS_THEY_ARE)]
    return "-".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """What is told of limits however they stand.

    Attributes:
        kinds: those of `x-ratelimit-*`, each with the place of its one limit, or None where it has several.
        policy: the field `RateLimit-Policy`; empty where no limit is in it.
        items: how each item of `RateLimit` begins, with the place of its limit.
    """

    kinds: tuple[tuple[str, int | None], ...]
    policy: str
    items: tuple[tuple[int, str], ...]


@functools.lru_cache(maxsize=10_000)
def _told(limits: tuple[Limit, ...]) -> _Told:
    kinds = [limit.kind for limit in limits]
    names = {limit: _string(policy_name(limit)) for limit in limits if limit.kind in _UNITS}
    return _Told(
        kinds=tuple((kind, kinds.index(kind) if kinds.count(kind) == 1 else None) for kind in _KINDS if kind in kinds),
        policy=", ".join(name + _quota(limit) for limit, name in names.items()),
        items=tuple((place, names[limit]) for place, limit in enumerate(limits) if limit in names),
    )


def _quota(limit: Limit) -> str:
    """So much in so many seconds: what may come at once, and how long all of it takes to come back.

    The draft counts whole seconds, so what comes back sooner is told for one second.
    """
    if limit.kind == "concurrent":
        return f";q={limit.amount}{_UNITS[limit.kind]}"
    period_us = PERIODS_US[limit.per]
    window_us = max(_SECOND_US, limit.burst * period_us // limit.amount)
    return f";q={max(limit.burst, limit.amount * window_us // period_us)};w={-(-window_us // _SECOND_US)}"


def _left(state: LimitState, *, is_refused: bool) -> str:
    """What is left, and after how many seconds more is.

    That is until the limit is whole; for a limit that refused, until the request would pass. The other limits of a
    refused request do not stand in its way and name no time: `Retry-After` is never before one that is named.
    """
    if is_refused:
        until_us = state.retry_after_us if state.is_refused and not state.is_hopeless else 0
    else:
        until_us = state.reset_us
    time = f";t={-(-until_us // _SECOND_US)}" if until_us else ""
    return f";r={state.remaining}{time}"


def _string(text: str) -> str:
    """A String of RFC 9651."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def route_headers(route: Route) -> dict[str, str]:
    """Where the answer came from."""
    model = route.model  # named by a caller, maybe: a header is ASCII
    return {
        "x-gateway-backend": route.backend,
        "x-gateway-model": model if model.isascii() and model.isprintable() else quote(model, safe=_AS_THEY_ARE),
        "x-gateway-attempts": str(route.attempts),
        "x-gateway-rule": route.rule,
    }


def recall_headers(recalled: Recalled) -> dict[str, str]:
    """Whether the answer was given before: `Age` and `Cache-Status` (RFC 9211) of a cache; idempotency's own."""
    headers = {}
    if recalled.outcome == "replayed":
        headers["idempotency-replayed"] = "true"
    if recalled.cache_status:
        headers["cache-status"] = f"gateway; {recalled.cache_status}"
    if recalled.age_s is not None:
        headers["age"] = str(recalled.age_s)
    return headers


def cost_headers(usage: Usage) -> dict[str, str]:
    """What the answer cost; nothing where it has no price."""
    return {} if usage.cost_nano_usd is None else {"x-gateway-cost-usd": usd(usage.cost_nano_usd)}


def usd(nano_usd: int) -> str:
    """1e-9 US dollars as plain decimal dollars, exact: `0.00004`, `12`; a number in JSON too."""
    whole, rest = divmod(nano_usd, NANO_USD_PER_USD)
    return f"{whole}.{rest:09d}".rstrip("0").rstrip(".")


def go_duration(length_us: int) -> str:
    """A length as OpenAI spells it (`6m0s`, `1s`, `120ms`), rounded up so that it is never too early."""
    length_ms = -(-length_us // 1000)
    if length_ms < 1000:  # noqa: PLR2004 - milliseconds in a second
        return f"{length_ms}ms"
    seconds = -(-length_ms // 1000)
    hours, minutes, seconds = seconds // 3600, seconds // 60 % 60, seconds % 60
    if hours:
        return f"{hours}h{minutes}m{seconds}s"
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"


def _named(kind: str) -> tuple[str, str, str]:
    return f"x-ratelimit-limit-{kind}", f"x-ratelimit-remaining-{kind}", f"x-ratelimit-reset-{kind}"


_KINDS: Final[dict[str, tuple[Callable[[Limit], int], Callable[[int], str], str, str, str]]] = {
    "requests": (lambda limit: limit.burst, str, *_named("requests")),
    "tokens": (lambda limit: limit.burst, str, *_named("tokens")),
    "usd": (lambda limit: limit.amount, usd, *_named("usd")),
}
"""By kind: how much of it there is, how an amount is written, and its three headers."""
