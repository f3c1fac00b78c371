"""A model that keeps state, on replicas that can be lost: what Triton's sequence batcher does, without Triton."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from gateway.core.errors import BackendError, Fault, FaultKind, InvalidInput, Reply
from gateway.core.models import ModelFacts
from gateway.core.tensors import from_numpy, to_numpy
from gateway.core.types import Answer, BackendCall, BackendEvent, Place, TensorPayload, Tensors

FACTS = ModelFacts(name="total", versions=("1", "2"), is_sequence=True, sequence_idle_us=5_000_000)


class Totals:
    """The contract of the model `total`: numbers in, their sum so far out. As bytes: int32, little-endian."""

    name: ClassVar[str] = "total"
    is_sequence: ClassVar[bool] = True
    tensor_fields: ClassVar[Mapping[str, str]] = {"NUMBER": "input.number"}
    speaks: ClassVar[frozenset[str]] = frozenset({"tensors"})
    input_schema: Mapping[str, Any] = {
        "type": "object",
        "properties": {"number": {"type": "integer"}, "audio": {"type": "string"}},
    }
    output_schema: Mapping[str, Any] = {"type": "object", "properties": {"total": {"type": "integer"}}}

    def parse(self, given: object, parameters: Mapping[str, Any]) -> int:
        fields = dict(given) if isinstance(given, Mapping) else {}
        if isinstance(audio := fields.get("audio"), bytes):
            if len(audio) != 4:
                raise InvalidInput("must be 4 bytes", field="input.audio")
            return int.from_bytes(audio, "little", signed=True)
        if not isinstance(number := fields.get("number"), int):
            raise InvalidInput("must be a whole number", field="input.number")
        return number

    @property
    def forms(self) -> Mapping[str, "Totals"]:
        return {"tensors": self}

    def payload(self, parsed: int) -> TensorPayload:
        return TensorPayload(inputs=(from_numpy("NUMBER", np.array([[parsed]], np.int32)),), outputs=("TOTAL",))

    def answer(self, event: Tensors, parsed: int) -> Answer:
        return Answer(output={"total": int(to_numpy(event.outputs[0])[0, 0])})


class StatefulBackend:
    """A backend with replicas. `gone` replicas refuse; `restart` makes one forget. `calls` are what came."""

    speaks = "tensors"
    is_probed = True

    def __init__(self, name: str, *replicas: str, facts: ModelFacts = FACTS) -> None:
        self.name = name
        self.known = facts
        self.names: Sequence[str] = replicas
        self.gone: set[str] = set()
        self.states: dict[str, dict[int, int]] = {replica: {} for replica in replicas or ("",)}
        self.calls: list[BackendCall] = []
        self.faults: list[Fault] = []  # told instead of the next answers
        self.held: asyncio.Event | None = None  # answers wait for it
        self.cancelled = 0

    def restart(self, replica: str) -> None:
        self.gone.discard(replica)
        self.states[replica] = {}

    def engine_load(self, replica: str) -> None:
        return None

    def replicas(self) -> Sequence[str]:
        return self.names

    async def infer(self, call: BackendCall, *, timeout_us: int) -> AsyncGenerator[BackendEvent, None]:
        self.calls.append(call)
        if call.replica in self.gone:
            raise BackendError(Fault(kind=FaultKind.UNAVAILABLE, message="nobody there", is_server=True))
        if self.faults:
            raise BackendError(self.faults.pop(0))
        if self.held is not None:
            await self._wait(timeout_us)
        number = int(to_numpy(call.payload.inputs[0])[0, 0])
        yield Tensors(outputs=(from_numpy("TOTAL", np.array([[self._total(call, number)]], np.int32)),), version="2")

    async def _wait(self, timeout_us: int) -> None:
        try:
            async with asyncio.timeout(timeout_us / 1e6):
                await self.held.wait()
        except TimeoutError:
            raise BackendError(Fault(kind=FaultKind.TIMEOUT, message="too late")) from None
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    def _total(self, call: BackendCall, number: int) -> int:
        if not self.known.is_sequence or call.sequence is None:
            return number
        state, step = self.states[call.replica], call.sequence
        if not step.is_start and step.id not in state:
            text = (
                f"inference request for sequence {step.id} to model '{call.model}' must specify the START flag on the "
                "first request of the sequence"
            )
            reply = Reply(code="INVALID_ARGUMENT", text=text)
            raise BackendError(Fault(kind=FaultKind.REFUSED_INPUT, message=text, reply=reply))
        total = number if step.is_start else state[step.id] + number
        state[step.id] = total
        if step.is_end:
            del state[step.id]
        return total

    async def probe(self, place: Place) -> None:
        if place.replica in self.gone:
            raise BackendError(Fault(kind=FaultKind.UNAVAILABLE, message="nobody there"))

    async def figures(self) -> Sequence[Any]:
        return ()

    async def close(self) -> None:
        pass

    async def facts(self, place: Place) -> ModelFacts:
        if place.replica in self.gone:
            raise BackendError(Fault(kind=FaultKind.UNAVAILABLE, message="nobody there", is_server=True))
        return self.known

    async def server_metadata(self, replica: str) -> Mapping[str, Any]:
        return {}

    async def metadata(self, place: Place) -> Mapping[str, Any]:
        return {}

    async def config(self, place: Place) -> Mapping[str, Any]:
        return {}

    async def statistics(self, place: Place) -> Mapping[str, Any]:
        return {}

    async def index(self, replica: str, *, ready_only: bool = False) -> list[Mapping[str, Any]]:
        return []

    async def load(self, model: str, *, replica: str, config: str | None = None, files: Any = None) -> None:
        pass

    async def unload(self, model: str, *, replica: str, unload_dependents: bool = False) -> None:
        pass


RULES = [{"name": "totals", "match": {"task": "total"}, "split": [{"backend": "triton", "model": "total"}]}]
TASKS = {"total": Totals()}
