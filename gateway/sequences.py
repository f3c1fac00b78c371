"""Sequences stay with the replica that keeps their state."""

from gateway.core.errors import Fault, InvalidInput
from gateway.core.routing import Plan
from gateway.core.types import InferenceRequest, Place, SequenceStep


class NoSequences:
    """`Sequences` where none can be kept."""

    async def route(self, request: InferenceRequest, plan: Plan) -> Plan:
        """Refuse."""
        raise InvalidInput("sequences are not offered here", field="x-sequence-id")

    async def bind(self, request: InferenceRequest, place: Place) -> SequenceStep:
        """Refuse."""
        raise InvalidInput("sequences are not offered here", field="x-sequence-id")

    async def failed(self, request: InferenceRequest, place: Place, fault: Fault) -> None:
        """Nothing is kept."""

    async def answered(self, request: InferenceRequest) -> None:
        """Nothing is kept."""
