"""What a `config.pbtxt` leaves out, as far as the model's own file tells it. Blocking; imports what reads the file.

- ONNX files and `torch.export` files (`model.pt2`) tell names, datatypes and shapes of all tensors. Those of the
  latter are the arguments of `forward` and the keys of the dict that it returns; other results have only an order.
- TorchScript keeps only the number and names of its tensors when it is saved, whether traced or scripted. Such a
  file is completed from a `config.pbtxt` saved inside it: `torch.jit.save(module, file, _extra_files={"config.pbtxt":
  text})`.
- A Python model tells what its static method `auto_complete_config` adds, with a complete config, too; running it is
  the executors' business, so the caller brings that.

As in Triton (onnxruntime_backend `src/onnxruntime.cc`), a model whose tensors all have a free first dimension
batches up to 4 rows dynamically unless its config says otherwise.
"""

import dataclasses
import importlib
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from tritonclient.grpc import model_config_pb2

from local_runtime.errors import ModelLoadError
from local_runtime.repository import parsing, torch_files
from local_runtime.repository.config_words import MODEL_FILES, ONNX_DATATYPES, config_word, default_file
from local_runtime.repository.model_config import NUMPY_TYPES, Backend

_DEFAULT_MAX_BATCH_SIZE = 4  # Triton's --backend-config=default-max-batch-size
_EMBEDDED = "config.pbtxt"
_COMPLETES = b"auto_complete_config"

# Runs that method of a model.py on a `ModelConfig` message and gives back the completed one, or ModelLoadError.
CompletePython: TypeAlias = Callable[[Path, Any], Any]
# torch names its types as numpy does.
_TORCH_DATATYPES: Mapping[str, str] = MappingProxyType(
    {f"torch.{np.dtype(numpy_type).name}": name for name, numpy_type in NUMPY_TYPES.items() if name != "BYTES"}
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    """A tensor as the file tells it: full shape with -1 for free dimensions, `datatype` in the protocol's words."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Signature:
    inputs: Sequence[_Tensor]
    outputs: Sequence[_Tensor]


def completed(message: Any, version_folder: Path, complete_python: CompletePython | None = None) -> Any:
    """The `ModelConfig` message (a copy) with backend, file name, inputs and outputs filled in where they lack.

    Raises ModelLoadError where inputs or outputs lack and the model's file does not tell them.
    """
    own = model_config_pb2.ModelConfig()
    own.CopyFrom(message)
    own.name = own.name or version_folder.parent.name
    _complete_backend(own, version_folder)
    backend = parsing.backend_of(own)
    if backend is Backend.PYTHON:
        own = _completed_python(own, version_folder, complete_python)
    if (own.input and own.output) or backend not in (Backend.PYTORCH, Backend.ONNXRUNTIME, Backend.PYTHON):
        return own
    file = version_folder / (own.default_model_filename or default_file(backend))
    if not file.is_file():
        return own  # what is wrong then is not the config
    where = f"{version_folder.parent.name}/{version_folder.name}/{file.name}"
    if backend is Backend.PYTHON:
        raise ModelLoadError(f"{where} does not tell its inputs and outputs: a config.pbtxt must")
    if backend is Backend.ONNXRUNTIME:
        _fill(own, _onnx_signature(file, where), where)
    elif file.suffix == ".pt2":
        _fill(own, _exported_signature(file, where), where)
    else:
        _fill_from_torchscript(own, file, where)
    return own


def _completed_python(message: Any, version_folder: Path, complete: CompletePython | None) -> Any:
    file = version_folder / (message.default_model_filename or default_file(Backend.PYTHON))
    if complete is None or not file.is_file() or _COMPLETES not in file.read_bytes():
        return message
    return complete(file, message)


def _complete_backend(message: Any, version_folder: Path) -> None:
    there = [name for name in MODEL_FILES if (version_folder / name).is_file()]
    named = message.default_model_filename
    backend = parsing.backend_of(message)
    if backend is None:
        backend = MODEL_FILES.get(named or next(iter(there), ""))
        message.backend = backend or ""
    if backend is Backend.PYTORCH and not named and "model.pt" not in there and "model.pt2" in there:
        message.default_model_filename = "model.pt2"


def _fill(message: Any, signature: _Signature, where: str) -> None:
    can_batch = all(tensor.shape[:1] == (-1,) for tensor in (*signature.inputs, *signature.outputs))
    if message.max_batch_size > 0 and not can_batch:
        raise ModelLoadError(f"{where} does not support batching while non-zero max_batch_size is specified")
    if can_batch and not message.input and not message.output and message.max_batch_size == 0:
        message.max_batch_size = _DEFAULT_MAX_BATCH_SIZE
    if message.max_batch_size > 1 and message.WhichOneof("scheduling_choice") is None:
        message.dynamic_batching.SetInParent()
    for tensors, field in ((signature.inputs, message.input), (signature.outputs, message.output)):
        if not field:
            for tensor in tensors:
                _add(field, tensor, is_batched=message.max_batch_size > 0)


def _add(field: Any, tensor: _Tensor, *, is_batched: bool) -> None:
    added = field.add(name=tensor.name, data_type=config_word(tensor.datatype))
    dims = tensor.shape[1:] if is_batched else tensor.shape
    added.dims.extend(dims or (1,))
    if not dims:
        added.reshape.SetInParent()


def _onnx_signature(file: Path, where: str) -> _Signature:
    try:
        onnxruntime: Any = importlib.import_module("onnxruntime")
    except ImportError as error:
        raise ModelLoadError(f"{where} cannot complete its config: onnxruntime is not installed") from error
    try:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors: what its optimizer thinks of a sound file is no news
        session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exception classes share no base but this one
        raise ModelLoadError(f"failed to read {where}: {error}") from error
    return _Signature(
        inputs=[_onnx_tensor(tensor, where) for tensor in session.get_inputs()],
        outputs=[_onnx_tensor(tensor, where) for tensor in session.get_outputs()],
    )


def _onnx_tensor(tensor: Any, where: str) -> _Tensor:
    """`type` is written like `tensor(float)`; a dimension is a number, a symbol or None."""
    datatype = ONNX_DATATYPES.get(tensor.type)
    if datatype is None:
        raise ModelLoadError(f"{where}: '{tensor.name}' is a {tensor.type}, which no config can describe")
    shape = tuple(dim if isinstance(dim, int) and dim >= 0 else -1 for dim in tensor.shape)
    return _Tensor(name=tensor.name, datatype=datatype, shape=shape)


def _exported_signature(file: Path, where: str) -> _Signature:
    try:
        program = torch_files.load_exported(file)
        arguments = torch_files.arguments(program).names
        returned = torch_files.returned(program)
    except Exception as error:  # whatever is wrong in a foreign file, it is the reason why it cannot be served
        raise ModelLoadError(f"failed to read {where}: {error}") from error
    made = {node.name: node.meta.get("val") for node in program.graph.nodes}
    signature = program.graph_signature
    outputs = dict(enumerate(signature.user_outputs))
    return _Signature(
        inputs=[
            _exported_tensor(name, made.get(node), where)
            for name, node in zip(arguments, signature.user_inputs, strict=True)
        ],
        outputs=[
            _exported_tensor(name, made.get(outputs[place]) if isinstance(place, int) else None, where)
            for name, place in _result_names(returned)
        ],
    )


def _result_names(returned: Any) -> list[tuple[Any, Any]]:
    """What `forward` returns by name: a dict's keys, else what Triton calls a PyTorch model's results."""
    if isinstance(returned, dict):
        return list(returned.items())
    values = returned if isinstance(returned, tuple | list) else (returned,)
    return [(f"OUTPUT__{position}", value) for position, value in enumerate(values)]


def _exported_tensor(name: Any, value: Any, where: str) -> _Tensor:
    datatype = _TORCH_DATATYPES.get(str(getattr(value, "dtype", "")))
    if datatype is None or not isinstance(name, str):
        raise ModelLoadError(f"{where}: {name!r} is not a tensor that a config can describe")
    shape = tuple(dim if isinstance(dim, int) else -1 for dim in value.shape)
    return _Tensor(name=name, datatype=datatype, shape=shape)


def _fill_from_torchscript(message: Any, file: Path, where: str) -> None:
    """From the config inside the file: what lacks of inputs and outputs; what the message lacks if it has neither."""
    torch = torch_files.import_torch()
    extra = {_EMBEDDED: ""}
    try:
        with warnings.catch_warnings():
            # Newer versions of torch advise against TorchScript; it is what lies in the repository.
            warnings.simplefilter("ignore", DeprecationWarning)
            module = torch.jit.load(str(file), map_location="cpu", _extra_files=extra)
    except (RuntimeError, ValueError) as error:
        raise ModelLoadError(f"failed to read {where}: {error}") from error
    if not extra[_EMBEDDED]:
        raise ModelLoadError(_what_torchscript_lacks(module, where))
    text = extra[_EMBEDDED]
    embedded = parsing.read_text(text.decode() if isinstance(text, bytes) else text, folder_name=where)
    embedded.ClearField("name")  # the file may have been copied
    if not message.input and not message.output:
        for field, _ in message.ListFields():
            embedded.ClearField(field.name)
        message.MergeFrom(embedded)
        return
    for field, found in ((message.input, embedded.input), (message.output, embedded.output)):
        if not field:
            field.extend(found)


def _what_torchscript_lacks(module: Any, where: str) -> str:
    schema = module.forward.schema
    names = [argument.name for argument in itertools.islice(schema.arguments, 1, None)]
    return (
        f"{where} takes {len(names)} inputs ({', '.join(names)}), but TorchScript does not keep their datatypes and "
        "shapes: write a config.pbtxt, or save one inside the file (_extra_files of torch.jit.save)"
    )
