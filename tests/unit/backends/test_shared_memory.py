"""The lane against a server that is made up here: refusals, pauses, bounds, and answers that do not fit."""

import asyncio
import contextlib
import functools
import os
from pathlib import Path

import pytest
from tritonclient.grpc import service_pb2 as pb

from gateway.backends.triton import shared_memory_region as regions
from gateway.backends.triton.shared_memory import MAX_PAUSE_US, MIN_PAUSE_US, SharedMemoryLane
from gateway.core.errors import BackendError, Fault, FaultKind
from gateway.core.regions import MIB, RegionBounds
from gateway.wiring import monotonic_us
from tests.kit.wait import until

SHM = Path("/dev/shm")  # noqa: S108 - where shm_open(3) looks
TOO_SMALL = "shared memory size specified with the request for output 'OUT' (4 bytes) should be at least 8 bytes"


def files():
    return list(SHM.glob(f"gateway-*-{os.getpid()}-*"))


class Server:
    """Registers what it is told; says no to the methods in `refuses`, and keeps what is `in_use`."""

    def __init__(self, version: str = "2.51.0", extensions: tuple[str, ...] = ("system_shared_memory",)) -> None:
        self.version, self.extensions = version, extensions
        self.regions: dict[str, int] = {}
        self.refuses: set[str] = set()
        self.in_use: set[str] = set()
        self.calls: list[str] = []
        self.now_us = 10**12

    async def ask(self, request, method, *, timeout_us):
        self.calls.append(method.removeprefix("SystemSharedMemory"))
        if self.calls[-1] in self.refuses:
            raise BackendError(Fault(kind=FaultKind.FAILED, message=f"no {self.calls[-1]} of {request}"))
        return self.answer(request)

    @functools.singledispatchmethod
    def answer(self, request):
        raise AssertionError("a call that it does not know")

    @answer.register
    def _(self, request: pb.ServerMetadataRequest):
        return pb.ServerMetadataResponse(name="s", version=self.version, extensions=self.extensions)

    @answer.register
    def _(self, request: pb.SystemSharedMemoryRegisterRequest):
        assert (SHM / request.key.removeprefix("/")).stat().st_size == request.byte_size
        self.regions[request.name] = request.byte_size

    @answer.register
    def _(self, request: pb.SystemSharedMemoryUnregisterRequest):
        if request.name in self.in_use:
            raise BackendError(Fault(kind=FaultKind.FAILED, message="it is currently in use"))
        self.regions.pop(request.name, None)

    @answer.register
    def _(self, request: pb.SystemSharedMemoryStatusRequest):
        answer = pb.SystemSharedMemoryStatusResponse()
        for name in self.regions:
            answer.regions[name].name = name
        return answer

    @contextlib.asynccontextmanager
    async def lane(self, *, time_runs: bool = False, **bounds):
        clock = monotonic_us if time_runs else lambda: self.now_us
        lane = SharedMemoryLane(self.ask, clock=clock, bounds=RegionBounds(**bounds))
        try:
            yield lane
        finally:
            await lane.close()
        assert not set(self.regions) - self.in_use
        assert not files()


async def slot_of(lane, size):
    slots = []
    await until(lambda: (slot := lane.take([size])) and slots.append(slot) is None)
    return slots[0]


async def refused(lane):
    """Until a try to make a region has failed."""
    before_us = lane._off_until_us
    assert lane.take([MIB]) is None
    await until(lambda: lane._off_until_us != before_us)


def answer(*outputs, raw=()):
    response = pb.ModelInferResponse(raw_output_contents=raw)
    for name, datatype, shape in outputs:
        response.outputs.add(name=name, datatype=datatype, shape=shape)
    return response


def unknown(slot):
    return f"Unable to find shared memory region: '{slot._region.name}'"


def contents(slot, response):
    return slot.contents(response.outputs, response.raw_output_contents)


async def test_small_and_huge_requests_are_none_of_its_business():
    server = Server()
    async with server.lane() as lane:
        assert lane.take([]) is None
        assert lane.take([256 * 1024 - 1, 10], [100]) is None
        assert lane.take([65 * MIB]) is None
        assert not lane._wanted
    assert not server.calls


async def test_a_request_finds_the_region_that_an_earlier_one_wanted():
    server = Server()
    async with server.lane() as lane:
        assert lane.take([3 * MIB]) is None  # it goes by message, without waiting
        with await slot_of(lane, 3 * MIB):
            assert list(server.regions.values()) == [4 * MIB]
            assert not files()  # unlinked by now
        with lane.take([MIB]) as slot:
            assert slot._region.size == 4 * MIB


async def test_a_region_is_used_again_after_a_success_alone():
    server = Server()
    async with server.lane(time_runs=True) as lane:
        with await slot_of(lane, MIB) as first:
            pass
        with contextlib.suppress(asyncio.CancelledError), lane.take([MIB]) as second:
            server.in_use = {second._region.name}
            raise asyncio.CancelledError
        assert first._region is second._region
        with await slot_of(lane, MIB) as third:
            assert third._region is not second._region
        await until(lambda: server.calls.count("Unregister") > 2)  # asked again and again
        assert second._region.name in server.regions
        server.in_use.clear()
        await until(lambda: second._region.name not in lane._kept)


async def test_tensors_are_placed_one_after_the_other_and_named():
    server = Server()
    async with server.lane() as lane:
        with await slot_of(lane, 2 * MIB) as slot:
            request = pb.ModelInferRequest()
            first, small, second = (request.inputs.add(name=name) for name in ("A", "S", "B"))
            assert slot.put(first, b"a" * 300_001)
            assert not slot.put(small, b"s" * 1000)
            assert slot.put(second, memoryview(b"b" * 300_000))
            assert not slot.put(request.inputs.add(name="C"), b"c" * 2 * MIB)  # no room for it
            assert not small.parameters
            assert first.parameters["shared_memory_region"].string_param == slot._region.name
            assert first.parameters["shared_memory_byte_size"].int64_param == 300_001
            offset = second.parameters["shared_memory_offset"].int64_param
            assert offset % 64 == 0
            assert slot._region.read(offset, 300_000) == b"b" * 300_000
            assert slot._region.read(0, 300_001) == b"a" * 300_001


async def test_outputs_come_from_where_they_were_asked_for():
    server = Server()
    async with server.lane() as lane:
        with await slot_of(lane, MIB) as slot:
            slot._region.write(0, b"x" * MIB)
            assert slot.ask(pb.ModelInferRequest.InferRequestedOutputTensor(name="A"), 300_000)
            assert not slot.ask(pb.ModelInferRequest.InferRequestedOutputTensor(name="B"), 100)
            slot._region.write(0, b"a" * 8)
            response = answer(("A", "INT32", [10]), ("B", "INT8", [1]), raw=[b"", b"b"])
            assert contents(slot, response) == [b"a" * 8 + bytes(32), b"b"]  # never what lay there before
            assert contents(slot, answer(("A", "INT32", [0]), raw=[b""])) == [b""]
            assert contents(slot, answer(("A", "INT32", [1]), raw=[b"1234"])) == [b"1234"]  # by message after all
            assert contents(slot, answer(("A", "INT32", [1]), raw=[])) == []  # for the codec to refuse


@pytest.mark.parametrize(
    ("datatype", "shape"), [("INT32", [75_001]), ("INT32", [-1]), ("INT64", [2**62, 8]), ("BYTES", [1]), ("WHAT", [1])]
)
async def test_an_output_that_cannot_be_here_is_broken(datatype, shape):
    server = Server()
    async with server.lane() as lane:
        with await slot_of(lane, MIB) as slot:
            slot.ask(pb.ModelInferRequest.InferRequestedOutputTensor(name="A"), 300_000)
            with pytest.raises(BackendError) as broken:
                contents(slot, answer(("A", datatype, shape), raw=[b""]))
            assert broken.value.fault.kind is FaultKind.BROKEN


async def test_a_server_that_forgot_is_left_alone_for_longer_and_longer():
    server = Server()
    async with server.lane() as lane:
        for pause_us in (MIN_PAUSE_US, 2 * MIN_PAUSE_US, 4 * MIN_PAUSE_US):
            with await slot_of(lane, MIB) as slot:
                server.regions.clear()
                assert slot.is_refused(unknown(slot))
            assert lane.take([MIB]) is None
            assert not lane._wanted
            server.now_us += pause_us - 1
            assert lane.take([MIB]) is None
            assert not lane._wanted
            server.now_us += 1
        with await slot_of(lane, MIB):
            server.now_us += 2 * MAX_PAUSE_US  # all is well for a time
        with await slot_of(lane, MIB) as slot:
            assert slot.is_refused(unknown(slot))
        assert lane._pause_us == MIN_PAUSE_US


async def test_other_errors_do_not_concern_it():
    server = Server()
    async with server.lane() as lane:
        with await slot_of(lane, MIB) as slot:
            assert not slot.is_refused("Unable to find shared memory region: 'x', says a model")
            assert not slot.is_refused(TOO_SMALL)  # nothing was asked for
            slot.ask(pb.ModelInferRequest.InferRequestedOutputTensor(name="A"), 300_000)
            assert slot.is_refused(TOO_SMALL)  # this request's, not the lane's
        with await slot_of(lane, MIB) as other:
            assert other._region is not slot._region


@pytest.mark.parametrize(
    ("version", "extensions"),
    [("2.49.0", ("system_shared_memory",)), ("2.51.0", ("statistics",)), ("?", ("system_shared_memory",))],
)
async def test_a_server_that_does_not_offer_it_is_asked_once_a_minute(version, extensions):
    server = Server(version, extensions)
    async with server.lane() as lane:
        await refused(lane)
        for _ in range(9):
            assert lane.take([MIB]) is None
        server.now_us += MAX_PAUSE_US - 1
        assert lane.take([MIB]) is None
        assert server.calls == ["ServerMetadata"]
        server.now_us += 1
        await refused(lane)
        assert server.calls == ["ServerMetadata"] * 2


@pytest.mark.parametrize("method", ["ServerMetadata", "Status", "Register"])
async def test_a_refusal_is_silent_and_tried_again(method, caplog):
    caplog.set_level("INFO", "gateway")
    server = Server()
    server.refuses = {method}
    async with server.lane() as lane:
        for _ in range(4):
            await refused(lane)
            server.now_us += lane._pause_us
        server.refuses = set()
        with await slot_of(lane, MIB):
            pass
    assert [f"no {method}" in line.reason for line in caplog.records] == [True]


async def test_no_room_in_shared_memory_is_no_region(monkeypatch):
    server = Server()
    monkeypatch.setattr(regions, "room", lambda: MIB - 1)
    async with server.lane() as lane:
        assert lane.take([MIB]) is None
        await until(lambda: not lane._wanted)
    assert "Register" not in server.calls


async def test_memory_that_cannot_be_had_is_no_region(monkeypatch):
    def full(handle, offset, size):
        raise OSError(28, "No space left on device")

    server = Server()
    monkeypatch.setattr(os, "posix_fallocate", full)
    async with server.lane() as lane:
        await refused(lane)
    assert "Register" not in server.calls


async def test_an_idle_region_goes():
    server = Server()
    async with server.lane(idle_us=20_000) as lane:
        with await slot_of(lane, MIB):
            pass
        server.now_us += 20_000
        await until(lambda: not server.regions)
        await until(lambda: not lane._kept)


async def test_a_region_of_another_size_makes_room():
    server = Server()
    async with server.lane(total=4 * MIB) as lane:
        with await slot_of(lane, 2 * MIB):
            pass
        server.now_us += 1_000_000
        with await slot_of(lane, 4 * MIB):
            assert list(server.regions.values()) == [4 * MIB]


async def test_what_the_dead_left_is_unregistered_and_what_the_living_have_is_not():
    server = Server()
    ours, host = regions.new_name(), regions._host()
    dead = f"{host}-{os.getpid()}-1-00"  # this pid, started at another time
    theirs = {"gateway-0123456789ab-1-1-00", f"{host}-strange", "other", ours}
    server.regions = dict.fromkeys({dead, *theirs}, 1)
    server.in_use = {dead}
    async with server.lane(time_runs=True) as lane:
        with await slot_of(lane, MIB):
            pass
        await until(lambda: server.calls.count("Unregister") > 1)
        server.in_use.clear()
        await until(lambda: dead not in server.regions)
        for name in theirs:
            del server.regions[name]
        assert len(server.regions) == 1


async def test_closing_waits_for_nobody_for_long():
    server = Server()
    lane = SharedMemoryLane(server.ask)
    with await slot_of(lane, MIB) as slot:
        server.refuses = {"Status"}
        await lane.close()
        assert lane.take([MIB]) is None
        assert slot._region.read(0, 1) == b"\0"  # its request may still read its answer
    await lane.close()


@pytest.mark.parametrize(
    ("address", "same"),
    [
        ("unix:/run/triton.sock", True),
        ("localhost:8001", True),
        ("127.0.0.1:8001", True),
        ("127.3.2.1:8001", True),
        ("ipv4:127.0.0.1:8001", True),
        ("0.0.0.0:8001", False),
        ("192.0.2.7:8001", False),
        ("[2001:db8::7]:8001", False),
        ("triton.example:8001", False),
        ("", False),
    ],
)
def test_what_counts_as_this_host(address, same):
    assert regions.is_same_host(address) is same


def test_a_region_is_private_and_its_name_tells_its_maker():
    region = regions.Region(regions.new_name(), 4096)
    try:
        found = (SHM / region.name).stat()
        assert found.st_mode & 0o777 == 0o600
        assert not regions.abandoned([region.name])
        with pytest.raises(FileExistsError):
            regions.Region(region.name, 4096)
    finally:
        region.unlink()
    region.write(1, b"abc")
    assert region.read(0, 5) == b"\0abc\0"
    region.clear(2, 2)
    assert region.read(0, 5) == b"\0a\0\0\0"
    region.close()
