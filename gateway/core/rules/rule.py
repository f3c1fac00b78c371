"""What a rule is: which requests it takes, where they go, and what is held to on the way."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from gateway.core.rules.policies import DEFAULT, Policies
from gateway.core.types import ANY, Limit, Place

Strategy = Literal["weighted", "ordered", "least_in_flight", "fastest", "cheapest", "prefix_affinity"]
"""How the places of a split are put in order; see `core.strategies`."""
STRATEGIES: Final[tuple[Strategy, ...]] = get_args(Strategy)
StickyBy = Literal["request", "tenant", "session", "ordering_key"]
"""What keeps a caller on its side of a weighted split: nothing, or a hash of who or what it is."""
STICKY_BY: Final[tuple[StickyBy, ...]] = get_args(StickyBy)


@functools.lru_cache(maxsize=8192)
def place_at(backend: str, model: str, version: str, replica: str) -> Place:
    """The place of these names: kept, since a request asks for several and making one takes a microsecond."""
    return Place(backend=backend, model=model, version=version, replica=replica)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A place in a rule, with its weight in a split (0 = never). Model `*` is the one that the caller names.

    Attributes:
        parameters: fields of an OpenAI body that are set for this place alone; None takes a field out.
        context_tokens: how long a prompt and its answer may be there together; 0 = not told. After "context too long"
            only places with more are tried.
    """

    backend: str
    model: str
    version: str = ""
    weight: int = 1
    parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)
    context_tokens: int = 0

    @property
    def place(self) -> Place:
        """The same without its weight."""
        return place_at(self.backend, self.model, self.version, "")

    def place_for(self, *, model: str, version: str) -> Place:
        """Where it sends a caller that names `model` and `version` (empty: it does not).

        The version that a caller names stands above the target's.
        """
        return place_at(self.backend, model if self.model == ANY else self.model, version or self.version, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeWindow:
    """A part of the week, by the clock of `timezone` (an IANA name).

    Attributes:
        days: 0 = Monday; a window that goes past midnight is of the day on which it begins.
        from_min / to_min: minutes of the day, the last one not included; where `to_min` is not later than `from_min`,
            it is the next day's.
    """

    days: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6)
    from_min: int = 0
    to_min: int = 1440
    timezone: str = "UTC"


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Which requests a rule takes: those that fit every field. `*` takes all.

    Attributes:
        tenant / key / model: a name, or its beginning and `*`. `model` is the one that a caller of a tensor task names.
        headers: by name in small letters; what each has to be, in the same form.
        min_input_tokens / max_input_tokens: of the prompt, as the gateway estimates it; only for tasks that an LLM can
            answer. 0 = no bound, here and below.
        min_input_bytes / max_input_bytes: of the request's body.
        times: in one of them; empty = always.
    """

    task: str = ANY
    tenant: str = ANY
    model: str = ANY
    key: str = ANY
    priority: Literal["*", "interactive", "batch"] = "*"
    headers: Mapping[str, str] = field(default_factory=dict, hash=False)
    min_input_tokens: int = 0
    max_input_tokens: int = 0
    min_input_bytes: int = 0
    max_input_bytes: int = 0
    times: tuple[TimeWindow, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shadow:
    """Where copies of `percent` of the answered requests are sent, after the caller has its answer.

    `compare`: whether the two answers are held against each other (`core.shadows.comparison`).
    """

    backend: str
    model: str
    version: str = ""
    percent: float = 100.0
    compare: bool = True

    @property
    def place(self) -> Place:
        """Where it is; the model `*` is the one that the caller names."""
        return Place(backend=self.backend, model=self.model, version=self.version)


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """What a canary may not do: a target of the split that breaks one of these gets no more requests.

    Canaries are all targets but the heaviest of the split (the first of equals), which is never taken out.

    Attributes:
        max_error_ratio: of attempts that failed there, 0 to 1. None = not watched, here and below.
        max_p99_ms: of whole answers.
        max_first_token_ms: p99 of streamed answers' first parts.
        max_violation_ratio: of attempts whose answer broke the task's contract or the backend's protocol.
        max_disagreement: of shadow comparisons in which the answers did not agree; of the rule's shadow.
        min_requests: below so many in the window nothing is judged.
        window_s: what is looked at.
    """

    max_error_ratio: float | None = None
    max_p99_ms: int | None = None
    max_first_token_ms: int | None = None
    max_violation_ratio: float | None = None
    max_disagreement: float | None = None
    min_requests: int = 200
    window_s: int = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """`split` shares requests as `strategy` says; `fallback` follows in order when none of them can answer.

    Attributes:
        retries: further rounds over places that failed for a moment, each after a pause.
        hedge: an interactive request that has no first part after the usual time (the 95th percentile, of streams or
            of whole answers as it is one) is sent to the next place too, and whichever begins first answers.
        timeout_ms: for the whole request; shortens the task's. 0 = the task's, here and below.
        attempt_timeout_ms: for one attempt, while another candidate remains; in the task's stead.
        limits: count the requests of this rule alone, beside their key's own.
    """

    name: str
    match: Match
    split: tuple[Target, ...]
    strategy: Strategy = "weighted"
    sticky_by: StickyBy = "request"
    fallback: tuple[Target, ...] = ()
    shadow: Shadow | None = None
    guard: Guard | None = None
    retries: int = 0
    hedge: bool = False
    timeout_ms: int = 0
    attempt_timeout_ms: int = 0
    limits: tuple[Limit, ...] = ()
    policies: Policies = DEFAULT
    enabled: bool = True

    @property
    def targets(self) -> tuple[tuple[str, Target], ...]:
        """All that it can send anything to, its shadow too, each with the field in which it stands."""
        split = [(f"split[{i}]", target) for i, target in enumerate(self.split)]
        fallback = [(f"fallback[{i}]", target) for i, target in enumerate(self.fallback)]
        shadow = self.shadow
        if shadow is None:
            return (*split, *fallback)
        copies = Target(backend=shadow.backend, model=shadow.model, version=shadow.version)
        return (*split, *fallback, ("shadow", copies))

    @property
    def baseline(self) -> Target:
        """The heaviest target of the split, the first of equals: all others are canaries."""
        return max(self.split, key=lambda target: target.weight)
