"""The `dynamic_batching` and `sequence_batching` blocks of a configuration as checked values. Pure.

Conditions, defaults and texts of refusals are Triton's: triton-inference-server/core `src/model_config_utils.cc`
(ValidateModelConfig) and `src/sequence_batch_scheduler/sequence_batch_scheduler.cc` (states).
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tritonclient.grpc import model_config_pb2

from local_runtime.errors import ModelLoadError
from local_runtime.repository.config_words import datatype, word
from local_runtime.repository.model_config import (
    NUMPY_TYPES,
    AdaptiveBatching,
    ControlInput,
    ControlKind,
    DirectStrategy,
    DynamicBatching,
    OldestStrategy,
    QueuePolicy,
    SequenceBatching,
    SequenceState,
    TimeoutAction,
)

ADAPTIVE_BATCHING = "ADAPTIVE_BATCHING"
ADAPTIVE_LATENCY_TARGET = "ADAPTIVE_LATENCY_TARGET_MICROSECONDS"
# Triton's readings of a boolean parameter (ParseBoolParameter).
_BOOLEANS: Mapping[str, bool] = MappingProxyType({"true": True, "1": True, "false": False, "0": False})
_SEQUENCE_IDLE_DEFAULT_US = 1_000_000
_FALSE_TRUE: Mapping[str, str] = MappingProxyType(
    {"int32_false_true": "INT32", "fp32_false_true": "FP32", "bool_false_true": "BOOL"}
)
_CORRID_TYPES = frozenset({"UINT64", "INT64", "UINT32", "INT32", "BYTES"})


def dynamic_batching(message: Any) -> DynamicBatching | None:
    """The block, with the adaptive batching that the model's `parameters` ask for; None without a block."""
    adaptive = _adaptive(message)
    if not message.HasField("dynamic_batching"):
        if adaptive is not None:
            raise ModelLoadError(f"parameter {ADAPTIVE_BATCHING} of {message.name} needs 'dynamic_batching'")
        return None
    block = message.dynamic_batching
    batching = DynamicBatching(
        preferred_batch_size=tuple(block.preferred_batch_size),
        max_queue_delay_microseconds=block.max_queue_delay_microseconds,
        preserve_ordering=block.preserve_ordering,
        priority_levels=block.priority_levels,
        default_priority_level=block.default_priority_level,
        default_queue_policy=_queue_policy(block.default_queue_policy),
        priority_queue_policy=MappingProxyType(
            {level: _queue_policy(policy) for level, policy in sorted(block.priority_queue_policy.items())}
        ),
        adaptive=adaptive,
    )
    _check_preferred(
        batching.preferred_batch_size,
        "dynamic batching preferred size",
        max_size=message.max_batch_size,
        message=message,
    )
    _check_priorities(batching, message.name)
    _check_ordering(batching, message.name)
    return batching


def _adaptive(message: Any) -> AdaptiveBatching | None:
    parameters = {key: value.string_value for key, value in message.parameters.items()}
    switch = parameters.get(ADAPTIVE_BATCHING)
    target = parameters.get(ADAPTIVE_LATENCY_TARGET)
    if switch is None:
        if target is not None:
            raise ModelLoadError(f"parameter {ADAPTIVE_LATENCY_TARGET} of {message.name} needs {ADAPTIVE_BATCHING}")
        return None
    is_on = _BOOLEANS.get(switch.lower())
    if is_on is None:
        raise ModelLoadError(f"parameter {ADAPTIVE_BATCHING} of {message.name} must be true or false, not '{switch}'")
    if target is not None and (not (target.isascii() and target.isdecimal()) or int(target) < 1):
        raise ModelLoadError(
            f"parameter {ADAPTIVE_LATENCY_TARGET} of {message.name} must be a positive whole number, not '{target}'"
        )
    if not is_on:
        return None
    return AdaptiveBatching(latency_target_us=None if target is None else int(target))


def _queue_policy(policy: Any) -> QueuePolicy:
    return QueuePolicy(
        timeout_action=TimeoutAction(word(model_config_pb2.ModelQueuePolicy.TimeoutAction, policy.timeout_action)),
        default_timeout_microseconds=policy.default_timeout_microseconds,
        allow_timeout_override=policy.allow_timeout_override,
        max_queue_size=policy.max_queue_size,
    )


def _check_preferred(sizes: Iterable[int], what: str, *, max_size: int, message: Any) -> None:
    for size in sizes:
        if size <= 0:
            raise ModelLoadError(f"{what} must be positive for {message.name}")
        if size > max_size:
            raise ModelLoadError(f"{what} must be <= max batch size for {message.name}")


def _check_priorities(batching: DynamicBatching, model: str) -> None:
    levels = batching.priority_levels
    if levels == 0:
        return
    if not 1 <= batching.default_priority_level <= levels:
        raise ModelLoadError(f"default priority level must be in range [1, {levels}] for {model}")
    if any(not 1 <= level <= levels for level in batching.priority_queue_policy):
        raise ModelLoadError(f"priority queue policy must have priority level in range [1, {levels}] for {model}")


def _check_ordering(batching: DynamicBatching, model: str) -> None:
    if not batching.preserve_ordering:
        return
    if batching.priority_levels > 1:
        raise ModelLoadError(f"Only one priority level is allowed when 'preserve_ordering' is true for {model}")
    for policy in (batching.default_queue_policy, *batching.priority_queue_policy.values()):
        if policy.timeout_action is TimeoutAction.DELAY and policy.default_timeout_microseconds:
            raise ModelLoadError(
                f"Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for {model}"
            )


def sequence_batching(message: Any) -> SequenceBatching | None:
    """The block, None without one. Without a strategy it is `direct`, without an idle time it is 1 s."""
    if not message.HasField("sequence_batching"):
        return None
    block = message.sequence_batching
    return SequenceBatching(
        strategy=_oldest(block.oldest, message) if block.HasField("oldest") else _direct(block.direct, message.name),
        max_sequence_idle_microseconds=block.max_sequence_idle_microseconds or _SEQUENCE_IDLE_DEFAULT_US,
        controls=_controls(block.control_input, message.name),
        states=_states(block.state, message.name),
    )


def _direct(direct: Any, model: str) -> DirectStrategy:
    if not 0.0 <= direct.minimum_slot_utilization <= 1.0:
        raise ModelLoadError(f"sequence batching minimum slot utilization must be in range (0.0, 1.0] for {model}")
    return DirectStrategy(
        max_queue_delay_microseconds=direct.max_queue_delay_microseconds,
        minimum_slot_utilization=direct.minimum_slot_utilization,
    )


def _oldest(oldest: Any, message: Any) -> OldestStrategy:
    """Triton takes as many candidates as there are batch rows where the field is not positive."""
    sizes = tuple(oldest.preferred_batch_size)
    _check_preferred(sizes, "sequence batching preferred batch size", max_size=message.max_batch_size, message=message)
    candidates = oldest.max_candidate_sequences
    return OldestStrategy(
        max_candidate_sequences=candidates if candidates > 0 else max(1, message.max_batch_size),
        preferred_batch_size=sizes,
        max_queue_delay_microseconds=oldest.max_queue_delay_microseconds,
        preserve_ordering=oldest.preserve_ordering,
    )


def _controls(entries: Iterable[Any], model: str) -> tuple[ControlInput, ...]:
    controls: list[ControlInput] = []
    for entry in entries:
        if not entry.name:
            raise ModelLoadError(f"sequence batching control tensor must have a name for {model}")
        if any(control.name == entry.name for control in controls):
            raise ModelLoadError(
                f"sequence batching control tensor '{entry.name}' is specified for multiple control kinds for {model}"
            )
        if len(entry.control) != 1:
            raise ModelLoadError(
                f"'sequence_batching.control_input.control' with {len(entry.control)} entries for '{entry.name}' "
                "is not supported by the local runtime"
            )
        control = _control(entry.name, entry.control[0], model)
        if any(other.kind is control.kind for other in controls):
            raise ModelLoadError(f"sequence batching specifies multiple {control.kind} tensors for {model}")
        controls.append(control)
    return tuple(controls)


def _control(name: str, control: Any, model: str) -> ControlInput:
    kind = ControlKind(word(model_config_pb2.ModelSequenceBatching.Control.Kind, control.kind))
    given = {field: tuple(getattr(control, field)) for field in _FALSE_TRUE if getattr(control, field)}
    if kind is ControlKind.CORRID:
        return ControlInput(name=name, kind=kind, datatype=_corrid_type(control, model, has_values=bool(given)))
    if not given:
        raise ModelLoadError(
            "sequence batching must specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' "
            f"for {kind} for {model}"
        )
    if len(given) > 1:
        raise ModelLoadError(
            "sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and "
            f"'bool_false_true' for {kind} for {model}"
        )
    ((field, values),) = given.items()
    if len(values) != 2:  # noqa: PLR2004 - the value for false and the value for true
        raise ModelLoadError(f"sequence batching control '{field}' must have exactly 2 entries for {kind} for {model}")
    return ControlInput(name=name, kind=kind, datatype=_FALSE_TRUE[field], false_true=(values[0], values[1]))


def _corrid_type(control: Any, model: str, *, has_values: bool) -> str:
    if has_values:
        raise ModelLoadError(
            "sequence batching must not specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' "
            f"for {ControlKind.CORRID} for {model}"
        )
    name = datatype(control.data_type)
    if name not in _CORRID_TYPES:
        raise ModelLoadError(
            f"unexpected data type for control {ControlKind.CORRID} for {model}. Allowed data types are TYPE_UINT64, "
            "TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING"
        )
    return name


def _states(states: Sequence[Any], model: str) -> tuple[SequenceState, ...]:
    for field in ("input_name", "output_name"):
        names = [getattr(state, field) for state in states]
        if "" in names:
            raise ModelLoadError(f"sequence batching state must specify '{field}' for {model}")
        for name in names:
            if names.count(name) > 1:
                raise ModelLoadError(f"State {field.replace('_', ' ')} '{name}' specified more than once.")
    return tuple(_state(state, model) for state in states)


def _state(state: Any, model: str) -> SequenceState:
    """The first step's value has the state's dims with 1 for the free ones, unless `initial_state` says otherwise."""
    name, dims = state.input_name, tuple(state.dims)
    state_type = datatype(state.data_type)
    if state_type not in NUMPY_TYPES:
        raise ModelLoadError(f"state '{name}' of {model} must specify a supported 'data_type'")
    if not dims or any(dim < 1 and dim != -1 for dim in dims):
        raise ModelLoadError(f"state '{name}' of {model} must specify 'dims' >= 1, or -1 for a variable-size dimension")
    if len(state.initial_state) > 1:
        raise ModelLoadError(
            f"initial_state field for state input '{name}' must contain exactly one or zero element. "
            f"Found '{len(state.initial_state)}' elements."
        )
    for initial in state.initial_state:
        _check_initial(initial, state, state_type)
    return SequenceState(
        input_name=name,
        output_name=state.output_name,
        datatype=state_type,
        dims=dims,
        initial_dims=tuple(state.initial_state[0].dims)
        if state.initial_state
        else tuple(1 if dim == -1 else dim for dim in dims),
        initial_file=state.initial_state[0].data_file if state.initial_state else "",
    )


def _check_initial(initial: Any, state: Any, state_type: str) -> None:
    name = state.input_name
    if datatype(initial.data_type) != state_type:
        raise ModelLoadError(
            f"The data type used for 'initial_state' field of state '{name}' does not match the state data type."
        )
    if not initial.name:
        raise ModelLoadError(f"Field 'name' must be set when using initial_state for state input '{name}'.")
    if len(initial.dims) != len(state.dims):
        raise ModelLoadError(
            f"Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state input "
            f"'{name}'. {len(initial.dims)} != {len(state.dims)}"
        )
    for have, want in zip(initial.dims, state.dims, strict=True):
        if have < 0:
            raise ModelLoadError(f"'initial_state' field for state input name '{name}' contains variable dimensions.")
        if want not in (-1, have):
            raise ModelLoadError(
                f"'initial_state' dim for input name '{name}' doesn't match 'state' dim description. {have} != {want}"
            )
    if initial.WhichOneof("state_data") is None:
        raise ModelLoadError(f"initial_state setting expects state '{name}' to have state_data set")
