"""gRPC calls to one address by gRPC's own library, in the form of `channel`: for messages that are compressed."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Final

import grpc
import grpc.aio

from gateway.backends.grpc.headers import MAX_DETAILS, GrpcError
from gateway.backends.grpc.http2 import MAX_BLOCK
from gateway.backends.grpc.stream import SETTLE_S

CHANNEL_OPTIONS: Final[tuple[tuple[str, int | str], ...]] = (
    # gRPC's own back-off keeps a restarted Triton away for 3 s; with these it was back in 0.14 s.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    # Triton counts pings that come more often than every 300 s as strikes and hangs up. The time-out also becomes
    # TCP_USER_TIMEOUT (gRFC A18), which is what finds a peer that vanished: the probe writes every second.
    ("grpc.keepalive_time_ms", 310_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),  # Triton's own answers are bounded by protobuf's 2 GiB
    # A model may make an error of a whole input: by default more than 8 KiB of text hide the status itself.
    ("grpc.max_metadata_size", MAX_BLOCK),
    ("grpc.absolute_max_metadata_size", MAX_BLOCK),
    ("grpc.enable_http_proxy", 0),  # where a request goes is in the configuration, not in the environment
    ("grpc.enable_retries", 0),  # `core.attempts` decides about attempts
    ("grpc.use_local_subchannel_pool", 1),  # a connection of its own
)

# The library's own words for what befell a connection: no server said them.
_CONNECTION_TEXTS: Final = (
    "failed to connect",
    "Socket closed",
    "Stream removed",
    "Connection reset",
    "Broken pipe",
    "GOAWAY",
    "Endpoint closing",
    "endpoint shutdown",
    "recvmsg",
    "sendmsg",
    "Transport closed",
    "transport is closing",
    "keepalive",
    "Too many pings",
    "Connection refused",
    "channel is closed",
    "RST_STREAM",
)
_LOCAL_CODES: Final = ("DEADLINE_EXCEEDED",)


class AioChannel:
    """Calls to `target`, compressed by gzip; answers may be. The constructor does no I/O.

    Args:
        target: the address.
        credentials: speak TLS, checked as these say.
        server_name: whose certificate it must be, and what the server is called; by default the target's host.
    """

    def __init__(
        self, target: str, *, credentials: grpc.ChannelCredentials | None = None, server_name: str = ""
    ) -> None:
        self._target = target
        self._credentials = credentials
        self._options = CHANNEL_OPTIONS
        if credentials is not None and server_name:
            self._options += (("grpc.ssl_target_name_override", server_name),)
        self._channel: Any = None
        self._calls: dict[tuple[bytes, bool], Any] = {}

    async def unary(
        self,
        path: bytes,
        *message: bytes | memoryview,
        timeout_s: float,
        metadata: Sequence[tuple[bytes, bytes]] = (),
    ) -> bytes:
        """The answer to one message, given in parts.

        Raises `GrpcError`; cancelling the wait cancels the call at the server.
        """
        begin = self._call(path, is_stream=False)
        call = begin(b"".join(message), timeout=timeout_s + SETTLE_S, metadata=_text(metadata))
        await _ended(call, timeout_s)
        try:
            answer: bytes = await call
        except grpc.aio.AioRpcError as error:
            raise _error(error) from error
        except asyncio.CancelledError as error:
            _raise_own(error)
        else:
            return answer
        raise GrpcError("UNAVAILABLE", "the channel was closed")

    async def stream(
        self, path: bytes, messages: Sequence[bytes], *, timeout_s: float, metadata: Sequence[tuple[bytes, bytes]] = ()
    ) -> AsyncGenerator[bytes, None]:
        """Send all messages, then yield those of the answer. Closing the iterator cancels the call at the server."""
        call = self._call(path, is_stream=True)(iter(messages), timeout=timeout_s, metadata=_text(metadata))
        try:
            async for message in call:
                yield message
        except grpc.aio.AioRpcError as error:
            raise _error(error) from error
        except asyncio.CancelledError as error:
            _raise_own(error)
            raise GrpcError("UNAVAILABLE", "the channel was closed") from error
        finally:
            call.cancel()

    async def close(self) -> None:
        """Close the connection; calls in flight end as UNAVAILABLE."""
        channel, self._channel = self._channel, None
        self._calls.clear()
        if channel is not None:
            await channel.close()

    def _call(self, path: bytes, *, is_stream: bool) -> Any:
        """The library's callable for a path; its channel is made at the first call: it belongs to the running loop."""
        call = self._calls.get((path, is_stream))
        if call is None:
            if self._channel is None:
                self._channel = self._opened()
            make = self._channel.stream_stream if is_stream else self._channel.unary_unary
            call = self._calls[path, is_stream] = make(path.decode())
        return call

    def _opened(self) -> Any:
        gzip = grpc.Compression.Gzip
        if self._credentials is None:
            return grpc.aio.insecure_channel(self._target, options=self._options, compression=gzip)
        return grpc.aio.secure_channel(self._target, self._credentials, options=self._options, compression=gzip)


async def _ended(call: Any, timeout_s: float) -> None:
    """Wait for the call; where nobody waits any more, the server is told so, but not too early (see `SETTLE_S`)."""
    loop = asyncio.get_running_loop()
    settled_at = loop.time() + SETTLE_S
    ended: asyncio.Future[None] = loop.create_future()

    def wake(_: Any) -> None:
        if not ended.done():
            ended.set_result(None)

    call.add_done_callback(wake)
    try:
        async with asyncio.timeout(timeout_s):
            await ended
    except TimeoutError:
        loop.call_at(settled_at, call.cancel)
        raise GrpcError("DEADLINE_EXCEEDED", "Deadline Exceeded") from None
    except asyncio.CancelledError:
        loop.call_at(settled_at, call.cancel)
        raise


def _text(metadata: Sequence[tuple[bytes, bytes]]) -> tuple[tuple[str, str], ...]:
    return tuple((name.decode(), value.decode()) for name, value in metadata)


def _error(error: grpc.aio.AioRpcError) -> GrpcError:
    code, details = error.code().name, (error.details() or "")[:MAX_DETAILS]
    is_reply = code not in _LOCAL_CODES and not any(text in details for text in _CONNECTION_TEXTS)
    return GrpcError(code, details, is_reply=is_reply)


def _raise_own(error: asyncio.CancelledError) -> None:
    """A channel that closes cancels its calls by the same exception as a cancelled task: tell them apart."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise error
