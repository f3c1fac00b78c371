"""`ModelStreamInfer`: many requests on one call, answered as answers come."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterable
from typing import Any, Final

from tritonclient.grpc import service_pb2

from local_runtime.errors import ErrorCode, InferenceError, invalid
from local_runtime.messages import InferAnswer
from local_runtime.protocol.answering import INTERNAL_TEXT, classes_of, is_decoupled, with_classes
from local_runtime.protocol.oip_codec import Decoded, decode_request, encode_answer, encode_stream_error
from local_runtime.runtime import LocalRuntime

MAX_UNANSWERED: Final = 1024  # requests of one stream: what a client sends beyond them waits in its own buffers
UNREADABLE_TEXT: Final = "the request is not a message of this call"
_log = logging.getLogger(__name__)
_ERROR_AS_STATUS = ("triton_grpc_error", "true")


async def serve_stream(
    runtime: LocalRuntime, requests: AsyncIterable[Any], context: Any, *, readers: set[asyncio.Task[None]]
) -> InferenceError | None:
    """Answer one stream until the client closes its side and has its answers; the error to end the call with, if any.

    Requests reach the runtime in the order in which they came. The answers of one request keep their order; those of
    different requests mix. Cancelling the call cancels whatever is in flight. `readers` holds the task that takes
    requests, while it runs: cancelling that one lets the rest finish, and ends the call with UNAVAILABLE.
    """
    stream = _Stream(runtime, context)
    failed: InferenceError | None = None
    reader: asyncio.Task[None] | None = None
    try:
        async with asyncio.TaskGroup() as group:
            reader = group.create_task(stream.read(requests, group))
            readers.add(reader)
            reader.add_done_callback(readers.discard)
    except* InferenceError as errors:
        # Only where the client wants errors as the call's status; the first one has ended all others.
        failed = _first(errors)
    if failed is None and reader is not None and reader.cancelled():
        return InferenceError(ErrorCode.UNAVAILABLE, "Server is stopping, this stream takes no more requests")
    return failed


class _Stream:
    """One call: writes one message at a time, which also holds back a model that answers faster than it is read."""

    def __init__(self, runtime: LocalRuntime, context: Any) -> None:
        self._runtime = runtime
        self._context = context
        self._writing = asyncio.Lock()
        self._free = asyncio.Semaphore(MAX_UNANSWERED)
        self._has_client_left = False
        metadata = context.invocation_metadata() or ()
        self._raises = any((str(key), str(value).lower()) == _ERROR_AS_STATUS for key, value in metadata)

    async def read(self, requests: AsyncIterable[Any], group: asyncio.TaskGroup) -> None:
        """Take requests and start answering each; waits while too many are not answered."""
        async for message in requests:
            if message is None:
                await self._fail(invalid(UNREADABLE_TEXT), "")
                continue
            async with self._answering_faults(message.id):
                remaining_s = self._context.time_remaining()
                timeout_us = None if remaining_s is None else int(remaining_s * 1_000_000)
                asked = decode_request(message, timeout_us=timeout_us)
                await self._free.acquire()
                # Tasks begin in the order in which they are made.
                group.create_task(self._answer(asked)).add_done_callback(lambda _: self._free.release())

    async def _answer(self, asked: Decoded) -> None:
        request_id = asked.request.request_id
        async with self._answering_faults(request_id):
            # Asked before the inference: behind it, the model may be gone.
            classes = classes_of(self._runtime, asked.request, asked.classes)
            drops_empty = not asked.wants_empty_final and is_decoupled(self._runtime, asked.request)
            async with contextlib.aclosing(self._runtime.stream(asked.request)) as answers:
                async for answer in answers:
                    if self._has_client_left:
                        return
                    if answer.outputs or answer.error is not None or not (answer.is_final and drops_empty):
                        await self._send(with_classes(answer, classes), request_id)

    @contextlib.asynccontextmanager
    async def _answering_faults(self, request_id: str) -> AsyncGenerator[None, None]:
        """What fails within is an answer to this one request."""
        try:
            yield
        except InferenceError as error:
            await self._fail(error, request_id)
        except Exception:  # noqa: BLE001 - the boundary of a request: logged, and the client gets an answer
            _log.exception("a request failed in the gRPC server")
            await self._fail(InferenceError(ErrorCode.INTERNAL, INTERNAL_TEXT), request_id)

    async def _send(self, answer: InferAnswer, request_id: str) -> None:
        if answer.error is not None:
            await self._fail(answer.error, request_id, is_final=answer.is_final)
            return
        response = encode_answer(answer, request_id=request_id, is_final=answer.is_final)
        await self._write(service_pb2.ModelStreamInferResponse(infer_response=response))

    async def _fail(self, error: InferenceError, request_id: str, *, is_final: bool = True) -> None:
        if self._raises:
            raise error
        await self._write(encode_stream_error(error, request_id=request_id, is_final=is_final))

    async def _write(self, message: Any) -> None:
        data = message.SerializeToString()
        async with self._writing:
            if self._has_client_left:
                return
            try:
                await self._context.write(data)
            except Exception:  # noqa: BLE001 - gRPC has no public error for it: nobody is there to be answered
                self._has_client_left = True
                _log.debug("a client has left its stream", exc_info=True)


def _first(errors: BaseExceptionGroup[InferenceError]) -> InferenceError:
    first = errors.exceptions[0]
    return first if isinstance(first, InferenceError) else _first(first)
