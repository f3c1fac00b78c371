"""Programs of `torch.export` (`model.pt2`): read, and what they tell of the arguments and results of `forward`."""

import dataclasses
import functools
import gc
import importlib
import logging
import threading
from pathlib import Path
from typing import Any

# `torch.export.load` keeps what it is reading in a global variable of torch, and fails when two threads read at once
# ("_CURRENT_DESERIALIZER is already set"), so all readers of this process share one lock. It is here because this is
# the lowest layer that reads: completing a config reads the file, and so does every instance. `torch.jit.load` has no
# such variable.
_READING = threading.Lock()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The arguments of `forward` in order, and those of them that go by keyword only."""

    names: tuple[str, ...]
    keywords: frozenset[str]


class _Reason(logging.Filter):
    """Keeps the first failure out of the log of torch, which tells it there, goes on and fails less clearly."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()
        self.error: BaseException | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it is to be logged."""
        error = record.exc_info[1] if record.exc_info else None
        if error is None or record.thread != self._thread:
            return True
        self.error = self.error or error
        return False


def import_torch() -> Any:
    """torch, imported; its half a million objects never go, so no search for garbage shall look at them again.

    Such a search would stop the whole process for 0.1 s, and again and again. What models make later is still found.
    """
    torch: Any = importlib.import_module("torch")
    _out_of_sight("torch")
    return torch


@functools.cache
def _out_of_sight(imported: str) -> None:  # noqa: ARG001 - once for each
    gc.freeze()


def load_exported(file: Path) -> Any:
    """The `ExportedProgram` in the file; raises whatever torch does of a file that it cannot read.

    Blocking, also while another thread reads such a file.
    """
    torch = import_torch()
    log = logging.getLogger("torch.export")
    with _READING:
        reason = _Reason()
        log.addFilter(reason)
        try:
            program = torch.export.load(str(file))
        except Exception:
            if reason.error is not None:
                raise reason.error from None
            raise
        finally:
            log.removeFilter(reason)
    _out_of_sight("torch.export")  # the first call imports as much again
    return program


def arguments(program: Any) -> Arguments:
    """How `forward` was called when it was exported, which is the only way to call the program.

    Raises ValueError if an argument was more than one value: a config has no words for that.
    """
    positional, keyword = program.call_spec.in_spec.children()
    if not all(child.is_leaf() for child in (*positional.children(), *keyword.children())):
        raise ValueError("forward takes lists, tuples or dicts of tensors, which a config cannot describe")
    count = len(positional.children())
    # The names in the graph are those of the arguments in lower case: good enough for files that lack the others.
    known = program.module_call_graph[0].signature.forward_arg_names or program.graph_signature.user_inputs
    keywords = tuple(str(name) for name in keyword.context)
    return Arguments(names=(*(str(name) for name in known[:count]), *keywords), keywords=frozenset(keywords))


def returned(program: Any) -> Any:
    """What `forward` returns, with the position in the signature's `user_outputs` in place of each value."""
    spec = program.call_spec.out_spec
    return spec.unflatten(range(spec.num_leaves))
