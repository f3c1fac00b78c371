"""A client of one HTTP/1.1 origin, with a pool of kept connections.

Written for the relay because of one property: when the caller leaves, the connection is closed at that moment, be it
before the first byte, in the middle of a body, or in a stream. (pyreqwest 0.15 goes on waiting for the head of an
answer after its task is cancelled, so an LLM would go on generating for nobody.)

It follows no redirects, uses no proxies and keeps no cookies.
"""

import asyncio
import re
import ssl
from collections import deque
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from gateway.backends.llm.http_connection import Connection, HttpError, Trouble

CONNECT_TIMEOUT_US: Final = 2_000_000
IDLE_US: Final = 4_000_000  # below the 5 s after which uvicorn, and so vLLM, closes an idle connection
MAX_IDLE: Final = 1024
MAX_PATHS: Final = 256  # that are remembered; a model's name, which a caller may give, may stand in one
_PATH = re.compile(r"(?:/[A-Za-z0-9._~%:@!$&'()*+,;=-]*)+")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[\x20-\x7e\x80-\xff]*")


class Exchange:
    """`async with client.exchange(...) as response`: leaving the block, however that happens, ends the exchange."""

    def __init__(self, client: "HttpClient", request: bytes, *, timeout_us: int) -> None:
        self._client = client
        self._request = request
        self._timeout_us = timeout_us
        self._connection: Connection | None = None

    async def __aenter__(self) -> Connection:
        self._connection = await self._client.send(self._request, timeout_us=self._timeout_us)
        return self._connection

    async def __aexit__(self, *_: object) -> None:
        if self._connection is not None:
            self._client.release(self._connection)


class HttpClient:
    """Exchanges with the origin of `base_url`. The constructor does no I/O.

    Args:
        base_url: http or https.
        headers: sent with every request.
        connect_timeout_us: for a new connection.
        tls: how https is checked; default: by the system's authorities.
        server_name: whose certificate it must be; by default the URL's host.

    Raises ValueError for a URL that is not http(s) or a header that cannot be sent.
    """

    def __init__(
        self,
        base_url: str,
        *,
        headers: Mapping[str, str],
        connect_timeout_us: int = CONNECT_TIMEOUT_US,
        tls: ssl.SSLContext | None = None,
        server_name: str = "",
    ) -> None:
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"'{base_url}' is not an http(s) URL")
        if url.query or url.fragment or url.username:
            raise ValueError("a base URL holds no query, fragment or user")
        self._host = url.hostname
        self._is_tls = url.scheme == "https"
        self._port = url.port or (443 if self._is_tls else 80)
        self._path = url.path.rstrip("/")
        self._connect_timeout_us = connect_timeout_us
        self._fixed = _head_lines({"host": url.netloc, "accept-encoding": "identity", **headers})
        self._tls = tls if self._is_tls else None
        self._server_name = (server_name or self._host) if self._is_tls else None
        self._posts: dict[str, bytes] = {}  # the beginnings of requests, by path
        self._idle: deque[Connection] = deque()
        self._busy: set[Connection] = set()
        self._sweeper: asyncio.TimerHandle | None = None

    def exchange(self, method: str, path: str, *, body: bytes = b"", extra: bytes = b"", timeout_us: int) -> Exchange:
        """One request. `path` follows the base URL's; `extra` are whole header lines, each with its line end."""
        length = b"content-length: %d\r\n" % len(body) if method == "POST" else b""
        request = b"".join((self._begun(f"{method} {self._path}{path}"), extra, length, b"\r\n", body))
        return Exchange(self, request, timeout_us=timeout_us)

    def get_from_root(self, path: str, *, timeout_us: int) -> Exchange:
        """A GET of what lies at the origin's root, and not behind the base URL."""
        return Exchange(self, self._begun(f"GET {path}") + b"\r\n", timeout_us=timeout_us)

    def post(self, path: str, *, extra: bytes, body: bytes) -> bytes:
        """A request for `send`, most of which is remembered; otherwise as `exchange`.

        Raises ValueError for a path that cannot be sent.
        """
        begun = self._posts.get(path)
        if begun is None:
            if not _PATH.fullmatch(path):
                raise ValueError(f"'{path}' is no path")
            if len(self._posts) >= MAX_PATHS:
                self._posts.clear()
            begun = self._posts[path] = self._begun(f"POST {self._path}{path}")
        return b"%b%bcontent-length: %d\r\n\r\n%b" % (begun, extra, len(body), body)

    def _begun(self, target: str) -> bytes:
        """The part of a head that is always the same."""
        return f"{target} HTTP/1.1\r\n".encode("ascii") + self._fixed

    async def send(self, request: bytes, *, timeout_us: int, begin_within_us: int | None = None) -> Connection:
        """The connection on which the answer's head has come; `release` must follow. Raises `HttpError`.

        `begin_within_us` is the time until the caller says, by `Connection.limit_silence`, that the answer has begun.
        """
        now = asyncio.get_running_loop().time()
        deadline = now + timeout_us / 1e6
        begin_by = None if begin_within_us is None else now + begin_within_us / 1e6
        kept = self.kept(now)
        if kept is not None:
            try:
                return await self._sent_on(kept, request, deadline, begin_by)
            except HttpError as error:
                # The other side gave up the idle connection while we took it: no fault, and no word was answered.
                if error.trouble is not Trouble.HUNG_UP or kept.has_begun:
                    raise
        return await self._sent_on(await self.connect(deadline), request, deadline, begin_by)

    async def _sent_on(
        self, connection: Connection, request: bytes, deadline: float, begin_by: float | None
    ) -> Connection:
        try:
            await connection.send(request, deadline, begin_by=begin_by)
        except BaseException:  # whatever ends the wait, a caller that leaves too
            self.release(connection)
            raise
        return connection

    def kept(self, now: float) -> Connection | None:
        """A connection of an earlier exchange, the youngest first; None where there is none."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_closed:
                continue
            if connection.idle_since < now - IDLE_US / 1e6:
                connection.abort()
                continue
            self._busy.add(connection)
            return connection
        return None

    async def connect(self, deadline: float) -> Connection:
        """A new connection. Raises `HttpError`."""
        connection = await self._connect(asyncio.get_running_loop(), deadline)
        self._busy.add(connection)
        return connection

    def release(self, connection: Connection) -> None:
        """Give a connection back after its exchange."""
        if connection not in self._busy:
            return
        self._busy.discard(connection)
        if not connection.finish():
            return
        if len(self._idle) >= MAX_IDLE:
            connection.abort()
            return
        loop = asyncio.get_running_loop()
        connection.idle_since = loop.time()
        self._idle.append(connection)
        if self._sweeper is None:
            self._sweeper = loop.call_later(IDLE_US / 1e6, self._sweep)

    async def close(self) -> None:
        """Close all connections; exchanges in flight end as HUNG_UP."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for connection in (*self._idle, *self._busy):
            connection.fail(HttpError(Trouble.HUNG_UP, "the client was closed"))
        self._idle.clear()
        await asyncio.sleep(0)  # transports close their sockets in the loop's next turn

    def _sweep(self) -> None:
        """Close connections that have been idle too long; the oldest stand first."""
        loop = asyncio.get_running_loop()
        oldest = loop.time() - IDLE_US / 1e6
        while self._idle and (self._idle[0].is_closed or self._idle[0].idle_since <= oldest):
            self._idle.popleft().abort()
        self._sweeper = loop.call_later(IDLE_US / 1e6, self._sweep) if self._idle else None

    async def _connect(self, loop: asyncio.AbstractEventLoop, deadline: float) -> Connection:
        connect_by = loop.time() + self._connect_timeout_us / 1e6
        if self._is_tls and self._tls is None:
            self._tls = ssl.create_default_context()
        try:
            async with asyncio.timeout_at(min(connect_by, deadline)):
                _, connection = await loop.create_connection(
                    Connection, self._host, self._port, ssl=self._tls, server_hostname=self._server_name
                )
        except TimeoutError as error:
            # By which bound is first, not by the time now: timers may fire a little early. The kernel's own ETIMEDOUT
            # is a TimeoutError too, and bears its number.
            is_late = error.errno is None and deadline <= connect_by
            trouble = Trouble.TIMED_OUT if is_late else Trouble.UNREACHABLE
            raise HttpError(trouble, "no connection in time") from error
        except (OSError, UnicodeError) as error:  # refused, unreachable, no such name, TLS refused; no name at all
            raise HttpError(Trouble.UNREACHABLE, str(error)) from error
        return connection


def _head_lines(headers: Mapping[str, str]) -> bytes:
    """Header lines; ValueError for a name or value that HTTP cannot carry."""
    lines: list[str] = []
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
            raise ValueError(f"header '{name[:40]}' cannot be sent")
        lines.append(f"{name.lower()}: {value}\r\n")
    return "".join(lines).encode("latin-1")
