"""The whole data plane over scripted backends, on a real socket: everything but the real parts."""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import httpx
import numpy as np

from gateway.api.app import create_app
from gateway.api.auth import KeyRing
from gateway.api.body import BodyLimits
from gateway.api.endpoint import Api, passed_through
from gateway.api.shedding import UNBOUNDED, Shedding
from gateway.backends.scripted import ScriptedBackend
from gateway.core.breaker import BreakerBoard
from gateway.core.cost import parse_prices
from gateway.core.rules import RuleSet, parse_rules
from gateway.core.tensors import from_numpy
from gateway.core.types import Caller, Limit, Tensors
from gateway.core.watching.record import RequestRecord
from gateway.gate import Gate
from gateway.http.server import bind, serve_app
from gateway.pipeline import Pipeline, Task
from gateway.ports import Admissions, Answers, Backend, Observer, SequenceStore
from gateway.recall import Recalls
from gateway.sequences import PinnedSequences
from gateway.stores.memory import MemoryRuleSource, MemorySequenceStore
from gateway.stores.memory_admissions import MemoryAdmissions
from gateway.stores.memory_answers import MemoryAnswers
from gateway.tasks.chat import Chat
from gateway.tasks.contract import Contract
from gateway.tasks.image_classification import ImageClassification
from gateway.tasks.text_embedding import TextEmbedding
from gateway.telemetry.observers import Observers
from gateway.telemetry.tracing import Tracing
from gateway.wiring import monotonic_us, wall_us

KEY, LIMITED_KEY, EMBEDDING_KEY, ADMIN_KEY = "secret-one", "secret-limited", "secret-embedding", "secret-admin"
OTHER_KEY = "secret-other"  # of another tenant than `KEY`, and as free as that
DIMENSIONS = 4
LABELS = ("tabby", "tiger cat", "Egyptian cat")

DEFAULT_RULES = [
    {
        "name": "embeddings",
        "match": {"task": "text-embedding"},
        "split": [{"backend": "triton", "model": "text_embedding"}],
        "fallback": [{"backend": "local", "model": "text_embedding"}],
    },
    {
        "name": "images",
        "match": {"task": "image-classification"},
        "split": [{"backend": "triton", "model": "image_classification"}],
        "fallback": [{"backend": "local", "model": "image_classification"}],
    },
    {
        "name": "chat",
        "match": {"task": "general_llm"},
        "split": [{"backend": "llm", "model": "smollm2"}],
        "fallback": [{"backend": "llm2", "model": "other"}],
    },
]


@dataclass
class Recorder:
    """An observer that keeps everything."""

    began_tasks: list[str] = field(default_factory=list)
    records: list[RequestRecord] = field(default_factory=list)
    at_the_door: list[RequestRecord] = field(default_factory=list)

    def began(self, task: str) -> None:
        self.began_tasks.append(task)

    def ended(self, record: RequestRecord) -> None:
        self.records.append(record)

    def refused(self, record: RequestRecord) -> None:
        self.at_the_door.append(record)

    @property
    def in_flight(self) -> int:
        return len(self.began_tasks) - len(self.records)


@dataclass
class Harness:
    url: str
    http: httpx.AsyncClient
    seen: Recorder
    board: BreakerBoard
    backends: Mapping[str, Any]
    rules: MemoryRuleSource
    app: Any
    stop: asyncio.Event
    pipeline: Pipeline

    @property
    def loads(self) -> dict[str, int]:
        """Requests that are at a backend or wait for it, by backend, as its gate or the board of loads has them."""
        found = {
            name: sum(gate.load(replica) for replica in self.backends[name].replicas() or ("",))
            for name, gate in self.pipeline.gates.items()
        }
        for (name, _), server in self.pipeline.loads._servers.items():
            found[name] = max(found[name], server.requests)
        return {name: count for name, count in found.items() if count}

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return await self.http.post(path, json=body, headers=headers)


def embedding(rows: int = 1, *, version: str = "1", tokens: int = 3, **changes: Any) -> Tensors:
    """A right answer to a text-embedding call; `changes` make it a wrong one."""
    vectors = np.zeros((rows, DIMENSIONS), np.float32)
    vectors[:, 0] = 1.0
    outputs = {"EMBEDDING": vectors, "TOKENS": np.full((rows, 1), tokens, np.int32), **changes}
    return Tensors(
        outputs=tuple(from_numpy(n, a) for n, a in outputs.items() if a is not None),
        version=version,
        queue_us=1500,
    )


def scores(*values: float) -> Tensors:
    return Tensors(outputs=(from_numpy("SCORES", np.array([values], np.float32)),), version="1")


@contextlib.asynccontextmanager
async def running(
    backends: Sequence[Backend],
    *,
    rules: Sequence[Mapping[str, Any]] = DEFAULT_RULES,
    max_body_bytes: int = 1_000_000,
    body_timeout_s: float = 5.0,
    timeout_us: int = 5_000_000,
    attempt_timeout_us: int = 1_000_000,
    more_tasks: Mapping[str, Contract] = MappingProxyType({}),
    sequence_store: SequenceStore | None = None,
    answers: Answers | None = None,
    admissions: Admissions | None = None,
    drain_s: float = 2,
    draw: Callable[[], float] = lambda: 0.0,
    prices: Mapping[str, Any] = MappingProxyType({}),
    usd_per_hour: Mapping[str, float] = MappingProxyType({}),
    max_in_flight: int = 256,
    max_queue_size: int = 1024,
    key_ring: KeyRing | None = None,
    cors_origins: Sequence[str] = (),
    more_callers: Mapping[str, Caller] = MappingProxyType({}),
    observers: Sequence[Observer] = (),
    tracing: Tracing | None = None,
    shedding: Shedding = UNBOUNDED,
) -> AsyncIterator[Harness]:
    """Serve on an ephemeral loopback port until the block ends. Scripted backends called `llm...` are generative.

    `prices` are those of a price table (USD per million tokens), `usd_per_hour` those of backends. `more_callers` are
    by their keys.
    """
    seen, board = Recorder(), BreakerBoard()
    source = MemoryRuleSource(RuleSet(revision=7, rules=parse_rules(rules)))
    contracts = {
        "text-embedding": TextEmbedding(dimensions=DIMENSIONS, max_texts=4),
        "image-classification": ImageClassification(labels=LABELS),
        "general_llm": Chat(),
        **more_tasks,
    }
    tasks = {
        name: Task(name=name, contract=contract, timeout_us=timeout_us, attempt_timeout_us=attempt_timeout_us)
        for name, contract in contracts.items()
    }
    for backend in backends:
        if isinstance(backend, ScriptedBackend) and backend.name.startswith("llm"):
            backend.speaks = "openai"
    by_name = {b.name: b for b in backends}
    store = sequence_store or MemorySequenceStore(monotonic_us)
    recalls = Recalls(answers or MemoryAnswers(monotonic_us, max_bytes=64 * 2**20), monotonic_us)
    pipeline = Pipeline(
        tasks=tasks,
        backends=by_name,
        gates={b.name: Gate(max_in_flight=max_in_flight, max_queue_size=max_queue_size) for b in backends},
        admissions=admissions or MemoryAdmissions(wall_us),
        rules=source,
        recalls=recalls,
        sequences=PinnedSequences(store, by_name, board=board, clock=monotonic_us),
        board=board,
        observer=Observers([seen, *observers, *([] if tracing is None else [tracing])]),
        clock=monotonic_us,
        wall_clock=wall_us,
        draw=draw,
        prices=parse_prices({"prices": dict(prices)}),
        usd_per_hour=dict(usd_per_hour),
    )
    stop = asyncio.Event()
    three = (Limit(kind="requests", amount=3, per="minute", burst=3),)
    callers = {
        KEY: Caller(key_id="one", tenant="t1"),
        ADMIN_KEY: Caller(key_id="admin", tenant="t1", is_admin=True),
        LIMITED_KEY: Caller(key_id="limited", tenant="t2", limits=three),
        OTHER_KEY: Caller(key_id="other", tenant="t4"),
        EMBEDDING_KEY: Caller(key_id="embed", tenant="t3", tasks=frozenset({"text-embedding"})),
        **more_callers,
    }
    api = Api(
        pipeline=pipeline,
        keys=key_ring or KeyRing({hashlib.sha256(k.encode()).hexdigest(): c for k, c in callers.items()}),
        models={**{name: name for name in tasks}, "minilm": "text-embedding", "org/smollm2": "general_llm"},
        body=BodyLimits(max_bytes=max_body_bytes, timeout_s=body_timeout_s),
        is_ready=lambda: not stop.is_set(),
        cors_origins=frozenset(cors_origins),
        traced=passed_through if tracing is None else tracing.begin,
        shedding=shedding,
    )
    app = create_app(api)
    listener = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    serving = asyncio.create_task(serve_app(app, [listener], stop, drain_s=drain_s, max_message_bytes=max_body_bytes))
    try:
        async with httpx.AsyncClient(
            base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=10, trust_env=False
        ) as http:
            yield Harness(
                url=url,
                http=http,
                seen=seen,
                board=board,
                backends={b.name: b for b in backends},
                rules=source,
                app=app,
                stop=stop,
                pipeline=pipeline,
            )
    finally:
        stop.set()
        await serving
        await recalls.close()
        listener.close()
