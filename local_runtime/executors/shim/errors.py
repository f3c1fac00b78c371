"""Errors in Triton's words."""

from typing import ClassVar

from local_runtime.errors import ErrorCode, InferenceError


class TritonModelException(Exception):
    """Raised by and for models."""

    def message(self) -> str:
        """The text."""
        return str(self)


class TritonError:
    """An error to put into a response: it fails that request and no other of the batch."""

    UNKNOWN: ClassVar[int] = 0
    INTERNAL: ClassVar[int] = 1
    NOT_FOUND: ClassVar[int] = 2
    INVALID_ARG: ClassVar[int] = 3
    UNAVAILABLE: ClassVar[int] = 4
    UNSUPPORTED: ClassVar[int] = 5
    ALREADY_EXISTS: ClassVar[int] = 6
    CANCELLED: ClassVar[int] = 7

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message = message
        self._code = code

    def message(self) -> str:
        """The text."""
        return self._message

    def code(self) -> int:
        """One of the codes above."""
        return self._code


_CODES = {
    TritonError.UNKNOWN: ErrorCode.UNKNOWN,
    TritonError.NOT_FOUND: ErrorCode.NOT_FOUND,
    TritonError.INVALID_ARG: ErrorCode.INVALID_ARG,
    TritonError.UNAVAILABLE: ErrorCode.UNAVAILABLE,
    TritonError.UNSUPPORTED: ErrorCode.UNSUPPORTED,
    TritonError.ALREADY_EXISTS: ErrorCode.ALREADY_EXISTS,
    TritonError.CANCELLED: ErrorCode.CANCELLED,
}


def inference_error(error: TritonError) -> InferenceError:
    """A model's error as the runtime's."""
    return InferenceError(_CODES.get(error.code(), ErrorCode.INTERNAL), error.message())
