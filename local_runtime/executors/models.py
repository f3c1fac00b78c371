"""Which model is run by what."""

from collections.abc import Sequence
from pathlib import Path

from local_runtime.errors import ModelLoadError
from local_runtime.executors.instance import Model
from local_runtime.executors.onnx_model import OnnxModel
from local_runtime.executors.python_model import PythonModel
from local_runtime.executors.services import Services
from local_runtime.executors.torch_model import TorchModel
from local_runtime.repository.completion import Placement
from local_runtime.repository.model_config import Backend, ModelConfig


def load_model(  # noqa: PLR0913 - all that a backend may ask about the instance it makes
    *,
    config: ModelConfig,
    folder: Path,
    file: Path,
    version: str,
    placement: Placement,
    placements: Sequence[Placement],
    services: Services,
    threads: int,
) -> Model:
    """Load one instance of a model; to be called in the instance's own thread, which then is the only one to use it.

    Args:
        config: the model's configuration.
        folder: the model's folder.
        file: the model's file in the version folder.
        version: name of the version folder.
        placement: which instance this is and where it runs.
        placements: all instances of the model, as the completed config lists them.
        services: what Python models may ask of the runtime.
        threads: CPU threads of this instance.

    Raises ModelLoadError, or whatever a Python model's own code raises.
    """
    if not file.is_file():
        raise ModelLoadError(f"no such file: {file.parent.name}/{file.name}")
    match config.backend:
        case Backend.PYTHON:
            return PythonModel(
                config=config,
                folder=folder,
                file=file,
                version=version,
                placement=placement,
                placements=placements,
                services=services,
            )
        case Backend.PYTORCH:
            return TorchModel(config=config, file=file, placement=placement)
        case Backend.ONNXRUNTIME:
            return OnnxModel(config=config, file=file, placement=placement, threads=threads)
        case Backend.ENSEMBLE:
            raise ModelLoadError(f"ensemble '{config.name}' has no instances")
