"""What a typed configuration must hold beyond its scheduler blocks. Pure; every check raises ModelLoadError.

Conditions and texts that Triton has, too: triton-inference-server/core `src/model_config_utils.cc`
(ValidateModelConfig, ValidateModelIOConfig, ValidateEnsembleSchedulingConfig) and
`src/backend_model_instance.cc` (warm-up).
"""

from collections.abc import Sequence

from local_runtime.errors import ModelLoadError
from local_runtime.repository.model_config import (
    NUMPY_TYPES,
    Backend,
    InstanceKind,
    ModelConfig,
    TensorSpec,
    Warmup,
    WarmupInput,
)

_IMAGE_DIMS = 3  # NHWC and NCHW without the batch dimension


def check(config: ModelConfig) -> None:
    """All checks, in Triton's order as far as it shows."""
    if config.max_batch_size < 0:
        raise ModelLoadError(f"'max_batch_size' must be non-negative value for {config.name}")
    _check_answers(config)
    _check_ensemble(config)
    _check_tensors(config, "input", config.inputs)
    _check_tensors(config, "output", config.outputs)
    _check_backend(config)
    _check_formats(config)
    _check_groups(config)
    for warmup in config.warmups:
        _check_warmup(config, warmup)


def _check_answers(config: ModelConfig) -> None:
    if not config.has_response_cache:
        return
    if config.sequence_batching is not None:
        raise ModelLoadError(
            f"Response Cache does not currently support model {config.name} with sequence batching scheduler. "
            "Please disable the response cache."
        )
    if config.is_decoupled:
        raise ModelLoadError(
            f"Response Cache does not currently support model {config.name} with 'decoupled' transaction policy. "
            "Please disable the response cache."
        )


def _check_ensemble(config: ModelConfig) -> None:
    """What the ensemble's own file must hold; that its steps fit their models is judged when those are loaded."""
    name = config.name
    has_block = config.message.HasField("ensemble_scheduling")
    if config.backend is not Backend.ENSEMBLE:
        if has_block:
            raise ModelLoadError(f"ensemble scheduling cannot be set for model '{name}' whose platform is not ensemble")
        return
    if not has_block:
        raise ModelLoadError(f"ensemble scheduling must be set for ensemble {name} whose platform is ensemble")
    if config.message.instance_group:
        raise ModelLoadError(f"instance group should not be specified for ensemble '{name}'")
    if config.message.HasField("optimization"):
        raise ModelLoadError(f"optimization should not be specified for ensemble '{name}'")
    if config.message.model_warmup:
        raise ModelLoadError(f"model_warmup can not be specified for ensemble '{name}'")
    _check_steps(config)


def _check_steps(config: ModelConfig) -> None:
    name = config.name
    if not config.ensemble_steps:
        raise ModelLoadError(f"must specify 'step' for ensemble '{name}'")
    for position, step in enumerate(config.ensemble_steps):
        for field in ("model_name", "input_map", "output_map"):
            if not getattr(step, field):
                raise ModelLoadError(f"must specify '{field}' in step {position} of ensemble '{name}'")


def _check_tensors(config: ModelConfig, what: str, specs: Sequence[TensorSpec]) -> None:
    if not specs:
        raise ModelLoadError(f"model must specify at least one {what} for {config.name}")
    names = [spec.name for spec in specs]
    if "" in names:
        raise ModelLoadError(f"model {what} must specify 'name' for {config.name}")
    if len(set(names)) != len(names):
        raise ModelLoadError(f"model {what} names must be unique for {config.name}")
    for spec in specs:
        fault = _tensor_fault(spec) or _reshape_fault(spec, config)
        if fault:
            raise ModelLoadError(f"model {what} '{spec.name}' {fault} for {config.name}")


def _tensor_fault(spec: TensorSpec) -> str:
    if spec.datatype == "INVALID":
        return "must specify 'data_type'"
    if spec.datatype not in NUMPY_TYPES:
        return f"has data_type TYPE_{spec.datatype}, which is not supported by the local runtime,"
    if not spec.dims:
        return "must specify 'dims'"
    if any(dim < 1 and dim != -1 for dim in spec.dims):
        return "dimension must be integer >= 1, or -1 to indicate a variable-size dimension"
    return ""


def _reshape_fault(spec: TensorSpec, config: ModelConfig) -> str:
    """Why `reshape` does not fit `dims`; the element counts between the free dimensions must be the same."""
    if spec.reshape is None:
        return ""
    if not spec.reshape and config.max_batch_size == 0:
        return "cannot have empty reshape for non-batching model as scalar tensors are not supported"
    if any(dim < 1 and dim != -1 for dim in spec.reshape):
        return "reshape dimensions must be integer >= 1, or -1 to indicate a variable-size dimension"
    outside, inside = _counts_between_free(spec.dims), _counts_between_free(spec.reshape)
    if len(outside) > 1 and len(inside) > 1 and len(outside) != len(inside):
        return "has different number of variable-size dimensions for dims and reshape"
    if outside != inside:
        return "has different size for dims and reshape"
    return ""


def _counts_between_free(shape: Sequence[int]) -> list[int]:
    counts = [1]
    for dim in shape:
        if dim == -1:
            counts.append(1)
        else:
            counts[-1] *= dim
    return counts


def _check_backend(config: ModelConfig) -> None:
    """What only some backends can do."""
    if config.backend is not Backend.PYTHON:
        if config.is_decoupled:
            raise _unsupported(config, "model_transaction_policy.decoupled")
        # Without `batch_input` a ragged batch means something only where requests are handed over one by one.
        if any(spec.allow_ragged_batch for spec in config.inputs):
            raise _unsupported(config, "input.allow_ragged_batch")
    if config.backend is Backend.ONNXRUNTIME and any(
        spec.datatype == "BF16" for spec in (*config.inputs, *config.outputs)
    ):
        raise _unsupported(config, "data_type: TYPE_BF16")


def _unsupported(config: ModelConfig, field: str) -> ModelLoadError:
    return ModelLoadError(f"'{field}' is not supported by the local runtime for {config.backend} model {config.name}")


def _check_formats(config: ModelConfig) -> None:
    for tensor in config.message.input:
        if tensor.format != tensor.FORMAT_NONE and len(tensor.dims) != _IMAGE_DIMS:
            raise ModelLoadError(f"model input NHWC/NCHW require 3 dims for {config.name}")


def _check_groups(config: ModelConfig) -> None:
    for group in config.instance_groups:
        if group.count < 1:
            raise ModelLoadError(f"instance group count must be positive for {config.name}")
        if group.gpus and group.kind in (InstanceKind.CPU, InstanceKind.MODEL):
            raise ModelLoadError(
                f"instance group {group.name} of model {config.name} has kind {group.kind} but specifies one or "
                "more GPUs"
            )
    names = [group.name for group in config.instance_groups]
    if len(set(names)) != len(names):
        raise ModelLoadError(f"instance group names must be unique for {config.name}")


def _check_warmup(config: ModelConfig, warmup: Warmup) -> None:
    where = f"warmup sample '{warmup.name}' of {config.name}"
    if warmup.batch_size > max(1, config.max_batch_size):
        raise ModelLoadError(f"{where}: batch_size {warmup.batch_size} exceeds max_batch_size {config.max_batch_size}")
    given = {entry.name: entry for entry in warmup.inputs}
    for entry in warmup.inputs:
        _check_warmup_input(entry, where)
    for spec in config.inputs:
        if spec.name in given:
            _check_warmup_fits(given[spec.name], spec, where)
        elif not spec.is_optional:
            raise ModelLoadError(f"{where}: missing required input '{spec.name}'")
    known = {spec.name for spec in config.inputs} | _sequence_names(config)
    unknown = sorted(given.keys() - known)
    if unknown:
        raise ModelLoadError(f"{where}: unexpected inference input '{unknown[0]}'")


def _sequence_names(config: ModelConfig) -> set[str]:
    block = config.sequence_batching
    if block is None:
        return set()
    return {control.name for control in block.controls} | {state.input_name for state in block.states}


def _check_warmup_input(entry: WarmupInput, where: str) -> None:
    if any(dim < 0 for dim in entry.dims):
        raise ModelLoadError(
            f"{where}: warmup setting expects all variable-size dimensions are specified for input '{entry.name}'"
        )
    if entry.datatype not in NUMPY_TYPES:
        raise ModelLoadError(f"{where}: input '{entry.name}' must specify a supported 'data_type'")


def _check_warmup_fits(entry: WarmupInput, spec: TensorSpec, where: str) -> None:
    if entry.datatype != spec.datatype:
        raise ModelLoadError(
            f"{where}: inference input '{spec.name}' data-type is '{entry.datatype}', but the model expects "
            f"'{spec.datatype}'"
        )
    fits = len(entry.dims) == len(spec.dims) and all(
        want in (-1, have) for have, want in zip(entry.dims, spec.dims, strict=True)
    )
    if not fits:
        raise ModelLoadError(
            f"{where}: unexpected shape for input '{spec.name}'. Expected {list(spec.dims)}, got {list(entry.dims)}"
        )
