"""What the pipeline needs from the world, each stated by its user. Adapters fit themselves to these."""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, runtime_checkable

from gateway.core.admissions import Wanted
from gateway.core.answers import Claim, Found, Slot
from gateway.core.breaker import Breaker
from gateway.core.errors import Fault
from gateway.core.keys import KnownKey
from gateway.core.models import ModelFacts, ModelFigures
from gateway.core.routing import Plan
from gateway.core.rules import RuleSet
from gateway.core.sequences import Pin
from gateway.core.shadows.shadow_reports import ShadowResult
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
from gateway.core.watching.record import RequestRecord

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
class KnowsModels(Protocol):
    """A backend that can tell what the gateway has to know of a model, such as whether it keeps state."""

    async def facts(self, place: Place) -> ModelFacts:
        """What the gateway has to know of a model: kept for a short while, so cheap to ask for every request.

        Raises `BackendError`, with the server's own words in `Fault.reply`.
        """
        ...


@runtime_checkable
class ModelServer(KnowsModels, Protocol):
    """A backend that serves a model repository and can be asked about it: Triton, the local runtime.

    Documents are those of the Open Inference Protocol with Triton's extensions, as its HTTP answers show them.
    `replica` is one of `Backend.replicas`, or empty for a server without. All raise `BackendError`, with the server's
    own words in `Fault.reply`.
    """

    def replicas(self) -> Sequence[str]:
        """As of `Backend`."""
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


@runtime_checkable
class HearsOfDeaths(Protocol):
    """A backend whose models run in processes of their own, and may die there."""

    on_death: Callable[[Place, Fault], None] | None
    """Told where a model's process was found dead."""

    def died(self, place: Place, fault: Fault) -> None:
        """Somebody else has found one: the calls that wait for it end at once."""
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


class ShadowResults(Protocol):
    """Hears of copies of requests that went to shadows."""

    def told(self, result: ShadowResult) -> None:
        """What became of one. Never waits, never raises."""
        ...


class StoreObserver(Protocol):
    """Hears of every round trip to the store that all workers share."""

    def __call__(self, operation: str, took_s: float | None, /) -> None:
        """One of `admit`, `rules`, `keys` took so long; None: it failed, or had no answer in time."""
        ...


class HealthObserver(Protocol):
    """Hears, about once a second, how the backends are."""

    def health(self, breakers: Mapping[Place, Breaker], rules: RuleSet) -> None:
        """Every breaker, and the rules and switches in force."""
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


class Keys(Protocol):
    """The API keys that were made at run time, as one worker knows them."""

    async def find(self, key_id: str) -> KnownKey | None:
        """The key as it is now, whether or not it is in force; None where there is none.

        Raises `KeysUnavailable` where nobody can tell.
        """
        ...
