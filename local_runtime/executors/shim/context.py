"""Whose code is calling: in Triton every model instance is a process of its own, here many share one.

A thread that belongs to an instance says so. Threads that a model starts itself are recognised by the model's code
on their stack: every module that was loaded from a model's folder is marked with its context.
"""

import contextlib
import dataclasses
import re
import sys
import threading
import uuid
from collections.abc import Iterator

from local_runtime.executors.services import Services
from local_runtime.executors.shim.errors import TritonModelException

# The global variable that marks a model's modules.
MARK = "__triton_model_context__"
_this_thread = threading.local()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelContext:
    """One instance.

    Args:
        folder: its version folder.
        package: the name of the package that its own modules are in.
        services: what it may ask of the runtime; None while a config is completed.
    """

    folder: str
    package: str
    services: Services | None


def new_package(name: str) -> str:
    """A name for the package of an instance of that name, the only one in this process."""
    return f"triton_model_{re.sub(r'[^A-Za-z0-9]', '_', name)}_{uuid.uuid4().hex}"


def enter(context: ModelContext) -> None:
    """From now on this thread belongs to that instance."""
    _this_thread.context = context


@contextlib.contextmanager
def entered(context: ModelContext) -> Iterator[None]:
    """This thread belongs to that instance for a while."""
    before = getattr(_this_thread, "context", None)
    _this_thread.context = context
    try:
        yield
    finally:
        _this_thread.context = before


def current() -> ModelContext:
    """The instance whose code is calling, or TritonModelException."""
    context: ModelContext | None = getattr(_this_thread, "context", None)
    frame = sys._getframe(1) if context is None else None  # noqa: SLF001 - the only way to see who calls
    while context is None and frame is not None:
        context = frame.f_globals.get(MARK)
        frame = frame.f_back
    if context is None:
        raise TritonModelException("this works only in a thread that runs a model's code")
    return context


def services() -> Services:
    """What the calling instance may ask of the runtime, or TritonModelException."""
    offered = current().services
    if offered is None:
        raise TritonModelException("not supported while the model's configuration is completed")
    return offered
