"""Which call a path names. Pure: bytes of the request line in, a value out."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from urllib.parse import unquote_to_bytes

REMEMBERED = 1024  # paths of clients that call few models; any other path is only a little slower
MAX_REMEMBERED = 512  # bytes of such a path: clients choose it, and a head may hold 64 KiB


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A call and what it is about. `model` is as the client spelled it: any text at all, even with slashes."""

    call: str
    model: str = ""
    version: str = ""


# The one method of each call.
METHODS: Mapping[str, bytes] = MappingProxyType(
    {
        "server": b"GET",
        "live": b"GET",
        "ready": b"GET",
        "metrics": b"GET",
        "metadata": b"GET",
        "model_ready": b"GET",
        "config": b"GET",
        "stats": b"GET",
        "infer": b"POST",
        "generate": b"POST",
        "generate_stream": b"POST",
        "index": b"POST",
        "load": b"POST",
        "unload": b"POST",
        "shared_memory_status": b"GET",
        "not_offered": b"",  # any method: there is nothing to get or to post to
    }
)
_FIXED: Mapping[tuple[str, ...], str] = MappingProxyType(
    {
        ("v2",): "server",
        ("v2", "health", "live"): "live",
        ("v2", "health", "ready"): "ready",
        ("v2", "models", "stats"): "stats",
        ("v2", "repository", "index"): "index",
        ("v2", "systemsharedmemory", "status"): "shared_memory_status",
        ("v2", "cudasharedmemory", "status"): "shared_memory_status",
        ("v2", "trace", "setting"): "not_offered",
        ("v2", "logging"): "not_offered",
        ("metrics",): "metrics",
    }
)
_MODEL_CALLS: Mapping[str, str] = MappingProxyType(
    {
        "ready": "model_ready",
        "config": "config",
        "stats": "stats",
        "infer": "infer",
        "generate": "generate",
        "generate_stream": "generate_stream",
    }
)
_REPOSITORY_CALLS = frozenset({"load", "unload"})
_SHARED_MEMORY = frozenset({"systemsharedmemory", "cudasharedmemory"})


def route(raw_path: bytes) -> Route | None:
    """The call that a path names, percent signs still in it; None if it names none."""
    try:
        parts = tuple(unquote_to_bytes(part).decode() for part in raw_path.removesuffix(b"/").split(b"/"))
    except UnicodeDecodeError:
        return None
    if parts[0] or not all(parts[1:]):
        return None
    return _route(parts[1:])


def known_route(raw_path: bytes) -> Route | None:
    """As `route`, of which the usual ones are remembered."""
    return (_known if len(raw_path) <= MAX_REMEMBERED else route)(raw_path)


_known = lru_cache(REMEMBERED)(route)


def _route(parts: tuple[str, ...]) -> Route | None:
    fixed = _FIXED.get(parts)
    if fixed is not None:
        return Route(call=fixed)
    if parts[:2] == ("v2", "models"):
        return _of_model(parts[2:])
    if parts[:3] == ("v2", "repository", "models"):
        return _of_repository(parts[3:])
    if parts[:1] == ("v2",) and len(parts) > 1 and parts[1] in _SHARED_MEMORY:
        return Route(call="not_offered")
    return None


def _of_model(parts: Sequence[str]) -> Route | None:
    if not parts:
        return None
    model, rest, version = parts[0], list(parts[1:]), ""
    if rest[:1] == ["versions"]:
        if len(rest) < 2 or not (rest[1].isascii() and rest[1].isdecimal()):  # noqa: PLR2004 - "versions" and its number
            return None
        version, rest = rest[1], rest[2:]
    if not rest:
        return Route(call="metadata", model=model, version=version)
    call = _MODEL_CALLS.get(rest[0])
    if rest == ["trace", "setting"]:
        call, rest = "not_offered", rest[:1]
    return Route(call=call, model=model, version=version) if call is not None and len(rest) == 1 else None


def _of_repository(parts: Sequence[str]) -> Route | None:
    if len(parts) != 2 or parts[1] not in _REPOSITORY_CALLS:  # noqa: PLR2004 - the model and what to do with it
        return None
    return Route(call=parts[1], model=parts[0])
