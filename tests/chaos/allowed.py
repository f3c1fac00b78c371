"""Which failures a fault excuses: the documents' words, as a table. What is not in it is a finding.

`cut` and `refused` stand for connections that end or cannot be made, `broken` for streams that end without any word.
"""

from collections.abc import Iterable
from typing import Final

from tests.chaos.history import Ended, Sent, Struck

GRACE_S: Final = 10.0
"""After a fault is healed its consequences may last so long: probes, open breakers, leases of the dead."""

TENSOR: Final = frozenset({"tensor", "v2"})
ORDERED: Final = frozenset({"serial", "release"})
LIMITED: Final = frozenset({"requests", "tokens", "concurrent"})
CHAT: Final = frozenset({"chat", "stream"}) | ORDERED | LIMITED
SEQUENCE: Final = frozenset({"sequence"})
ADMIN: Final = frozenset({"admin"})
DATA: Final = TENSOR | CHAT | SEQUENCE
KINDS: Final = DATA | ADMIN

_LATE: Final = {"deadline_exceeded"}
_GONE: Final = {"no_healthy_backend", "backend_error", *_LATE}
_LEFT: Final = {"cut", "refused"}
_LOST: Final = {"sequence_lost", *_GONE}


def allowed(sent: Sent, ended: Ended, struck: Iterable[Struck]) -> set[str]:
    """What `sent` may end with, by the faults whose times, with `GRACE_S` after them, it has met."""
    met = [one for one in struck if one.began <= ended.at and sent.at <= one.healed + GRACE_S]
    codes = {"rate_limited"} if sent.kind in LIMITED else set()
    for one in met:
        codes |= _by_part(one, sent.kind)
    tritons = {one.part for one in met if one.part.startswith("triton")}
    if sent.kind in TENSOR and len(tritons) > 1:  # one replica alone is nobody's excuse: the other answers
        codes |= _GONE
    return codes


def _by_part(struck: Struck, kind: str) -> set[str]:
    match struck.part:
        case "redis":
            return _of_redis(kind)
        case "llm" if kind in CHAT:
            return {*_GONE, *({"ordering_unavailable"} if kind in ORDERED else ())}
        case "triton-0" | "triton-1" if kind in SEQUENCE:
            return _LOST
        case "worker":
            return _of_worker(struck.action, kind)
        case "control" if kind in ADMIN:
            return {"store_unavailable", "silent", *_LEFT}
    return set()


def _of_redis(kind: str) -> set[str]:
    if kind in ORDERED:
        return {"ordering_unavailable", *_LATE}
    if kind in SEQUENCE:
        return {"sequences_unavailable"}
    return {"store_unavailable"} if kind in ADMIN else set()


def _of_worker(action: str, kind: str) -> set[str]:
    """A worker that is told to stop ends what it has begun, so that nobody notices."""
    if kind in ADMIN:
        return set()
    match action:
        case "kill":
            return {"cut", *(_LATE if kind in ORDERED else ())}  # the turn of the dead is free after a lease
        case "pause":
            return {*_LATE, *({"ordering_unavailable"} if kind in ORDERED else ())}
        case "cut" if kind not in ORDERED:  # whose clients have a way of their own, or nobody could say what came first
            return _LEFT
    return set()
