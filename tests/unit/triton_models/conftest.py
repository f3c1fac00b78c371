"""The model repository under test: built once, its Python models loaded with a stand-in for Triton's module."""

import importlib.util
import json
import os
import shutil
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from google.protobuf import json_format, text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from triton_models import build

os.environ["HF_HUB_OFFLINE"] = "1"


@dataclass
class Tensor:
    label: str
    array: np.ndarray

    def name(self) -> str:
        return self.label

    def as_numpy(self) -> np.ndarray:
        return self.array


class TritonError(Exception):
    INVALID_ARG = "INVALID_ARG"
    INTERNAL = "INTERNAL"

    def __init__(self, message: str, code: str = INTERNAL) -> None:
        super().__init__(message)
        self.code = code


@dataclass
class InferenceResponse:
    output_tensors: list[Tensor]
    error: TritonError | None = None

    def array(self, name: str) -> np.ndarray:
        assert self.error is None, self.error
        [tensor] = [tensor for tensor in self.output_tensors if tensor.name() == name]
        return tensor.as_numpy()


class Logger:
    errors: list[str] = []  # noqa: RUF012 - Triton's Logger is a class with static methods, too

    @classmethod
    def log_error(cls, message: str) -> None:
        cls.errors.append(message)


@dataclass
class Request:
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    sequence: int | str = 0

    def correlation_id(self) -> int | str:
        return self.sequence


def pb_utils() -> types.ModuleType:
    module = types.ModuleType("triton_python_backend_utils")
    types_ = {"TYPE_FP32": np.float32, "TYPE_INT64": np.int64, "TYPE_INT32": np.int32}
    vars(module).update(
        Tensor=Tensor,
        TritonError=TritonError,
        InferenceResponse=InferenceResponse,
        Logger=Logger,
        get_input_tensor_by_name=lambda request, name: Tensor(name, request.tensors[name]),
        triton_string_to_numpy=types_.__getitem__,
    )
    return module


def read_config(folder: Path) -> ModelConfig:
    return text_format.Parse((folder / "config.pbtxt").read_text(), ModelConfig())


@pytest.fixture(scope="session")
def repository() -> Iterator[Path]:
    """The repository with all products in place; a second run finds them up to date."""
    assert build.main([]) == 0
    yield build.REPOSITORY
    shutil.rmtree(build.REPOSITORY / "__pycache__", ignore_errors=True)  # Triton would take it for a model


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`load(model.py, model folder)` gives the initialised TritonPythonModel; settings go into its config."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", pb_utils())
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    Logger.errors.clear()

    def load(source: Path, folder: Path, **parameters: str) -> Any:
        config = read_config(folder)
        for name, value in parameters.items():
            config.parameters[name].string_value = value
        # As in Triton, modules beside a model are importable, and each model has its own.
        monkeypatch.syspath_prepend(str(source.parent))
        for sibling in source.parent.glob("*.py"):
            monkeypatch.delitem(sys.modules, sibling.stem, raising=False)
        spec = importlib.util.spec_from_file_location(f"model_of_{folder.name}", source)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        model = module.TritonPythonModel()
        # Triton writes out every field, also those that have their default.
        as_json = json_format.MessageToDict(
            config, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        model.initialize(
            {
                "model_config": json.dumps(as_json),
                "model_name": folder.name,
                "model_repository": str(folder),
                "model_version": "1",
                "model_instance_kind": "CPU",
                "model_instance_device_id": "0",
            }
        )
        return model

    return load


def torchscript(file: Path) -> torch.jit.ScriptModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch advises torch.export
        return torch.jit.load(file)


def rows_of(*values: bytes) -> np.ndarray:
    return np.array([[value] for value in values], dtype=object)
