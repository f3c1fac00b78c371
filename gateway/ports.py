"""What the pipeline needs from the world, each stated by its user. Adapters fit themselves to these."""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import date
from typing import Any, Protocol, runtime_checkable

from gateway.core.admissions import Wanted
from gateway.core.answers import Claim, Found, Slot
from gateway.core.breaker import Breaker
from gateway.core.errors import Fault
from gateway.core.keys import ApiKey, KnownKey
from gateway.core.models import ModelFacts, ModelFigures, Outcomes
from gateway.core.record import RequestRecord
from gateway.core.routing import Plan
from gateway.core.rules import Rule, RuleSet
from gateway.core.sequences import Pin
from gateway.core.types import (
    BackendCall,
    BackendEvent,
    EngineLoad,
    InferenceRequest,
    Place,
    SequenceStep,
    Speech,
    Verdict,
)

JsonObject = Mapping[str, Any]


class Clock(Protocol):
    """A monotonic clock in integer microseconds."""

    def __call__(self) -> int:
        """The instant now."""
        ...


class Backend(Protocol):
    """A place that can answer: one server, or several replicas of one that are equal.

    `speaks` says what it is asked in. `is_probed` is false for servers of others, whose health requests alone tell.
    """

    @property
    def speaks(self) -> Speech:
        """Which payloads it takes."""
        ...

    @property
    def is_probed(self) -> bool:
        """Whether `probe` may be called every second."""
        ...

    def engine_load(self, replica: str) -> EngineLoad | None:
        """What an LLM server last said of its load; None where it does not tell. Never waits."""
        ...

    def replicas(self) -> Sequence[str]:
        """The names of its servers now; empty where it has but one. Never waits; called for every request."""
        ...

    def infer(self, call: BackendCall, *, timeout_us: int) -> AsyncGenerator[BackendEvent, None]:
        """Answer as events; unary answers are a stream of one.

        Raises `BackendError` and nothing else; closing the iterator (or cancelling) ends the work at the
        backend too. `timeout_us` bounds the whole call.
        """
        ...

    async def probe(self, place: Place) -> None:
        """Return when `place` can answer now; raise `BackendError` otherwise. Cheap; called every second.

        With the model `*`, whether anybody answers there at all.
        """
        ...

    async def figures(self) -> Sequence[ModelFigures]:
        """What its servers count by themselves; empty where they do not tell. Raises `BackendError`."""
        ...

    async def close(self) -> None:
        """Let go of connections; nothing may be called after."""
        ...


@runtime_checkable
class ModelServer(Protocol):
    """A backend that serves a model repository and can be asked about it: Triton, the local runtime.

    Documents are those of the Open Inference Protocol with Triton's extensions, as its HTTP answers show them.
    `replica` is one of `Backend.replicas`, or empty for a server without. All raise `BackendError`, with the server's
    own words in `Fault.reply`.
    """

    def replicas(self) -> Sequence[str]:
        """As of `Backend`."""
        ...

    async def facts(self, place: Place) -> ModelFacts:
        """What the gateway has to know of a model: kept for a short while, so cheap to ask for every request."""
        ...

    async def server_metadata(self, replica: str) -> JsonObject:
        """Name, version and extensions of the server."""
        ...

    async def metadata(self, place: Place) -> JsonObject:
        """A model's inputs and outputs."""
        ...

    async def config(self, place: Place) -> JsonObject:
        """A model's whole configuration, in the form of Triton's JSON."""
        ...

    async def statistics(self, place: Place) -> JsonObject:
        """A model's counters; of all models with an empty model."""
        ...

    async def index(self, replica: str, *, ready_only: bool = False) -> list[JsonObject]:
        """The models of the repository, and the state of each version."""
        ...

    async def load(
        self, model: str, *, replica: str, config: str | None = None, files: Mapping[str, bytes] | None = None
    ) -> None:
        """Load a model, or load it anew; returns when it is ready. `config` (JSON) and `files` as in Triton."""
        ...

    async def unload(self, model: str, *, replica: str, unload_dependents: bool = False) -> None:
        """Unload a model; returns when no new request is taken."""
        ...


class Sequences(Protocol):
    """Where sequences live: a sequence stays with the replica that its first request went to.

    Called by the walk for requests that have a `sequence`, and for no others.
    """

    async def route(self, request: InferenceRequest, plan: Plan) -> Plan:
        """The plan for it: as it is for the first request of a sequence, else where the sequence lives.

        Raises `SequenceUnknown`, `SequenceLost`, `SequencesUnavailable`.
        """
        ...

    async def bind(self, request: InferenceRequest, place: Place) -> SequenceStep:
        """It is about to be sent to `place`: the first of a sequence is pinned there. Its step as the server sees it.

        Raises `BackendError` where `place` cannot take it, `SequencesUnavailable`.
        """
        ...

    async def failed(self, request: InferenceRequest, place: Place, fault: Fault) -> None:
        """It failed at `place`. Raises `SequenceLost` where that ends the sequence."""
        ...

    async def answered(self, request: InferenceRequest, *, version: str) -> None:
        """It was answered, by that version: the last of a sequence gives its place up. Never raises."""
        ...


class SequenceStore(Protocol):
    """Which replica keeps the state of which sequence: `core.sequences.Pins` where all workers see it.

    Raises `SequencesUnavailable` when it cannot be asked. `for_us` is how long the request may still be under way.
    """

    async def find(self, owner: str, *, for_us: int) -> Pin | None:
        """The pin of an owner, its lease renewed; one step."""
        ...

    async def pin(self, owner: str, place: Place, numbers: Sequence[int], *, idle_us: int, for_us: int) -> int | None:
        """Pin a new sequence under the first number that is its owner's already, or free; None where none is."""
        ...

    async def lose(self, owner: str, pin: Pin) -> None:
        """What was kept is gone: until a new start, `find` says so. Nothing where it lives elsewhere by now."""
        ...

    async def end(self, owner: str, pin: Pin) -> None:
        """It has ended. Nothing where it lives elsewhere by now."""
        ...


class Admission(Protocol):
    """One request's, from `Admissions.admit` to `settle`, which must follow whatever the verdict says."""

    @property
    def verdict(self) -> Verdict:
        """Whether it may go on."""
        ...

    @property
    def is_lost(self) -> bool:
        """Whether its ticket's lease has run out: another may have its turn by now. Never waits."""
        ...

    async def turn(self, *, within_us: int) -> None:
        """Return when it has its turn under its ordering key; at once where it has none.

        Raises `DeadlineExceeded` after `within_us`, `OrderingUnavailable` where its place is lost.
        """
        ...

    def settle(self, *, tokens: int, nano_usd: int) -> None:
        """It has ended, and used up that much. Never waits, never raises; said again, it changes nothing."""
        ...


class Admissions(Protocol):
    """Limits and queues that all workers share; each admission is one atomic step, all or nothing."""

    async def admit(self, wanted: Wanted) -> Admission:
        """Raises `LimitsUnavailable` and `OrderingUnavailable` where the store is out of reach and `wanted` says so.

        Without a store, limits are kept by this worker alone otherwise (the verdict is then `degraded`).
        """
        ...


class Answers(Protocol):
    """Answers that are kept for all workers, and who is at work on one. Each operation is one atomic step.

    All but `waiting` raise `IdempotencyUnavailable` where the store is out of reach.
    """

    async def claim(self, claim: Claim, *, lease_us: int, max_age_us: int | None = None) -> Found:
        """The slot's kept answer, if it is not older than `max_age_us`; else the slot is claimed, if nobody has it.

        An answer that is too old stays until it is kept anew.
        """
        ...

    async def renew(self, claim: Claim, *, lease_us: int) -> None:
        """Its lease lasts from now; nothing where it is no longer the slot's."""
        ...

    async def keep(self, claim: Claim, answer: bytes, *, for_us: int) -> bool:
        """End the claim with the answer; false, and nothing is changed, where it is no longer the slot's.

        Of those that an owner has kept the ones that end first make room.
        """
        ...

    async def release(self, claim: Claim) -> None:
        """End the claim without an answer; nothing where it is no longer the slot's."""
        ...

    def waiting(self, slot: Slot) -> AbstractAsyncContextManager["ClaimEnd"]:
        """For those who wait: told of every end of a claim on `slot` from the start of the block on."""
        ...


class ClaimEnd(Protocol):
    """See `Answers.waiting`."""

    async def __call__(self, within_s: float) -> None:
        """Return when a claim may have ended since the last call, or after `within_s`; never raises.

        A lease that runs out is not told: claim again every second or so.
        """
        ...


class RuleSource(Protocol):
    """The routing rules in force."""

    def current(self) -> RuleSet:
        """The newest valid rule set; never waits."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """What one worker reports of itself.

    `state` is `serving`, or `refused` where the stored set is not taken.
    `revision` is the set in force there; `detail` says why a set was refused; `started` is in Unix seconds.
    """

    id: str
    pid: int
    revision: int
    started: int
    state: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """How far a revision has got: `workers` of `of` live workers run it, seen after `ms` milliseconds."""

    workers: int
    of: int
    ms: int


class RuleStore(Protocol):
    """The shared routing rules, for the control plane. Raises `RulesUnavailable` when the store cannot answer."""

    async def get(self) -> RuleSet:
        """The newest set; revision 0 and no rules where none was ever stored."""
        ...

    async def put(self, rules: Sequence[Rule], *, expected_revision: int, at_ms: int = 0) -> int:
        """Replace the set of `expected_revision`; returns the new revision.

        All workers put it in force at the same instant, `at_ms` (Unix milliseconds, seconds ahead at most), or, with 0,
        each as soon as it hears of it.
        Raises `StaleRevision` when that is not the newest.
        """
        ...

    async def workers(self) -> list[WorkerState]:
        """The live data-plane workers."""
        ...

    async def applied(self, revision: int, timeout_s: float = 1.0) -> Applied:
        """Wait until all live workers run `revision` or a later one, or hold it for its instant; never raises."""
        ...


class DeployStore(Protocol):
    """What becomes of deploys, kept where a restart of the control plane does not lose it. Raises `RulesUnavailable`.

    Documents are plain JSON objects with an `id`.
    """

    async def save(self, document: JsonObject) -> None:
        """Keep it in place of the one with the same `id`; the oldest of too many are forgotten."""
        ...

    async def load(self, deploy_id: str) -> JsonObject | None:
        """The one with this id."""
        ...

    async def recent(self) -> Sequence[JsonObject]:
        """The newest first."""
        ...

    async def claim(self, model: str, owner: str) -> bool:
        """Take a model, or keep it, for a few seconds; false while another owner has it."""
        ...

    async def owner(self, model: str) -> str:
        """Who has claimed the model; empty for nobody."""
        ...

    async def release(self, model: str, owner: str) -> None:
        """Give up a claim of one's own."""
        ...


class OutcomeSource(Protocol):
    """What became of the requests to a model, as all workers saw it. Raises `RulesUnavailable`."""

    async def read(self, model: str) -> Mapping[str, Outcomes]:
        """By version; only of requests whose route named one."""
        ...


class Events(Protocol):
    """What happened to backends lately: models whose processes died, and what became of them."""

    async def read(self, limit: int) -> Sequence[JsonObject]:
        """The newest first."""
        ...


class EventLog(Protocol):
    """Where events are written for `Events` to read."""

    async def add(self, event: JsonObject) -> None:
        """Write one down; never raises."""
        ...


class Leases(Protocol):
    """What only one worker at a time may do. None of it raises: without the store nobody gets anything."""

    async def take(self, name: str, ttl_s: float) -> bool:
        """Whether it is ours now, for `ttl_s` seconds; false while another has it, or while it is not known."""
        ...

    async def keep(self, name: str, ttl_s: float, *, word: str = "") -> None:
        """Have it for `ttl_s` from now, and leave a word for those who do not get it."""
        ...

    async def word(self, name: str) -> str:
        """The word that was left with it; empty where there is none."""
        ...


class Observer(Protocol):
    """Hears of requests. A new kind of log or metric is another observer."""

    def began(self, task: str) -> None:
        """A request entered the walk."""
        ...

    def ended(self, record: RequestRecord) -> None:
        """It left it, one way or another; called exactly once for each `began`."""
        ...

    def refused(self, record: RequestRecord) -> None:
        """A request was refused at the door, before the walk."""
        ...


class HealthObserver(Protocol):
    """Hears, about once a second, how the backends are."""

    def health(self, breakers: Mapping[Place, Breaker], revision: int) -> None:
        """Every breaker, and the revision of the rules in force."""
        ...

    def figures(self, backend: str, figures: Sequence[ModelFigures]) -> None:
        """What `Backend.figures` told."""
        ...

    def waiting(self, counts: Mapping[str, int]) -> None:
        """How many requests wait at the gates of each backend."""
        ...

    def engines(self, backend: str, loads: Mapping[str, EngineLoad]) -> None:
        """What the LLM servers of a backend say of their load, by replica; those that do not tell are left out."""
        ...

    def healed(self, place: Place, outcome: str) -> None:
        """A model whose process had died was loaded anew (`healed`), or could not be (`failed`, `not_allowed`)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow:
    """What a tenant has used up of one model for one task, on one day (in UTC, the day on which requests ended).

    Attributes:
        requests: those that were answered, or used something up; `failed` of them came to no good end.
        input_tokens / output_tokens: all of them, `cached_tokens` and `reasoning_tokens` included.
        estimated_requests: those whose tokens the gateway has estimated, as the backend did not tell.
        cost_nano_usd: in 1e-9 US dollars; 0 also where no price is known.
    """

    day: date
    tenant: str
    task: str
    backend: str
    model: str
    requests: int = 0
    failed: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    estimated_requests: int = 0
    cost_nano_usd: int = 0


class UsageSource(Protocol):
    """The books of what was used up, as all workers wrote them. Raises `RulesUnavailable`."""

    async def read(self, first_day: date, last_day: date) -> Sequence[UsageRow]:
        """Every row of these days, the last included, in the order of days and names."""
        ...


class Keys(Protocol):
    """The API keys that were made at run time, as one worker knows them."""

    async def find(self, key_id: str) -> KnownKey | None:
        """The key as it is now, whether or not it is in force; None where there is none.

        Raises `KeysUnavailable` where nobody can tell.
        """
        ...


class KeyStore(Protocol):
    """The same for the control plane, to change them. Raises `RulesUnavailable`."""

    async def create(self, key: ApiKey) -> None:
        """Add a key. Raises `TooManyKeys`."""
        ...

    async def get(self, key_id: str) -> ApiKey:
        """One key. Raises `UnknownKey`."""
        ...

    async def page(self, *, after: str, size: int, tenant: str = "") -> tuple[list[ApiKey], str | None]:
        """At most `size` keys (of a tenant) in the order in which they were made, and what to name for those after."""
        ...

    async def change(
        self, key_id: str, change: Callable[[ApiKey], ApiKey], *, expected_revision: int | None = None
    ) -> ApiKey:
        """Put what `change` makes of it in its place; `change` may be called again where another writer was quicker.

        Raises `UnknownKey`, and `StaleRevision` where it is not the revision that was expected.
        """
        ...

    async def delete(self, key_id: str) -> None:
        """Take it away for good. Raises `UnknownKey`."""
        ...
