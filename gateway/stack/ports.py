"""The ports of the stack: which ones, who uses them, and whether they are free."""

import contextlib
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """One port per listener, all on the loopback address.

    The three public ones are the documented ports of the gateway. The inner ones lie outside the usual
    defaults (6379, 8000...), so that a Redis or a Triton that already runs on the machine is not in the way.
    """

    data: int = 8080
    ops: int = 8081
    admin: int = 8090
    redis: int = 16379
    triton_http: int = 18000
    triton_grpc: int = 18001
    triton_metrics: int = 18002
    llm: int = 18003


# Settings that the gateway itself reads: whoever moved a port there means the same port here.
ENVIRONMENT = {"data": "GATEWAY_PORT", "ops": "GATEWAY_OPS_PORT", "admin": "GATEWAY_ADMIN_PORT"}

_MAX_PORT = 65535


class BadPortError(ValueError):
    """A port in the environment is not a number from 1 to 65535; the text is one line for a person."""


def default_ports(environ: Mapping[str, str]) -> Ports:
    """The documented ports, with `GATEWAY_PORT` and its two siblings applied; raises `BadPortError`."""
    chosen: dict[str, int] = {}
    for field, variable in ENVIRONMENT.items():
        text = environ.get(variable)
        if not text:
            continue
        if not (text.isascii() and text.isdigit() and 0 < int(text) <= _MAX_PORT):
            raise BadPortError(f"{variable} is {text!r}: a port is a number from 1 to {_MAX_PORT}.")
        chosen[field] = int(text)
    return Ports(**chosen)


def free_ports() -> Ports:
    """Ports that nobody listens on now, all different, picked by the kernel."""
    names = [field.name for field in fields(Ports)]
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in names]
        for one in sockets:
            one.bind((HOST, 0))
        return Ports(**{name: one.getsockname()[1] for name, one in zip(names, sockets, strict=True)})


def is_free(port: int) -> bool:
    """Whether a server could listen on `port` of the loopback address now."""
    with socket.socket() as probe:
        # As servers do: a port in TIME_WAIT counts as free, one with a listener does not.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def taken(named: Iterator[tuple[str, int]]) -> tuple[str, int] | None:
    """The first `(part, port)` whose port is not free."""
    return next(((name, port) for name, port in named if not is_free(port)), None)
