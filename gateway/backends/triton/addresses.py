"""The addresses behind a backend's url: fixed ones as they are, names as DNS tells them, again and again."""

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

REFRESH_S: Final = 5.0  # how often names are asked for again: DNS itself is rarely quicker
RESOLVE_TIMEOUT_S: Final = 5.0
_UNIX: Final = "unix:"

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""A host's addresses. Raises OSError where there are none, or none can be had now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One part of a url: a host (a name or an address) and its port, or the path of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def is_fixed(self) -> bool:
        """Whether it needs no look-up."""
        return bool(self.path) or _is_address(self.host)


def parse(url: str) -> tuple[Endpoint, ...]:
    """`host:port[,host:port...]`, hosts being names, IPv4 or [IPv6] addresses, or `unix:/path`. Raises ValueError."""
    return tuple(_endpoint(part.strip()) for part in url.split(","))


class Addresses:
    """The targets of a url, as far as they are known.

    Args:
        url: see `parse`.
        resolve: how names are looked up.
    """

    def __init__(self, url: str, *, resolve: Resolve | None = None) -> None:
        self._endpoints = parse(url)
        self._resolve = resolve or _look_up
        self._found: dict[Endpoint, tuple[str, ...]] = {
            endpoint: (target(endpoint.host, endpoint.port) if endpoint.host else _UNIX + endpoint.path,)
            for endpoint in self._endpoints
            if endpoint.is_fixed
        }

    @property
    def is_fixed(self) -> bool:
        """Whether they can never change."""
        return all(endpoint.is_fixed for endpoint in self._endpoints)

    @property
    def is_one_socket(self) -> bool:
        """Whether it is a single Unix socket."""
        return len(self._endpoints) == 1 and bool(self._endpoints[0].path)

    def known(self) -> tuple[str, ...]:
        """Each address once, as `host:port` or `unix:/path`, in the order of the url; none before names are known."""
        found = (address for endpoint in self._endpoints for address in self._found.get(endpoint, ()))
        return tuple(dict.fromkeys(found))

    def host_of(self, target: str) -> str:
        """What the url calls an address that is known; of two hosts with one address the first. Empty for a socket."""
        found = (endpoint.host for endpoint in self._endpoints if target in self._found.get(endpoint, ()))
        return next(found, "")

    async def refresh(self) -> None:
        """Look all names up. A name that cannot be looked up now keeps what was last known of it."""
        names = [endpoint for endpoint in self._endpoints if not endpoint.is_fixed]
        await asyncio.gather(*(self._refresh(endpoint) for endpoint in names))

    async def _refresh(self, endpoint: Endpoint) -> None:
        with contextlib.suppress(OSError, UnicodeError):  # TimeoutError among them; a name that is none
            async with asyncio.timeout(RESOLVE_TIMEOUT_S):
                hosts = await self._resolve(endpoint.host, endpoint.port)
            if hosts:
                self._found[endpoint] = tuple(sorted({target(host, endpoint.port) for host in hosts}))


def target(host: str, port: int) -> str:
    """`host:port`, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _look_up(host: str, port: int) -> Sequence[str]:
    """The host's addresses of one family, IPv4 if it has any: a server with both must not count twice."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    by_family: dict[int, list[str]] = {}
    for family, _, _, _, address in found:
        by_family.setdefault(family, []).append(str(address[0]))
    return by_family.get(socket.AF_INET) or by_family.get(socket.AF_INET6) or ()


def _endpoint(part: str) -> Endpoint:
    if part.startswith(_UNIX):
        path = part.removeprefix(_UNIX)
        if not path:
            raise ValueError(f"'{part}' names no path")
        return Endpoint(path=path)
    host, colon, port = part.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if is_bracketed else host
    if not colon or not bare or (":" in bare) is not is_bracketed or "/" in bare:
        raise ValueError(f"'{part}' is neither host:port, [v6]:port nor unix:/path")
    if not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):  # noqa: PLR2004 - ports are 16 bits
        raise ValueError(f"'{part}' has no port from 1 to 65535")
    return Endpoint(host=bare, port=int(port))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
