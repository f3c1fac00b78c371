"""Several classes of traffic out of one YAML file, each with its own requests, key and SLO."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson
from pydantic import TypeAdapter, ValidationError

from gateway.settings.yaml_text import read_yaml
from gateway.tuning.load.asks import Ask, AskError, task_rows
from gateway.tuning.load.recorded import instants
from gateway.tuning.traffic import TrafficClass, TrafficError, parse_class

_ASK: Final = TypeAdapter(Ask)
_OF_ASK: Final = frozenset(one.name for one in dataclasses.fields(Ask)) - {"key"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A class, and what its requests are."""

    traffic: TrafficClass
    ask: Ask


def read(path: Path, *, url: str, key: str, environ: Mapping[str, str]) -> list[Part]:
    """The classes of a file: `classes`, a list; `url` and `key` where a class has none of its own.

    A class names a key by `key_env`, a variable of the environment; `trace` is a file beside this one. Raises
    `AskError` or `TrafficError`.
    """
    try:
        document = read_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise AskError(f"traffic: {path}: {error.strerror}") from error
    except ValueError as error:  # what is no YAML, or no text
        raise AskError(f"traffic: {path}: {error}") from error
    classes = document.get("classes") if isinstance(document, dict) else None
    if not isinstance(classes, list) or not classes or set(document) != {"classes"}:
        raise AskError(f"traffic: {path}: must be an object with a list `classes`, and nothing else")
    parts = [
        part(given, at=f"classes[{index}]", folder=path.parent, url=url, key=key, environ=environ)
        for index, given in enumerate(classes)
    ]
    names = [one.traffic.name for one in parts]
    if len(set(names)) < len(names):
        raise TrafficError(f"classes: {', '.join(names)}: each must have a name of its own")
    return parts


def part(given: object, *, at: str, folder: Path, url: str, key: str, environ: Mapping[str, str]) -> Part:
    """One class as it stands in a file."""
    if not isinstance(given, Mapping):
        raise AskError(f"{at}: must be an object")
    of_ask = {name: value for name, value in given.items() if name in _OF_ASK}
    of_traffic = {name: value for name, value in given.items() if name not in _OF_ASK and name != "key_env"}
    if variable := given.get("key_env"):
        if not (key := environ.get(str(variable), "")):
            raise AskError(f"{at}.key_env: the environment has no {variable}")
        of_traffic.setdefault("tenant", str(variable))
    if isinstance(trace := of_traffic.get("trace"), str):
        of_traffic["trace"] = trace_of(folder / trace, task=str(of_ask.get("task", "")))
    if image := of_ask.get("image"):
        of_ask["image"] = str(folder / str(image))
    ask = ask_of({"url": url, "key": key, **of_ask}, at=at)
    rows = {"rows": task_rows(ask)} if ask.task and not ask.image else {}
    traffic = parse_class(rows | of_traffic, at=at)
    if traffic.sequence_length:
        raise TrafficError(f"{at}.sequence_length: sequences are simulated (`gateway simulate`), and not measured")
    return Part(traffic=traffic, ask=ask)


def ask_of(given: Mapping[str, Any], *, at: str) -> Ask:
    """The requests of a class. Raises `AskError`."""
    try:
        return _ASK.validate_json(orjson.dumps({**given, "url": "" if given.get("triton") else given.get("url", "")}))
    except ValidationError as error:
        first = error.errors()[0]
        inner = first.get("ctx", {}).get("error")
        reason = str(inner) if isinstance(inner, AskError) else first["msg"]
        where = ".".join(map(str, (at, *first["loc"][:1]))).strip(".")
        raise AskError(f"{where}: {reason}" if where else reason) from None
    except orjson.JSONEncodeError as error:
        raise AskError(f"{at}: {error}") from error


def trace_of(path: Path, *, task: str) -> tuple[float, ...]:
    """The instants of a recording. Raises `TrafficError`."""
    try:
        return instants(path.read_text(encoding="utf-8"), task=task)
    except OSError as error:
        raise TrafficError(f"trace: {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TrafficError(f"trace: {path}: {error}") from error
