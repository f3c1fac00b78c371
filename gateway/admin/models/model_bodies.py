"""Bodies of the admin API about models, backends and deploys."""

from typing import Any, Literal

from pydantic import Field

from gateway.admin.fields import Body, Next


class LoadIn(Body):
    """How to load a model."""

    backend: str | None = Field(
        default=None, description="only on this backend; default: on every one that has the model"
    )
    config: dict[str, Any] | str | None = Field(
        default=None, description="a configuration (JSON) in place of config.pbtxt"
    )


class UnloadIn(Body):
    """How to unload a model."""

    backend: str | None = Field(
        default=None, description="only on this backend; default: on every one that has the model"
    )
    unload_dependents: bool = Field(default=False, description="the models that an ensemble is made of too")


class DeployIn(Body):
    """What to deploy, and how fast. The folder of the version is in the repository already."""

    version: str = Field(pattern=r"^[1-9][0-9]{0,17}$", description="whose folder is in the repository")
    backend: str | None = Field(
        default=None, description="only on this backend; default: on every one that has the model"
    )
    canary: int = Field(default=10, ge=1, le=100, description="the first share of the callers, in percent")
    hold_s: float = Field(default=10.0, ge=0, le=86_400, description="seconds that each share is held and watched")
    max_error_ratio: float = Field(
        default=0.02, ge=0, le=1, description="0 to 1, of the new version's requests that may fail beyond the old one's"
    )
    load_timeout_s: float = Field(default=600.0, gt=0, le=86_400, description="seconds for the load, warm-up included")


class VersionOut(Body):
    """A version in a server's index: READY, LOADING, UNLOADING or UNAVAILABLE, and why."""

    version: str = Field(description="its number")
    state: str = Field(description="READY, LOADING, UNLOADING or UNAVAILABLE")
    reason: str = Field(description="the server's own words; empty: none")


class ReplicaOut(Body):
    """A model on one server; `error` says why that cannot be told."""

    replica: str = Field(description="the server's address; empty: the backend's only one")
    ready: bool = Field(description="whether some version is")
    versions: list[VersionOut] = Field(description="those in its index")
    error: str = Field(default="", description="why it cannot be told; empty: it can")


class FiguresOut(Body):
    """What a server counts of one version since it was loaded; times are means per request, in microseconds."""

    replica: str = Field(description="the server's address; empty: the backend's only one")
    version: str = Field(description="its number")
    requests: int = Field(description="that were answered")
    failures: int = Field(description="requests that failed")
    inferences: int = Field(description="rows")
    executions: int = Field(description="batches")
    mean_batch_size: float = Field(description="rows per batch")
    queue_us: int = Field(description="microseconds per request, waiting for its batch")
    compute_input_us: int = Field(description="microseconds per request, preparing inputs")
    compute_infer_us: int = Field(description="microseconds per request, in the model")
    compute_output_us: int = Field(description="microseconds per request, preparing outputs")
    batch_sizes: dict[int, int] = Field(description="batches by their rows")


class ModelOut(Body):
    """A model of a backend."""

    model: str = Field(description="its name")
    backend: str = Field(description="its backend's name")
    replicas: list[ReplicaOut] = Field(description="on each of its servers")
    figures: list[FiguresOut] = Field(description="of each version on each server")
    events: list[dict[str, Any]] = Field(description="as in `GET /events`")


class UnreachableOut(Body):
    """A backend that this process cannot ask about its models."""

    backend: str = Field(description="its name")
    reason: str = Field(description="why")


class ModelsOut(Body):
    """The models of all backends that can be asked."""

    items: list[ModelOut] = Field(description="a model of two backends is there twice")
    unreachable: list[UnreachableOut] = Field(description="backends of which nothing is known now")
    next: Next = None


class OutcomeOut(Body):
    """What became of a change on one server."""

    backend: str = Field(description="its name")
    replica: str = Field(description="the server's address; empty: the backend's only one")
    ok: bool = Field(description="whether it was done there")
    error: str = Field("", description="why not")


class FannedOut(Body):
    """On how many servers it was done."""

    replicas: int = Field(description="servers that have done it")
    of: int = Field(description="servers that were asked")


class ControlOut(Body):
    """A load or unload, on every server."""

    model: str = Field(description="its name")
    action: Literal["load", "unload"] = Field(description="what was asked for")
    applied: FannedOut = Field(description="on how many servers")
    outcomes: list[OutcomeOut] = Field(description="of each server")


class EngineOut(Body):
    """What an LLM server says of itself."""

    running: int = Field(description="requests that it answers")
    waiting: int = Field(description="requests in its own queue")
    kv_used: float | None = Field(description="of its KV cache, 0 to 1; null where it does not tell")


class ServerOut(Body):
    """One server of a backend: as a probe found it, or, where this process cannot probe it, as the workers see it."""

    replica: str = Field(description="its address; empty: the backend's only one")
    live: bool = Field(description="it answers a probe; where none is made: not every worker keeps it out")
    latency_ms: float | None = Field(description="milliseconds that a probe took; null: there was none, or no answer")
    error: str = Field("", description="why the probe failed")
    in_flight: int | None = Field(None, description="from all workers; null: they have not told")
    waiting: int | None = Field(None, description="before it; null where the backend has several servers")
    shut: list[str] = Field(default_factory=list, description="what breakers keep out, and why")
    switches: list[str] = Field(default_factory=list, description="ids of those that block or drain it")
    engine: EngineOut | None = Field(None, description="of an LLM server that tells; else null")


class BackendOut(Body):
    """A backend of the configuration."""

    backend: str = Field(description="its name")
    kind: str = Field(description="as in the configuration")
    reachable: bool = Field(description="by this process; workers may reach it all the same")
    is_on: bool | None = Field(None, description="whether some worker sends requests there; null: none has told")
    detail: str = Field(default="", description="why it is off, or why this process does not reach it")
    repository: str = Field(default="", description="where its models lie, if the configuration says so")
    waiting: int | None = Field(None, description="before its servers, in all workers")
    replicas: list[ServerOut] = Field(description="its servers")


class BackendsOut(Body):
    """All backends."""

    items: list[BackendOut] = Field(description="those that are reached from here first")
    next: Next = None


class EventsOut(Body):
    """What happened to backends lately, the newest first."""

    items: list[dict[str, Any]] = Field(
        description="each with `at` (Unix seconds), `event`, `backend`, `model`, `replica` and `detail`"
    )
    next: Next = None


class PaceOut(Body):
    """How traffic is shifted."""

    percents: list[int] = Field(description="percent of the callers, one after the other")
    hold_s: float = Field(description="seconds that each is held and watched")
    max_error_ratio: float = Field(
        description="0 to 1, of the new version's requests that may fail beyond the old one's"
    )
    load_timeout_s: float = Field(description="seconds for the load, warm-up included")


class DeployOut(Body):
    """A deploy as it is now; `rules` are those that it holds."""

    id: str = Field(description="what it is rolled back and gone on with by")
    model: str = Field(description="its name")
    old: str = Field(description="the version before")
    new: str = Field(description="the version that it is moved to")
    backends: list[str] = Field(description="whose servers are changed")
    served: list[str] = Field(description="the versions that were ready before")
    pace: PaceOut = Field(description="how traffic is shifted")
    started_ms: int = Field(description="Unix milliseconds")
    updated_ms: int = Field(description="Unix milliseconds")
    status: Literal["running", "done", "failed", "rolled_back", "interrupted"] = Field(
        description="`interrupted`: nobody runs it: go on with it, or roll it back"
    )
    step: Literal["pin", "load", "shift", "retire", "unpin"] = Field(description="where it is")
    weight: int = Field(description="percent of the callers that are on the new version")
    undo: Literal["", "asked", "forced"] = Field(
        description="it goes back: an operator has asked for it, or it could not go on; empty: it does not"
    )
    reason: str = Field(description="why it failed or was rolled back")
    notes: list[str] = Field(description="what to know of it")
    rules: list[str] = Field(description="names of the rules that it holds now")


class DeploysOut(Body):
    """The deploys that are known, the newest first."""

    items: list[DeployOut] = Field(description="the newest first")
    next: Next = None
