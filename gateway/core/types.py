"""The values that walk through the gateway. All frozen; data only moves down.

One file, longer than others, since they name each other all the way from the caller to the answer.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, TypeVar

from gateway.core.trace import Headers, Trace
from gateway.core.values import quick_value

Priority = Literal["interactive", "batch"]
ANY: Final = "*"
"""In the place of a name: all there are. As the model of a place: the server itself, whichever models it serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """So much per period, or at once, of one key or of several together.

    Attributes:
        kind: what is counted. `usd` in 1e-9 dollars, by calendar days and months (UTC).
        amount: so many. `burst` of them may come at once (requests and tokens).
        per: second, minute, hour, day, month; empty for `concurrent`.
        task / model / priority: the requests that it counts.
        shared_by: each key has a counter of its own, or those of a tenant have one, or all of them; `token`: a client
            token, which counts for itself what it may do beside its key's limits.
        rule: the routing rule whose limit it is, and whose requests alone it counts; empty for a key's.
    """

    kind: Literal["requests", "tokens", "usd", "concurrent"]
    amount: int
    per: str = ""
    burst: int = 0
    task: str = ANY
    model: str = ANY
    priority: str = ANY
    shared_by: Literal["key", "tenant", "all", "token"] = "key"
    rule: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks. `key_id` names the key in logs and limits; the secret itself is never kept.

    Attributes:
        tasks: None where the key may use every task.
        models: those that it may name; None: any.
        is_admin: it may also load and unload models.
        priority: the highest that it may ask for.
        origins: of the web pages that may use it; None: any. A client token with some is nothing without one of them.
        token_id: names the client token that was sent in the key's place; empty where the key itself was.
    """

    key_id: str
    tenant: str
    limits: tuple[Limit, ...] = ()
    tasks: frozenset[str] | None = None
    is_admin: bool = False
    models: frozenset[str] | None = None
    priority: Priority = "interactive"
    origins: frozenset[str] | None = None
    token_id: str = ""


Parameter = str | int | float | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a request can be sent: a backend, and a model there (version empty = the backend's own choice).

    `replica` is one of the backend's servers; empty where it has but one, or where none is chosen yet.
    """

    backend: str
    model: str
    version: str = ""
    replica: str = ""

    def __str__(self) -> str:
        version = f":{self.version}" if self.version else ""
        return f"{self.backend}/{self.model}{version}" + (f"@{self.replica}" if self.replica else "")


@quick_value
class Tensor:
    """A named tensor in the wire form of the Open Inference Protocol.

    Attributes:
        datatype: the protocol's name: BOOL, INT8..INT64, UINT8..UINT64, FP16, BF16, FP32, FP64, BYTES.
        shape: the full shape, batch dimension included.
        data: row-major little-endian; an element of BYTES is a little-endian uint32 length and its bytes.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceStep:
    """A request's place in its sequence (Triton's correlation id, `sequence_start`, `sequence_end`).

    `id` is the caller's own in an `InferenceRequest`; in a `BackendCall` it is the number that the server shall see.
    """

    id: int | str
    is_start: bool = False
    is_end: bool = False


@quick_value
class InferenceRequest:
    """One request after its door: authenticated, decoded and checked against its task's contract.

    Attributes:
        input: the contract's own parsed input (see `gateway.tasks`).
        received_us / deadline_us: instants on the process's monotonic clock.
        stream: whether the caller wants events as they come.
        model / version: named by the caller itself (tensor tasks); empty where the rules alone decide.
        sequence: where the request is one of a sequence.
        ordering_key: requests of a tenant with the same one go in their order; empty where there is none.
        idempotency_key / fingerprint: requests of a tenant with the same key are one request, whose method, path and
            body `fingerprint` stands for; both empty where there is none.
        cache_control: the header of that name, as the caller sent it.
        headers: the caller's, by name in small letters, for rules that match on them; secrets among them.
        input_bytes: the length of the body that it came in.
        session: what the caller says that its requests belong together by; empty where it does not.
        trace: the trace that it is part of; None where there is none.
    """

    id: str
    task: str
    caller: Caller
    input: Any
    received_us: int
    deadline_us: int
    stream: bool = False
    model: str = ""
    version: str = ""
    sequence: SequenceStep | None = None
    priority: Priority = "interactive"
    ordering_key: str = ""
    idempotency_key: str = ""
    fingerprint: str = ""
    cache_control: str = ""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    input_bytes: int = 0
    session: str = ""
    trace: Trace | None = None

    @property
    def goes_on(self) -> bool:
        """Whether it goes on with a sequence, whose state is somewhere."""
        return self.sequence is not None and not self.sequence.is_start


# --- what a backend is asked -------------------------------------------------------------------


@quick_value
class TensorPayload:
    """Named tensors in, the named outputs wanted (empty = all).

    Attributes:
        stream: answers are wanted as they come; needed for decoupled models.
        wants_empty_final: a decoupled model's empty last response is wanted too.
        classes: how many best classes are wanted in place of an output's values, by output (Triton's classification:
            BYTES "value:index[:label]").
        parameters: the caller's own, for the model.
        priority / queue_timeout_us: Triton's `priority` and `timeout`, sent only to models that declare them.
    """

    inputs: tuple[Tensor, ...]
    outputs: tuple[str, ...] = ()
    stream: bool = False
    wants_empty_final: bool = False
    classes: Mapping[str, int] = field(default_factory=dict)
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    priority: int = 0
    queue_timeout_us: int = 0


OpenAIApi = Literal["chat/completions", "completions", "responses", "embeddings"]
"""Which of OpenAI's APIs a body is for, by its path behind `/v1/`."""


@quick_value
class OpenAIPayload:
    """An OpenAI body as the caller sent it; a backend sets only its own model name in a copy."""

    body: Mapping[str, Any]
    api: OpenAIApi = "chat/completions"
    stream: bool = False


Payload = TensorPayload | OpenAIPayload
Speech = Literal["tensors", "openai"]
"""What a backend is asked in: `TensorPayload`, or `OpenAIPayload`."""


@quick_value
class BackendCall:
    """One attempt at one model. `version` and `replica` empty mean the backend's own choice.

    `trace` are headers to send along, in ASCII: the trace that it is part of.
    """

    request_id: str
    model: str
    version: str
    payload: Payload
    replica: str = ""
    sequence: SequenceStep | None = None
    trace: Headers = ()


# --- what comes back: one event stream for unary and streamed answers (unary = a stream of one) ---


@quick_value
class Work:
    """What a generative request will take, as far as its body tells.

    Attributes:
        input_tokens: an estimate of the prompt (`core.tokens`).
        output_tokens: the most that it asks for, or a guess where it sets no bound.
    """

    input_tokens: int
    output_tokens: int


@quick_value
class Usage:
    """What an answer used up, where it is known.

    Attributes:
        input_tokens / output_tokens: all of them, the next two included.
        cached_tokens: the part of the input that the engine had in its prefix cache.
        reasoning_tokens: the part of the output that was thought and not said.
        is_estimated: counted by us (`core.tokens`), as the backend did not tell.
        cost_nano_usd: in 1e-9 US dollars; None where no price is known.
        estimated_scores: the scores of a task's answer are a model's own guess, not probabilities that it computed.
    """

    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    is_estimated: bool = False
    cost_nano_usd: int | None = None
    estimated_scores: bool = False


NOTHING_USED: Final = Usage()


@quick_value
class Tensors:
    """A tensor answer of a backend, or one of a decoupled model's many.

    Attributes:
        queue_us: only where the backend tells it for each call.
        parameters: the model's own, sent along with its outputs.
        is_final: no other answer follows; such a one may be empty.
    """

    outputs: tuple[Tensor, ...]
    version: str
    queue_us: int | None = None
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    is_final: bool = True


@quick_value
class Message:
    """A whole OpenAI answer as the upstream's own JSON bytes."""

    body: bytes
    usage: Usage = NOTHING_USED


@quick_value
class Delta:
    """The payload of one streamed event (what follows `data:`), untouched, without line breaks; never `[DONE]`.

    Attributes:
        event: the event's name (what follows `event:`), which the responses API has; empty where it has none.
        usage: what the answer has used up so far, where this event tells; the last one counts.
    """

    data: bytes
    event: bytes = b""
    usage: Usage | None = None


@quick_value
class Deltas:
    """One or several such events that came together, none with a name or with usage.

    `wire`: as they are sent on, each `data: `, its payload in one line, and an empty line.
    """

    wire: bytes

    def each(self) -> list[Delta]:
        """One by one."""
        return [Delta(data=line.removeprefix(b"data: ")) for line in self.wire.removesuffix(b"\n\n").split(b"\n\n")]


@quick_value
class Metered:
    """What a streamed answer has used up so far; the last one counts. For our books alone: the caller did not ask."""

    usage: Usage


BackendEvent = Tensors | Message | Delta | Deltas | Metered


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """What an LLM server said of itself lately: it is asked every other second, and counts for five.

    Attributes:
        running / waiting: its requests, from all gateways, in the running batch and in its own queue.
        kv_used: how much of its KV cache is taken, 0 to 1; None where it does not tell.
    """

    running: int
    waiting: int
    kv_used: float | None = None


@quick_value
class Answer:
    """A task's output in the shape of its contract, with what the contract could count."""

    output: Mapping[str, Any]
    usage: Usage = NOTHING_USED


@quick_value
class Route:
    """Where the answer came from: shown in `route` and the `x-gateway-*` headers; the replica in the log alone."""

    backend: str
    model: str
    version: str
    rule: str
    attempts: int
    replica: str = ""


@quick_value
class Timing:
    """Lengths in microseconds. `queue_us` is None where the backend does not tell it per call."""

    total_us: int
    admit_us: int
    backend_us: int
    queue_us: int | None = None


class LimitState(NamedTuple):
    """How a limit stands after a request, in the limit's own unit.

    Attributes:
        remaining: never negative.
        reset_us: until it is whole again; of `concurrent` 0, as nobody knows.
        is_hopeless: the request asks for more than the limit ever gives at once.
        retry_after_us: until the same request would pass; 0 where it has passed, or where nobody knows.
    """

    limit: Limit
    remaining: int
    reset_us: int
    is_refused: bool = False
    is_hopeless: bool = False
    retry_after_us: int = 0


@quick_value
class Verdict:
    """What the limiter said. Being limited is a result, not an error.

    Attributes:
        states: of every limit that counts the request.
        refused_by: the limit that was hit; of several, the one that lasts longest.
        is_queue_full: no limit was hit, but too many requests wait under its ordering key.
        ticket: its number under its ordering key.
        degraded: the shared store was out of reach; the worker decided alone, or let it pass.
    """

    allowed: bool
    states: tuple[LimitState, ...] = ()
    refused_by: LimitState | None = None
    is_queue_full: bool = False
    ticket: int | None = None
    degraded: bool = False

    def nearest(self, kind: str) -> LimitState | None:
        """The limit of a kind that is nearest to its end."""
        states = [state for state in self.states if state.limit.kind == kind]
        if len(states) < 2:  # noqa: PLR2004 - nothing to choose
            return states[0] if states else None
        return min(states, key=lambda state: (not state.is_refused, state.remaining))


ALLOWED: Final = Verdict(allowed=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalled:
    """How an answer stands to those that are kept.

    Attributes:
        id: the request that it was made for, where it is given again to one with the same idempotency key.
        outcome: `replayed`, `hit`, `collapsed` (it was waited for), `miss`; empty where no answer was looked for.
        cache_status: RFC 9211's words on it; empty where it has nothing to do with the cache.
        age_s: since it was made, where it comes out of the cache.
    """

    id: str = ""
    outcome: Literal["", "replayed", "hit", "collapsed", "miss"] = ""
    cache_status: str = ""
    age_s: int | None = None

    @property
    def is_again(self) -> bool:
        """Whether the answer was not made for this request."""
        return self.outcome in ("replayed", "hit", "collapsed")


@quick_value
class Started:
    """The first event of every answer: the route is settled and the backend has begun to answer.

    `recalled` is None where neither an idempotency key nor a cache is in play.
    """

    route: Route
    verdict: Verdict
    recalled: Recalled | None = None


@quick_value
class Finished:
    """The last event of every complete answer."""

    usage: Usage
    timing: Timing


STREAMED: Final = (Deltas, Delta)
"""What the streams of LLMs are made of, for `isinstance`."""

Part = Answer | Message | Delta | Deltas | Tensors
"""A whole answer, or one of its parts, in the form of its task's contract."""

Parts = AsyncGenerator[Part, None]

Event = Started | Part | Finished

_Kind = TypeVar("_Kind", BackendEvent, Part)


def singly(event: _Kind) -> Sequence[_Kind]:
    """An event of a backend, or a part of an answer; where it is several, one by one."""
    return event.each() if isinstance(event, Deltas) else (event,)
