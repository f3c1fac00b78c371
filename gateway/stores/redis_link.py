"""One connection to Redis for the call that every request makes: what the library does around a call is most of it.

The library makes the connection, with all that belongs to it (TLS, the password, the database, the master that
sentinels name); its socket is taken over then. One call at a time, and nothing is put right here: whoever gets no
answer asks by the library, which tries again, and knows what an error means.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final

import hiredis
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from gateway.stores.redis_cluster import ClusterClient
from gateway.stores.redis_script import TURNS, UNREACHABLE, in_time

PAUSE_S: Final = 1.0  # before another is made, where one could not be
CONNECTED_WITHIN_S: Final = 2.0
_NOT_WHOLE: Final = object()


class Link:
    """A connection that is made beside the library's, once that has found Redis; for a cluster there is none."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._socket: _Socket | None = None
        self._opening: asyncio.Task[None] | None = None
        self._not_before_s = 0.0

    async def call(self, *words: str | bytes | int, timeout_s: float) -> Any:
        """Redis's reply to a command; None where there is no connection, or it broke, or the reply is an error.

        None tells nothing of whether Redis has done it. Raises `TimeoutError`; that connection is not used again.
        """
        socket = self._socket
        if socket is None or socket.is_busy:
            return None
        try:
            reply = await socket.call(words, timeout_s)
        except RedisConnectionError:
            reply = None
        finally:
            if socket.is_over:
                self._socket = None
        if isinstance(reply, hiredis.ReplyError):
            self._hang_up()  # it may be that of a master that is one no more
            return None
        return reply

    def open(self) -> None:
        """Redis answers the library: begin to connect, unless it is connected, or could not be a moment ago."""
        if self._socket is None and self._opening is None and not isinstance(self._client, ClusterClient):
            loop = asyncio.get_running_loop()
            if loop.time() >= self._not_before_s:
                self._opening = loop.create_task(self._connect(), name="redis-link")

    async def close(self) -> None:
        """Hang up; what is under way breaks."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        self._hang_up()

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _forget(self, socket: "_Socket") -> None:
        """It has ended, maybe between two calls: the next one shall not find it."""
        if self._socket is socket:
            self._socket = None

    async def _connect(self) -> None:
        pool: Any = self._client.connection_pool
        connection = pool.make_connection()
        try:
            async with in_time(CONNECTED_WITHIN_S):
                await connection.connect()
            if _has_broken(connection):
                raise RedisConnectionError("the connection broke as soon as it was made")
            self._socket = _Socket(connection, self._forget)
        except UNREACHABLE:
            self._not_before_s = asyncio.get_running_loop().time() + PAUSE_S
        finally:
            self._opening = None
            if self._socket is None:
                await connection.disconnect(nowait=True)


def _has_broken(connection: Any) -> bool:
    """Whether it has ended before it could be taken over: its end was told to the library, and is not told again."""
    reader: asyncio.StreamReader = connection._reader  # noqa: SLF001 - what the socket's end was told to
    return reader.at_eof() or reader.exception() is not None or connection._writer.transport.is_closing()  # noqa: SLF001 - the same


class _Socket(asyncio.Protocol):
    """A connection of the library's, taken over. `ended` is told of its end, whoever brought it about."""

    def __init__(self, connection: Any, ended: Callable[["_Socket"], None]) -> None:
        self._writer: asyncio.StreamWriter = connection._writer  # noqa: SLF001 - kept: its end would close the socket
        connection._reader = connection._writer = None  # noqa: SLF001 - it is the library's no more
        self._transport = self._writer.transport
        self._parser = hiredis.Reader(notEnoughData=_NOT_WHOLE)
        self._reply: asyncio.Future[Any] | None = None
        self._ended = ended
        self.is_over = False
        self._transport.set_protocol(self)

    @property
    def is_busy(self) -> bool:
        """Whether a reply is waited for."""
        return self._reply is not None

    async def call(self, words: tuple[Any, ...], timeout_s: float) -> Any:
        """The reply, errors too. Raises `RedisConnectionError` and `TimeoutError`; whatever it raises ends it."""
        loop = asyncio.get_running_loop()
        reply = self._reply = loop.create_future()
        timer = loop.call_later(timeout_s, self._late, reply, TURNS)
        try:
            self._transport.write(hiredis.pack_command(words))
            return await reply
        except BaseException:
            self.close()
            raise
        finally:
            timer.cancel()
            self._reply = None

    def _late(self, reply: asyncio.Future[Any], turns_left: int) -> None:
        """As `redis_script.in_time` has it: a loop that was held up first reads what has come."""
        if reply.done():
            return
        if turns_left:
            asyncio.get_running_loop().call_soon(self._late, reply, turns_left - 1)
        else:
            reply.set_exception(TimeoutError())

    def data_received(self, data: bytes) -> None:
        """A reply, or a part of it."""
        try:
            self._parser.feed(data)
            while (reply := self._parser.gets()) is not _NOT_WHOLE:
                if self._reply is not None and not self._reply.done() and type(reply) is not hiredis.PushNotification:
                    self._reply.set_result(reply)
        except hiredis.HiredisError:  # no Redis speaks so
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        """Redis hung up, or we did."""
        self.is_over = True
        self._ended(self)
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(RedisConnectionError(f"the connection broke: {error}"))

    def close(self) -> None:
        """Hang up."""
        self.is_over = True
        self._transport.abort()
