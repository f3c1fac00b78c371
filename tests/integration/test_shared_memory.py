"""Large tensors by shared memory, against a real Triton (and the local runtime, which does not offer it)."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import grpc.aio
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc as pb_grpc

from gateway.backends.triton import shared_memory_region
from gateway.backends.triton.faults import fault_of
from gateway.backends.triton.shared_memory import MAX_PAUSE_US, SharedMemoryLane
from gateway.core.errors import BackendError
from gateway.core.regions import RegionBounds
from gateway.core.tensors import BYTES, from_numpy
from gateway.core.types import Tensor
from tests.kit.servers import ROOT, running
from tests.kit.wait import until, until_async
from tests.parity.client_models import DATATYPES, IDENTITY

KIB, MIB = 2**10, 2**20
OPTIONS = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))

# Gives IN back as OUT after MS milliseconds; says by a file, where one is named, that it has begun.
SLEEPY = (
    """name: "sleepy"
backend: "python"
max_batch_size: 0
input [ { name: "IN" data_type: TYPE_UINT8 dims: [ -1 ] }, { name: "MS" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_UINT8 dims: [ -1 ] } ]
instance_group [ { count: 2 kind: KIND_CPU } ]
""",
    """
import pathlib
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        given, ms = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("IN", "MS"))
        if ms[0]:
            (pathlib.Path(__file__).parent / "begun").touch()
        time.sleep(ms[0] / 1000)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", given)])
""",
)


@pytest.fixture(scope="module")
def triton(tmp_path_factory):
    with running("triton", tmp_path_factory.mktemp("triton")) as server:
        yield server


@contextlib.asynccontextmanager
async def connected(server):
    async with grpc.aio.insecure_channel(server.grpc, options=OPTIONS) as channel:
        stub = pb_grpc.GRPCInferenceServiceStub(channel)
        for name, (config, model) in {"identity": IDENTITY, "sleepy": SLEEPY}.items():
            if not (server.repository / name).exists():
                server.add_model(name, config=config, model=model)
            await stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name=name))
        yield stub


def asker(stub):
    """Calls as a replica makes them."""

    async def ask(request, method, *, timeout_us):
        try:
            return await getattr(stub(), method)(request, timeout=timeout_us / 1e6)
        except grpc.aio.AioRpcError as error:
            raise BackendError(fault_of(error.code().name, error.details())) from error
        except grpc.aio.UsageError as error:
            raise BackendError(fault_of("UNAVAILABLE", "the channel is closed")) from error

    return ask


@contextlib.asynccontextmanager
async def lane_to(stub, **options):
    lane = SharedMemoryLane(asker(lambda: stub), **options)
    try:
        yield lane
    finally:
        await lane.close()


class Call:
    """One inference as a replica makes it; says afterwards which way it went."""

    def __init__(self, lane, stub, model="identity"):
        self.lane, self.stub, self.model = lane, stub, model
        self.ways = []
        self.raw_sizes = ()

    async def infer(self, *tensors: Tensor, ask: int | None = None) -> dict[str, bytes]:
        outputs = (
            {} if self.model == "sleepy" else {one.name: len(one.data) for one in tensors if one.datatype != BYTES}
        )
        if self.model == "sleepy":
            outputs = {"IN": len(tensors[0].data) if ask is None else ask}
        slot = self.lane.take([len(one.data) for one in tensors], outputs.values())
        if slot is not None:
            with slot:
                try:
                    return await self._by("shared memory", tensors, outputs, slot)
                except grpc.aio.AioRpcError as error:
                    if not slot.is_refused(error.details()):
                        raise
        return await self._by("message", tensors, outputs, None)

    async def _by(self, way, tensors, outputs, slot):
        self.ways.append(way)
        request = pb.ModelInferRequest(model_name=self.model)
        for one in tensors:
            added = request.inputs.add(name=one.name, datatype=one.datatype, shape=one.shape)
            if slot is None or not slot.put(added, one.data):
                request.raw_input_contents.append(bytes(one.data))
            if self.model == "sleepy" and one.name == "MS":
                continue
            wanted = request.outputs.add(name=one.name.replace("IN", "OUT", 1))
            if slot is not None and one.name in outputs:
                slot.ask(wanted, outputs[one.name])
        response = await self.stub.ModelInfer(request)
        self.raw_sizes = tuple(len(one) for one in response.raw_output_contents)
        contents = (
            response.raw_output_contents
            if slot is None
            else slot.contents(response.outputs, response.raw_output_contents)
        )
        return {output.name: bytes(one) for output, one in zip(response.outputs, contents, strict=True)}


async def registered(stub):
    return set((await stub.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest())).regions)


def files(pid: int) -> set[str]:
    """The files that process has in shared memory."""
    return {entry.name for entry in Path("/dev/shm").glob(f"gateway-*-{pid}-*")}  # noqa: S108 - as shm_open(3) does


async def a_slot(lane, size):
    """One for `size` bytes, as soon as there is one."""
    slots = []
    await until(lambda: (slot := lane.take([size])) and slots.append(slot) is None, timeout_s=10)
    return slots[0]


async def warm(lane, size):
    with await a_slot(lane, size):
        pass


def some(datatype: str, rng: np.random.Generator, count: int) -> Tensor:
    name = f"IN_{datatype}"
    if datatype == BYTES:
        return from_numpy(name, np.array([[rng.bytes(int(rng.integers(0, 99))) for _ in range(count)]], np.object_))
    if datatype == "BOOL":
        return from_numpy(name, rng.random((1, count)) < 0.5)
    size = {"BF16": 2}.get(datatype) or int(datatype.removeprefix("U").strip("INTFP")) // 8
    pattern = rng.integers(0, 127, count * size, np.uint8).tobytes()  # bytes below 127: no NaN that a copy might change
    return Tensor(name=name, datatype=datatype, shape=(1, count), data=pattern)


async def test_every_datatype_comes_out_as_by_message(triton):
    tensors = [some(datatype, np.random.default_rng(1), 30_000) for datatype in DATATYPES]
    async with connected(triton) as stub, lane_to(stub, threshold=1000) as lane:
        await warm(lane, 2 * sum(len(one.data) + 64 for one in tensors))
        plain = Call(SharedMemoryLane(asker(lambda: stub), threshold=2**40), stub)
        fast = Call(lane, stub)
        assert await fast.infer(*tensors) == await plain.infer(*tensors)
        assert fast.ways == ["shared memory"]
        assert sorted(fast.raw_sizes)[:-1] == [0] * (len(DATATYPES) - 1)  # all but BYTES came by shared memory
        assert plain.ways == ["message"]


async def test_large_and_small_tensors_of_one_request_go_their_own_ways(triton):
    rng = np.random.default_rng(2)
    tensors = [some("INT8", rng, 10), some("FP32", rng, MIB), some("INT64", rng, 7), some("BYTES", rng, 3)]
    async with connected(triton) as stub, lane_to(stub) as lane:
        await warm(lane, 8 * MIB)
        fast = Call(lane, stub)
        answer = await fast.infer(*tensors)
        assert answer == {one.name.replace("IN", "OUT", 1): bytes(one.data) for one in tensors}
        assert fast.ways == ["shared memory"]
        assert 0 in fast.raw_sizes
        assert 10 in fast.raw_sizes


async def test_200_at_once_of_whom_many_leave(triton):
    dice = random.Random(3)  # noqa: S311 - the same sizes each time

    async def one(number: int) -> int:
        size = dice.randint(1, 63) * KIB
        content = Tensor(name="IN", datatype="UINT8", shape=(size,), data=number.to_bytes(4, "little") * (size // 4))
        call = Call(lane, stub, "sleepy")
        task = asyncio.create_task(call.infer(content, from_numpy("MS", np.array([dice.randint(1, 9)], "<i4"))))
        if dice.random() < 0.4:
            await asyncio.wait([task], timeout=dice.random() / 2)
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            assert await task == {"OUT": content.data}, number
        return call.ways.count("shared memory")

    async def caller(number: int) -> int:
        return sum([await one(1000 * number + turn) for turn in range(4)])

    async with connected(triton) as stub:
        bounds = RegionBounds(smallest=128 * KIB, count=200)
        async with lane_to(stub, threshold=8 * KIB, bounds=bounds) as lane:
            with contextlib.ExitStack() as held:
                for _ in range(150):
                    held.enter_context(await a_slot(lane, 128 * KIB))
            assert sum(await asyncio.gather(*(caller(number) for number in range(200)))) >= 100
        assert not await registered(stub)
    assert not files(os.getpid())


async def test_what_a_left_request_may_still_write_to_serves_nobody_else(triton):
    begun = triton.repository / "sleepy" / "1" / "begun"
    content = Tensor(name="IN", datatype="UINT8", shape=(MIB,), data=b"\1" * MIB)
    async with connected(triton) as stub, lane_to(stub) as lane:
        begun.unlink(missing_ok=True)
        await warm(lane, 2 * MIB)
        (name,) = await registered(stub)
        left = asyncio.create_task(Call(lane, stub, "sleepy").infer(content, from_numpy("MS", np.array([700], "<i4"))))
        await until(begun.exists)
        left.cancel()
        await asyncio.wait([left])
        await warm(lane, 2 * MIB)
        both = await registered(stub)
        assert name in both  # still in use, so still there
        (other,) = both - {name}
        with lane.take([2 * MIB]) as slot:
            assert slot._region.name == other
        await until_async(lambda: is_gone(stub, name))  # when the model is done
        assert other in await registered(stub)


async def is_gone(stub, name):
    return name not in await registered(stub)


async def test_a_killed_process_leaves_nothing_for_long(triton):
    holder = f"""
import asyncio, grpc.aio
from tritonclient.grpc import service_pb2_grpc
from gateway.backends.triton import shared_memory_region
from gateway.backends.triton.shared_memory import SharedMemoryLane
from tests.integration.test_shared_memory import asker

async def hold():
    async with grpc.aio.insecure_channel("{triton.grpc}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        lane = SharedMemoryLane(asker(lambda: stub))
        while (slot := lane.take([2**20])) is None:
            await asyncio.sleep(0.01)
        left = shared_memory_region.Region(shared_memory_region.new_name(), 4096)  # killed before it is unlinked
        print(slot._region.name, left.name, flush=True)
        await asyncio.sleep(60)

asyncio.run(hold())
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", holder, cwd=ROOT, stdout=subprocess.PIPE)
    try:
        region, file = (await process.stdout.readline()).decode().split()
        async with connected(triton) as stub, lane_to(stub) as lane:
            await warm(lane, MIB)
            assert region in await registered(stub)  # of one who lives
            assert files(process.pid) == {file}
        process.kill()
        await process.wait()
        async with connected(triton) as stub, lane_to(stub) as lane:
            await warm(lane, MIB)
            await until_async(lambda: is_gone(stub, region))
        assert not files(process.pid)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_lane_that_closes_lets_its_last_request_finish(triton):
    begun = triton.repository / "sleepy" / "1" / "begun"
    content = Tensor(name="IN", datatype="UINT8", shape=(MIB,), data=b"\2" * MIB)
    async with connected(triton) as stub:
        async with lane_to(stub) as lane:
            begun.unlink(missing_ok=True)
            await warm(lane, 2 * MIB)
            last = asyncio.create_task(
                Call(lane, stub, "sleepy").infer(content, from_numpy("MS", np.array([500], "<i4")))
            )
            await until(begun.exists)
        assert await last == {"OUT": content.data}
        assert not await registered(stub)


async def test_an_output_that_is_larger_than_promised_comes_by_message(triton):
    content = Tensor(name="IN", datatype="UINT8", shape=(2 * MIB,), data=b"\3" * 2 * MIB)
    async with connected(triton) as stub, lane_to(stub) as lane:
        await warm(lane, 4 * MIB)
        call = Call(lane, stub, "sleepy")
        assert await call.infer(content, from_numpy("MS", np.array([0], "<i4")), ask=MIB) == {"OUT": content.data}
        assert call.ways == ["shared memory", "message"]


async def test_a_triton_that_was_killed_and_came_back_is_used_again(tmp_path):
    content = Tensor(name="IN", datatype="UINT8", shape=(MIB,), data=b"\4" * MIB)
    at_once = from_numpy("MS", np.array([0], "<i4"))
    instant_us = 10**9
    stubs = []
    lane = SharedMemoryLane(asker(lambda: stubs[-1]), clock=lambda: instant_us)
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.raises(AssertionError, match="ended with status -9"))
        server = stack.enter_context(running("triton", tmp_path / "first"))
        ways = await killed_while_it_works(server, lane, stubs)
    assert ways == ["shared memory"]
    with running("triton", tmp_path / "second") as server:
        async with connected(server) as stub:
            stubs.append(stub)
            call = Call(lane, stub, "sleepy")
            for _ in range(2):
                assert await call.infer(content, at_once) == {"OUT": content.data}
            assert call.ways == ["shared memory", "message", "message"]
            instant_us += MAX_PAUSE_US
            await warm(lane, 2 * MIB)
            assert await call.infer(content, at_once) == {"OUT": content.data}
            assert call.ways[3:] == ["shared memory"]
            await lane.close()
            assert not await registered(stub)
    assert not files(os.getpid())


async def killed_while_it_works(server, lane, stubs):
    """Leaves `lane` with a second region that its server had registered."""
    content = Tensor(name="IN", datatype="UINT8", shape=(MIB,), data=b"\4" * MIB)
    async with connected(server) as stub:
        stubs.append(stub)
        await warm(lane, 2 * MIB)
        with lane.take([2 * MIB]):
            await warm(lane, 2 * MIB)
        call = Call(lane, stub, "sleepy")
        last = asyncio.create_task(call.infer(content, from_numpy("MS", np.array([5000], "<i4"))))
        await until((server.repository / "sleepy" / "1" / "begun").exists)
        os.kill(pid_of(server), signal.SIGKILL)
        with pytest.raises(grpc.aio.AioRpcError) as broken:
            await last
    return call.ways if broken.value.code() is grpc.StatusCode.UNAVAILABLE else broken.value


def pid_of(server):
    port = f"--grpc-port={server.grpc.rpartition(':')[2]}".encode()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and port in (entry / "cmdline").read_bytes().split(b"\0"):
                return int(entry.name)
    raise AssertionError("it does not run")


async def test_a_server_that_does_not_see_our_memory_is_served_by_message(triton, monkeypatch, caplog):
    caplog.set_level("INFO", "gateway")
    elsewhere = Path(tempfile.mkdtemp(dir="/dev/shm"))  # as where it runs in a container of its own
    monkeypatch.setattr(shared_memory_region, "_SHM", elsewhere)
    content = some("FP32", np.random.default_rng(5), MIB)
    async with connected(triton) as stub, lane_to(stub) as lane:
        call = Call(lane, stub)
        for _ in range(3):
            assert await call.infer(content) == {"OUT_FP32": content.data}
            await until(lambda: lane._off_until_us)
        assert call.ways == ["message"] * 3
        assert not await registered(stub)
    (line,) = caplog.records
    assert "Unable to open shared memory region" in line.reason
    elsewhere.rmdir()  # noqa: ASYNC240 - nothing else runs; it is empty


async def test_the_local_runtime_is_served_by_message(tmp_path, caplog):
    caplog.set_level("INFO", "gateway")
    content = some("FP32", np.random.default_rng(6), MIB)
    with running("local", tmp_path) as server:
        async with connected(server) as stub, lane_to(stub) as lane:
            call = Call(lane, stub)
            for _ in range(3):
                assert await call.infer(content) == {"OUT_FP32": content.data}
                await until(lambda: lane._off_until_us)
            assert call.ways == ["message"] * 3
    (line,) = caplog.records
    assert "not offered" in line.reason
