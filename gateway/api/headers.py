"""Response headers: the limits' state, the route taken, and what the answer cost."""

from urllib.parse import quote

from gateway.core.types import Route, Usage, Verdict

_NANO = 1_000_000_000
_AS_THEY_ARE = " !\"#$&'()*+,/:;<=>?@[\\]^`{|}~%"


def limit_headers(verdict: Verdict) -> dict[str, str]:
    """OpenAI's `x-ratelimit-*` names; nothing where no limit applies."""
    headers = {}
    for kind in ("requests", "tokens"):
        state = verdict.nearest(kind)
        if state is not None:
            headers[f"x-ratelimit-limit-{kind}"] = str(state.limit.burst)
            headers[f"x-ratelimit-remaining-{kind}"] = str(state.remaining)
            headers[f"x-ratelimit-reset-{kind}"] = go_duration(state.reset_us)
    if verdict.ticket is not None:
        headers["x-ordering-ticket"] = str(verdict.ticket)
    return headers


def route_headers(route: Route) -> dict[str, str]:
    """Where the answer came from."""
    return {
        "x-gateway-backend": route.backend,
        "x-gateway-model": quote(route.model, safe=_AS_THEY_ARE),  # named by a caller, maybe: a header is ASCII
        "x-gateway-attempts": str(route.attempts),
        "x-gateway-rule": route.rule,
    }


def cost_headers(usage: Usage) -> dict[str, str]:
    """What the answer cost; nothing where it has no price."""
    return {} if usage.cost_nano_usd is None else {"x-gateway-cost-usd": usd(usage.cost_nano_usd)}


def usd(nano_usd: int) -> str:
    """1e-9 US dollars as plain decimal dollars, exact: `0.00004`, `12`; a number in JSON too."""
    whole, rest = divmod(nano_usd, _NANO)
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
