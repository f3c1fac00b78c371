"""The options of `gateway load`, and what the stack of this folder says -> what is to be measured."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from gateway.cli.tuning.options import duration_s, shapes_of, slo_of
from gateway.tuning.load import traffic_file
from gateway.tuning.load.asks import AskError, task_rows
from gateway.tuning.load.session import Plan
from gateway.tuning.load.traffic_file import Part
from gateway.tuning.traffic import TrafficClass, TrafficError, check_amount, parse_class

DEFAULT_TASK: Final = "text-embedding"
DEFAULT_INPUTS: Final[Mapping[str, Mapping[str, Any]]] = {DEFAULT_TASK: {"text": "a cat"}}
DEFAULT_CONCURRENCY: Final = 8
DEFAULT_DURATION_S: Final = 10
DEFAULT_WARMUP_S: Final = 1
_AFTER_TRACE_S: Final = 0.001
_STRAIGHT: Final = ("triton", "shape")


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The options as they were given."""

    url: str
    triton: str
    key: str = field(repr=False)
    task: str
    input: str
    image: str
    tensor: str
    shape: Sequence[str]
    chat: str
    max_tokens: int
    traffic: Path | None
    rows: int | None
    priority: str
    rate: str
    arrivals: str
    trace: Path | None
    speed: float
    concurrency: int
    think_ms: float
    duration: str
    warmup: str
    grace: str
    connections: int
    seed: int
    slo: str
    find: bool
    ops_url: str


def plan_of(given: Given, stack: Mapping[str, Any]) -> Plan:
    """What is to be measured; the stack's key and operations listener are for the stack's own address alone.

    Raises `AskError`, `TrafficError` and ValueError, and ends the command for what is no time.
    """
    of_stack = str(stack.get("data_url", ""))
    is_stack = not given.url or given.url.rstrip("/") == of_stack.rstrip("/")
    url = given.url or of_stack
    key = given.key or (str(stack.get("key", "")) if is_stack else "")
    parts = _parts(given, url=url, key=key)
    if given.find and (len(parts) > 1 or parts[0].traffic.trace or parts[0].traffic.ramp_to):
        raise AskError("--find: raises one rate, or one number of callers: no trace, no ramp, no --traffic of several")
    is_sloped = any(part.traffic.trace or part.traffic.ramp_to for part in parts)
    warmup_s = duration_s(given.warmup, "--warmup") if given.warmup else DEFAULT_WARMUP_S * (not is_sloped)
    counted_s = _counted_s(given, [part.traffic for part in parts])
    check_amount([part.traffic for part in parts], duration_s=warmup_s + counted_s)
    return Plan(
        parts=parts,
        duration_s=counted_s,
        warmup_s=warmup_s,
        grace_s=duration_s(given.grace, "--grace"),
        seed=given.seed,
        connections=given.connections,
        ops_url=given.ops_url or (str(stack.get("ops_url", "")) if is_stack else ""),
    )


def _parts(given: Given, *, url: str, key: str) -> list[Part]:
    slo_ms = slo.ms if (slo := slo_of(given.slo)) else 0.0
    if given.traffic is None:
        return [_one(given, url=url, key=key, slo_ms=slo_ms)]
    others = {
        name: getattr(given, name)
        for name in ("task", "tensor", "chat", "image", "input", "rate", "trace", "concurrency", "rows", *_STRAIGHT)
    }
    if any(others.values()):
        named = ", ".join(f"--{name}" for name, value in others.items() if value)
        raise AskError(f"--traffic: the file says all of what is asked, and how much; not beside it: {named}")
    parts = traffic_file.read(given.traffic, url=url, key=key, environ=os.environ)
    return [
        part if part.traffic.slo_ms else replace(part, traffic=replace(part.traffic, slo_ms=slo_ms)) for part in parts
    ]


def _one(given: Given, *, url: str, key: str, slo_ms: float) -> Part:
    if not url and not given.triton:
        raise AskError("nobody to ask: run `gateway up` here, or give --url (or --triton with --tensor)")
    task = given.task or ("" if given.tensor or given.chat else DEFAULT_TASK)
    asked = {name: getattr(given, name) for name in ("triton", "image", "tensor", "chat", "max_tokens")}
    has_input = not (given.image or given.chat or given.tensor)
    default = DEFAULT_INPUTS.get(task, ()) if has_input else ()
    ask = traffic_file.ask_of(
        {
            **asked,
            "url": url,
            "key": "" if given.triton else key,
            "shape": shapes_of(given.shape),
            "task": task,
            "input": _input(given.input) if given.input else default,
        },
        at="",
    )
    how_much: dict[str, Any] = {
        "name": task or given.tensor or "chat",
        "rows": given.rows or (1 if given.tensor else task_rows(ask)),
        "slo_ms": slo_ms,
        **{name: getattr(given, name) for name in ("think_ms", "speed", "arrivals", "priority")},
        **_rate(given.rate),
    }
    if given.trace is not None:
        how_much["trace"] = traffic_file.trace_of(given.trace, task=task)
    if given.concurrency or not (given.rate or given.trace):
        how_much["concurrency"] = given.concurrency or DEFAULT_CONCURRENCY
    return Part(traffic=parse_class(how_much, at="--"), ask=ask)


def _rate(text: str) -> dict[str, float]:
    if not text:
        return {}
    begin, dots, end = text.partition("..")
    try:
        return {"rate": float(begin), **({"ramp_to": float(end)} if dots else {})}
    except ValueError:
        raise TrafficError(f"--rate {text}: write 50, or 10..500 for a ramp") from None


def _input(text: str) -> Mapping[str, Any] | Sequence[Mapping[str, Any]]:
    """One object, or those of a file: one, a list of them, or one a line."""
    try:
        if not text.startswith("@"):
            return _objects(json.loads(text))
        content = Path(text[1:]).read_text(encoding="utf-8")
        try:
            return _objects(json.loads(content))
        except json.JSONDecodeError:
            return _objects([json.loads(line) for line in content.splitlines() if line.strip()])
    except OSError as error:
        raise AskError(f"--input: {text[1:]}: {error.strerror}") from error
    except ValueError as error:
        raise AskError(f"--input: {error}") from error


def _objects(read: Any) -> Mapping[str, Any] | Sequence[Mapping[str, Any]]:
    many = read if isinstance(read, list) else [read]
    if not many or not all(isinstance(one, dict) for one in many):
        raise ValueError("must be a JSON object, or several")
    return many


def _counted_s(given: Given, classes: Sequence[TrafficClass]) -> float:
    if given.duration:
        counted_s = duration_s(given.duration, "--duration")
        if not counted_s:
            raise AskError("--duration: must be longer than 0s")
        return counted_s
    ends = [one.trace[-1] / one.speed + _AFTER_TRACE_S for one in classes if one.trace]
    return max(ends) if ends else DEFAULT_DURATION_S
