"""Rules as the control plane shows them: of what a rule says beside its targets there is only what is not as usual."""

from typing import Any, Literal

from pydantic import Field

from gateway.admin.fields import Body
from gateway.core.rules import StickyBy, Strategy
from gateway.core.rules.policies import DEFAULT, Idempotency, OnStoreDown


class TargetOut(Body):
    """One place to send a request."""

    backend: str = Field(description="its name")
    model: str = Field(description="`*`: the one that the caller names")
    version: str = Field("", description="empty: the caller's, or else the server's choice")
    weight: int = Field(description="its share among the weights of the split; 0: none")
    parameters: dict[str, Any] = Field(
        default_factory=dict,
        exclude_if=lambda fields: not fields,
        description="fields of an OpenAI body that are set for this place alone; null takes a field out",
    )
    context_tokens: int = Field(
        0,
        exclude_if=lambda tokens: not tokens,
        description="tokens of a prompt and its answer that fit together; 0: not told",
    )


class WindowOut(Body):
    """A part of the week."""

    days: list[str] = Field(description="`mon` to `sun`; past midnight it is still of the day on which it began")
    begin: str = Field(alias="from", description="HH:MM")
    end: str = Field(alias="to", description="HH:MM, not included; not later than `from`: of the next day")
    timezone: str = Field(description="IANA name")


class MatchOut(Body):
    """Which requests a rule takes; `*` takes all. What is not there takes all, too."""

    task: str = Field(description="the task's name")
    tenant: str = Field(description="its name, or how it begins and `*`")
    model: str = Field(description="the one that the caller names, or how it begins and `*`")
    key: str = Field("*", exclude_if=lambda key: key == "*", description="the key's id, or how it begins and `*`")
    priority: str = Field("*", exclude_if=lambda priority: priority == "*", description="interactive or batch")
    headers: dict[str, str] = Field(
        default_factory=dict,
        exclude_if=lambda headers: not headers,
        description="by name in small letters; the value, or how it begins and `*`",
    )
    min_input_tokens: int = Field(
        0, exclude_if=lambda bound: not bound, description="tokens of the prompt, as estimated; 0: no bound"
    )
    max_input_tokens: int = Field(
        0, exclude_if=lambda bound: not bound, description="tokens of the prompt, as estimated; 0: no bound"
    )
    min_input_bytes: int = Field(
        0, exclude_if=lambda bound: not bound, description="of the request's body; 0: no bound"
    )
    max_input_bytes: int = Field(
        0, exclude_if=lambda bound: not bound, description="of the request's body; 0: no bound"
    )
    times: list[WindowOut] = Field(
        default_factory=list, exclude_if=lambda times: not times, description="in one of these; empty: always"
    )


class RuleShadowOut(Body):
    """Where copies go."""

    backend: str = Field(description="its name")
    model: str = Field(description="`*`: the one that the caller names")
    version: str = Field(
        "", exclude_if=lambda version: not version, description="empty: the caller's, or else the server's choice"
    )
    percent: float = Field(description="percent of the requests that were answered")
    compare: bool = Field(description="whether both answers are held against each other")


class GuardOut(Body):
    """What a canary may not do."""

    max_error_ratio: float | None = Field(
        None,
        exclude_if=lambda bound: bound is None,
        description="0 to 1, of attempts that failed there; null: not watched",
    )
    max_violation_ratio: float | None = Field(
        None,
        exclude_if=lambda bound: bound is None,
        description="0 to 1, of attempts whose answer broke the task's contract or the protocol; null: not watched",
    )
    max_disagreement: float | None = Field(
        None,
        exclude_if=lambda bound: bound is None,
        description="0 to 1, of comparisons with the rule's shadow; null: not watched",
    )
    max_p99_ms: int | None = Field(
        None, exclude_if=lambda bound: bound is None, description="milliseconds, of whole answers; null: not watched"
    )
    max_first_token_ms: int | None = Field(
        None,
        exclude_if=lambda bound: bound is None,
        description="milliseconds to streamed answers' first parts, p99; null: not watched",
    )
    min_requests: int = Field(description="with fewer in the window nothing is judged")
    window_s: int = Field(description="seconds that are looked at")


class OrderingOut(Body):
    """How requests with one ordering key go."""

    mode: Literal["serial", "release"] = Field(
        description="`serial`: each is sent when the one before ended; `release`: all at once, answered in their order"
    )
    max_queue_size: int = Field(description="requests that may be under way and wait under one key")
    max_wait_ms: int = Field(description="milliseconds for a turn; 0: as long as the request has time")
    on_store_down: Literal["refuse", "local"] = Field(
        description="without Redis: refuse, or each worker orders its own requests"
    )


class CacheOut(Body):
    """Answers are kept, and given to the same request again."""

    ttl_s: int = Field(description="seconds for which an answer is kept")
    shared_by: Literal["tenant", "all"] = Field(description="whether tenants are given each other's answers")
    single_flight: bool = Field(description="the same requests at the same time wait for one of them")


class RuleOut(Body):
    """One rule. Of what it says beside its targets there is only what is not as usual."""

    name: str = Field(description="which no other rule has")
    match: MatchOut = Field(description="the requests that it takes")
    split: list[TargetOut] = Field(description="the places that share them")
    strategy: Strategy = Field(description="how the places of the split are put in order")
    sticky_by: StickyBy = Field(description="what keeps a caller on its side of a weighted split")
    fallback: list[TargetOut] = Field(description="in this order, when no place of the split can answer")
    shadow: RuleShadowOut | None = Field(None, exclude_if=lambda shadow: shadow is None, description="where copies go")
    guard: GuardOut | None = Field(None, exclude_if=lambda guard: guard is None, description="what a canary may not do")
    retries: int = Field(
        0, exclude_if=lambda rounds: not rounds, description="further rounds over places that failed for a moment"
    )
    hedge: bool = Field(
        default=False,
        exclude_if=lambda hedges: not hedges,
        description="whether a late interactive request is sent to the next place too",
    )
    timeout_ms: int = Field(
        0, exclude_if=lambda timeout_ms: not timeout_ms, description="milliseconds for the whole request; 0: the task's"
    )
    attempt_timeout_ms: int = Field(
        0,
        exclude_if=lambda timeout_ms: not timeout_ms,
        description="milliseconds for one attempt while another place remains; 0: the task's",
    )
    limits: list[dict[str, Any]] = Field(
        default_factory=list,
        exclude_if=lambda limits: not limits,
        description="of the requests of this rule alone, as in the section `limits` of the configuration",
    )
    ordering: OrderingOut | None = Field(
        None, exclude_if=lambda ordering: ordering is None, description="of requests with one ordering key"
    )
    cache: CacheOut | None = Field(
        None, exclude_if=lambda cache: cache is None, description="answers that are kept and given again; null: none"
    )
    on_store_down: OnStoreDown = Field(
        DEFAULT.on_store_down,
        exclude_if=lambda how: how == DEFAULT.on_store_down,
        description="how limits go without Redis: each worker counts alone, all pass, or none",
    )
    idempotency: Idempotency = Field(
        DEFAULT.idempotency,
        exclude_if=lambda how: how == DEFAULT.idempotency,
        description="a second request with the key of one that is under way is refused, or waits for its answer",
    )
    enabled: bool = Field(description="a rule that is off takes nothing")
