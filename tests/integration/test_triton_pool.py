"""Two real Tritons behind one backend: how load spreads, and what the death of a server or of a model costs."""

import asyncio
import contextlib
import itertools
import json
import logging
import random
import urllib.request
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from gateway.backends.triton.backend import TritonBackend
from gateway.core.breaker import BreakerBoard
from gateway.core.errors import BackendError, FaultKind, GatewayError
from gateway.core.rules import RuleSet, parse_rules
from gateway.core.tensors import from_numpy, to_numpy
from gateway.core.types import BackendCall, Caller, InferenceRequest, Place, SequenceStep, TensorPayload, Tensors
from gateway.gate import Gate
from gateway.healing import Healer
from gateway.health import Prober
from gateway.pipeline import Pipeline, Task
from gateway.recall import Recalls
from gateway.sequences import PinnedSequences
from gateway.stores.leases import MemoryLeases
from gateway.stores.memory import MemoryRuleSource, MemorySequenceStore
from gateway.stores.memory_admissions import MemoryAdmissions
from gateway.stores.memory_answers import MemoryAnswers
from gateway.telemetry.metrics import Metrics
from gateway.wiring import monotonic_us, wall_us
from tests.kit.app import Recorder
from tests.kit.tritons import tritons
from tests.kit.wait import until, until_async

RULES = parse_rules([{"name": "tensors", "split": [{"backend": "triton", "model": "*"}]}])
TIMEOUT_US = 20_000_000

CONFIG = """
backend: "python"
max_batch_size: 8
input [ { name: "X" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
NEXT = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("Y", pb_utils.get_input_tensor_by_name(one, "X").as_numpy() + 1)]
            )
            for one in requests
        ]
"""
SLOW = NEXT.replace("        return [", "        import time\n        time.sleep(0.15)\n        return [")
CORRELATED = NEXT.replace(
    'pb_utils.get_input_tensor_by_name(one, "X").as_numpy() + 1', "numpy.array([[one.correlation_id() % 2**31]], 'i4')"
).replace("import triton", "import numpy\nimport triton")
# How a model may answer wrongly: what takes the place of its output.
WRONG = {
    "wrong_datatype": 'pb_utils.Tensor("Y", X.as_numpy().astype("float32"))',
    "too_few_rows": 'pb_utils.Tensor("Y", X.as_numpy()[:-1])',
    "too_many_rows": 'pb_utils.Tensor("Y", X.as_numpy().repeat(2, axis=0))',
    "wrong_shape": 'pb_utils.Tensor("Y", X.as_numpy().repeat(2, axis=1))',
    "no_output": 'pb_utils.Tensor("Z", X.as_numpy())',
}
# X answers, and after the first it waits until it is cancelled, which it writes down.
MANY = """
import pathlib, time
import numpy
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for one in requests:
            sender = one.get_response_sender()
            count = int(pb_utils.get_input_tensor_by_name(one, "X").as_numpy()[0, 0])
            for number in range(abs(count)):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", numpy.array([[number]], "i4"))]))
                while count < 0 and not sender.is_cancelled():
                    time.sleep(0.005)
                if count < 0:
                    pathlib.Path(__file__).with_name("cancelled").write_text("yes")
                    break
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 8
input [ { name: "X" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] } ]
ensemble_scheduling { step [
  { model_name: "part" model_version: -1 input_map { key: "X" value: "X" } output_map { key: "Y" value: "T" } },
  { model_name: "next" model_version: -1 input_map { key: "X" value: "T" } output_map { key: "Y" value: "Y" } } ] }
"""


# Works until its caller leaves, and writes that down.
PATIENT = NEXT.replace(
    "        return [",
    """        import pathlib, time
        mark = pathlib.Path(__file__).with_name("cancelled")
        mark.with_name("begun").write_text("yes")
        until = time.monotonic() + 20
        while not requests[0].is_cancelled() and time.monotonic() < until:
            time.sleep(0.002)
        mark.write_text("yes" if requests[0].is_cancelled() else "no")
        return [""",
)


def models():
    yield "next", CONFIG, NEXT
    yield "part", CONFIG.replace("count: 1", 'name: "cpus" count: 1'), NEXT
    yield "both", ENSEMBLE, ""
    yield "slow", CONFIG.replace("max_batch_size: 8", "max_batch_size: 1"), SLOW
    levels = "dynamic_batching { priority_levels: 2 default_priority_level: 2 }"
    yield "levels", CONFIG.replace("max_batch_size: 8", "max_batch_size: 1") + levels, SLOW
    control = 'name: "ID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ]'
    yield "sequence", CONFIG + f"sequence_batching {{ control_input [ {{ {control} }} ] }}", CORRELATED
    for name, output in WRONG.items():
        source = NEXT.replace(
            'pb_utils.Tensor("Y", pb_utils.get_input_tensor_by_name(one, "X").as_numpy() + 1)', output
        )
        yield name, CONFIG, source.replace("X.as_numpy", 'pb_utils.get_input_tensor_by_name(one, "X").as_numpy')
    yield "patient", CONFIG, PATIENT
    yield "many", CONFIG + "model_transaction_policy { decoupled: true }", MANY


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    with tritons(tmp_path_factory.mktemp("pool"), 2, models()) as started:
        yield started


@pytest.fixture
async def backend(servers):
    backend = await TritonBackend.open("triton", ",".join(one.server.grpc for one in servers))
    yield backend
    await backend.close()


def payload(*values, **fields):
    return TensorPayload(inputs=(from_numpy("X", np.array(values, np.int32).reshape(-1, 1)),), **fields)


def call(model, *values, sequence=None, replica="", **fields):
    return BackendCall(
        request_id="r",
        model=model,
        version="",
        payload=payload(*(values or (1,)), **fields),
        sequence=sequence,
        replica=replica,
    )


async def answers(backend, request):
    return [one async for one in backend.infer(request, timeout_us=TIMEOUT_US)]


async def numbers(backend, request):
    return [to_numpy(one.outputs[0]).ravel().tolist() for one in await answers(backend, request)]


async def fault_of(backend, request):
    with pytest.raises(BackendError) as caught:
        await answers(backend, request)
    return caught.value.fault


# --- the whole walk over both ---------------------------------------------------------------------


class Raw:
    """A task whose input is what is sent."""

    name: ClassVar[str] = "raw"
    is_sequence: ClassVar[bool] = False
    tensor_fields: ClassVar[dict[str, str]] = {}
    speaks: ClassVar[frozenset[str]] = frozenset({"tensors"})
    input_schema: ClassVar[dict[str, Any]] = {}
    output_schema: ClassVar[dict[str, Any]] = {}

    @property
    def forms(self):
        return {"tensors": self}

    def payload(self, parsed):
        return parsed

    def answer(self, event, parsed):
        return event


class Walk:
    """A pipeline over the backend, with its prober and healer, and load at a steady pace."""

    def __init__(self, backend) -> None:
        self.backend, self.board, self.seen = backend, BreakerBoard(), Recorder()
        self.registry = CollectorRegistry()
        backends = {"triton": backend}
        rules, metrics = MemoryRuleSource(RuleSet(revision=1, rules=RULES)), Metrics(self.registry)
        self.healer = Healer(backends=backends, board=self.board, leases=MemoryLeases(monotonic_us), observer=metrics)
        self.prober = Prober(
            backends=backends,
            rules=rules,
            board=self.board,
            clock=monotonic_us,
            observer=metrics,
            healer=self.healer,
        )
        self.pipeline = Pipeline(
            tasks={"raw": Task(name="raw", contract=Raw(), timeout_us=TIMEOUT_US, attempt_timeout_us=5_000_000)},
            backends=backends,
            gates={"triton": Gate(max_in_flight=256, max_queue_size=1024)},
            admissions=MemoryAdmissions(wall_us),
            rules=rules,
            recalls=Recalls(MemoryAnswers(monotonic_us, max_bytes=2**20), monotonic_us),
            sequences=PinnedSequences(
                MemorySequenceStore(monotonic_us), backends, board=self.board, clock=monotonic_us
            ),
            board=self.board,
            observer=self.seen,
            clock=monotonic_us,
            wall_clock=wall_us,
            draw=random.random,
        )
        self.failed: list[str] = []
        self.count = 0

    async def ask(self, model: str, number: int) -> None:
        """One request; anything but the right answer is written down."""
        now_us = monotonic_us()
        request = InferenceRequest(
            id=f"r{number}",
            task="raw",
            caller=Caller(key_id="k", tenant="t"),
            input=payload(number),
            received_us=now_us,
            deadline_us=now_us + TIMEOUT_US,
            model=model,
        )
        self.count += 1
        try:
            async with contextlib.aclosing(self.pipeline.handle(request)) as events:
                found = [event async for event in events if isinstance(event, Tensors)]
            if [to_numpy(one.outputs[0]).tolist() for one in found] != [[[number + 1]]]:
                self.failed.append(f"{number}: {found}")
        except GatewayError as error:
            self.failed.append(f"{number}: {error.code}: {error}")

    @contextlib.asynccontextmanager
    async def under_load(self, model: str, *, per_second: int):
        """Requests at a steady pace while the block runs; at its end all have ended."""
        numbers = itertools.count()
        asking: set[asyncio.Task[None]] = set()

        async def ask_on() -> None:
            began = asyncio.get_running_loop().time()
            for number in numbers:
                task = asyncio.create_task(self.ask(model, number))
                asking.add(task)
                task.add_done_callback(asking.discard)
                await asyncio.sleep(began + (number + 1) / per_second - asyncio.get_running_loop().time())

        pacing = asyncio.create_task(ask_on())
        try:
            yield
        finally:
            pacing.cancel()
            await asyncio.gather(pacing, return_exceptions=True)
            await asyncio.gather(*asking)

    async def answered(self, replica: str, model: str) -> int:
        """How many requests a server says that it has answered."""
        figures = await self.backend.figures()
        return sum(one.requests for one in figures if (one.replica, one.model) == (replica, model))


@pytest.fixture
async def walk(backend):
    walk = Walk(backend)
    await walk.prober.start()
    yield walk
    await walk.prober.close()


async def test_load_spreads_evenly(walk, servers):
    before = [await walk.answered(one.server.grpc, "next") for one in servers]
    for start in range(0, 800, 16):
        await asyncio.gather(*(walk.ask("next", start + number) for number in range(16)))
    after = [await walk.answered(one.server.grpc, "next") for one in servers]
    one, other = (new - old for old, new in zip(before, after, strict=True))
    assert not walk.failed
    assert one + other == 800
    assert 0.9 < one / other < 1.1


async def test_who_leaves_the_gateways_queue_never_reaches_a_server(walk, servers):
    async def answered():
        return sum([await walk.answered(one.server.grpc, "slow") for one in servers])

    gate = walk.pipeline.gates["triton"] = Gate(max_in_flight=1, max_queue_size=100)
    before = await answered()
    sent = [asyncio.create_task(walk.ask("slow", number)) for number in range(2)]  # one for each server
    await until(lambda: sum(gate.load(one.server.grpc) for one in servers) == 2)
    waiting = [asyncio.create_task(walk.ask("slow", number)) for number in range(10)]
    await until(lambda: sum(gate.waiting().values()) == 10)
    for one in waiting:
        one.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert not gate.waiting()
    await asyncio.gather(*sent)
    await walk.ask("slow", 5)
    assert await answered() == before + 3
    assert not walk.failed


async def test_a_killed_server_costs_no_request_and_returns(walk, servers):
    victim = servers[0]
    async with walk.under_load("next", per_second=200):
        await until(lambda: walk.count > 100)
        victim.kill()
        killed_at = walk.count
        await until(lambda: walk.count > killed_at + 200)
        victim.launch()
        await asyncio.to_thread(victim.wait_ready)
        await until_async(lambda: walk.answered(victim.server.grpc, "next"))
        returned_at = walk.count
        await until(lambda: walk.count > returned_at + 100)
    assert not walk.failed
    assert await walk.answered(victim.server.grpc, "next") > 20


async def test_a_killed_model_costs_no_request_and_is_healed(walk, servers, caplog):
    victim = servers[1]
    caplog.set_level(logging.INFO, logger="gateway.healing")
    labels = {"backend": "triton", "model": "next", "outcome": "healed"}
    async with walk.under_load("next", per_second=200):
        await until(lambda: walk.count > 100)
        victim.kill_model("next")
        await until(lambda: walk.registry.get_sample_value("gateway_model_heals_total", labels), timeout_s=20)
        await until_async(lambda: walk.answered(victim.server.grpc, "next"))
    assert not walk.failed
    assert len(victim.processes("next")) == 1
    assert caplog.messages == ["a model whose process had died was loaded anew"]
    assert not [breaker for breaker in walk.board.all().values() if breaker.dead_model]


async def test_a_dead_part_of_an_ensemble_is_found_and_healed(walk, backend, servers):
    replica = servers[0].server.grpc
    assert await numbers(backend, call("both", 1, replica=replica)) == [[3]]
    servers[0].kill_model("part")
    found = await fault_of(backend, call("both", 1, replica=replica))
    assert (found.kind, found.dead_model) == (FaultKind.DEAD, "part")
    place = Place(backend="triton", model="both", replica=replica)
    walk.board.failed(place, now_us=monotonic_us(), fault=found)
    await until(lambda: walk.board.why_not(place, monotonic_us()) is None)
    assert await numbers(backend, call("both", 1, replica=replica)) == [[3]]


# --- one of them as a model server ----------------------------------------------------------------


def http(server, path, body=None):
    with urllib.request.urlopen(urllib.request.Request(f"http://{server.http}{path}", data=body), timeout=10) as answer:
        return json.load(answer)


@pytest.mark.parametrize("model", ["next", "both", "levels", "sequence", "many"])
async def test_documents_are_those_of_tritons_own_http(backend, servers, model):
    server = servers[0].server
    place = Place(backend="triton", model=model, replica=server.grpc)
    assert await backend.metadata(place) == http(server, f"/v2/models/{model}")
    assert await backend.config(place) == http(server, f"/v2/models/{model}/config")
    assert await backend.statistics(place) == http(server, f"/v2/models/{model}/stats")
    assert await backend.server_metadata(server.grpc) == http(server, "/v2")
    assert await backend.index(server.grpc) == http(server, "/v2/repository/index", b"")


async def test_facts(backend):
    async def facts(model):
        return await backend.facts(Place(backend="triton", model=model))

    assert (await facts("levels")).has_priority_levels
    assert (await facts("sequence")).is_sequence
    assert (await facts("many")).is_decoupled
    assert (await facts("next")).max_batch_size == 8


async def test_models_come_and_go_on_one_server(backend, servers):
    here, there = (Place(backend="triton", model="wrong_shape", replica=one.server.grpc) for one in servers)
    await backend.unload("wrong_shape", replica=here.replica)
    with pytest.raises(BackendError):
        await backend.probe(here)
    await backend.probe(there)
    found = await fault_of(backend, call("wrong_shape", replica=here.replica))
    assert found.kind is FaultKind.UNKNOWN_MODEL
    await backend.load("wrong_shape", replica=here.replica)
    await backend.probe(here)


@pytest.mark.parametrize("model", WRONG)
async def test_a_wrong_answer_is_the_models_fault(backend, model):
    found = await fault_of(backend, call(model, 1, 2))
    assert found.kind is FaultKind.BROKEN
    assert model in found.message or "Y" in found.message


async def test_the_model_may_change_under_what_is_known_of_it(backend, servers):
    place = Place(backend="triton", model="next", replica=servers[0].server.grpc)
    config = await backend.config(place)
    changed = json.dumps(config | {"output": [{"name": "Y", "data_type": "TYPE_INT32", "dims": [-1]}]})
    await backend.facts(place)
    other = await TritonBackend.open("other", place.replica)
    await other.load("next", replica=place.replica, config=changed)
    assert await numbers(backend, call("next", 5, replica=place.replica)) == [[6]]
    assert (await other.facts(place)).outputs["Y"].shape == (-1, -1)
    await other.load("next", replica=place.replica, config=json.dumps(config))
    await other.close()


@pytest.mark.parametrize(("model", "order"), [("levels", ["plug", "high", "low"]), ("slow", ["plug", "low", "high"])])
async def test_priority_is_for_models_that_have_levels(backend, servers, model, order):
    replica, ended = servers[0].server.grpc, []

    async def ask(name, priority):
        await answers(backend, call(model, replica=replica, priority=priority, queue_timeout_us=1_000_000))
        ended.append(name)

    await answers(backend, call(model, replica=replica))  # its facts are known from here on
    asked = []
    for name, priority in (("plug", 2), ("low", 2), ("high", 1)):
        asked.append(asyncio.create_task(ask(name, priority)))
        await asyncio.sleep(0.03)  # so that they arrive in this order, the first one being at work
    await asyncio.gather(*asked)
    assert ended == order


@pytest.mark.parametrize("number", [1, 2**31 + 7, 2**63 + 9, 2**64 - 1])
async def test_every_sequence_id_arrives(backend, number):
    step = SequenceStep(id=number, is_start=True, is_end=True)
    assert await numbers(backend, call("sequence", sequence=step)) == [[number % 2**31]]


async def test_the_best_classes_in_place_of_values(backend, servers):
    found = await answers(backend, call("next", 4, outputs=("Y",), classes={"Y": 1}))
    assert to_numpy(found[0].outputs[0]).tolist() == [[b"5:0"]]


async def test_compressed(servers):
    backend = await TritonBackend.open("triton", servers[0].server.grpc, compression="gzip")
    assert await numbers(backend, call("next", *range(8))) == [list(range(1, 9))]
    assert await numbers(backend, call("many", 2, stream=True)) == [[0], [1]]
    assert (await fault_of(backend, call("many", 1))).reply.code == "UNIMPLEMENTED"
    await backend.close()


# --- streams --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wants_end", "finals"), [(False, [False] * 3), (True, [False] * 3 + [True])])
async def test_a_decoupled_model(backend, wants_end, finals):
    found = await answers(backend, call("many", 3, stream=True, wants_empty_final=wants_end))
    assert [one.is_final for one in found] == finals
    assert [to_numpy(one.outputs[0]).tolist() for one in found[:3]] == [[[0]], [[1]], [[2]]]


async def test_a_decoupled_model_may_answer_nothing(backend):
    assert await answers(backend, call("many", 0, stream=True)) == []
    (end,) = await answers(backend, call("many", 0, stream=True, wants_empty_final=True))
    assert (end.outputs, end.is_final) == ((), True)


async def test_a_plain_model_in_a_stream(backend):
    (one,) = await answers(backend, call("next", 4, stream=True))
    assert (to_numpy(one.outputs[0]).tolist(), one.is_final) == ([[5]], True)


async def test_a_decoupled_model_cannot_be_asked_once(backend):
    found = await fault_of(backend, call("many", 1))
    assert found.kind is FaultKind.UNSUPPORTED
    assert found.reply.code == "UNIMPLEMENTED"


async def test_errors_of_streams_have_their_codes(backend):
    for request in (call("next", *range(9), stream=True), call("nope", stream=True)):
        streamed = await fault_of(backend, request)
        plain = await fault_of(backend, replace(request, payload=replace(request.payload, stream=False)))
        assert streamed == plain


async def test_a_model_sees_that_its_caller_has_left(backend, servers):
    replica, folder = servers[0].server.grpc, servers[0].repository / "patient" / "1"
    asking = asyncio.create_task(answers(backend, call("patient", replica=replica)))
    await until((folder / "begun").exists)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await until((folder / "cancelled").exists)
    assert (folder / "cancelled").read_text() == "yes"


async def test_a_model_sees_that_the_caller_of_a_stream_has_left(backend, servers):
    replica = servers[0].server.grpc
    mark = servers[0].repository / "many" / "1" / "cancelled"
    stream = backend.infer(call("many", -1, stream=True, replica=replica), timeout_us=TIMEOUT_US)
    await anext(stream)
    assert not mark.exists()
    await stream.aclose()
    await until(mark.exists)
