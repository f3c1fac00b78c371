"""Making a backend's own words fit to show and to log: one line, bounded, no internals, no secrets."""

import re
from typing import Final

MAX_TEXT: Final = 300  # enough for the longest of Triton's validation texts, short enough for one log line
MAX_REPLY: Final = 4096  # of a model server's own text, for callers who speak its protocol; nothing beyond is looked at
GENERIC_REFUSAL: Final = "the backend refused the input"
GENERIC_FAILURE: Final = "the model failed on this request"

# What a traceback or a Python exception leaves behind in a text.
_PYTHON = re.compile(
    r"Traceback \(most recent call last\)|\bFile \"|\.py[\"(:]|\bAt:\s"
    r"|\b[A-Za-z_.]*(?:Error|Exception|Interrupt|StopIteration)\b\s*:"
)
_NOT_PRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")
_SPACES = re.compile(r"\s+")
_URL = re.compile(r"\b[a-z][a-z0-9+.-]*://\S+", re.IGNORECASE)
_KEY = re.compile(r"\b(?:sk|pk|key|gsk|hf|xai)[-_][A-Za-z0-9*_\-]{6,}|\bBearer\s+\S+", re.IGNORECASE)
_PATH = re.compile(r"(?<![\w./:])/(?:[\w.\-]+/)+[\w.\-]*")
_SECRET = re.compile(r"\bsk-[A-Za-z0-9*_\-]{6,}|\bBearer\s+\S+")  # not `key_...`, as tensors are called
_CODE = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_FIELD = re.compile(r"[A-Za-z0-9_.\-\[\]]{1,128}")

# Triton's decorations (see its src/infer_request.cc and src/ensemble_scheduler): not the caller's business.
_REQUEST_ID = re.compile(r"\[request id: [^\]]*\]\s*")
_ENSEMBLE = re.compile(r"\bin ensemble '[^']*',\s*")
_NOTE = re.compile(r"\s*\bNOTE: .*")
_MODEL = re.compile(r"\bmodel '[^']*'")
_FOR_MODEL = re.compile(r"\bfor '[^']*'")


def one_line(text: str) -> str:
    """The text on one line, without control characters, at most `MAX_TEXT` long; for logs."""
    flat = _SPACES.sub(" ", _NOT_PRINTABLE.sub(" ", text[: 8 * MAX_TEXT])).strip()
    return flat if len(flat) <= MAX_TEXT else flat[: MAX_TEXT - 1] + "…"


def has_python_text(text: str) -> bool:
    """Whether the text, of a bounded length, looks as if it came from a Python exception."""
    return _PYTHON.search(text) is not None


def shown(text: str) -> str:
    """The text as a caller may see it: no addresses, no keys, and a generic sentence for Python texts."""
    text = text[:MAX_REPLY]
    if not text.strip() or has_python_text(text):
        return GENERIC_REFUSAL
    return one_line(_KEY.sub("***", _URL.sub("(address removed)", text)))


def triton_plain(text: str) -> str:
    """As `shown`, without Triton's request id: for callers who name the model themselves."""
    return shown(_REQUEST_ID.sub("", text))


def triton_shown(text: str) -> str:
    """As `shown`, without what Triton adds for its operators: request id, ensemble, and model names."""
    text = _ENSEMBLE.sub("", _REQUEST_ID.sub("", text[:MAX_REPLY]))
    text = _FOR_MODEL.sub("for the model", _MODEL.sub("the model", _NOTE.sub("", text)))
    return shown(text)


def replied(text: str) -> str:
    """A model server's own words for a caller who speaks its protocol: as they are, but without internals or secrets.

    Python texts become a generic sentence, file paths, addresses and keys are taken out.
    """
    text = text[:MAX_REPLY]
    if not text.strip() or has_python_text(text):
        return GENERIC_FAILURE
    return _SECRET.sub("***", _PATH.sub("(path removed)", _URL.sub("(address removed)", text)))


def logged(text: str) -> str:
    """The text as a log may hold it: one line and no keys."""
    return one_line(_KEY.sub("***", text[:MAX_REPLY]))


def code(value: object) -> str | None:
    """An upstream's error code, if it is a short plain word."""
    return value if isinstance(value, str) and _CODE.fullmatch(value) else None


def field(value: object) -> str | None:
    """The name of a part of the request, if it is one."""
    return value if isinstance(value, str) and _FIELD.fullmatch(value) else None
