"""What was seen of a stack: its configuration as it is, and what happened between two looks at it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from gateway.core.memory_plan import MemoryPlan

Name = tuple[str, str]
"""A backend and a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The part of a model's configuration that decides about batches and waiting.

    Attributes:
        file: the path of its config.pbtxt, or the address of the server that told it.
        delay_us: max_queue_delay_microseconds.
        preferred: preferred_batch_size, in rows.
        queue_timeout_us: the default_queue_policy's default_timeout_microseconds; 0 is none.
        instances: of all groups, on each server.
        steps: the models that an ensemble is made of.
        faults: what `gateway check` finds wrong with the batching of a file, by the field that it is about.
    """

    backend: str
    model: str
    file: str = ""
    max_batch_size: int = 0
    is_batching: bool = False
    is_sequence: bool = False
    delay_us: int = 0
    preferred: tuple[int, ...] = ()
    queue_timeout_us: int = 0
    instances: int = 1
    steps: tuple[str, ...] = ()
    faults: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> Name:
        """Backend and model."""
        return self.backend, self.model

    def __str__(self) -> str:
        return f"{self.backend}/{self.model}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What servers counted of a model between the looks, all versions and replicas together.

    Attributes:
        window_s: how long.
        requests / rows / executions: requests answered, their rows, and the batches that they ran in.
        queue_s / compute_s: summed over requests; each request of a batch counts the batch's whole time.
        batch_sizes: executions by their rows.
    """

    window_s: float
    requests: int
    rows: int
    executions: int
    queue_s: float
    compute_s: float
    batch_sizes: Mapping[int, int] = field(default_factory=dict)

    @property
    def joined(self) -> float:
        """Requests in a batch, on the average."""
        return self.requests / self.executions if self.executions else 0.0

    @property
    def mean_batch(self) -> float:
        """Rows in a batch, on the average."""
        return self.rows / self.executions if self.executions else 0.0

    @property
    def queue_share(self) -> float:
        """The part of requests' time at the servers that they waited."""
        whole = self.queue_s + self.compute_s
        return self.queue_s / whole if whole else 0.0

    @property
    def present(self) -> float:
        """Requests that were at the servers at once, on the average (Little's law)."""
        return (self.queue_s + self.compute_s) / self.window_s

    @property
    def waiting(self) -> float:
        """Of these, requests that waited."""
        return self.queue_s / self.window_s

    @property
    def busy(self) -> float:
        """Instances that worked, on the average: batches a second times the time of one."""
        return self.executions * self.compute_s / self.requests / self.window_s if self.requests else 0.0

    @property
    def queue_ms(self) -> float:
        """The mean wait of a request."""
        return 1000 * self.queue_s / self.requests if self.requests else 0.0

    @property
    def compute_ms(self) -> float:
        """The mean time of a batch."""
        return 1000 * self.compute_s / self.requests if self.requests else 0.0

    @property
    def short_delay_us(self) -> int:
        """A tenth of a batch's time: what a delay adds stays small against it."""
        return max(100, round(self.compute_ms * 100))

    def is_held_by(self, delay_us: int) -> bool:
        """Whether this delay makes the wait: it is half of the mean one, or more."""
        return delay_us > 0 and delay_us / 1000 >= self.queue_ms / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task of the configuration, and the places to which rules send it (`*`: any model of the backend).

    `is_sequence`: its requests are steps of sequences.
    """

    name: str
    timeout_ms: int
    attempt_timeout_ms: int
    is_sequence: bool = False
    places: tuple[Name, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """How long a task's requests took at a place, as the gateway saw it."""

    task: str
    backend: str
    model: str
    requests: int
    p99_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One of the last requests; `stands_for` so many of its kind."""

    key: str
    priority: str
    code: str
    backend: str
    model: str
    total_ms: float
    stands_for: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """The gateway's own queue before a backend.

    Attributes:
        max_in_flight: requests of one worker at one server.
        waiting: in the gateway, the greater of the two looks; None: nobody tells.
        in_flight: at the servers, the greater of the two looks.
        workers / servers: how many there are, 1 at least.
    """

    backend: str
    max_in_flight: int
    waiting: int | None = None
    in_flight: int = 0
    workers: int = 1
    servers: int = 1

    @property
    def use(self) -> float:
        """The part of the places that are taken."""
        return self.in_flight / (self.max_in_flight * self.workers * self.servers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One replica of a backend: requests that its models answered between the looks, and what keeps it out.

    `requests` is 0 at all servers of a backend one of which counts anew: their shares cannot be told.
    """

    backend: str
    replica: str
    requests: int
    is_live: bool = True
    shut: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limiting:
    """What the limiter did between the looks.

    `limits`: the sizes of those that are set, in words; `hit`: refusals by kind and period, where the gateway tells.
    """

    requests: int
    refused: int
    limits: tuple[str, ...] = ()
    hit: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Memory of one GPU in bytes; `plan` is what the repository's models need of it, where that is known."""

    name: str
    used: int
    total: int
    plan: MemoryPlan | None = None


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All that was seen. `target_p99_ms` is what is promised, where somebody says it.

    `unseen`: what could not be looked at, and why, a line each.
    """

    window_s: float
    setups: Sequence[Setup] = ()
    traffic: Mapping[Name, Traffic] = field(default_factory=dict)
    tasks: Sequence[Task] = ()
    latencies: Sequence[Latency] = ()
    requests: Sequence[Request] = ()
    gates: Sequence[Gate] = ()
    servers: Sequence[Server] = ()
    limiting: Limiting | None = None
    gpus: Sequence[Gpu] = ()
    target_p99_ms: float | None = None
    unseen: Sequence[str] = ()

    @cached_property
    def by_name(self) -> Mapping[Name, Setup]:
        """Setups by backend and model."""
        return {setup.name: setup for setup in self.setups}

    def below(self, name: Name) -> Iterator[Setup]:
        """The model itself and, of an ensemble, its steps; `*` is every model of the backend."""
        backend, model = name
        if model == "*":
            yield from (setup for setup in self.setups if setup.backend == backend)
            return
        left, seen = [model], set[str]()
        while left:
            one = left.pop(0)
            setup = self.by_name.get((backend, one))
            if setup is None or one in seen:
                continue
            seen.add(one)
            left += setup.steps
            yield setup

    def under_load(self) -> Iterator[tuple[Setup, Traffic]]:
        """Models whose configuration and counters are both known."""
        for setup in self.setups:
            if (traffic := self.traffic.get(setup.name)) is not None:
                yield setup, traffic

    def servers_of(self, backend: str) -> int:
        """How many servers a backend has, 1 at least."""
        return max(1, sum(server.backend == backend for server in self.servers))
