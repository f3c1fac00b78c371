"""From what a model returned for a batch to one outcome for each of its members, with the times that it took."""

from collections.abc import Callable, Sequence

from local_runtime.errors import InferenceError
from local_runtime.messages import Tensors
from local_runtime.repository.model_config import ModelConfig, TensorSpec
from local_runtime.scheduling import collate
from local_runtime.scheduling.execution import Executed, Outcome
from local_runtime.scheduling.stats import Compute
from local_runtime.scheduling.validation import CheckedRequest, check_outputs


def compute_between(start_ns: int, ready_ns: int, ran_ns: int, end_ns: int) -> Compute:
    """The times between four readings of one clock: batch put together, model run, outputs taken apart."""
    return Compute(
        input_us=(ready_ns - start_ns) // 1000,
        infer_us=(ran_ns - ready_ns) // 1000,
        output_us=(end_ns - ran_ns) // 1000,
    )


def isolated(
    members: Sequence[CheckedRequest],
    run: Callable[[Sequence[CheckedRequest]], Executed],
    *,
    failure: Callable[[BaseException], InferenceError],
) -> Executed:
    """Run the members together; if that raises, each alone, so that a bad one never fails its neighbours."""
    try:
        return run(members)
    except BaseException as error:  # noqa: BLE001 - a model's code may raise anything, SystemExit too
        if len(members) == 1:
            return Executed(outcomes=[failure(error)], compute=Compute())
    return one_by_one(members, run, failure=failure)


def one_by_one(
    members: Sequence[CheckedRequest],
    run: Callable[[Sequence[CheckedRequest]], Executed],
    *,
    failure: Callable[[BaseException], InferenceError],
) -> Executed:
    """Run each member alone; the times are sums."""
    parts = [isolated([member], run, failure=failure) for member in members]
    return Executed(
        outcomes=[outcome for part in parts for outcome in part.outcomes],
        compute=Compute(
            input_us=sum(part.compute.input_us for part in parts),
            infer_us=sum(part.compute.infer_us for part in parts),
            output_us=sum(part.compute.output_us for part in parts),
        ),
    )


def output_specs(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """All tensors that the model gives: its outputs, then those states that are not among them."""
    names = {spec.name for spec in config.outputs}
    states = config.sequence_batching.states if config.sequence_batching is not None else ()
    return (
        *config.outputs,
        *(
            TensorSpec(name=state.output_name, datatype=state.datatype, dims=state.dims)
            for state in states
            if state.output_name not in names
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
    """One outcome per member from the outputs of the whole batch.

    Raises InferenceError if the model broke its configuration; a wrong number of rows is every member's outcome.
    """
    checked = check_outputs(outputs, config, wanted=tuple(outputs))
    if config.max_batch_size == 0:
        return [_wanted(checked, members[0].outputs)]
    split = collate.split(checked, rows=[member.rows for member in members], model=config.name)
    return [
        outcome if isinstance(outcome, InferenceError) else _wanted(outcome, member.outputs)
        for outcome, member in zip(split, members, strict=True)
    ]


def _wanted(outcome: Tensors, names: Sequence[str]) -> Tensors:
    return outcome if len(outcome) == len(names) else {name: outcome[name] for name in names}
