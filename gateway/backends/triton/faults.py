"""What Triton's error codes and texts mean, shared by the real Triton and the local runtime that copies it.

Decisions that the code alone does not settle:

- A full queue and an expired queue timeout are both OVERLOADED: Triton is well, it has too much to do.
- INTERNAL is FAILED: a model that raises on one caller's input must not be taken away from all others.
- `Stub process ... is not healthy` is DEAD: the model's process is dead until the model is loaded again, while its
  probes go on saying "ready". The text is taken for Triton's own only in the forms that Triton gives it, since a model
  is unloaded and loaded for it, and models may quote their callers.
- NOT_FOUND in Triton's own words is UNKNOWN_MODEL; NOT_FOUND in a model's own words is about the input.
- INVALID_ARGUMENT in Triton's own words about names, datatypes, shapes or batch sizes is MISFIT: the tensors are made
  by the task's contract, so the route leads to a model that does not fit it. In a model's words it is REFUSED_INPUT.
- A version that is no number is the route's fault, so UNKNOWN_MODEL, though its code is INVALID_ARGUMENT.
- RESOURCE_EXHAUSTED is a message over a size limit: REFUSED_INPUT where our request was too large for the server,
  BROKEN where its answer was too large for us.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from gateway.core.errors import Fault, FaultKind, Reply
from gateway.core.texts import logged, triton_shown

QUEUE_FULL: Final = "Exceeds maximum queue size"
QUEUE_TIMEOUT: Final = "Request timeout expired"
# As Triton says it of a model that was asked, of a part of an ensemble, and of one that another model asked (BLS).
_DEAD_STUB: Final = re.compile(
    r"(?:in ensemble '[^']*', )?"
    r"(?:Failed to process the request\(s\) for model '[^']*', message: TritonModelException: )?"
    r"Stub process '(?P<stub>[^']+)' is not healthy\.?\s*(?:At:\s.*)?",
    re.DOTALL,
)
_UNNAMED_GROUP: Final = re.compile(r"(?P<model>.+)_\d+_\d+")
RESET_STREAM: Final = "RST_STREAM"
BAD_VERSION: Final = "failed to get model version"
_UNKNOWN_MODEL_TEXTS: Final = ("unknown model", "no available versions")

# Triton's validation of a call against a model's configuration (core/src/infer_request.cc).
_MISFIT_TEXTS: Final = (
    "unexpected inference input",
    "unexpected inference output",
    "unexpected shape for input",
    "inference input '",  # '...' data-type is ..., but model ... expects ...
    "inputs but got",
    "batch-size must be <=",
    "batch size does not match other inputs",
    "input byte size mismatch",
    "missing required input(s)",
)

# By gRPC's names of codes; those not listed are BROKEN.
KINDS: Final[Mapping[str, FaultKind]] = {
    "UNAVAILABLE": FaultKind.UNAVAILABLE,
    "CANCELLED": FaultKind.UNAVAILABLE,  # by the server: our own cancellations never come here
    "DEADLINE_EXCEEDED": FaultKind.TIMEOUT,
    "NOT_FOUND": FaultKind.UNKNOWN_MODEL,
    "INVALID_ARGUMENT": FaultKind.REFUSED_INPUT,
    "UNIMPLEMENTED": FaultKind.UNSUPPORTED,
    "INTERNAL": FaultKind.FAILED,
    "RESOURCE_EXHAUSTED": FaultKind.BROKEN,
}


def _unavailable(text: str) -> FaultKind:
    is_full = QUEUE_FULL in text or QUEUE_TIMEOUT in text
    return FaultKind.OVERLOADED if is_full else FaultKind.UNAVAILABLE


def _not_found(text: str) -> FaultKind:
    is_model = any(known in text for known in _UNKNOWN_MODEL_TEXTS)
    return FaultKind.UNKNOWN_MODEL if is_model else FaultKind.REFUSED_INPUT


def _invalid(text: str) -> FaultKind:
    if BAD_VERSION in text:
        return FaultKind.UNKNOWN_MODEL
    is_misfit = any(known in text for known in _MISFIT_TEXTS)
    return FaultKind.MISFIT if is_misfit else FaultKind.REFUSED_INPUT


def _internal(text: str) -> FaultKind:
    return FaultKind.DEAD if dead_stub(text) else FaultKind.FAILED


def _exhausted(text: str) -> FaultKind:
    # gRPC puts before the text which side found the message too large; older servers put nothing.
    is_answer = "CLIENT: Received" in text or "SERVER: Sent" in text
    is_request = "message larger than max" in text and not is_answer
    return FaultKind.REFUSED_INPUT if is_request else FaultKind.BROKEN


_BY_TEXT: Final[Mapping[str, Callable[[str], FaultKind]]] = {
    "UNAVAILABLE": _unavailable,
    "NOT_FOUND": _not_found,
    "INVALID_ARGUMENT": _invalid,
    "INTERNAL": _internal,
    "RESOURCE_EXHAUSTED": _exhausted,
}


def dead_stub(text: str) -> str:
    """The name of the process that an error says has died; empty where it says nothing of the kind."""
    found = _DEAD_STUB.fullmatch(text)
    return found["stub"] if found else ""


def likely_model(stub: str) -> str:
    """The model of a process by its name, `<model>_<group>_<index>`; empty for one whose group was given a name."""
    found = _UNNAMED_GROUP.fullmatch(stub)
    return found["model"] if found else ""


def fault_of(code: str, text: str) -> Fault:
    """The fault behind an error that a model server answered with; `code` is gRPC's name of it."""
    by_text = _BY_TEXT.get(code)
    kind = by_text(text) if by_text else KINDS.get(code, FaultKind.BROKEN)
    reply = None if kind is FaultKind.TIMEOUT else Reply(code=code, text=text)
    if kind is FaultKind.DEAD:
        return Fault(kind=kind, message=logged(text), reply=reply, dead_model=likely_model(dead_stub(text)))
    if kind is not FaultKind.REFUSED_INPUT:
        return Fault(kind=kind, message=logged(f"{code}: {text}"), reply=reply)
    if code == "RESOURCE_EXHAUSTED":
        return Fault(kind=kind, message="the input is larger than the backend takes", reply=reply)
    return Fault(kind=kind, message=triton_shown(text), reply=reply)


def lost(code: str, text: str) -> Fault:
    """The fault behind a call that no server answered: the connection failed, or the time was over."""
    is_reset = code == "INTERNAL" and RESET_STREAM in text
    return replace(fault_of("UNAVAILABLE" if is_reset else code, text), reply=None, is_server=code == "UNAVAILABLE")


def streamed(text: str) -> Fault:
    """The fault behind an error in the middle of a stream, where Triton tells its text but not its code."""
    known = (
        ("INTERNAL", bool(dead_stub(text))),
        ("NOT_FOUND", _not_found(text) is FaultKind.UNKNOWN_MODEL),
        ("UNAVAILABLE", _unavailable(text) is FaultKind.OVERLOADED),
        ("INVALID_ARGUMENT", _invalid(text) is not FaultKind.REFUSED_INPUT),
    )
    return fault_of(next((code for code, is_it in known if is_it), "INTERNAL"), text)


def wrong_names(got: Sequence[str], wanted: Sequence[str]) -> str | None:
    """What is wrong with the names of the outputs, or None. Triton leaves out an output that it does not find."""
    if len(set(got)) != len(got):
        return f"outputs come more than once: {', '.join(got)}"
    missing = [name for name in wanted if name not in got]
    return f"outputs are missing: {', '.join(missing)}" if missing else None
