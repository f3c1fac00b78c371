"""W3C Trace Context: what a request's headers say of the trace that it is part of, and what is sent on. Pure.

Source: w3c.github.io/trace-context (level 2): `traceparent: 00-<trace id>-<parent id>-<flags>`, `tracestate`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

SAMPLED: Final = 1
ROUTE: Final = "gateway.route"  # in an ASGI scope: the path as the table has it, with its parameters' names
RANDOM: Final = 2  # the trace id was made at random: a bit that stays with its trace id
MAX_STATE: Final = 512  # characters of tracestate that everybody has to pass on; a longer one may be dropped
_PARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MEMBER: Final = re.compile(r"[a-z0-9][a-z0-9_*/@-]{0,255}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,256}")

Headers = tuple[tuple[str, str], ...]
"""`traceparent`, and `tracestate` where there is one."""


def is_sampled(headers: Headers) -> bool:
    """Whether whoever is sent these is to record what it does."""
    return bool(headers) and bool(int(headers[0][1][-2:], 16) & SAMPLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A request's place in a trace.

    Attributes:
        trace_id / span_id: 32 and 16 small hex digits, neither all zeros. The span is the gateway's own where the
            request is recorded, or where its trace begins here; else the caller's, passed through.
        parent_id: the caller's span; empty where the trace begins here.
        flags: `SAMPLED` and `RANDOM`.
        state: `tracestate` as it came; empty where there is none, or one that is not valid.
        is_recorded: the gateway makes spans of it.
        has_content: with what was asked and answered.
        method / scheme / path / route: of the HTTP request, where it is recorded; the route may not be known.
    """

    trace_id: str
    span_id: str
    parent_id: str = ""
    flags: int = 0
    state: str = ""
    is_recorded: bool = False
    has_content: bool = False
    method: str = ""
    scheme: str = ""
    path: str = ""
    route: str = ""

    def headers(self, span_id: str = "") -> Headers:
        """What is sent on, with the span `span_id` as the parent of what follows there."""
        parent = ("traceparent", f"00-{self.trace_id}-{span_id or self.span_id}-{self.flags:02x}")
        return (parent, ("tracestate", self.state)) if self.state else (parent,)


def incoming(headers: Mapping[str, str]) -> Trace | None:
    """The trace that a request comes in, by its headers (names in small letters); None for none, or an invalid one."""
    given = headers.get("traceparent")
    found = _PARENT.fullmatch(given) if given else None
    if found is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    # Of a later version only what this one knows is read; this version has nothing behind the flags.
    if version == "ff" or (version == "00" and rest) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return Trace(
        trace_id=trace_id,
        span_id=span_id,
        parent_id=span_id,
        flags=int(flags, 16) & (SAMPLED | RANDOM),
        state=_state(headers.get("tracestate", "")),
    )


def _state(given: str) -> str:
    """`given` where it can be passed on, else nothing: the trace goes on without it."""
    members = [member for one in given.split(",") if (member := one.strip(" \t"))]
    if len(given) > MAX_STATE or len(members) > 32 or not all(map(_MEMBER.fullmatch, members)):  # noqa: PLR2004 - the specification's bound
        return ""
    return ",".join(members)
