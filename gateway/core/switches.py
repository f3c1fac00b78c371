"""Switches: what operators put above all rules for a while: block, drain, force a backend, force the fallback, freeze.

A switch names what it is for (its scope), why, whose it is, and when it ends by itself.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, get_args

from gateway.core.errors import Blocked
from gateway.core.types import InferenceRequest, Place

Action = Literal["block", "drain", "force_backend", "force_fallback", "freeze"]
ACTIONS: Final[tuple[Action, ...]] = get_args(Action)
ScopeKind = Literal["everything", "tenant", "key", "task", "model", "backend", "replica"]
SCOPE_KINDS: Final[tuple[ScopeKind, ...]] = get_args(ScopeKind)
SCOPES_OF: Final[Mapping[Action, tuple[ScopeKind, ...]]] = {
    "block": SCOPE_KINDS,
    "drain": SCOPE_KINDS,
    "force_backend": ("everything", "tenant", "key", "task", "model"),
    "force_fallback": ("everything", "tenant", "key", "task", "model"),
    "freeze": ("everything",),
}
"""What each may be for: what chooses among places has no place of its own, and rules are frozen all together."""
LONGEST_RETRY_MS: Final = 30_000  # an operator may end a switch long before its time
_PLACES: Final = ("model", "backend", "replica")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What a switch is for: requests (`everything`, `tenant`, `key`, `task`), or places (`backend`, `replica`).

    `model` is both: requests that name it, and the places where it is. A model is named with or without its version
    (`name:2`), a replica with or without its backend (`triton@host:8001`).
    """

    kind: ScopeKind
    name: str = ""

    def __str__(self) -> str:
        return self.kind if self.kind == "everything" else f"{self.kind} {self.name}"

    def has_request(self, request: InferenceRequest) -> bool:
        """Whether `request` is among what it is for, wherever it goes."""
        if self.kind == "everything":
            return True
        named = {
            "tenant": request.caller.tenant,
            "key": request.caller.key_id,
            "task": request.task,
            "model": request.model,
        }
        version = f"{request.model}:{request.version}" if self.kind == "model" and request.version else None
        return self.name != "" and self.name in (named.get(self.kind), version)

    def has_place(self, place: Place) -> bool:
        """Whether `place` is among what it is for."""
        if self.kind == "backend":
            return place.backend == self.name
        if self.kind == "replica":
            return place.replica != "" and self.name in (place.replica, f"{place.backend}@{place.replica}")
        return self.kind == "model" and self.name in (place.model, f"{place.model}:{place.version}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """One switch. Times in Unix milliseconds.

    Attributes:
        value: the backend of `force_backend`; else empty.
        owner: who set it.
    """

    id: str
    action: Action
    scope: Scope
    reason: str
    owner: str
    created_ms: int
    expires_ms: int
    value: str = ""

    def __str__(self) -> str:
        return f"switch {self.id} ({self.action} {self.scope})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Forced:
    """Where switches send a request: to one backend (empty: any), to the fallbacks alone, and which switches say so."""

    backend: str = ""
    is_fallback: bool = False
    by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Switches:
    """All switches under one revision. Those whose time is over change nothing, whether or not they are still listed.

    Every question is given the time, `now_ms`, in Unix milliseconds.
    """

    revision: int = 0
    items: tuple[Switch, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.items)

    def in_force(self, now_ms: int) -> tuple[Switch, ...]:
        """Those whose time is not over."""
        return tuple([one for one in self.items if now_ms < one.expires_ms])

    def refusing(self, request: InferenceRequest, now_ms: int) -> Switch | None:
        """The switch for which `request` is not served at all. A drain lets sequences that have begun go on."""
        for one in self.in_force(now_ms):
            stops = one.action == "block" or (one.action == "drain" and not request.goes_on)
            if stops and one.scope.has_request(request):
                return one
        return None

    def closing(self, place: Place, now_ms: int, *, goes_on: bool = False) -> Switch | None:
        """The switch for which nothing is sent to `place`; `goes_on`: unless for a sequence whose state is there."""
        for one in self.in_force(now_ms):
            stops = one.action == "block" or (one.action == "drain" and not goes_on)
            if stops and one.scope.has_place(place):
                return one
        return None

    def forced(self, request: InferenceRequest, now_ms: int) -> Forced | None:
        """Where switches send `request`; None where the rules alone say it. Of two backends the newest switch's."""
        backend, is_fallback, by = "", False, []
        for one in sorted(self.in_force(now_ms), key=lambda one: one.created_ms):
            if one.action in ("force_backend", "force_fallback") and one.scope.has_request(request):
                backend = one.value if one.action == "force_backend" else backend
                is_fallback = is_fallback or one.action == "force_fallback"
                by.append(str(one))
        return Forced(backend=backend, is_fallback=is_fallback, by=tuple(by)) if by else None

    def freezing(self, now_ms: int) -> Switch | None:
        """The switch for which rules may not be changed; of several the one that lasts longest."""
        frozen = [one for one in self.in_force(now_ms) if one.action == "freeze"]
        return max(frozen, key=lambda one: one.expires_ms, default=None)


NO_SWITCHES: Final = Switches()


def blocked(switch: Switch, now_ms: int) -> Blocked:
    """What its callers hear: when to come back, and not an operator's reasons."""
    error = Blocked(f"an operator has switched off requests of this kind ({switch.scope.kind}) for now")
    error.retry_after_us = min(switch.expires_ms - now_ms, LONGEST_RETRY_MS) * 1000
    return error


def is_for_places(scope: Scope) -> bool:
    """Whether what it is for is somewhere, so that it is asked at each place."""
    return scope.kind in _PLACES


def switches_document(switches: Iterable[Switch]) -> list[dict[str, Any]]:
    """As plain lists and dicts."""
    return [asdict(one) for one in switches]


def parse_switches(document: Sequence[Mapping[str, Any]], revision: int) -> Switches:
    """The inverse of `switches_document`. Raises `ValueError`, `TypeError` or `KeyError` for anything else."""
    items = tuple(Switch(**{**entry, "scope": Scope(**entry["scope"])}) for entry in document)
    for one in items:
        if one.action not in ACTIONS or one.scope.kind not in SCOPE_KINDS:
            raise ValueError(f"no such switch: {one.action}")
    return Switches(revision=revision, items=items)
