"""gRPC calls to one address over HTTP/2, with TLS or without, on one connection at a time.

Written for the relay because of its price: a small call costs a third to six tenths of the CPU time that it costs in
`grpc.aio` (`python -m tests.bench.grpc_client`), and when the caller leaves, the server is told within 20 ms.

Messages are bytes, encoded by the caller. It follows no proxies, makes no call twice, and takes no compressed answers.
"""

import asyncio
import functools
import ssl
from collections.abc import AsyncGenerator, Sequence
from typing import Final

from gateway.backends.grpc.connection import Connection
from gateway.backends.grpc.headers import GrpcError, encoded_metadata
from gateway.backends.grpc.stream import MAX_MESSAGE, PREFIX, Message

CONNECT_TIMEOUT_S: Final = 2.0
FIRST_BACKOFF_S: Final = 0.1
MAX_BACKOFF_S: Final = 0.5
BACKOFF_GROWTH: Final = 1.6
ALPN: Final = "h2"
_UNIX: Final = "unix:"

__all__ = ["GrpcChannel", "GrpcError"]


class GrpcChannel:
    """Calls to `target`: `host:port`, `[v6]:port` or `unix:/path`. The constructor does no I/O.

    It connects at the first call, and again at the first call after a connection was lost. While it connects, calls
    wait; after a failure they fail at once until the next attempt is due. Raises ValueError for another kind of target.

    Args:
        target: the address.
        max_receive_bytes: the size of one message of an answer.
        tls: speak TLS, checked as this says; there is no way back to speaking without.
        server_name: whose certificate it must be, and what the server is called; by default the target's host.
    """

    def __init__(
        self,
        target: str,
        *,
        max_receive_bytes: int = MAX_MESSAGE,
        tls: ssl.SSLContext | None = None,
        server_name: str = "",
    ) -> None:
        self._target = target
        self._path = target.removeprefix(_UNIX) if target.startswith(_UNIX) else ""
        self._host, self._port = ("", 0) if self._path else _host_and_port(target)
        self._tls = tls
        self._server_name = (server_name or self._host) if tls is not None else ""
        self._max_receive_bytes = min(max_receive_bytes, MAX_MESSAGE)
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[Connection | GrpcError] | None = None
        self._open: set[Connection] = set()  # with those that still finish their calls
        self._failure: GrpcError | None = None
        self._backoff_s = FIRST_BACKOFF_S
        self._retry_at = 0.0
        self._is_closed = False

    async def unary(
        self,
        path: bytes,
        *message: bytes | memoryview,
        timeout_s: float,
        metadata: Sequence[tuple[bytes, bytes]] = (),
    ) -> Message:
        """The answer to one message. Raises `GrpcError`; cancelling the wait cancels the call at the server.

        Args:
            path: `/package.Service/Method`.
            message: the request, encoded, in parts; must not change until the call has ended.
            timeout_s: the time for everything, connecting included; the server is told of it.
            metadata: lower-case names and printable ASCII; ValueError for others.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        headers = encoded_metadata(metadata) if metadata else b""
        connection = self._free or await self._with_room(deadline)
        parts = (PREFIX.pack(0, sum(map(len, message))), *message)
        stream = connection.start(path, parts, deadline=deadline, is_unary=True, metadata=headers)
        try:
            return await stream.only()
        finally:
            stream.end()

    async def stream(
        self, path: bytes, messages: Sequence[bytes], *, timeout_s: float, metadata: Sequence[tuple[bytes, bytes]] = ()
    ) -> AsyncGenerator[Message, None]:
        """Send all messages, then yield those of the answer as they are read; the arguments are those of `unary`.

        Closing the iterator cancels the call at the server. A reader that does not read stops the server.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        headers = encoded_metadata(metadata) if metadata else b""
        connection = self._free or await self._with_room(deadline)
        parts = [part for message in messages for part in (PREFIX.pack(0, len(message)), message)]
        stream = connection.start(path, parts, deadline=deadline, is_unary=False, metadata=headers)
        try:
            while (message := await stream.next_message()) is not None:
                yield message
        finally:
            stream.end()

    async def close(self) -> None:
        """Close the connections; calls in flight end as UNAVAILABLE, as do those that come later."""
        self._is_closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait({self._connecting})
        connections = tuple(self._open)
        for connection in connections:
            connection.close("the channel was closed")
        if connections:
            await asyncio.wait({connection.gone for connection in connections})

    # --- inside -----------------------------------------------------------------------------------

    @property
    def _free(self) -> Connection | None:
        """The connection, where a call can be started at once."""
        connection = self._connection
        return connection if connection is not None and connection.is_free else None

    async def _with_room(self, deadline: float) -> Connection:
        """A connection on which a call can be started now."""
        try:
            async with asyncio.timeout_at(deadline):
                connection = self._connection or await self._connected()
                if connection.is_queued_for:
                    await connection.room()
                while not connection.has_room:
                    if connection.is_usable:
                        await connection.room()
                    else:
                        connection = self._connection or await self._connected()
                return connection
        except TimeoutError as error:
            raise GrpcError("DEADLINE_EXCEEDED", "Deadline Exceeded", never_sent=True) from error

    async def _connected(self) -> Connection:
        """A new connection, made once for all who wait."""
        loop = asyncio.get_running_loop()
        if self._is_closed:
            raise GrpcError("UNAVAILABLE", "the channel was closed", never_sent=True)
        if self._connecting is None:
            if self._failure is not None and loop.time() < self._retry_at:
                raise GrpcError(self._failure.code, self._failure.details, never_sent=True)
            self._connecting = loop.create_task(self._connect())
        connecting = self._connecting
        await asyncio.wait({connecting})
        outcome = GrpcError("UNAVAILABLE", "the channel was closed") if connecting.cancelled() else connecting.result()
        if isinstance(outcome, GrpcError):
            raise GrpcError(outcome.code, outcome.details, never_sent=True)  # each waiter its own traceback
        return outcome

    async def _connect(self) -> Connection | GrpcError:
        """One attempt. Its failure is a value, because nobody may be left to hear of it."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        connection: Connection | None = None
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                if self._path:
                    _, connection = await loop.create_unix_connection(self._protocol, self._path)
                else:
                    transport, connection = await loop.create_connection(
                        self._protocol,
                        self._host,
                        self._port,
                        ssl=self._tls,
                        server_hostname=self._server_name or None,
                    )
                    if self._tls is not None:
                        _check_protocol(transport)
                self._open.add(connection)
                connection.gone.add_done_callback(functools.partial(self._drop, connection))
                await connection.ready
            if not connection.is_usable:
                raise ConnectionError(connection.failure)
        except (OSError, UnicodeError) as error:  # TimeoutError among the first; the second for what is no host's name
            if connection is not None:
                connection.close("no use of it")
                connection = None  # the error's traceback has this frame, and the connection may have the error
            reason = str(error) or f"no answer within {CONNECT_TIMEOUT_S:g} s"
            self._failure = GrpcError("UNAVAILABLE", f"failed to connect to {self._target}: {reason}")
            self._retry_at = began + self._backoff_s
            self._backoff_s = min(self._backoff_s * BACKOFF_GROWTH, MAX_BACKOFF_S)
            return self._failure
        else:
            self._failure = None
            self._backoff_s = FIRST_BACKOFF_S
            self._connection = connection
            return connection
        finally:
            self._connecting = None

    def _protocol(self) -> Connection:
        authority = "localhost" if self._path else self._target
        if self._server_name:
            authority = f"[{self._server_name}]" if ":" in self._server_name else self._server_name
            authority += f":{self._port}"
        return Connection(authority.encode("ascii"), max_message=self._max_receive_bytes, on_unusable=self._forget)

    def _forget(self, connection: Connection) -> None:
        if self._connection is connection:
            self._connection = None

    def _drop(self, connection: Connection, _: asyncio.Future[None]) -> None:
        self._open.discard(connection)


def _host_and_port(target: str) -> tuple[str, int]:
    host, _, port = target.rpartition(":")
    if not host or not port.isdecimal() or not target.isascii():
        raise ValueError(f"'{target}' is neither host:port, [v6]:port nor unix:/path")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _check_protocol(transport: asyncio.BaseTransport) -> None:
    """A server of TLS says what it speaks inside (RFC 7301); a web server on that port would not speak HTTP/2."""
    chosen = transport.get_extra_info("ssl_object").selected_alpn_protocol()
    if chosen != ALPN:
        raise ConnectionError(f"the server speaks {chosen or 'no HTTP/2'} over TLS, and not h2")
