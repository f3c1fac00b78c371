"""Small real models written to a temporary repository."""

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

PYTHON_CONFIG = """
backend: "python"
max_batch_size: 8
input [ { name: "X" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
dynamic_batching { }
"""

TORCH_CONFIG = """
platform: "pytorch_libtorch"
max_batch_size: 8
input [ { name: "INPUT__0" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 2 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
dynamic_batching { }
"""

DOUBLE = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("Y", 2 * r.inputs()[0].as_numpy())])
            for r in requests
        ]
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


@pytest.fixture
def write_python(repository: Path) -> Callable[..., Path]:
    def write(name: str, code: str = DOUBLE, config: str = PYTHON_CONFIG, version: str = "1") -> Path:
        folder = repository / name / version
        folder.mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(config)
        (folder / "model.py").write_text(textwrap.dedent(code))
        return repository / name

    return write


@pytest.fixture
def write_torch(repository: Path) -> Callable[..., Path]:
    """The source is the body of `forward` in TorchScript, e.g. "def forward(self, x): ..."."""

    def write(name: str, source: str, config: str = TORCH_CONFIG, version: str = "1") -> Path:
        import torch  # noqa: PLC0415 - only the tests that need it pay for it

        folder = repository / name / version
        folder.mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(config)
        # A class of its own: scripted methods belong to the class and cannot be defined twice.
        module = type(name, (torch.jit.ScriptModule,), {})()
        module.define(textwrap.dedent(source) + "\n")
        module.save(str(folder / "model.pt"))
        return repository / name

    return write


@pytest.fixture
def write_config(repository: Path) -> Callable[[str, str], Path]:
    def write(name: str, config: str) -> Path:
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(config)
        return repository / name

    return write
