"""A sweep on a running Triton (or another server of its protocol) in explicit mode, which ends as it was found.

While a model is swept its configuration carries the parameter `GATEWAY_SWEEP`: who sweeps it, and what was found. So a
second sweep of that server sees the first one, wherever it runs, and what a killed sweep has left can be put back.
"""

import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

from google.protobuf import json_format
from tritonclient.grpc import model_config_pb2
from tritonclient.grpc import service_pb2 as pb

from gateway.backends.grpc.channel import GrpcChannel
from gateway.backends.triton.documents import load_request
from gateway.backends.triton.replica import TritonReplica
from gateway.core.errors import BackendError, FaultKind
from gateway.core.tensors import from_numpy
from gateway.core.types import BackendCall, TensorPayload
from gateway.tuning.sweep.callers import AskFailed
from gateway.tuning.sweep.local import check_shapes, one_row
from gateway.tuning.sweep.memory import listener, resident_bytes
from gateway.tuning.sweep.servers import Counters
from gateway.tuning.sweep.settings import Setting, SweepError, Unreachable, measurable, refusal
from local_runtime.messages import TensorMetadata

MARK: Final = "GATEWAY_SWEEP"
LOAD_TIMEOUT_US: Final = 300_000_000
CALL_TIMEOUT_US: Final = 10_000_000
INFER_TIMEOUT_US: Final = 60_000_000
ABSENT: Final = frozenset({FaultKind.UNAVAILABLE, FaultKind.TIMEOUT})  # of who did not answer at all


class TritonServer:
    """The model on a server; made by `opened`."""

    name = "triton"

    def __init__(self, replica: TritonReplica, model: str, *, address: str) -> None:
        self.place = f"Triton at {address}"
        self.message: Any = None
        self.written: Any = None
        self.files = ""
        self.model = model
        self._replica = replica
        self._address = address
        self._was_loaded = False
        self.has_changed = False  # whether there is something to put back
        self._call: BackendCall | None = None
        host, _, port = address.rpartition(":")
        self._pid = listener(host, int(port)) if port.isdecimal() else None

    # --- found and put back -----------------------------------------------------------------------

    async def find(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Look at the model, which is loaded for it. Raises SweepError."""
        index = await self._ask(pb.RepositoryIndexRequest(), "RepositoryIndex")
        names = sorted({one.name for one in index.models})
        if self.model not in names:
            raise SweepError(f"--model {self.model}: is not on {self._address}; there are {', '.join(names) or 'none'}")
        ready = {one.name for one in index.models if one.state == "READY"}
        await self._refuse_others(ready)
        self._was_loaded = self.model in ready
        if not self._was_loaded:
            await self._change(None)
        self.message = self.written = await self._config(self.model)
        if reason := refusal(self.message):
            raise SweepError(f"--model {self.model}: {reason}")
        metadata = await self._ask(pb.ModelMetadataRequest(name=self.model), "ModelMetadata")
        self.files = f"versions {', '.join(sorted(metadata.versions))}"
        check_shapes(shapes, [one.name for one in metadata.inputs])
        self._call = _call(metadata, shapes, has_batch=self.message.max_batch_size > 0)

    async def begin(self) -> None:
        """Mark the model as swept. Raises SweepError where models cannot be loaded here, or another was quicker."""
        await self._change(self._marked(self.message))
        await self._refuse_a_later_one()

    async def _refuse_a_later_one(self) -> None:
        """Two that began at once both loaded their mark: the one whose mark is gone gives way, before each load."""
        with contextlib.suppress(BackendError):  # not served now, such as after a load that failed: nobody's mark
            answer = await self._replica.ask(
                pb.ModelConfigRequest(name=self.model), "ModelConfig", timeout_us=CALL_TIMEOUT_US
            )
            if _sweeper(answer.config) not in (None, _me()):
                self.has_changed = False  # the other one puts it back
                raise SweepError(f"--triton {self._address}: another sweep of '{self.model}' began at the same time")

    async def restore(self) -> None:
        """Serve the model as it was found, or not at all if it was not loaded. Raises SweepError."""
        if not self._was_loaded:
            await self._ask(pb.RepositoryModelUnloadRequest(model_name=self.model), "RepositoryModelUnload")
            return
        with contextlib.suppress(SweepError):  # its folder may have changed since; what was found counts
            await self._load(None)
            if await self._config(self.model) == self.message:
                return
        await self._load(self.message)

    async def put_back(self) -> bool:
        """Restore what another sweep has left behind; False if there is nothing of the kind. Raises SweepError."""
        left = _mark(await self._config(self.model))
        if left is None:
            return False
        self.message = json_format.Parse(left["found"], model_config_pb2.ModelConfig())
        self._was_loaded = bool(left["was_loaded"])
        await self.restore()
        return True

    async def _refuse_others(self, ready: set[str]) -> None:
        """Two sweeps at once would measure each other."""
        for name in sorted(ready):
            left = _mark(await self._config(name))
            if left is None:
                continue
            who = f"process {left['pid']} on {left['host']}"
            if left["host"] == socket.gethostname() and not _lives(int(left["pid"])):
                dead = TritonServer(self._replica, name, address=self._address)
                await dead.put_back()
                continue
            raise SweepError(
                f"--triton {self._address}: '{name}' is being swept by {who}; if that one is dead, "
                f"put back what it found: gateway sweep --triton {self._address} --model {name} --restore"
            )

    def _marked(self, message: Any) -> Any:
        marked = type(message)()
        marked.CopyFrom(message)
        found = json_format.MessageToJson(self.message, preserving_proto_field_name=True, indent=None)
        mark = {"host": socket.gethostname(), "pid": os.getpid(), "was_loaded": self._was_loaded, "found": found}
        marked.parameters[MARK].string_value = json.dumps(mark)
        return marked

    # --- measured ---------------------------------------------------------------------------------

    async def load(self, setting: Setting) -> None:
        """Serve the model this way. Raises SweepError with the server's reason, or where another sweep has begun."""
        await self._refuse_a_later_one()
        try:
            await self._load(self._marked(measurable(self.message, setting)))
        except SweepError as error:
            raise SweepError(f"{self.model}: cannot be loaded as '{setting}': {error}") from error

    async def ask(self) -> None:
        """One request of one row. Raises AskFailed."""
        assert self._call is not None  # noqa: S101 - `find` came first
        payload = self._call.payload
        assert isinstance(payload, TensorPayload)  # noqa: S101 - made so
        try:
            await self._replica.infer(self._call, payload, timeout_us=INFER_TIMEOUT_US)
        except BackendError as error:
            raise AskFailed(error.fault.kind.value, error.fault.message) from error

    async def answers(self) -> None:
        """Raises Unreachable where nobody does any more."""
        await self._ask(pb.ServerLiveRequest(), "ServerLive")

    async def counters(self) -> Counters:
        """What the server has counted."""
        found = await self._ask(pb.ModelStatisticsRequest(name=self.model), "ModelStatistics")
        executions: dict[int, int] = {}
        compute_us: dict[int, float] = {}
        for one in found.model_stats:
            for batch in one.batch_stats:
                rows = int(batch.batch_size)
                ns = batch.compute_input.ns + batch.compute_infer.ns + batch.compute_output.ns
                executions[rows] = executions.get(rows, 0) + batch.compute_infer.count
                compute_us[rows] = compute_us.get(rows, 0.0) + ns / 1e3
        return Counters(
            requests=sum(one.inference_stats.success.count for one in found.model_stats),
            queue_us=sum(one.inference_stats.queue.ns for one in found.model_stats) / 1e3,
            executions=executions,
            compute_us=compute_us,
        )

    def memory_bytes(self) -> int | None:
        """Of the server's process and its children, where it is on this machine."""
        return None if self._pid is None else resident_bytes(self._pid)

    # --- calls ------------------------------------------------------------------------------------

    async def _load(self, message: Any) -> None:
        """With `message` in place of its config.pbtxt, or without."""
        config = None if message is None else json_format.MessageToJson(message, preserving_proto_field_name=True)
        request = load_request(self.model, config=config, files=None)
        await self._ask(request, "RepositoryModelLoad", timeout_us=LOAD_TIMEOUT_US)
        self._replica.forget_facts()

    async def _change(self, message: Any) -> None:
        """`_load`, which is to be put back: also where it was not waited for, but not where it was refused."""
        had_changed, self.has_changed = self.has_changed, True
        try:
            await self._load(message)
        except SweepError:
            self.has_changed = had_changed
            raise

    async def _config(self, model: str) -> Any:
        return (await self._ask(pb.ModelConfigRequest(name=model), "ModelConfig")).config

    async def _ask(self, request: Any, method: str, *, timeout_us: int = CALL_TIMEOUT_US) -> Any:
        try:
            return await self._replica.ask(request, method, timeout_us=timeout_us)
        except BackendError as error:
            text = error.fault.reply.text if error.fault.reply else error.fault.message
            if "explicit model load" in text:
                text = f"models can be loaded here only with --model-control-mode=explicit ({text})"
            is_absent = error.fault.kind in ABSENT and error.fault.reply is None
            refusing = Unreachable if is_absent else SweepError
            raise refusing(f"--triton {self._address}: {method}: {text}") from error


@contextlib.asynccontextmanager
async def connected(address: str, model: str) -> AsyncIterator[TritonServer]:
    """A connection; nothing is asked or changed yet. Raises SweepError for what is no address."""
    try:
        replica = TritonReplica("", GrpcChannel(address))
    except ValueError as error:
        raise SweepError(f"--triton: {error}") from error
    try:
        yield TritonServer(replica, model, address=address)
    finally:
        await replica.close()


@contextlib.asynccontextmanager
async def opened(address: str, model: str, shapes: Mapping[str, tuple[int, ...]]) -> AsyncIterator[TritonServer]:
    """The model; put back at the end, however that comes, if it was changed. Raises SweepError."""
    async with connected(address, model) as server:
        try:
            await server.find(shapes)
            yield server
        finally:
            if server.has_changed:
                await server.restore()


def _mark(message: Any) -> Any:
    text = message.parameters[MARK].string_value if MARK in message.parameters else ""
    return json.loads(text) if text else None


def _sweeper(message: Any) -> tuple[str, int] | None:
    left = _mark(message)
    return None if left is None else (left["host"], left["pid"])


def _me() -> tuple[str, int]:
    return socket.gethostname(), os.getpid()


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _call(metadata: Any, shapes: Mapping[str, tuple[int, ...]], *, has_batch: bool) -> BackendCall:
    inputs = []
    for one in metadata.inputs:
        spec = TensorMetadata(name=one.name, datatype=one.datatype, shape=tuple(one.shape))
        inputs.append(from_numpy(one.name, one_row(spec, shapes, has_batch=has_batch)))
    return BackendCall(request_id="", model=metadata.name, version="", payload=TensorPayload(inputs=tuple(inputs)))
