"""What an OpenAI-compatible upstream's refusals mean. Pure.

By blame: the caller's input (400, 409, 413, 422, a 404 that names no model, and what a content filter refuses), a
prompt that is too long for this model, an API or a kind of input that the upstream lacks (501, a 404 for its path),
our account or configuration (401, 402, 403, redirects, a 404 without an error body, used-up quota), the model name of
our route (404), too much load (429, 503, 529), lateness (408, 504), a failure on this one request (another 5xx with an
error object), and everything else is the upstream's own failure.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Final

import orjson

from gateway.core import texts
from gateway.core.errors import Fault, FaultKind

MAX_RETRY_AFTER_US: Final = 86_400_000_000  # a day; what is longer is a mistake or a ban
_NO_MODEL = re.compile(r"\bmodels?\b.*\b(?:not found|not exist|unknown|not available)\b", re.IGNORECASE)
_NO_PATH = re.compile(r"(?:file )?not found|invalid url\b.*", re.IGNORECASE)  # FastAPI, llama.cpp, OpenAI
_LACKS = re.compile(r"\bnot support|\bnot a multimodal model\b", re.IGNORECASE)
_LACKS_IMAGES = re.compile(
    r"\bnot a multimodal model\b|\b(?:image|vision|multimodal)\w*\b.*\bnot support", re.IGNORECASE
)

CONTEXT_CODE: Final = "context_length_exceeded"
_TOO_LONG_TYPES: Final = frozenset({CONTEXT_CODE, "exceed_context_size_error"})  # OpenAI's code, llama.cpp's type
_TOO_LONG = re.compile(
    r"maximum context length|max_model_len"  # OpenAI, vLLM, SGLang
    r"|longer than the model's context length|exceeds? the (?:model's )?(?:available )?context"  # SGLang, llama.cpp
    r"|\btokens\b.* exceeds the maximum allowed length"  # SGLang
    r"|(?:prompt|input) length \(?\d+\)? exceeds|should not exceed max_num_tokens"  # TensorRT-LLM
    r"|prompt is too long",  # Anthropic
    re.IGNORECASE,
)
_MAY_BE_TOO_LONG: Final = frozenset({200, 400, 413, 422, 500})  # 500: what old servers answer to it
_FILTERED: Final = frozenset(
    {"content_filter", "content_policy_violation", "moderation_blocked", "data_inspection_failed"}
)
# What error codes without a status of their own mean, as OpenAI's own answers pair them.
_MEANT: Final[Mapping[str, int]] = {
    **dict.fromkeys((*_FILTERED, CONTEXT_CODE, "invalid_prompt", "invalid_request_error"), 400),
    "model_not_found": 404,
    **dict.fromkeys(("rate_limit_exceeded", "insufficient_quota"), 429),
}
REFUSALS: Final = frozenset({400, 404, 409, 413, 422})  # statuses that may be told to the caller as they are
_REFUSAL_WITHOUT_BODY: Final = frozenset({400, 413, 422})
_OK: Final = 200
_SERVER_ERROR: Final = 500
_NOT_IMPLEMENTED: Final = 501


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamError:
    """The error object of an answer; all parts as they came, None where absent.

    Texts are cut after `MAX_REPLY` characters: it may be the caller's own prompt that comes back in one, and the
    patterns here take time by the square of what they look through.
    """

    message: str | None = None
    type: str | None = None
    param: str | None = None
    code: str | int | None = None


def error_of(body: bytes) -> UpstreamError | None:
    """The error object in a body, in any of the shapes that OpenAI-compatible servers use; None if there is none."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return error_in(parsed) if isinstance(parsed, dict) else None


def error_in(parsed: Mapping[str, Any]) -> UpstreamError | None:
    """As `error_of`, of a parsed object."""
    error = parsed.get("error")
    if isinstance(error, str) and error:
        return UpstreamError(message=_text(error))
    if isinstance(error, dict) and error:
        return error_object(error)
    if error:
        return UpstreamError()
    if parsed.get("object") == "error":  # vLLM before 0.10: the error's fields at the top
        return error_object(parsed)
    if "detail" in parsed and "choices" not in parsed:  # FastAPI
        return _from_detail(parsed["detail"])
    return None


def error_object(error: Mapping[str, Any]) -> UpstreamError:
    """An object that is known to be an error's."""
    code = error.get("code")
    return UpstreamError(
        message=_text(error.get("message")),
        type=_text(error.get("type")),
        param=_text(error.get("param")),
        code=code if isinstance(code, str | int) and not isinstance(code, bool) else None,
    )


def _from_detail(detail: object) -> UpstreamError:
    if isinstance(detail, str):
        return UpstreamError(message=_text(detail))
    first = detail[0] if isinstance(detail, list) and detail else None
    if not isinstance(first, dict):
        return UpstreamError()
    place = first.get("loc")
    steps = [str(step) for step in place if step != "body"] if isinstance(place, list) else []
    return UpstreamError(message=_text(first.get("msg")), param=_text(".".join(steps)))


def _text(value: object) -> str | None:
    return value[: texts.MAX_REPLY] if isinstance(value, str) and value else None


# --- status -> kind -------------------------------------------------------------------------------------

Judge = Callable[[int, UpstreamError | None], FaultKind]


def _caller(status: int, error: UpstreamError | None) -> FaultKind:
    if error is not None and error.code == "model_not_found":
        return FaultKind.UNKNOWN_MODEL
    if error is not None and _LACKS_IMAGES.search(error.message or ""):
        return FaultKind.UNSUPPORTED
    if error is None and status not in _REFUSAL_WITHOUT_BODY:
        return FaultKind.BROKEN
    return FaultKind.REFUSED_INPUT


def _not_found(status: int, error: UpstreamError | None) -> FaultKind:
    if error is not None and _NO_PATH.fullmatch(error.message or ""):
        return FaultKind.UNSUPPORTED
    names_model = error is not None and (error.param == "model" or _NO_MODEL.search(error.message or "") is not None)
    return FaultKind.UNKNOWN_MODEL if names_model else _caller(status, error)


def _denied(_status: int, error: UpstreamError | None) -> FaultKind:
    # Our account may not do this, unless it says that the content was judged.
    is_filtered = error is not None and error.code in _FILTERED
    return FaultKind.REFUSED_INPUT if is_filtered else FaultKind.DENIED


def _limited(_status: int, error: UpstreamError | None) -> FaultKind:
    # Not load: our account there has run dry, and waiting does not help.
    is_dry = error is not None and "insufficient_quota" in (error.code, error.type)
    return FaultKind.DENIED if is_dry else FaultKind.OVERLOADED


def _unavailable(_status: int, error: UpstreamError | None) -> FaultKind:
    # llama.cpp while it loads its model.
    is_loading = error is not None and error.type == "unavailable_error"
    return FaultKind.UNAVAILABLE if is_loading else FaultKind.OVERLOADED


def _late(_status: int, _error: UpstreamError | None) -> FaultKind:
    return FaultKind.TIMEOUT


def _busy(_status: int, _error: UpstreamError | None) -> FaultKind:
    return FaultKind.OVERLOADED


def _broken(_status: int, _error: UpstreamError | None) -> FaultKind:
    return FaultKind.BROKEN


def _otherwise(status: int, error: UpstreamError | None) -> FaultKind:
    """Chiefly 500. With an error object the server is alive and speaks of this request.

    That is how llama.cpp and others answer input that they cannot take.
    """
    if error is None or (status < _SERVER_ERROR and status != _OK):
        return FaultKind.BROKEN
    lacks = status == _NOT_IMPLEMENTED or _LACKS.search(error.message or "") is not None
    return FaultKind.UNSUPPORTED if lacks else FaultKind.FAILED


_NOT_MENDED_BY_WAITING: Final = (FaultKind.BROKEN, FaultKind.DENIED)
JUDGES: Final[Mapping[int, Judge]] = {
    400: _caller,
    401: _denied,
    402: _denied,
    403: _denied,
    404: _not_found,
    408: _late,
    409: _caller,
    413: _caller,
    422: _caller,
    429: _limited,
    502: _broken,  # something before the server speaks, and the server is not there
    503: _unavailable,
    504: _late,
    529: _busy,
}
_STATUSES: Final[Mapping[str, int]] = {**{str(status): status for status in JUDGES}, **_MEANT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """The headers that say when to come back, as they came."""

    retry_after: str | None = None
    retry_after_ms: str | None = None
    date: str | None = None

    @property
    def us(self) -> int | None:
        """Microseconds from now, None where not said or not sensible (RFC 9110, section 10.2.3).

        An HTTP date is measured against the answer's own Date, so that no clock of ours matters.
        """
        for value, unit_us in ((self.retry_after_ms, 1e3), (self.retry_after, 1e6)):
            try:
                length = float(value or "")
            except ValueError:
                continue
            if math.isfinite(length) and length >= 0:
                return math.ceil(min(length * unit_us, MAX_RETRY_AFTER_US))
        if self.retry_after and self.date:
            try:
                wait = parsedate_to_datetime(self.retry_after) - parsedate_to_datetime(self.date)
            except (ValueError, TypeError, OverflowError):  # TypeError: one of them is without a zone
                return None
            return min(max(0, int(wait.total_seconds() * 1e6)), MAX_RETRY_AFTER_US)
        return None


def fault_of(status: int, body: bytes, waiting: Waiting) -> Fault:
    """The fault behind a status that is not 200."""
    return fault_for(status, error_of(body), waiting)


def fault_for(status: int, error: UpstreamError | None, waiting: Waiting) -> Fault:
    """As `fault_of`, of a parsed error."""
    message = (error.message if error else None) or ""
    if error is not None and status in _MAY_BE_TOO_LONG and _is_too_long(error):
        kind = FaultKind.CONTEXT_TOO_LONG
    else:
        kind = JUDGES.get(status, _otherwise)(status, error)
    if kind in (FaultKind.REFUSED_INPUT, FaultKind.CONTEXT_TOO_LONG):
        is_too_long = kind is FaultKind.CONTEXT_TOO_LONG
        return Fault(
            kind=kind,
            message=texts.shown(message),
            field=texts.field(error.param.removeprefix("body.") if error.param else None) if error else None,
            code=CONTEXT_CODE if is_too_long else texts.code(error.code) if error else None,
            status=status if status in REFUSALS and not is_too_long else 400,
        )
    return Fault(
        kind=kind,
        message=texts.logged(f"status {status}: {message}" if message else f"status {status}"),
        # What is broken is not mended by waiting, whatever its answer says.
        retry_after_us=None if kind in _NOT_MENDED_BY_WAITING else waiting.us,
        # `invalid_api_key` would tell the caller of a key that is not theirs.
        code=texts.code(error.code) if error and kind is not FaultKind.DENIED else None,
    )


def _is_too_long(error: UpstreamError) -> bool:
    is_named = error.code in _TOO_LONG_TYPES or error.type in _TOO_LONG_TYPES
    return is_named or _TOO_LONG.search(error.message or "") is not None


def fault_in_answer(error: UpstreamError) -> Fault:
    """The fault behind an error that came with status 200, as an event or as a whole body.

    Some upstreams put the status they meant into `code`, others a word of OpenAI's; without either it is the upstream's
    own failure.
    """
    meant = error.code if isinstance(error.code, int) else _STATUSES.get(error.code or "", 0)
    return fault_for(meant if meant in JUDGES else _OK, error, Waiting())
