"""Ensembles: several models as one, joined by tensor names. Each step batches with everybody's requests."""

import asyncio
import dataclasses
import graphlib
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from local_runtime.errors import InferenceError, ModelLoadError, in_ensemble
from local_runtime.messages import Array, InferAnswer, InferRequest, Tensors
from local_runtime.repository.model_config import EnsembleStep, ModelConfig, TensorSpec
from local_runtime.scheduling.validation import CheckedRequest

Infer = Callable[[InferRequest], Awaitable[InferAnswer]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EnsembleResult:
    """The ensemble's outputs and the sums of its steps' times, in microseconds."""

    outputs: Tensors
    queue_us: int
    compute_us: int


def check_steps(config: ModelConfig, models: Mapping[str, ModelConfig]) -> None:
    """Refuse an ensemble that cannot run: absent models, tensors nobody makes, types or shapes that differ.

    `models` are the configurations of the models that are served. Raises ModelLoadError.
    """
    made = {spec.name: _full(spec, config) for spec in config.inputs}
    for step in config.ensemble_steps:
        inner = models.get(step.model_name)
        if inner is None:
            raise ModelLoadError(f"ensemble '{config.name}' depends on '{step.model_name}' which has no loaded version")
        _check_outputs(config, step, inner, made)
    for step in config.ensemble_steps:
        _check_inputs(config, step, models[step.model_name], made)
    for spec in config.outputs:
        if spec.name not in made:
            raise ModelLoadError(f"ensemble '{config.name}': no step makes output '{spec.name}'")
        _check_meets(config, made[spec.name], _full(spec, config))
    _check_acyclic(config)


def _full(spec: TensorSpec, config: ModelConfig) -> TensorSpec:
    """The spec with its batch dimension among the dims, so that models with and without one compare."""
    return dataclasses.replace(spec, dims=config.full_shape(spec))


def _check_outputs(config: ModelConfig, step: EnsembleStep, inner: ModelConfig, made: dict[str, TensorSpec]) -> None:
    outputs = {spec.name: spec for spec in inner.outputs}
    for output, tensor in step.output_map.items():
        if output not in outputs:
            raise ModelLoadError(
                f"ensemble '{config.name}': output_map names '{output}', which '{inner.name}' does not have"
            )
        if tensor in made:
            raise ModelLoadError(f"ensemble '{config.name}': tensor '{tensor}' is made more than once")
        made[tensor] = dataclasses.replace(_full(outputs[output], inner), name=tensor)


def _check_inputs(config: ModelConfig, step: EnsembleStep, inner: ModelConfig, made: Mapping[str, TensorSpec]) -> None:
    inputs = {spec.name: spec for spec in inner.inputs}
    required = {spec.name for spec in inner.inputs if not spec.is_optional}
    faults = [
        *(f"'{name}' is missing" for name in sorted(required - step.input_map.keys())),
        *(f"'{name}' is none of them" for name in sorted(step.input_map.keys() - inputs.keys())),
    ]
    if faults:
        raise ModelLoadError(
            f"ensemble '{config.name}': input_map of '{inner.name}' must name exactly its inputs {sorted(inputs)} "
            f"(optional ones may be left out): {', '.join(faults)}"
        )
    if inner.is_decoupled:
        raise ModelLoadError(f"ensemble '{config.name}': '{inner.name}' is decoupled, which is not supported here")
    for name, tensor in step.input_map.items():
        if tensor not in made:
            raise ModelLoadError(f"ensemble '{config.name}': nothing makes tensor '{tensor}'")
        _check_meets(config, made[tensor], _full(inputs[name], inner))
    if inner.max_batch_size < config.max_batch_size:
        raise ModelLoadError(
            f"ensemble '{config.name}' allows maximum batch size {config.max_batch_size}, but it contains "
            f"model '{inner.name}' which only allows maximum batch size to be {inner.max_batch_size}"
        )


def _check_meets(config: ModelConfig, made: TensorSpec, wanted: TensorSpec) -> None:
    if made.datatype != wanted.datatype:
        raise ModelLoadError(
            f"ensemble '{config.name}': tensor '{made.name}' is {made.datatype}, but '{wanted.name}' is "
            f"{wanted.datatype}"
        )
    agree = len(made.dims) == len(wanted.dims) and all(
        -1 in pair or pair[0] == pair[1] for pair in zip(made.dims, wanted.dims, strict=True)
    )
    if not agree:
        raise ModelLoadError(
            f"ensemble '{config.name}': tensor '{made.name}' has dims {list(made.dims)}, but '{wanted.name}' "
            f"has {list(wanted.dims)}"
        )


def _check_acyclic(config: ModelConfig) -> None:
    maker = {tensor: number for number, step in enumerate(config.ensemble_steps) for tensor in step.output_map.values()}
    graph = {
        number: {maker[tensor] for tensor in step.input_map.values() if tensor in maker}
        for number, step in enumerate(config.ensemble_steps)
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        raise ModelLoadError(f"ensemble '{config.name}': steps wait for each other in a circle") from error


async def run(request: CheckedRequest, *, config: ModelConfig, infer: Infer) -> EnsembleResult:
    """Run every step as soon as its inputs are there.

    Args:
        request: the ensemble's checked request.
        config: the ensemble's configuration, which has passed `check_steps`.
        infer: answers a request to a composing model.

    The first failing step ends the others and is raised with its own code, as the ensemble's error.
    """
    execution = _Execution(request=request, config=config, infer=infer)
    try:
        await execution.run()
    except InferenceError as error:
        raise in_ensemble(config.name, error) from error
    return execution.result()


def _needed_steps(config: ModelConfig, outputs: Sequence[str]) -> list[EnsembleStep]:
    """The steps that lead to the wanted outputs; Triton runs no others, either (core `src/ensemble_scheduler`)."""
    maker = {tensor: step for step in config.ensemble_steps for tensor in step.output_map.values()}
    needed: list[EnsembleStep] = []
    tensors = list(outputs)
    while tensors:
        step = maker.get(tensors.pop())
        if step is not None and step not in needed:
            needed.append(step)
            tensors.extend(step.input_map.values())
    return [step for step in config.ensemble_steps if step in needed]


class _Execution:
    """The tensors and sums of one request on its way through the steps."""

    def __init__(self, *, request: CheckedRequest, config: ModelConfig, infer: Infer) -> None:
        self._request = request
        self._config = config
        self._infer = infer
        self._tensors: dict[str, Array] = dict(request.inputs)
        # Optional inputs that the caller left out: no step waits for them, and each is told by its own model.
        self._absent = {spec.name for spec in config.inputs if spec.name not in request.inputs}
        self._waiting = _needed_steps(config, request.outputs)
        self._queue_us = 0
        self._compute_us = 0

    async def run(self) -> None:
        """Run the steps; a chain runs in the caller's task, branches get tasks of their own."""
        try:
            async with asyncio.TaskGroup() as group:
                await self._run_ready(group)
        except* InferenceError as errors:
            first = errors.exceptions[0]
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            failure = first
        else:
            return
        raise failure

    async def _run_ready(self, group: asyncio.TaskGroup) -> None:
        while ready := self._take_ready():
            for step in ready[1:]:
                group.create_task(self._run_branch(step, group))
            await self._run_step(ready[0])

    async def _run_branch(self, step: EnsembleStep, group: asyncio.TaskGroup) -> None:
        await self._run_step(step)
        await self._run_ready(group)

    def _take_ready(self) -> list[EnsembleStep]:
        there = self._tensors.keys() | self._absent
        ready = [step for step in self._waiting if there >= set(step.input_map.values())]
        for step in ready:
            self._waiting.remove(step)
        return ready

    async def _run_step(self, step: EnsembleStep) -> None:
        # Sequence, priority, timeout and parameters are every step's, as in Triton.
        request = msgspec.structs.replace(
            self._request.source,
            model=step.model_name,
            version=step.model_version,
            inputs={name: self._tensors[tensor] for name, tensor in step.input_map.items() if tensor in self._tensors},
            outputs=tuple(step.output_map),
            timeout_us=None,
        )
        answer = await self._infer(request)
        for output, tensor in step.output_map.items():
            self._tensors[tensor] = answer.outputs[output]
        self._queue_us += answer.queue_us
        self._compute_us += answer.compute_us

    def result(self) -> EnsembleResult:
        """The wanted outputs, once all steps have run."""
        # An output may be an input passed on: absent where that was left out, and never the caller's own memory.
        given = self._request.inputs
        outputs = {
            name: self._tensors[name].copy() if name in given else self._tensors[name]
            for name in self._request.outputs
            if name in self._tensors
        }
        return EnsembleResult(outputs=outputs, queue_us=self._queue_us, compute_us=self._compute_us)
