"""One Triton server, or another that speaks its protocol: the calls to it, and what is known of its models."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from tritonclient.grpc import service_pb2 as pb

from gateway.backends.grpc.headers import GrpcError
from gateway.backends.grpc.stream import Message
from gateway.backends.triton import codec as triton_codec
from gateway.backends.triton import documents as triton_documents
from gateway.backends.triton.faults import dead_stub, fault_of, lost, streamed
from gateway.backends.triton.shared_memory import SharedMemoryLane
from gateway.core.errors import BackendError, Fault, FaultKind
from gateway.core.models import ModelFacts, output_sizes, rows, why_wrong
from gateway.core.trace import is_sampled
from gateway.core.types import BackendCall, TensorPayload, Tensors

FACTS_FRESH_S: Final = 30.0  # how long a model's facts are taken for true; a wrong answer has them asked for anew
FACTS_FAILURE_S: Final = 1.0  # how long a model whose facts cannot be had is not asked for them again
FACTS_TIMEOUT_US: Final = 1_000_000
MAX_NESTING: Final = 4  # of ensembles in ensembles
MAX_FACTS: Final = 1024  # models and versions that are remembered, by server

_SERVICE: Final[Any] = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
_INFER: Final = f"/{_SERVICE.full_name}/ModelInfer".encode()
_STREAM: Final = f"/{_SERVICE.full_name}/ModelStreamInfer".encode()
# A stream's errors come with their codes, and end it (Triton from 24.08 on); others tell the text alone.
_WITH_CODES: Final = ((b"triton_grpc_error", b"true"),)


class Channel(Protocol):
    """All that is asked of a gRPC library. Both raise `GrpcError`."""

    async def unary(
        self,
        path: bytes,
        *message: bytes | memoryview,
        timeout_s: float,
        metadata: Sequence[tuple[bytes, bytes]] = (),
    ) -> Message:
        """The answer to one message, given in parts. Cancelling the wait cancels the call at the server."""
        ...

    def stream(
        self, path: bytes, messages: Sequence[bytes], *, timeout_s: float, metadata: Sequence[tuple[bytes, bytes]] = ()
    ) -> AsyncGenerator[Message, None]:
        """Send all messages, then yield those of the answer. Closing the iterator cancels the call at the server."""
        ...

    async def close(self) -> None:
        """Close the connection; calls in flight end as UNAVAILABLE."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """A model's facts, or why they could not be had; true until an instant of the loop's clock."""

    facts: ModelFacts | None
    fault: Fault | None
    until: float


class TritonReplica:
    """A server behind one channel, which this owns.

    Args:
        name: as `Backend.replicas` has it.
        channel: to the server.
        is_on_this_host: large tensors may go by shared memory.
    """

    def __init__(self, name: str, channel: Channel, *, is_on_this_host: bool = False) -> None:
        self.name = name
        self._channel = channel
        self._lane = SharedMemoryLane(self.ask) if is_on_this_host else None
        self.on_death: Callable[[str, Fault], None] | None = None  # told of the model that met a dead process
        self._in_flight = 0
        self._is_leaving = False
        self._closing: asyncio.Task[None] | None = None
        self._known: dict[tuple[str, str], _Known] = {}
        self._asking: dict[tuple[str, str], asyncio.Task[_Known]] = {}
        self._calls: dict[str, set[asyncio.Task[Any]]] = {}  # unary inference in flight, by model
        self._aborted: dict[asyncio.Task[Any], Fault] = {}

    async def ask(self, request: Any, method: str, *, timeout_us: int) -> Any:
        """The answer to a call of the protocol other than inference. Raises `BackendError`."""
        path = f"/{_SERVICE.full_name}/{method}".encode()
        message = await self._unary(path, request.SerializeToString(), timeout_us=timeout_us)
        try:
            return GetMessageClass(_SERVICE.methods_by_name[method].output_type).FromString(bytes(message))
        except DecodeError as error:
            raise BackendError(Fault(kind=FaultKind.BROKEN, message=f"{method}: not an answer")) from error

    async def infer(self, call: BackendCall, payload: TensorPayload, *, timeout_us: int) -> Tensors:
        """One answer to one request, held against what is known of the model."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_us / 1e6
        facts = await self._facts_for(call, deadline=deadline)
        answer = await self._by_shared_memory(call, payload, facts, deadline=deadline) if self._lane else None
        if answer is None:
            message = triton_codec.encode(call, payload, facts)
            answer = triton_codec.decode(await self._infer(call, message, deadline=deadline), payload.outputs)
        if facts is not None and _why_wrong(facts, payload, answer) is not None:
            await self._judge(call, payload, answer, deadline=deadline)
        return answer

    async def _by_shared_memory(
        self, call: BackendCall, payload: TensorPayload, facts: ModelFacts | None, *, deadline: float
    ) -> Tensors | None:
        """The answer by that way; None where it must go by message."""
        sizes = output_sizes(facts, payload.outputs, rows(facts, payload.inputs)) if facts is not None else {}
        assert self._lane is not None  # noqa: S101 - the only caller has seen it
        slot = self._lane.take([len(tensor.data) for tensor in payload.inputs], sizes.values())
        if slot is None:
            return None
        with slot:
            message = triton_codec.encode(call, payload, facts, aside=slot, sizes=sizes)
            try:
                answer = await self._infer(call, message, deadline=deadline)
            except BackendError as error:
                if error.fault.reply is None or not slot.is_refused(error.fault.reply.text):
                    raise
                return None
            return triton_codec.decode(answer, payload.outputs, aside=slot)

    async def stream(
        self, call: BackendCall, payload: TensorPayload, *, timeout_us: int
    ) -> AsyncGenerator[Tensors, None]:
        """The answers to one request as they come, each held against what is known of the model."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_us / 1e6
        facts = await self._facts_for(call, deadline=deadline)
        message = b"".join(triton_codec.encode(call, payload, facts))
        self._in_flight += 1
        try:
            left_s = deadline - loop.time()
            answers = self._channel.stream(
                _STREAM, (message,), timeout_s=left_s, metadata=(*_WITH_CODES, *_metadata(call))
            )
            async with aclosing(answers):
                async for part in answers:
                    answer = triton_codec.decode_streamed(part, payload.outputs)
                    if isinstance(answer, str):
                        raise BackendError(await self._located(streamed(answer), call.model, deadline=deadline))
                    is_wrong = answer.outputs and facts is not None and _why_wrong(facts, payload, answer) is not None
                    if is_wrong:
                        await self._judge(call, payload, answer, deadline=deadline)
                    yield answer
        except GrpcError as error:
            raise BackendError(await self._located(_fault(error), call.model, deadline=deadline)) from error
        finally:
            self._ended()

    # --- a model whose process has died -----------------------------------------------------------

    async def _infer(self, call: BackendCall, message: Sequence[bytes | memoryview], *, deadline: float) -> Message:
        """One unary call. Where the model's process has died, all calls that wait for it end at once.

        Triton takes a second to notice for each request that waits for a dead process, one after another.
        """
        task, model = asyncio.current_task(), call.model
        assert task is not None  # noqa: S101 - a coroutine runs in a task
        calls = self._calls.setdefault(model, set())
        calls.add(task)
        cancelling = task.cancelling()
        self._in_flight += 1
        try:
            left_s = deadline - asyncio.get_running_loop().time()
            return await self._channel.unary(_INFER, *message, timeout_s=left_s, metadata=_metadata(call))
        except GrpcError as error:
            fault = _fault(error)
            if fault.kind is FaultKind.DEAD:
                calls.discard(task)
                fault = await self._located(fault, model, deadline=deadline)
                self.abort(fault, model)
                if self.on_death is not None:
                    self.on_death(model, fault)
            raise BackendError(fault) from error
        except asyncio.CancelledError as error:
            aborted = self._aborted.pop(task, None)
            if aborted is None or task.uncancel() > cancelling:
                raise  # the caller has left
            raise BackendError(aborted) from error
        finally:
            self._aborted.pop(task, None)
            calls.discard(task)
            if not calls and self._calls.get(model) is calls:
                del self._calls[model]
            self._ended()

    def abort(self, fault: Fault, model: str) -> None:
        """End what waits for a dead process: the calls to it, and those to the model that has met it."""
        for name in {model, fault.dead_model}:
            for task in self._calls.get(name, ()):
                if task not in self._aborted:
                    self._aborted[task] = fault
                    task.cancel()

    async def _located(self, fault: Fault, model: str, *, deadline: float) -> Fault:
        """The fault with the right name of the dead model: the one that was asked, or a part of that ensemble."""
        if fault.kind is not FaultKind.DEAD or fault.dead_model == model or fault.reply is None:
            return fault
        stub = dead_stub(fault.reply.text)
        try:
            async with asyncio.timeout_at(deadline):
                owner = await self._owner(stub, model, depth=0)
        except (BackendError, TimeoutError):
            owner = ""
        return replace(fault, dead_model=owner or fault.dead_model or model)

    async def _owner(self, stub: str, model: str, *, depth: int) -> str:
        """Which of a model and its parts has an instance of that name; empty if none."""
        request = pb.ModelConfigRequest(name=model)
        config = (await self.ask(request, "ModelConfig", timeout_us=FACTS_TIMEOUT_US)).config
        if any(stub.rpartition("_")[0] == group.name for group in config.instance_group):
            return model
        if depth < MAX_NESTING:
            for step in config.ensemble_scheduling.step:
                if owner := await self._owner(stub, step.model_name, depth=depth + 1):
                    return owner
        return ""

    # --- what is known of models ------------------------------------------------------------------

    async def facts(self, model: str, version: str) -> ModelFacts:
        """What the server told of a model, 30 s ago at most. Raises `BackendError`."""
        known = self._known.get((model, version))
        if known is None or known.until < asyncio.get_running_loop().time():
            known = await self._ask_facts(model, version)
        if known.facts is None:
            raise BackendError(known.fault or Fault(kind=FaultKind.BROKEN, message="no facts"))
        return known.facts

    def forget_facts(self) -> None:
        """Models have changed there: what is known of any may be wrong, since ensembles are made of others."""
        self._known.clear()
        self._asking.clear()  # who waits has the answer, nobody else

    async def _facts_for(self, call: BackendCall, *, deadline: float) -> ModelFacts | None:
        """The facts for a request; None where they cannot be had, and it is sent all the same.

        What has grown old is used once more, while it is asked for anew: no request waits for that.
        """
        key, now = (call.model, call.version), asyncio.get_running_loop().time()
        known = self._known.get(key)
        if known is not None and known.until >= now:
            return known.facts
        if known is not None and known.facts is not None and known.until + FACTS_FRESH_S >= now:
            self._start_asking(key)
            return known.facts
        known = await self._ask_facts(*key, deadline=deadline)
        if known.fault is not None and (known.fault.is_server or known.fault.kind is FaultKind.UNKNOWN_MODEL):
            raise BackendError(known.fault)  # the request would meet the same
        return known.facts

    async def _ask_facts(self, model: str, version: str, *, deadline: float | None = None) -> _Known:
        asking = self._start_asking((model, version))
        left_s = None if deadline is None else max(0.0, deadline - asyncio.get_running_loop().time())
        await asyncio.wait({asking}, timeout=left_s)
        if not asking.done():
            raise BackendError(Fault(kind=FaultKind.TIMEOUT, message=f"model '{model}' could not be asked about"))
        if asking.cancelled():
            raise BackendError(Fault(kind=FaultKind.UNAVAILABLE, message="the connection was closed", is_server=True))
        return asking.result()

    def _start_asking(self, key: tuple[str, str]) -> "asyncio.Task[_Known]":
        """Ask once for all who want to know."""
        asking = self._asking.get(key)
        if asking is None:
            asking = self._asking[key] = asyncio.create_task(self._asked(key), name="facts")
            asking.add_done_callback(lambda done: self._asked_and_done(key, done))
        return asking

    def _asked_and_done(self, key: tuple[str, str], done: "asyncio.Task[_Known]") -> None:
        if self._asking.get(key) is not done:
            return  # of a model that has been loaded anew since
        del self._asking[key]
        if done.cancelled():
            return
        if len(self._known) >= MAX_FACTS:
            self._known.clear()
        self._known[key] = done.result()

    async def _asked(self, key: tuple[str, str]) -> _Known:
        """Its failure is a value, because nobody may be left to hear of it."""
        model, version = key
        facts, fault = None, None
        try:
            metadata, config = await asyncio.gather(
                self.ask(
                    pb.ModelMetadataRequest(name=model, version=version), "ModelMetadata", timeout_us=FACTS_TIMEOUT_US
                ),
                self.ask(
                    pb.ModelConfigRequest(name=model, version=version), "ModelConfig", timeout_us=FACTS_TIMEOUT_US
                ),
            )
            facts = triton_documents.facts(metadata, config.config)
        except BackendError as error:
            fault = error.fault
        lasts_s = FACTS_FRESH_S if facts is not None else FACTS_FAILURE_S
        return _Known(facts=facts, fault=fault, until=asyncio.get_running_loop().time() + lasts_s)

    async def _judge(self, call: BackendCall, payload: TensorPayload, answer: Tensors, *, deadline: float) -> None:
        """An answer looks wrong: raise BROKEN, unless the model has changed since it was asked for."""
        self._known.pop((call.model, call.version), None)
        known = await self._ask_facts(call.model, answer.version or call.version, deadline=deadline)
        wrong = known.facts and _why_wrong(known.facts, payload, answer)
        if wrong:
            raise BackendError(Fault(kind=FaultKind.BROKEN, message=f"model '{call.model}': {wrong}"))

    # --- coming and going -------------------------------------------------------------------------

    def retire(self) -> None:
        """It takes no new requests; its connection is closed when its last call has ended."""
        self._is_leaving = True
        if not self._in_flight:
            self._begin_closing()

    async def close(self) -> None:
        """Close the connection; calls in flight end as UNAVAILABLE."""
        for asking in tuple(self._asking.values()):
            asking.cancel()
        await self._close_channel()
        if self._closing is not None:
            await asyncio.gather(self._closing, return_exceptions=True)

    @property
    def is_closed(self) -> bool:
        """Whether it was retired, and nothing is left of it."""
        return self._closing is not None and self._closing.done()

    async def _unary(self, path: bytes, message: bytes, *, timeout_us: int) -> Message:
        self._in_flight += 1
        try:
            return await self._channel.unary(path, message, timeout_s=timeout_us / 1e6)
        except GrpcError as error:
            raise BackendError(_fault(error)) from error
        finally:
            self._ended()

    def _ended(self) -> None:
        self._in_flight -= 1
        if self._is_leaving and not self._in_flight:
            self._begin_closing()

    def _begin_closing(self) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._close_channel(), name="retired replica")

    async def _close_channel(self) -> None:
        if self._lane is not None:
            await self._lane.close()
        await self._channel.close()


def _why_wrong(facts: ModelFacts, payload: TensorPayload, answer: Tensors) -> str | None:
    """Some of the outputs that nobody named may be left out; classes stand in the place of what is declared."""
    if not answer.outputs and facts.outputs and not facts.is_decoupled:
        return "there are no outputs"
    outputs = tuple(tensor for tensor in answer.outputs if tensor.name not in payload.classes)
    return why_wrong(facts, outputs, rows(facts, payload.inputs))


def _metadata(call: BackendCall) -> Sequence[tuple[bytes, bytes]]:
    """The trace that it is part of, as Triton takes it with `--trace-config mode=opentelemetry`.

    Where it is sampled alone: Triton (2.51) records all that comes in a trace, whatever its flags say.
    """
    return [(name.encode(), value.encode()) for name, value in call.trace] if is_sampled(call.trace) else ()


def _fault(error: GrpcError) -> Fault:
    return fault_of(error.code, error.details) if error.is_reply else lost(error.code, error.details)
