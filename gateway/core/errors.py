"""The closed list of errors, sorted by whose fault they are.

A `GatewayError` is what a client sees: a stable `code`, an HTTP status and a sentence that is safe to show.
A `BackendError` is what an adapter raises about its backend; `core.attempts` turns it into the next attempt
or into a `GatewayError`. Nothing else crosses a module border: adapters translate foreign exceptions once.
The list is closed, so it stands in one file, however long.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from gateway.core.types import Place, Recalled, Verdict


class GatewayError(Exception):
    """An answer that is a refusal or a failure.

    Attributes:
        detail: one sentence for the caller; never holds Python text, an upstream address or a secret.
        field: where in the request the fault lies, dotted (`input.image`, `messages[0].role`).
        retry_after_us: when the same request may succeed, in microseconds from now.
        upstream_status: an LLM endpoint's own status for this refusal, shown to those who speak its protocol; 0 = none.
        upstream_code: an upstream's own error code (OpenAI's `error.code`), kept so that users can act on it.
        verdict: what the limiter said of this request, once it was asked; set by the pipeline.
        reply: a model server's own error behind this one, for callers who speak its protocol.
        should_retry: false where the same request will not do better soon, whatever its status says.
        recalled: where it is given again.
    """

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    title: ClassVar[str] = "Internal error"

    def __init__(
        self,
        detail: str,
        *,
        field: str | None = None,
        retry_after_us: int | None = None,
        upstream_code: str | None = None,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.field = field
        self.retry_after_us = retry_after_us
        self.upstream_code = upstream_code
        self.upstream_status = 0
        self.verdict: Verdict | None = None
        self.reply: Reply | None = None
        self.should_retry = True
        self.recalled: Recalled | None = None


# --- the caller's fault -------------------------------------------------------------------------


class MalformedRequest(GatewayError):
    """The bytes are not what the content type says, or the OpenAI/OIP shape is broken."""

    code, status, title = "malformed_request", 400, "Malformed request"


class Unauthorized(GatewayError):
    """No key, or one that is not known. One text for both, so that nothing can be learned."""

    code, status, title = "unauthorized", 401, "Missing or unknown API key"


class Forbidden(GatewayError):
    """A known key without the right to this."""

    code, status, title = "forbidden", 403, "Not allowed for this key"


class NotFound(GatewayError):
    """No such path."""

    code, status, title = "not_found", 404, "Not found"


class UnknownTask(GatewayError):
    """No such task."""

    code, status, title = "unknown_task", 404, "Unknown task"


class UnknownModel(GatewayError):
    """No such model, alias or task behind an OpenAI `model` field."""

    code, status, title = "model_not_found", 404, "Unknown model"


class MethodNotAllowed(GatewayError):
    """The path exists, the method does not."""

    code, status, title = "method_not_allowed", 405, "Method not allowed"


class BodyTooLarge(GatewayError):
    """The body is over `server.max_body_bytes`."""

    code, status, title = "body_too_large", 413, "Body too large"


class UnsupportedMediaType(GatewayError):
    """A content type that this path does not take."""

    code, status, title = "unsupported_media_type", 415, "Unsupported media type"


class RequestTimeout(GatewayError):
    """The caller did not send its body in time."""

    code, status, title = "request_timeout", 408, "Request body too slow"


class InvalidInput(GatewayError):
    """Well formed, but against the task's contract; `field` names the place."""

    code, status, title = "invalid_input", 422, "Input does not fit the task"


class SequenceLost(GatewayError):
    """The server that kept a sequence's state is gone, and the state with it: a new sequence has to be started."""

    code, status, title = "sequence_lost", 410, "Sequence lost"


class SequenceUnknown(GatewayError):
    """A request goes on with a sequence that was never started, has ended, or was idle for too long."""

    code, status, title = "sequence_unknown", 400, "Unknown sequence"


class ClientClosed(GatewayError):
    """The caller left before the answer; seen in logs and metrics only."""

    code, status, title = "client_closed", 499, "Client closed the connection"


class IdempotencyInProgress(GatewayError):
    """A request with the same idempotency key is under way."""

    code, status, title = "idempotency_in_progress", 409, "Request in progress"


class IdempotencyMismatch(GatewayError):
    """An idempotency key that was used for another request."""

    code, status, title = "idempotency_mismatch", 422, "Idempotency key used before"


# --- nobody's fault: the system is full, draining or late ---------------------------------------


class RateLimited(GatewayError):
    """A limit is used up; `detail` names which."""

    code, status, title = "rate_limited", 429, "Rate limit reached"


class OrderingQueueFull(GatewayError):
    """Too many requests wait under one ordering key."""

    code, status, title = "ordering_queue_full", 429, "Ordering queue full"


class QueueFull(GatewayError):
    """Every candidate's queue is full."""

    code, status, title = "queue_full", 429, "Queue full"


class NoHealthyBackend(GatewayError):
    """Every candidate is down, drained or switched off."""

    code, status, title = "no_healthy_backend", 503, "No healthy backend"


class Blocked(GatewayError):
    """An operator has switched such requests off for now."""

    code, status, title = "blocked", 503, "Switched off"


class SequencesUnavailable(GatewayError):
    """The store that says where sequences live cannot be asked now."""

    code, status, title = "sequences_unavailable", 503, "Sequences unavailable"


class KeysUnavailable(GatewayError):
    """Where keys are kept cannot be asked now, and this worker does not know the one that was sent."""

    code, status, title = "keys_unavailable", 503, "Keys unavailable"


class LimitsUnavailable(GatewayError):
    """The store that keeps the limits cannot be asked, and the rule admits nobody without it."""

    code, status, title = "limits_unavailable", 503, "Limits unavailable"


class OrderingUnavailable(GatewayError):
    """The store that keeps the order cannot be asked, or has lost this request's place in it."""

    code, status, title = "ordering_unavailable", 503, "Ordering unavailable"


class IdempotencyUnavailable(GatewayError):
    """The store that keeps answers cannot be asked, so that a request could be done twice."""

    code, status, title = "idempotency_unavailable", 503, "Idempotency unavailable"


class DeadlineExceeded(GatewayError):
    """The request's time is used up."""

    code, status, title = "deadline_exceeded", 504, "Deadline exceeded"


# --- a backend's fault, or ours -----------------------------------------------------------------


class UnsupportedByBackend(GatewayError):
    """The chosen backend lacks the feature."""

    code, status, title = "unsupported", 501, "Not supported by the backend"


class BackendBroke(GatewayError):
    """A backend answered something that breaks its protocol or the task's contract."""

    code, status, title = "backend_error", 502, "Backend error"


class InternalError(GatewayError):
    """A fault of the gateway itself."""

    code, status, title = "internal", 500, "Internal error"


# --- the control plane's own --------------------------------------------------------------------


class InvalidRules(GatewayError):
    """A rule set that cannot be taken; `detail` names the rule and the field."""

    code, status, title = "invalid_rules", 422, "Rules cannot be taken"


class UnknownRule(GatewayError):
    """No rule of that name."""

    code, status, title = "unknown_rule", 404, "Unknown rule"


class RevisionRequired(GatewayError):
    """A replacement that does not say which revision it was made from."""

    code, status, title = "revision_required", 428, "Revision required"


class StaleRevision(GatewayError):
    """A change made from a revision that is no longer the newest.

    `changes` is what others have changed since, as documents; None where nobody has looked.
    """

    code, status, title = "revision_stale", 412, "Revision is stale"
    changes: Sequence[Mapping[str, Any]] | None = None

    def __init__(self, *, expected: int, current: int) -> None:
        super().__init__(f"made from revision {expected}, but the current revision is {current}")
        self.expected = expected
        self.current = current


class UnknownRevision(GatewayError):
    """No rule set of that revision is kept."""

    code, status, title = "unknown_revision", 404, "Unknown revision"


class Frozen(GatewayError):
    """An operator has frozen the rules: they cannot be changed for now."""

    code, status, title = "frozen", 409, "Changes are frozen"


class UnknownSwitch(GatewayError):
    """No switch has this id."""

    code, status, title = "unknown_switch", 404, "Unknown switch"


class TooManySwitches(GatewayError):
    """As many switches are set as may be."""

    code, status, title = "too_many_switches", 409, "Too many switches"


class UnknownRollout(GatewayError):
    """No rollout has this id."""

    code, status, title = "unknown_rollout", 404, "Unknown rollout"


class RolloutConflict(GatewayError):
    """The rule, or another rollout of it, is not in a state in which this can be done."""

    code, status, title = "rollout_conflict", 409, "Rollout conflict"


class UnknownRequest(GatewayError):
    """No request of that id is on record any more."""

    code, status, title = "unknown_request", 404, "Unknown request"


class UnknownDeploy(GatewayError):
    """No deploy of that id, or of that model."""

    code, status, title = "unknown_deploy", 404, "Unknown deploy"


class DeployConflict(GatewayError):
    """The model, or another deploy of it, is not in a state in which this can be done."""

    code, status, title = "deploy_conflict", 409, "Deploy conflict"


class UnknownKey(GatewayError):
    """No key has this id."""

    code, status, title = "unknown_key", 404, "Unknown key"


class TooManyKeys(GatewayError):
    """As many keys are kept as may be."""

    code, status, title = "too_many_keys", 409, "Too many keys"


class RulesUnavailable(GatewayError):
    """The shared rules cannot be read or written now."""

    code, status, title = "store_unavailable", 503, "Store unavailable"


DATA_PLANE: tuple[type[GatewayError], ...] = (
    MalformedRequest,
    Unauthorized,
    Forbidden,
    NotFound,
    UnknownTask,
    UnknownModel,
    MethodNotAllowed,
    RequestTimeout,
    BodyTooLarge,
    UnsupportedMediaType,
    InvalidInput,
    SequenceLost,
    SequenceUnknown,
    IdempotencyInProgress,
    IdempotencyMismatch,
    ClientClosed,
    RateLimited,
    OrderingQueueFull,
    QueueFull,
    NoHealthyBackend,
    Blocked,
    SequencesUnavailable,
    KeysUnavailable,
    LimitsUnavailable,
    OrderingUnavailable,
    IdempotencyUnavailable,
    DeadlineExceeded,
    UnsupportedByBackend,
    BackendBroke,
    InternalError,
)

CONTROL_PLANE: tuple[type[GatewayError], ...] = (
    InvalidRules,
    UnknownRule,
    RevisionRequired,
    StaleRevision,
    UnknownRevision,
    Frozen,
    UnknownSwitch,
    TooManySwitches,
    UnknownRollout,
    RolloutConflict,
    UnknownRequest,
    UnknownDeploy,
    DeployConflict,
    UnknownKey,
    TooManyKeys,
    RulesUnavailable,
)

CLOSED_LIST = (*DATA_PLANE, *CONTROL_PLANE)


# --- what adapters see ---------------------------------------------------------------------------


class FaultKind(Enum):
    """What an adapter saw. `core.attempts.CONSEQUENCES` says what follows from each."""

    UNAVAILABLE = "unavailable"  # says that it cannot answer now, or (Triton) cannot be reached
    UNREACHABLE = "unreachable"  # nobody answers at an endpoint's address, or it hung up before it answered
    TIMEOUT = "timeout"  # no answer within the attempt's time
    OVERLOADED = "overloaded"  # says itself that it is full (429, 503, full queue)
    BROKEN = "broken"  # answered with garbage, or cannot answer anything
    DENIED = "denied"  # refuses the gateway itself: its key, its rights, its credit
    FAILED = "failed"  # answered this one request with an error of its own, which may be the request's doing
    DEAD = "dead"  # the model's own process has died; only loading the model again helps
    UNKNOWN_MODEL = "unknown_model"  # is up, but does not serve this model or version, which a rule names
    NO_SUCH_MODEL = "no_such_model"  # the same, where the caller itself named the model
    MISFIT = "misfit"  # the call does not fit the model: names, datatypes or shapes that it does not have
    CONTEXT_TOO_LONG = "context_too_long"  # the prompt does not fit into the model's context
    REFUSED_INPUT = "refused_input"  # judged the content of the caller's input invalid
    UNSUPPORTED = "unsupported"  # lacks the feature asked for
    SKIPPED = "skipped"  # no attempt: it was out of order, or had asked to wait, when its turn came


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An error as a model server worded it: gRPC's name of its code, and its text, not cleaned yet."""

    code: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One failed attempt, in the gateway's words.

    Attributes:
        kind: what happened.
        message: the backend's own words. Shown to the caller for REFUSED_INPUT only (adapters clean it);
            otherwise for logs.
        retry_after_us: the backend's own wish, in microseconds.
        field: the part of the input that was refused, where the backend named one.
        code: an upstream's error code, where it gave one.
        reply: a model server's own error; None where no server answered.
        status: the HTTP status of an LLM endpoint's refusal of the caller's input (400, 404, 409, 413, 422), for
            callers who speak its protocol; else 0.
        place: where it happened; filled in by the walk.
        is_own_limit: for TIMEOUT, that a limit of the endpoint's own configuration ran out, whatever time the caller
            gave.
        is_server: nobody answers at this address, whatever the model.
        dead_model: the model whose process died (a part of an ensemble, maybe), for DEAD.
    """

    kind: FaultKind
    message: str
    retry_after_us: int | None = None
    field: str | None = None
    code: str | None = None
    reply: Reply | None = None
    status: int = 0
    place: Place | None = None
    is_own_limit: bool = False
    is_server: bool = False
    dead_model: str = ""


class BackendError(Exception):
    """Raised by adapters, and by contracts about an answer that does not fit; carries one `Fault`."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(f"{fault.kind.value}: {fault.message}")
        self.fault = fault
