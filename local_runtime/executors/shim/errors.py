"""Errors in Triton's words."""

from typing import ClassVar

from local_runtime.errors import ErrorCode, InferenceError
from local_runtime.executors.faults import text_of


class TritonModelException(Exception):
    """Raised by and for models."""

    def message(self) -> str:
        """The text."""
        return text_of(self)


class TritonError:
    """An error to put into a response: it fails that request and no other of the batch.

    What is given as message may be anything, an exception for instance: its text is taken.
    """

    UNKNOWN: ClassVar[int] = 0
    INTERNAL: ClassVar[int] = 1
    NOT_FOUND: ClassVar[int] = 2
    INVALID_ARG: ClassVar[int] = 3
    UNAVAILABLE: ClassVar[int] = 4
    UNSUPPORTED: ClassVar[int] = 5
    ALREADY_EXISTS: ClassVar[int] = 6
    CANCELLED: ClassVar[int] = 7

    def __init__(self, message: object, code: int = INTERNAL) -> None:
        self._message = text_of(message)
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
    code = error.code()
    return InferenceError(
        _CODES.get(code, ErrorCode.INTERNAL) if isinstance(code, int) else ErrorCode.INTERNAL, text_of(error.message())
    )
