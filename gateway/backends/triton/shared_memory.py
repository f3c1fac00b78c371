"""The fast path to a Triton on this host: large tensors by shared memory (docs/decisions/0011).

A lane belongs to one replica in one process. It never makes a request wait and never fails one: where it has no free
region, `take` answers None, the request goes the ordinary way, and a region is made for those after it.

What makes it safe: a region serves one request at a time, and is used again only after Triton has answered that one
with success. In every other case Triton may still read it or write to it, so nobody else gets it, and it goes when
Triton says that it is no longer in use. A region's file is unlinked as soon as Triton has mapped it.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, Protocol, Self

from tritonclient.grpc import service_pb2 as pb

from gateway.backends.triton import shared_memory_region as regions
from gateway.backends.triton.shared_memory_region import ALIGNMENT, Region
from gateway.core.errors import BackendError, Fault, FaultKind
from gateway.core.regions import KeptRegion, RegionBounds, RegionState, fitting, plan, size_for
from gateway.core.tensors import byte_size
from gateway.ports import Clock

THRESHOLD: Final = 256 * 1024  # bytes of a tensor: below it nothing is gained (`python -m tests.bench.shared_memory`)
EXTENSION: Final = "system_shared_memory"
MIN_VERSION: Final = (2, 50)  # before, Triton died of a region that was unregistered while in use (server #3207, #7567)
RPC_TIMEOUT_US: Final = 2_000_000
CLOSE_TIMEOUT_S: Final = 2.0
MIN_PAUSE_US, MAX_PAUSE_US = 1_000_000, 60_000_000  # after a refusal, doubling
MIN_PACE_US, MAX_PACE_US = 20_000, 1_000_000  # between asking whether a region is out of use, doubling
SWEEP_US: Final = 60_000_000  # between looks for what dead processes have left

# Triton's words for an output that is larger than the place that was asked for.
_TOO_SMALL: Final = "shared memory size specified with the request for output"

_log = logging.getLogger(__name__)

Content = bytes | memoryview


class Ask(Protocol):
    """One call to the replica, by the method's name. Raises `BackendError`."""

    async def __call__(self, request: Any, method: str, *, timeout_us: int) -> Any:
        """The answer's message."""
        ...


class Slot:
    """A region that one request has to itself. A context: leave it by an exception unless the answer was a success."""

    def __init__(
        self, region: Region, *, threshold: int, give_back: Callable[[str, bool], None], lost: Callable[[], None]
    ) -> None:
        self._region = region
        self._threshold = threshold
        self._give_back = give_back
        self._lost = lost
        self._used = 0
        self._asked: dict[str, tuple[int, int]] = {}
        self._is_refused = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._give_back(self._region.name, kind is None and not self._is_refused)

    def put(self, tensor: pb.ModelInferRequest.InferInputTensor, content: Content) -> bool:
        """Place an input's content here and say so in `tensor`. False: it goes into `raw_input_contents` instead.

        Triton counts the raw contents over the inputs that are not in shared memory, in their order.
        """
        offset = self._place(tensor, len(content))
        if offset is None:
            return False
        self._region.write(offset, content)
        return True

    def ask(self, output: pb.ModelInferRequest.InferRequestedOutputTensor, size: int) -> bool:
        """Have an output of at most `size` bytes written here. False: it comes back in the answer itself.

        Never for BYTES: Triton does not say how long they came out. What the place held before is overwritten.
        """
        offset = self._place(output, size)
        if offset is None:
            return False
        self._region.clear(offset, size)
        self._asked[output.name] = offset, size
        return True

    def contents(
        self, outputs: Sequence[pb.ModelInferResponse.InferOutputTensor], raw: Sequence[Content]
    ) -> Sequence[Content]:
        """`raw`, the answer's raw contents, with those that came by shared memory in their places; copies, to keep.

        For those Triton leaves an empty one. Raises `BackendError` BROKEN for an output whose shape promises more than
        it was given room for.
        """
        if len(raw) != len(outputs):
            return raw  # broken in a way that the codec reports
        return [self._content(output, content) for output, content in zip(outputs, raw, strict=True)]

    def is_refused(self, details: str) -> bool:
        """Whether Triton's error, in its own words, is about this path: the request may go the ordinary way then."""
        if self._region.name in details:  # nobody but Triton knows it, and it names it only to say that it does not
            self._is_refused = True
            self._lost()
        elif self._asked and _TOO_SMALL in details:
            self._is_refused = True
        return self._is_refused

    def _place(self, tensor: Any, size: int) -> int | None:
        """Take the next `size` bytes for a tensor, where it is large enough and they are there."""
        offset = self._used
        if size < self._threshold or offset + size > self._region.size:
            return None
        self._used = offset + _aligned(size)
        tensor.parameters["shared_memory_region"].string_param = self._region.name
        tensor.parameters["shared_memory_byte_size"].int64_param = size
        tensor.parameters["shared_memory_offset"].int64_param = offset
        return offset

    def _content(self, output: pb.ModelInferResponse.InferOutputTensor, content: Content) -> Content:
        place = self._asked.get(output.name)
        if place is None or len(content):
            return content
        offset, room = place
        try:
            size = byte_size(output.datatype, output.shape)
        except ValueError as error:
            raise _broken(f"output '{output.name}': {error}") from error
        if size > room:
            raise _broken(f"output '{output.name}' has {size} bytes, more than the {room} that it has room for")
        return self._region.read(offset, size)


class SharedMemoryLane:
    """The regions of one replica, and the one task that makes them and sees them gone.

    Args:
        ask: calls that replica.
        threshold: in bytes; smaller tensors travel in the messages.
        bounds: how many regions, how large.
        clock: monotonic, in microseconds.
    """

    def __init__(
        self,
        ask: Ask,
        *,
        threshold: int = THRESHOLD,
        bounds: RegionBounds | None = None,
        clock: Clock = lambda: time.monotonic_ns() // 1000,
    ) -> None:
        self._ask_server = ask
        self._threshold = threshold
        self._bounds = bounds or RegionBounds()
        self._clock = clock
        self._kept: dict[str, KeptRegion] = {}
        self._regions: dict[str, Region] = {}  # of the kept ones, those that are still mapped here
        self._abandoned: set[str] = set()  # names that the server knows and whose makers are dead
        self._wanted: set[int] = set()  # sizes that were asked for in vain since the last round
        self._pause_us, self._off_until_us = 0, 0
        self._reason = ""  # of the pause, as it was logged
        self._pace_us, self._reclaim_at_us = MIN_PACE_US, 0
        self._sweep_at_us = 0
        self._is_closing = False
        self._wake = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    def take(self, inputs: Iterable[int], outputs: Iterable[int] = ()) -> Slot | None:
        """A slot for a unary request with tensors of these sizes in bytes; None: go the ordinary way.

        `outputs` are those whose size is known before: they are bounds, and a model that exceeds one fails.
        """
        need = sum(_aligned(size) for size in (*inputs, *outputs) if size >= self._threshold)
        if not need or self._is_closing or self._clock() < self._off_until_us:
            return None
        size = size_for(need, self._bounds)
        if size is None:
            return None
        name = fitting(self._kept.values(), need)
        if name is None:
            self._wanted.add(size)
            self._rouse()
            return None
        self._become(name, RegionState.BUSY)
        return Slot(self._regions[name], threshold=self._threshold, give_back=self._give_back, lost=self._lost)

    async def close(self) -> None:
        """Have the server let go of every region, for at most two seconds. Call it before the channel closes."""
        self._is_closing = True
        if self._keeper is not None:
            self._wake.set()
            await asyncio.wait({self._keeper})

    # --- the life of a region -------------------------------------------------------------------

    def _give_back(self, name: str, is_clean: bool) -> None:  # noqa: FBT001 - the callback of a slot alone
        if self._is_closing:
            self._regions.pop(name).close()  # the farewell sees to the rest
        elif is_clean:
            self._become(name, RegionState.FREE)
        else:
            self._leave(name)

    def _become(self, name: str, state: RegionState) -> None:
        self._kept[name] = replace(self._kept[name], state=state, since_us=self._clock())

    def _leave(self, name: str) -> None:
        """Let go of it here; the server may still hold it."""
        if not any(one.state is RegionState.LEAVING for one in self._kept.values()):
            self._pace_us, self._reclaim_at_us = MIN_PACE_US, 0
        self._become(name, RegionState.LEAVING)
        self._regions.pop(name).close()
        self._rouse()

    def _lost(self) -> None:
        """Triton was started anew, or several answer at its address."""
        self._pause("the server does not know a region that it had registered")

    def _pause(self, reason: str, *, is_final: bool = False) -> None:
        now_us = self._clock()
        is_first = now_us - self._off_until_us > MAX_PAUSE_US
        self._pause_us = MIN_PAUSE_US if is_first else min(2 * self._pause_us, MAX_PAUSE_US)
        if is_final:
            self._pause_us = MAX_PAUSE_US
        self._off_until_us, self._sweep_at_us = now_us + self._pause_us, 0
        if reason != self._reason:  # once, not with every try
            self._reason = reason
            _log.info("shared memory is not used for now", extra={"reason": reason})
        for one in list(self._kept.values()):
            if one.state is RegionState.FREE:
                self._leave(one.name)

    # --- the keeper -----------------------------------------------------------------------------

    def _rouse(self) -> None:
        self._wake.set()
        if self._keeper is None or self._keeper.done():
            self._keeper = asyncio.get_running_loop().create_task(self._keep())

    async def _keep(self) -> None:
        while not self._is_closing:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._nap_s()):
                    await self._wake.wait()
            self._wake.clear()
            try:
                await self._round()
            except BackendError as error:
                self._pause(error.fault.message, is_final=error.fault.kind is FaultKind.UNSUPPORTED)
            except Exception as error:  # noqa: BLE001 - the task's supervisor: requests go on without it
                _log.exception("shared memory failed")
                self._pause(repr(error))
        with contextlib.suppress(TimeoutError, BackendError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._farewell()

    def _nap_s(self) -> float | None:
        """Until something is due; None where only a call can bring work."""
        if self._going():
            return max(0, self._reclaim_at_us - self._clock()) / 1e6
        return self._bounds.idle_us / 2e6 if self._kept else None

    async def _round(self) -> None:
        if self._clock() >= self._reclaim_at_us:
            with contextlib.suppress(BackendError):  # it is away: what it held is gone with it, and will be seen to be
                await self._reclaim()
        wanted, self._wanted = self._wanted, set()
        if self._clock() < self._off_until_us:
            return
        if wanted and self._clock() >= self._sweep_at_us:
            await self._sweep()
        steps = plan(
            self._kept.values(),
            wanted,
            room=regions.room() if wanted else 0,
            now_us=self._clock(),
            bounds=self._bounds,
        )
        for name in steps.drop:
            if self._kept[name].state is RegionState.FREE:
                self._leave(name)
        for size in steps.make:
            if not self._is_closing:
                await self._make(size)

    async def _sweep(self) -> None:
        """See whether the server offers this, and what dead processes have left with it."""
        server = await self._ask("ServerMetadata", pb.ServerMetadataRequest())
        if EXTENSION not in server.extensions or _version(server.version) < MIN_VERSION:
            text = f"not offered by {server.name} {server.version}"
            raise BackendError(Fault(kind=FaultKind.UNSUPPORTED, message=text))
        regions.unlink_abandoned()
        self._abandoned |= regions.abandoned(await self._registered())
        self._sweep_at_us = self._clock() + SWEEP_US

    async def _make(self, size: int) -> None:
        name = regions.new_name()
        try:
            # in a thread, because the kernel clears what it gives: 20 ms for 64 MiB
            region = await asyncio.to_thread(Region, name, size)
        except OSError as error:
            raise BackendError(Fault(kind=FaultKind.FAILED, message=str(error))) from error
        self._regions[name] = region
        # Once it is sent, the server may know the region, whatever becomes of the answer.
        self._kept[name] = KeptRegion(name=name, size=size, state=RegionState.BUSY, since_us=self._clock())
        try:
            await self._ask(
                "SystemSharedMemoryRegister",
                pb.SystemSharedMemoryRegisterRequest(name=name, key=f"/{name}", byte_size=size),
            )
        except BackendError as error:
            self._leave(name)
            text = error.fault.message.replace(name, "NAME")  # so that one reason is logged as one
            raise BackendError(replace(error.fault, message=text)) from error
        except BaseException:  # cancelled too: the server may have it all the same
            self._leave(name)
            raise
        finally:
            region.unlink()
        self._become(name, RegionState.FREE)
        self._reason = ""

    async def _reclaim(self) -> None:
        """Ask for the end of every region that is going, and forget those that the server no longer has.

        Triton 2.50 and 2.51 refuse to unregister what is in use, later ones put it off: both list it until it is gone.
        """
        self._reclaim_at_us = self._clock() + self._pace_us
        self._pace_us = min(2 * self._pace_us, MAX_PACE_US)
        going = self._going()
        if not going:
            return
        known = await self._registered()
        for name in going & known:
            with contextlib.suppress(BackendError):
                await self._ask("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest(name=name))
        for name in going - (await self._registered() if going & known else known):
            self._abandoned.discard(name)
            self._kept.pop(name, None)

    async def _farewell(self) -> None:
        for one in list(self._kept.values()):
            if one.state is RegionState.FREE:
                self._leave(one.name)
            elif one.state is RegionState.BUSY:  # its request is still reading here: the mapping is closed with it
                self._become(one.name, RegionState.LEAVING)
        while self._going():
            await self._reclaim()
            await asyncio.sleep(max(0, self._reclaim_at_us - self._clock()) / 1e6 if self._going() else 0)

    def _going(self) -> set[str]:
        return self._abandoned | {one.name for one in self._kept.values() if one.state is RegionState.LEAVING}

    async def _registered(self) -> set[str]:
        return set((await self._ask("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest())).regions)

    async def _ask(self, method: str, request: Any) -> Any:
        return await self._ask_server(request, method, timeout_us=RPC_TIMEOUT_US)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _version(text: str) -> tuple[int, ...]:
    """`2.51.0` as numbers; nothing where it is not of that form."""
    parts = text.split(".")
    return tuple(int(part) for part in parts if part.isdigit()) if parts[0].isdigit() else ()


def _broken(text: str) -> BackendError:
    return BackendError(Fault(kind=FaultKind.BROKEN, message=text))
