"""Model files of Python models, executed: each time as a module of its own, so that instances share no globals."""

import importlib.util
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

from google.protobuf import json_format

from local_runtime.errors import ModelLoadError
from local_runtime.executors import triton_python_backend_utils as pb_utils
from local_runtime.executors.shim import context
from local_runtime.executors.shim.context import ModelContext
from local_runtime.repository.completion import triton_json

_SHIM = "triton_python_backend_utils"
# sys.path and sys.modules are the process's: one model file at a time may be executed.
_import_lock = threading.Lock()


def execute_file(file: Path, *, name: str, owner: ModelContext) -> ModuleType:
    """Execute a model file as a new module of that name. Modules that lie beside it belong to its owner alone."""
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ModelLoadError(f"{file.name} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    module.__dict__[context.MARK] = owner
    folder = str(file.parent)
    with _import_lock:
        sys.modules[_SHIM] = pb_utils
        sys.modules[name] = module
        sys.path.append(folder)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        finally:
            sys.path.remove(folder)
            _adopt_siblings(folder, owner=owner)
    return module


def forget_file(module: ModuleType) -> None:
    """Let go of an executed model file."""
    sys.modules.pop(module.__name__, None)


def python_auto_complete(file: Path, message: Any) -> Any:
    """The `ModelConfig` message as the `auto_complete_config` of that model.py completes it.

    A file without that method leaves it as it is. Blocking, and runs the file's own code: whatever that raises
    becomes a ModelLoadError.
    """
    owner = ModelContext(folder=str(file.parent), services=None)
    with context.entered(owner):
        try:
            module = execute_file(file, name=f"triton_model_config_{message.name}_{id(owner)}", owner=owner)
        except Exception as error:
            raise _incomplete(message.name, error) from error
        try:
            complete = getattr(getattr(module, "TritonPythonModel", None), "auto_complete_config", None)
            if complete is None:
                return message
            tree = complete(pb_utils.ModelConfig(triton_json(message))).as_dict()
            return json_format.ParseDict(tree, type(message)())
        except Exception as error:
            raise _incomplete(message.name, error) from error
        finally:
            forget_file(module)


def _incomplete(model: str, error: Exception) -> ModelLoadError:
    return ModelLoadError(f"failed to auto-complete config of model '{model}': {type(error).__name__}: {error}")


def _adopt_siblings(folder: str, *, owner: ModelContext) -> None:
    """Take the modules loaded from that folder out of sys.modules, so that no other model finds them.

    Model files themselves, of this and other instances, are marked already and stay.
    """
    for name, module in list(sys.modules.items()):
        origin = getattr(module, "__file__", None)
        is_marked = context.MARK in getattr(module, "__dict__", ())
        if not is_marked and origin is not None and Path(origin).parent == Path(folder):
            module.__dict__[context.MARK] = owner
            sys.modules.pop(name, None)
