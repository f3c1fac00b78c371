"""TorchScript files (`model.pt`) and programs of `torch.export` (`model.pt2`), run as Triton's PyTorch backend does.

Tensors find their argument by Triton's three conventions (server docs, model_configuration.md, "Special Conventions
for PyTorch Backend"): the names are arguments of `forward`; or they end in `__<index>`, its position; or else the
order in the config is the order of the arguments.
"""

import dataclasses
import re
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from local_runtime.errors import ErrorCode, InferenceError, ModelLoadError, model_fault
from local_runtime.executors.faults import text_of
from local_runtime.executors.outcomes import answers, compute_between, executed, input_specs
from local_runtime.messages import Array, Tensors
from local_runtime.repository import torch_files
from local_runtime.repository.completion import Placement
from local_runtime.repository.model_config import InstanceKind, ModelConfig, TensorSpec
from local_runtime.scheduling import collate
from local_runtime.scheduling.execution import Executed
from local_runtime.scheduling.validation import CheckedRequest, output_specs

_INDEXED = re.compile(r".+__(\d+)")
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Program:
    """What a file holds.

    `call` is to be called with `arguments`, of which `keywords` go by keyword only, and `defaults` may be left out.
    `keys` are those of the dict that it returns; None if it returns no dict, or its file does not tell.
    """

    call: Any
    arguments: tuple[str, ...]
    keywords: frozenset[str] = frozenset()
    defaults: frozenset[str] = frozenset()
    keys: frozenset[str] | None = None


class TorchModel:
    """One instance. To be used by the thread that made it, whose CUDA stream it is."""

    def __init__(self, *, config: ModelConfig, file: Path, placement: Placement) -> None:
        torch = torch_files.import_torch()

        self._torch: Any = torch
        self._config = config
        _refuse_strings(config)
        self._device = _Device(torch, placement, optimization=config.message.optimization)
        self._program = self._load(file)
        self._inputs = _argument_order(input_specs(config), self._program)
        self._outputs = _output_order(output_specs(config), self._program.keys)
        # The parameter of Triton's PyTorch backend: true spares models of many shapes a compilation per shape.
        self._is_optimized = config.parameters.get("DISABLE_OPTIMIZED_EXECUTION", "false").lower() != "true"

    def execute(self, members: Sequence[CheckedRequest]) -> Executed:
        """Run the members as one batch; see `outcomes.executed` for what becomes of a failure."""
        return executed(members, self._run, config=self._config, failure=_execute_failure)

    def close(self) -> None:
        """Let go of the weights."""
        self._program = _Program(call=None, arguments=())

    def _run(self, members: Sequence[CheckedRequest]) -> Executed:
        start_ns = time.perf_counter_ns()
        batch = self._device.batch([member.inputs for member in members])
        ready_ns = time.perf_counter_ns()
        with self._torch.inference_mode(), self._torch.jit.optimized_execution(self._is_optimized):
            returned = self._call(batch)
        self._device.wait()
        ran_ns = time.perf_counter_ns()
        outputs = self._device.host(self._named(returned))
        outcomes = answers(outputs, members, self._config)
        return Executed(outcomes=outcomes, compute=compute_between(start_ns, ready_ns, ran_ns, time.perf_counter_ns()))

    def _call(self, batch: Mapping[str, Any]) -> Any:
        program = self._program
        if not program.keywords:
            return program.call(*_arguments(self._inputs, batch))
        named = dict(zip(program.arguments, _arguments(self._inputs, batch), strict=False))
        positional = [value for name, value in named.items() if name not in program.keywords]
        return program.call(*positional, **{name: named[name] for name in named.keys() & program.keywords})

    def _named(self, returned: Any) -> dict[str, Any]:
        """The returned tensors by output name: from a dict by key, else by position."""
        if isinstance(returned, dict):
            return {spec.name: _returned(returned, spec.name, spec, self._config.name) for _, spec in self._outputs}
        values = tuple(returned) if isinstance(returned, tuple | list) else (returned,)
        by_position = dict(enumerate(values))
        return {
            spec.name: _returned(by_position, position, spec, self._config.name) for position, spec in self._outputs
        }

    def _load(self, file: Path) -> _Program:
        if not file.is_file():
            raise ModelLoadError(f"no such file: {file.parent.name}/{file.name}")
        load = self._load_exported if file.suffix == ".pt2" else self._load_script
        try:
            program = load(file)
        except Exception as error:
            raise ModelLoadError(f"failed to load model '{self._config.name}': {text_of(error)}") from error
        self._device.finish_load()
        return program

    def _load_script(self, file: Path) -> _Program:
        # Triton's file format for PyTorch is TorchScript; that torch would rather have another is no news here.
        warnings.filterwarnings("ignore", message="`torch.jit.load` is deprecated", category=DeprecationWarning)
        module = self._torch.jit.load(str(file), map_location=self._device.device).eval()
        arguments = module.forward.schema.arguments[1:]
        return _Program(
            call=module,
            arguments=tuple(argument.name for argument in arguments),
            defaults=frozenset(argument.name for argument in arguments if argument.has_default_value()),
        )

    def _load_exported(self, file: Path) -> _Program:
        from torch.export import passes  # noqa: PLC0415 - as torch itself

        exported = torch_files.load_exported(file)
        arguments = torch_files.arguments(exported)
        returned = torch_files.returned(exported)
        if self._device.is_gpu:
            exported = passes.move_to_device_pass(exported, self._device.device)
        return _Program(
            call=exported.module(),
            arguments=arguments.names,
            keywords=arguments.keywords,
            keys=frozenset(returned) if isinstance(returned, dict) else None,
        )


class _Device:
    """Where a model runs, and how its tensors get there and back.

    Args:
        torch: the package.
        placement: which device.
        optimization: the block of the model's config; it may forbid pinned memory.
    """

    def __init__(self, torch: Any, placement: Placement, *, optimization: Any) -> None:
        self._torch = torch
        self._pins_inputs = _is_enabled(optimization, "input_pinned_memory")
        self._pins_outputs = _is_enabled(optimization, "output_pinned_memory")
        self.is_gpu = placement.kind is InstanceKind.GPU
        self.device = torch.device(f"cuda:{placement.device_id}" if self.is_gpu else "cpu")
        self._stream: Any = None
        if self.is_gpu:
            # Settings of this thread: all that it does from now on is on a stream of its own.
            torch.cuda.set_device(self.device)
            self._stream = torch.cuda.Stream(self.device)
            torch.cuda.set_stream(self._stream)

    def finish_load(self) -> None:
        """Wait until the weights are on the GPU: they may have been copied on any stream."""
        if self.is_gpu:
            self._torch.cuda.synchronize(self.device)

    def batch(self, members: Sequence[Tensors]) -> Mapping[str, Any]:
        """All members' rows as tensors on the device, always new memory: a model may work in place."""
        if not self.is_gpu:
            return {name: self._tensor(array) for name, array in collate.concatenate(members).items()}
        return {name: self._uploaded([member[name] for member in members]) for name in members[0]}

    def wait(self) -> None:
        """Until the device has done what was asked of it."""
        if self._stream is not None:
            self._stream.synchronize()

    def host(self, tensors: Mapping[str, Any]) -> Tensors:
        """The values in CPU memory."""
        if self.is_gpu:
            tensors = {name: self._download(tensor) for name, tensor in tensors.items()}
            self.wait()
        return {name: self._array(tensor) for name, tensor in tensors.items()}

    def _tensor(self, array: Array) -> Any:
        if array.dtype == _BFLOAT16:
            return self._torch.from_numpy(array.view(np.int16)).view(self._torch.bfloat16)
        return self._torch.from_numpy(array)

    def _array(self, tensor: Any) -> Array:
        if tensor.dtype == self._torch.bfloat16:
            bits: Array = tensor.view(self._torch.int16).numpy(force=True)
            return bits.view(_BFLOAT16)
        array: Array = tensor.numpy(force=True)
        return array

    def _uploaded(self, arrays: Sequence[Array]) -> Any:
        """One copy into new memory; if that is pinned, the GPU fetches it while the next input is put together."""
        rows = sum(len(array) for array in arrays) if arrays[0].ndim else 0
        shape = (rows, *arrays[0].shape[1:]) if len(arrays) > 1 else arrays[0].shape
        one = np.empty(1, arrays[0].dtype)
        here = self._torch.empty(shape, dtype=self._tensor(one).dtype, pin_memory=self._pins_inputs)
        if len(arrays) > 1:
            np.concatenate(arrays, out=self._array(here))
        else:
            np.copyto(self._array(here), arrays[0])
        return here.to(self.device, non_blocking=True)

    def _download(self, tensor: Any) -> Any:
        if tensor.device.type == "cpu":
            return tensor
        here = self._torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._pins_outputs)
        return here.copy_(tensor, non_blocking=True)


def _is_enabled(optimization: Any, buffer: str) -> bool:
    """Whether `input_pinned_memory` or `output_pinned_memory` is used: unless the config says no, as in Triton."""
    return not optimization.HasField(buffer) or bool(getattr(optimization, buffer).enable)


def _arguments(inputs: Sequence[tuple[int, TensorSpec]], batch: Mapping[str, Any]) -> list[Any]:
    """The arguments in order; an optional input that is absent is None, and left out at the end."""
    values = [batch.get(spec.name) for _, spec in inputs]
    while values and values[-1] is None:
        values.pop()
    return values


def _returned(values: Mapping[Any, Any], key: Any, spec: TensorSpec, model: str) -> Any:
    if key not in values:
        raise model_fault(model, f"returned {len(values)} outputs, none for '{spec.name}'")
    return values[key]


def _execute_failure(error: BaseException) -> InferenceError:
    if isinstance(error, InferenceError):
        return error
    return InferenceError(ErrorCode.INTERNAL, f"PyTorch execute failure: {text_of(error)}")


def _refuse_strings(config: ModelConfig) -> None:
    for spec in (*input_specs(config), *output_specs(config)):
        if spec.datatype == "BYTES":
            raise ModelLoadError(f"TYPE_STRING of '{spec.name}' is not supported for PyTorch models")


def _argument_order(specs: Sequence[TensorSpec], program: _Program) -> list[tuple[int, TensorSpec]]:
    """The inputs with the position of their argument, in that order; see the module for how it is found."""
    arguments = program.arguments
    names = [spec.name for spec in specs]
    if set(names) <= set(arguments):
        positioned = [(arguments.index(spec.name), spec) for spec in specs]
    elif (indexes := _indexes(specs)) is not None:
        positioned = list(zip(indexes, specs, strict=True))
    else:
        positioned = list(enumerate(specs))
    positioned.sort(key=lambda pair: pair[0])
    positions = [position for position, _ in positioned]
    _check_fit(names, positions, program)
    if positions != list(range(len(positions))):
        raise ModelLoadError(f"input positions must be 0, 1, ... without gap or repetition, got {positions}")
    return positioned


def _check_fit(names: Sequence[str], positions: Sequence[int], program: _Program) -> None:
    """Every input needs an argument, and every argument without a default needs an input."""
    arguments = program.arguments
    faults = [
        f"nothing is given for '{name}'"
        for position, name in enumerate(arguments)
        if position not in positions and name not in program.defaults
    ]
    if any(position >= len(arguments) for position in positions):
        faults.append(f"there is no argument {max(positions)}, counted from 0")
    if faults:
        raise ModelLoadError(
            f"the inputs of the config {list(names)} do not fit the arguments of forward {list(arguments)}: "
            + ", ".join(faults)
        )


def _output_order(specs: Sequence[TensorSpec], keys: frozenset[str] | None) -> list[tuple[int, TensorSpec]]:
    """The outputs with their position in what `forward` returns: their index if all have one, else config order."""
    if keys is not None:
        absent = [spec.name for spec in specs if spec.name not in keys]
        if absent:
            raise ModelLoadError(f"forward returns a dict with the keys {sorted(keys, key=str)}, without {absent}")
        return list(enumerate(specs))
    indexes = _indexes(specs)
    positions = list(range(len(specs))) if indexes is None else indexes
    if len(set(positions)) != len(positions):
        raise ModelLoadError(f"output positions must be without repetition, got {sorted(positions)}")
    return list(zip(positions, specs, strict=True))


def _indexes(specs: Sequence[TensorSpec]) -> list[int] | None:
    matches = [_INDEXED.fullmatch(spec.name) for spec in specs]
    return [int(match[1]) for match in matches if match is not None] if all(matches) else None
