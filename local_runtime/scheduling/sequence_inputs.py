"""What a sequence model gets besides the caller's inputs: control tensors and implicit state. Pure numpy.

Shapes are those of one row: [1, ...] for a model with a batch dimension, without the 1 otherwise.
"""

import hashlib
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from local_runtime.errors import InferenceError
from local_runtime.messages import Annotated, Array, InferRequest, Tensors
from local_runtime.repository.model_config import (
    NUMPY_TYPES,
    ControlInput,
    ControlKind,
    SequenceBatching,
)
from local_runtime.scheduling.decisions import CorrelationId, Slot
from local_runtime.scheduling.execution import Deferred, Outcome
from local_runtime.scheduling.validation import CheckedRequest


class SequenceInputs:
    """Makes the control and state inputs of one model's sequences, and keeps the states between their requests.

    Args:
        config: the `sequence_batching` block: its controls and states are used.
        max_batch_size: as configured; 0 for a model without a batch dimension.
        initial_states: first values by state *input* name, with a batch dimension of 1 where the model has one.
            Every state has one (`repository.side_files.initial_states`).
    """

    def __init__(self, *, config: SequenceBatching, max_batch_size: int, initial_states: Mapping[str, Array]) -> None:
        self._controls = config.controls
        self._control_shape = (1, 1) if max_batch_size > 0 else (1,)
        self._output_of = {state.input_name: state.output_name for state in config.states}
        self._initial = {name: initial_states[name] for name in self._output_of}
        self._states: dict[CorrelationId, Mapping[str, Array]] = {}

    @property
    def state_output_names(self) -> tuple[str, ...]:
        """Outputs that the model must give in addition to those wanted."""
        return tuple(self._output_of.values())

    def inputs_for(self, slot: Slot, request_inputs: Tensors) -> Tensors:
        """All inputs of the slot: the request's own, then controls, then states. State arrays are the model's to keep.

        For a slot with nothing to run, `request_inputs` are those of any request of the batch: the slot gets zeros
        (b"" for BYTES) of the same shapes, and every control false.
        """
        if slot.request is None:
            inputs = {name: _blank(array) for name, array in request_inputs.items()}
            states = {name: _blank(array) for name, array in self._initial.items()}
        else:
            inputs = dict(request_inputs)
            if slot.is_start:
                self.drop(slot.correlation_id)
            known = self._states.get(slot.correlation_id, self._initial)
            states = {name: array.copy() for name, array in known.items()}
        for control in self._controls:
            inputs[control.name] = self._control(control, slot)
        return inputs | states

    def rows_of(self, slots: Sequence[Slot], requests: Sequence[CheckedRequest]) -> list[CheckedRequest]:
        """One row for each slot, with its control and state inputs; `requests` are those of the slots that have one.

        A slot without one gets a request that nobody waits for, in the shapes of the first.
        """
        waiting = iter(requests)
        return [self._row(slot, requests[0] if slot.request is None else next(waiting)) for slot in slots]

    def _row(self, slot: Slot, request: CheckedRequest) -> CheckedRequest:
        inputs = self.inputs_for(slot, request.inputs)
        outputs = (*request.outputs, *self.state_output_names)
        if slot.request is None:
            nobody = InferRequest(model=request.source.model, inputs={})
            return CheckedRequest(source=nobody, inputs=inputs, rows=1, batch_key=request.batch_key, outputs=outputs)
        return msgspec.structs.replace(request, inputs=inputs, outputs=outputs)

    def without_states(self, slots: Sequence[Slot], outcomes: Sequence[Outcome]) -> list[Outcome]:
        """The outcomes of the slots that have a request, without the states, which are kept for the next one."""
        return [
            self._without_state(slot, outcome)
            for slot, outcome in zip(slots, outcomes, strict=True)
            if slot.request is not None
        ]

    def _without_state(self, slot: Slot, outcome: Outcome) -> Outcome:
        if isinstance(outcome, InferenceError | Deferred):
            return outcome
        if isinstance(outcome, Annotated):
            return msgspec.structs.replace(outcome, outputs=self.store(slot, outcome.outputs))
        return self.store(slot, outcome)

    def store(self, slot: Slot, outputs: Tensors) -> Tensors:
        """Keep the state outputs for the sequence's next request, and give back the other outputs.

        `outputs` must hold every state output. Do not call it for a request that failed: its sequence then goes on
        from the state before, since nobody knows a better one.
        """
        if slot.request is not None and self._output_of:
            if slot.is_end:
                self.drop(slot.correlation_id)
            else:
                # Copies, so that no view keeps the whole batch in memory.
                self._states[slot.correlation_id] = {
                    name: outputs[output_name].copy() for name, output_name in self._output_of.items()
                }
        kept = frozenset(self.state_output_names)
        return {name: array for name, array in outputs.items() if name not in kept}

    def drop(self, correlation_id: CorrelationId) -> None:
        """Give up the state of a sequence that has ended."""
        self._states.pop(correlation_id, None)

    def _control(self, control: ControlInput, slot: Slot) -> Array:
        if control.false_true is None:
            made = np.empty(self._control_shape, NUMPY_TYPES[control.datatype])
            # Not np.full: that takes zero bytes off the end of a bytes value.
            made[...] = _id_value(slot.correlation_id, control.datatype)
            return made
        is_true = {
            ControlKind.START: slot.is_start,
            ControlKind.END: slot.is_end,
            ControlKind.READY: slot.request is not None,
        }[control.kind]
        return np.full(self._control_shape, control.false_true[int(is_true)], dtype=NUMPY_TYPES[control.datatype])


def _id_value(correlation_id: CorrelationId, datatype: str) -> "np.generic | bytes":
    """The correlation id as a value of the CORRID input's datatype; 0 or b"" for none.

    Integers as BYTES are decimal text. Strings as integers are hashed (first 8 bytes of BLAKE2b, little-endian):
    Triton passes on the first bytes of the serialized string instead, so that ids of equal length and beginning
    collide. Narrower types get the low bytes, as in Triton.
    """
    if datatype == "BYTES":
        return b"" if correlation_id == 0 else str(correlation_id).encode()
    if isinstance(correlation_id, str):
        digest = hashlib.blake2b(correlation_id.encode()).digest()
        correlation_id = int.from_bytes(digest[:8], "little") if correlation_id else 0
    number: np.generic = np.uint64(correlation_id).astype(NUMPY_TYPES[datatype])
    return number


def _blank(array: Array) -> Array:
    """Zeros (b"" for object arrays) in the array's shape and type."""
    return np.full_like(array, b"") if array.dtype == np.object_ else np.zeros_like(array)
