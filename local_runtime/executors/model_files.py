"""Model files of Python models, executed: each time as modules of their own, so that instances share no globals."""

from pathlib import Path
from types import ModuleType
from typing import Any

from google.protobuf import json_format

from local_runtime.errors import ModelLoadError
from local_runtime.executors import triton_python_backend_utils as pb_utils
from local_runtime.executors.faults import raised_by_load
from local_runtime.executors.own_modules import OwnModules
from local_runtime.executors.shim import context
from local_runtime.executors.shim.context import ModelContext
from local_runtime.repository.completion import triton_json


def python_auto_complete(file: Path, message: Any) -> Any:
    """The `ModelConfig` message as the `auto_complete_config` of that model.py completes it.

    A file without that method leaves it as it is. Blocking, and runs the file's own code: whatever that raises
    becomes a ModelLoadError. Not for the main thread: an interrupt that comes there would become one, too.
    """
    owner = ModelContext(folder=str(file.parent), package=context.new_package(message.name), services=None)
    modules = OwnModules(file.parent, owner=owner)
    try:
        with context.entered(owner):
            return _completed(modules.execute(file), message)
    except BaseException as error:
        raise ModelLoadError(
            f"failed to auto-complete config of model '{message.name}': {raised_by_load(error, file)}"
        ) from error
    finally:
        modules.forget()


def _completed(module: ModuleType, message: Any) -> Any:
    complete = getattr(getattr(module, "TritonPythonModel", None), "auto_complete_config", None)
    if complete is None:
        return message
    tree = complete(pb_utils.ModelConfig(triton_json(message))).as_dict()
    return json_format.ParseDict(tree, type(message)())
