"""A change of a setting as a diff of the file that it is in; everything else in the file stays as it is. Pure."""

import copy
import difflib
import re
from typing import Any, Final

import yaml
from google.protobuf.message import Message

from gateway.tuning.advising.situation import Setting
from local_runtime.errors import ModelLoadError
from local_runtime.repository import parsing

_CODE: Final = r"(?m)^(?P<before>(?:[^#\n\"']|\"[^\"\n]*\"|'[^'\n]*')*?\b{name}\s*:?\s*)"


def unified(before: str, after: str, file: str) -> str:
    """The diff of two texts; empty where they are the same."""
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), f"{file} (now)", f"{file} (advised)", lineterm=""
    )
    return "\n".join(lines)


def config_diff(text: str, file: str, *, before: Setting, after: Setting) -> str:
    """The diff of a `config.pbtxt`; the lines alone, each with a +, where the text cannot be changed that way."""
    lines = config_lines(before, after)
    if not lines:
        return ""
    changed = edited(text, before, after) if text else None
    return "\n".join(f"+{line}" for line in lines) if changed is None else unified(text, changed, file)


def config_lines(before: Setting, after: Setting) -> list[str]:
    """What to write, for those who write it by hand."""
    lines = []
    if after.max_batch_size != before.max_batch_size:
        lines.append(f"max_batch_size: {after.max_batch_size}")
    if (after.delay_us, after.is_batching) != (before.delay_us, before.is_batching):
        delay = f"max_queue_delay_microseconds: {after.delay_us} " if after.delay_us else ""
        lines.append(f"dynamic_batching {{ {delay}}}")
    if after.instances != before.instances:
        lines.append(f"instance_group [ {{ count: {after.instances} }} ]")
    return lines


def edited(text: str, before: Setting, after: Setting) -> str | None:
    """The text of a `config.pbtxt` with the change in it; None where it has a form that this does not know.

    It is read again, and must say what it said but for the change.
    """
    try:
        wanted = copy.deepcopy(parsing.read_text(text, folder_name="advised"))
    except ModelLoadError:
        return None
    made = text
    if after.max_batch_size != before.max_batch_size:
        wanted.max_batch_size = after.max_batch_size
        made = (
            _number(made, "max_batch_size", after.max_batch_size) or f"max_batch_size: {after.max_batch_size}\n{made}"
        )
    if (after.delay_us, after.is_batching) != (before.delay_us, before.is_batching):
        wanted.dynamic_batching.max_queue_delay_microseconds = after.delay_us
        wanted.dynamic_batching.SetInParent()
        made = _delayed(made, after.delay_us)
    if after.instances != before.instances:
        if len(wanted.instance_group) > 1:
            return None
        (wanted.instance_group[0] if wanted.instance_group else wanted.instance_group.add()).count = after.instances
        made = _counted(made, after.instances)
    return made if _reads(made, wanted) else None


def _reads(text: str, wanted: Message) -> bool:
    try:
        return bool(parsing.read_text(text, folder_name="advised") == wanted)
    except ModelLoadError:
        return False


def _number(text: str, name: str, value: int) -> str | None:
    """A number in its place; None where it is not there."""
    made, count = re.subn(_CODE.format(name=name) + r"\d+", rf"\g<before>{value}", text, count=1)
    return made if count else None


def _opened(text: str, name: str, bracket: str, more: str) -> str | None:
    """Something put behind the first bracket of a block."""
    made, count = re.subn(_CODE.format(name=name) + bracket, rf"\g<0> {more}", text, count=1)
    return made if count else None


def _delayed(text: str, delay_us: int) -> str:
    more = f"max_queue_delay_microseconds: {delay_us}"
    return (
        _number(text, "max_queue_delay_microseconds", delay_us)
        or _opened(text, "dynamic_batching", r"\{", more)
        or f"{text.rstrip()}\ndynamic_batching {{ {more if delay_us else ''} }}\n"
    )


def _counted(text: str, count: int) -> str:
    found = re.search(_CODE.format(name="instance_group") + r"(?:\[\s*)?\{", text)
    if found is None:
        return f"{text.rstrip()}\ninstance_group [ {{ count: {count} }} ]\n"
    head, block = text[: found.end()], text[found.end() :]
    inner, brace, rest = block.partition("}")
    written = _number(inner, "count", count)
    return head + (f" count: {count}{inner}" if written is None else written) + brace + rest


def gateway_diff(text: str, file: str, *, backend: str, max_in_flight: int) -> str:
    """The diff of the gateway's configuration; the lines alone where the text cannot be changed that way."""
    changed = gated(text, backend, max_in_flight)
    if changed is None:
        return f"+backends:\n+  {backend}: {{max_in_flight: {max_in_flight}}}"
    return unified(text, changed, file)


def gated(text: str, backend: str, max_in_flight: int) -> str | None:
    """The configuration with `max_in_flight` of that backend; None where it has a form that this does not know."""
    try:
        wanted: Any = yaml.safe_load(text)
        wanted["backends"][backend]["max_in_flight"] = max_in_flight
    except (yaml.YAMLError, TypeError, KeyError):
        return None
    lines = text.splitlines(keepends=True)
    sections = [place for place, line in enumerate(lines) if re.match(r"backends\s*:", line)]
    for place in range(sections[0] + 1, len(lines)) if sections else ():
        if re.match(rf"\s+{re.escape(backend)}\s*:", lines[place]):
            made = "".join([*lines[:place], *_with_gate(lines[place:], max_in_flight)])
            return made if _same(made, wanted) else None
    return None


def _with_gate(lines: list[str], value: int) -> list[str]:
    """`lines` begin with the backend's."""
    head, *rest = lines
    if "{" in head.partition("#")[0]:
        changed, count = re.subn(r"(\bmax_in_flight\s*:\s*)\d+", rf"\g<1>{value}", head, count=1)
        return [changed if count else head.replace("{", f"{{max_in_flight: {value}, ", 1), *rest]
    indent = len(head) - len(head.lstrip())
    inner = " " * (indent + 2)
    for place, line in enumerate(rest):
        if line.strip() and not line.lstrip().startswith("#"):
            depth = len(line) - len(line.lstrip())
            if depth <= indent:
                break
            inner = line[:depth] if place == 0 else inner
            if re.match(r"\s+max_in_flight\s*:", line):
                rest[place] = re.sub(r"(:\s*)\d+", rf"\g<1>{value}", line, count=1)
                return [head, *rest]
    return [head, f"{inner}max_in_flight: {value}\n", *rest]


def _same(text: str, wanted: object) -> bool:
    try:
        return bool(yaml.safe_load(text) == wanted)
    except yaml.YAMLError:
        return False
