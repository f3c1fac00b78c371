"""From what a model returned for a batch to one outcome for each of its members, with the times that it took."""

import logging
from collections.abc import Callable, Sequence
from typing import TypeAlias

from local_runtime.errors import InferenceError, model_fault
from local_runtime.messages import Tensors
from local_runtime.repository.model_config import ModelConfig, TensorSpec
from local_runtime.scheduling import collate
from local_runtime.scheduling.execution import Executed, Outcome
from local_runtime.scheduling.stats import Compute
from local_runtime.scheduling.validation import CheckedRequest, check_outputs

_log = logging.getLogger(__name__)

Run: TypeAlias = Callable[[Sequence[CheckedRequest]], Executed]
Failure: TypeAlias = Callable[[BaseException], InferenceError]


def compute_between(start_ns: int, ready_ns: int, ran_ns: int, end_ns: int) -> Compute:
    """The times between four readings of one clock: batch put together, model run, outputs taken apart."""
    return Compute(
        input_us=(ready_ns - start_ns) // 1000,
        infer_us=(ran_ns - ready_ns) // 1000,
        output_us=(end_ns - ran_ns) // 1000,
    )


def executed(members: Sequence[CheckedRequest], run: Run, *, config: ModelConfig, failure: Failure) -> Executed:
    """Run the members of a model that takes tensors of a whole batch, as its configuration says.

    Sequences run together and fail together: in a batch of `direct` the slot is the row. A state with free
    dimensions cannot grow in a batch, since the members' states then differ in shape: such a batch fails, and the
    model needs max_batch_size 1. All others are `isolated`, and alone where there is no batch dimension.
    """
    if config.sequence_batching is not None:
        fault = _unequal_states(members, config)
        if fault is not None:
            return Executed(outcomes=[fault] * len(members), compute=Compute())
        return together(members, run, failure=failure)
    if config.max_batch_size == 0:
        return _one_by_one(members, run, failure=failure)
    return isolated(members, run, model=config.name, failure=failure)


def together(members: Sequence[CheckedRequest], run: Run, *, failure: Failure) -> Executed:
    """Run the members together; if that raises, all have failed."""
    try:
        return run(members)
    except BaseException as error:  # noqa: BLE001 - a model's code may raise anything, SystemExit too
        return Executed(outcomes=[failure(error)] * len(members), compute=Compute())


def isolated(members: Sequence[CheckedRequest], run: Run, *, model: str, failure: Failure) -> Executed:
    """Run the members together; if that raises, each alone, so that a bad one never fails its neighbours."""
    if len(members) == 1:
        return together(members, run, failure=failure)
    try:
        return run(members)
    except BaseException as error:  # noqa: BLE001 - a model's code may raise anything, SystemExit too
        # Members that succeed alone would hide a fault of the batch, and a batch that always fails costs twice.
        _log.warning(
            "a batch failed, its members run again one by one",
            extra={"model": model, "members": len(members), "error": failure(error).message},
        )
    return _one_by_one(members, run, failure=failure)


def _one_by_one(members: Sequence[CheckedRequest], run: Run, *, failure: Failure) -> Executed:
    """Run each member alone; the times are sums."""
    parts = [together([member], run, failure=failure) for member in members]
    return Executed(
        outcomes=[outcome for part in parts for outcome in part.outcomes],
        compute=Compute(
            input_us=sum(part.compute.input_us for part in parts),
            infer_us=sum(part.compute.infer_us for part in parts),
            output_us=sum(part.compute.output_us for part in parts),
        ),
    )


def input_specs(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """All tensors that the model is given: its inputs, then control inputs and states, in config order."""
    sequence = config.sequence_batching
    if sequence is None:
        return config.inputs
    controls = (TensorSpec(name=control.name, datatype=control.datatype, dims=(1,)) for control in sequence.controls)
    states = (TensorSpec(name=state.input_name, datatype=state.datatype, dims=state.dims) for state in sequence.states)
    return (*config.inputs, *controls, *states)


def answers(outputs: Tensors, members: Sequence[CheckedRequest], config: ModelConfig) -> list[Outcome]:
    """One outcome per member from the outputs of the whole batch, in memory of their own.

    Raises InferenceError if the model broke its configuration. A wrong number of rows does, too: nobody can tell
    whose they are, but it may have been the data of a single member that made it so.
    """
    checked = check_outputs(outputs, config, wanted=tuple(outputs))
    # A model may return what it keeps (a buffer, a constant) or was given, and work in it while callers still read.
    copied = {name: array.copy() for name, array in checked.items()}
    if config.max_batch_size == 0:
        return [_wanted(copied, members[0].outputs)]
    split = collate.split(copied, rows=[member.rows for member in members], model=config.name)
    outcomes: list[Outcome] = []
    for outcome, member in zip(split, members, strict=True):
        if isinstance(outcome, InferenceError):
            raise outcome
        outcomes.append(_wanted(outcome, member.outputs))
    return outcomes


def _unequal_states(members: Sequence[CheckedRequest], config: ModelConfig) -> InferenceError | None:
    for state in config.sequence_batching.states if config.sequence_batching is not None else ():
        shapes = sorted(
            {member.inputs[state.input_name].shape for member in members if state.input_name in member.inputs}
        )
        if len(shapes) > 1:
            return model_fault(
                config.name,
                f"cannot run sequences together whose state '{state.input_name}' has the shapes "
                f"{' and '.join(str(list(shape)) for shape in shapes)}: a state that grows needs max_batch_size 1",
            )
    return None


def _wanted(outcome: Tensors, names: Sequence[str]) -> Tensors:
    return outcome if len(outcome) == len(names) else {name: outcome[name] for name in names}
