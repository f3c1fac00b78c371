"""Bodies of the admin API about models, backends and deploys."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class LoadIn(_Body):
    """How to load a model."""

    backend: str | None = Field(
        default=None, description="only on this backend; default: on every one that has the model"
    )
    config: dict[str, Any] | str | None = Field(
        default=None, description="a configuration (JSON) in place of config.pbtxt"
    )


class UnloadIn(_Body):
    """How to unload a model."""

    backend: str | None = Field(
        default=None, description="only on this backend; default: on every one that has the model"
    )
    unload_dependents: bool = Field(default=False, description="the models that an ensemble is made of too")


class DeployIn(_Body):
    """What to deploy, and how fast. The folder of the version is in the repository already."""

    version: str = Field(pattern=r"^[1-9][0-9]{0,17}$")
    backend: str | None = Field(
        default=None, description="only on this backend; default: on every one that has the model"
    )
    canary: int = Field(default=10, ge=1, le=100, description="the first share of the callers, in percent")
    hold_s: float = Field(default=10.0, ge=0, le=86_400, description="how long each share is held and watched")
    max_error_ratio: float = Field(
        default=0.02, ge=0, le=1, description="of the new version's requests, beyond the old one's"
    )
    load_timeout_s: float = Field(default=600.0, gt=0, le=86_400, description="for the load, warm-up included")


class VersionOut(_Body):
    """A version in a server's index: READY, LOADING, UNLOADING or UNAVAILABLE, and why."""

    version: str
    state: str
    reason: str


class ReplicaOut(_Body):
    """A model on one server; `error` says why that cannot be told."""

    replica: str
    ready: bool
    versions: list[VersionOut]
    error: str = ""


class FiguresOut(_Body):
    """What a server counts of one version since it was loaded; times are means per request, in microseconds."""

    replica: str
    version: str
    requests: int
    failures: int
    inferences: int = Field(description="rows")
    executions: int = Field(description="batches")
    mean_batch_size: float
    queue_us: int
    compute_input_us: int
    compute_infer_us: int
    compute_output_us: int
    batch_sizes: dict[int, int] = Field(description="batches by their rows")


class ModelOut(_Body):
    """A model of a backend."""

    model: str
    backend: str
    replicas: list[ReplicaOut]
    figures: list[FiguresOut]
    events: list[dict[str, Any]]


class UnreachableOut(_Body):
    """A backend that this process cannot ask about its models."""

    backend: str
    reason: str


class ModelsOut(_Body):
    """The models of all backends that can be asked."""

    items: list[ModelOut]
    unreachable: list[UnreachableOut]
    next: str | None = None


class OutcomeOut(_Body):
    """What became of a change on one server."""

    backend: str
    replica: str
    ok: bool
    error: str = ""


class FannedOut(_Body):
    """On how many servers it was done."""

    replicas: int
    of: int


class ControlOut(_Body):
    """A load or unload, on every server."""

    model: str
    action: Literal["load", "unload"]
    applied: FannedOut
    outcomes: list[OutcomeOut]


class EngineOut(_Body):
    """What an LLM server says of itself."""

    running: int
    waiting: int
    kv_used: float | None = Field(description="of its KV cache, 0 to 1; null where it does not tell")


class ServerOut(_Body):
    """One server of a backend: as a probe found it, or, where this process cannot probe it, as the workers see it."""

    replica: str
    live: bool
    latency_ms: float | None
    error: str = ""
    in_flight: int | None = Field(None, description="from all workers; null: they have not told")
    waiting: int | None = Field(None, description="before it; null where the backend has several servers")
    shut: list[str] = Field(default_factory=list, description="what breakers keep out, and why")
    switches: list[str] = Field(default_factory=list, description="ids of those that block or drain it")
    engine: EngineOut | None = None


class BackendOut(_Body):
    """A backend of the configuration."""

    backend: str
    kind: str
    reachable: bool = Field(description="by this process; workers may reach it all the same")
    is_on: bool | None = Field(None, description="whether some worker sends requests there; null: none has told")
    detail: str = Field(default="", description="why it is off, or why this process does not reach it")
    repository: str = Field(default="", description="where its models lie, if the configuration says so")
    waiting: int | None = Field(None, description="before its servers, in all workers")
    replicas: list[ServerOut]


class BackendsOut(_Body):
    """All backends."""

    items: list[BackendOut]
    next: str | None = None


class EventsOut(_Body):
    """What happened to backends lately, the newest first."""

    items: list[dict[str, Any]]
    next: str | None = None


class PaceOut(_Body):
    """How traffic is shifted."""

    percents: list[int]
    hold_s: float
    max_error_ratio: float
    load_timeout_s: float


class DeployOut(_Body):
    """A deploy as it is now; `rules` are those that it holds."""

    id: str
    model: str
    old: str
    new: str
    backends: list[str]
    served: list[str]
    pace: PaceOut
    started_ms: int
    updated_ms: int
    status: Literal["running", "done", "failed", "rolled_back", "interrupted"]
    step: Literal["pin", "load", "shift", "retire", "unpin"]
    weight: int
    undo: Literal["", "asked", "forced"]
    reason: str
    notes: list[str]
    rules: list[str]


class DeploysOut(_Body):
    """The deploys that are known, the newest first."""

    items: list[DeployOut]
    next: str | None = None
