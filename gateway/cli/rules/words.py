"""Rules, what has changed in them, and what a change would do, as people read it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rich.table import Table
from rich.text import Text

from gateway.cli.show import add, percent, place, table
from gateway.cli.terminal import visible

POLICIES: Final = ("ordering", "cache", "on_store_down", "idempotency")
SHOWN: Final = 120  # characters of a value
_SIGNS: Final = {"added": ("+", "green"), "removed": ("-", "red"), "changed": ("~", "yellow"), "moved": ("=", "cyan")}
_NAMES: Final = ("tenant", "key", "model", "priority")
_RATIOS: Final = {
    "max_error_ratio": "errors",
    "max_violation_ratio": "contract violations",
    "max_disagreement": "disagreement",
}
_TIMES: Final = {"max_p99_ms": "p99", "max_first_token_ms": "first token"}


def rules_table(rules: Sequence[Mapping[str, Any]], title: str) -> Table:
    """Every rule with what it takes, where that goes, and what is held to."""
    shown = table("rule", "takes", "split", "fallback", "also", title=title)
    for rule in rules:
        add(
            shown,
            rule["name"] if rule["enabled"] else f"{rule['name']}\n(off)",
            match_words(rule["match"]),
            _split(rule),
            "\n".join(place(target) for target in rule["fallback"]),
            "\n".join(_also(rule)),
            style=None if rule["enabled"] else "dim",
        )
    return shown


def match_words(match: Mapping[str, Any]) -> str:
    """Which requests a rule takes, as short as it can be said: a line for each thing that is asked of them."""
    task = match.get("task", "*")
    words = ["all" if task == "*" else task]
    words += [f"{name} {match[name]}" for name in _NAMES if match.get(name, "*") != "*"]
    words += [f"{name}: {value}" for name, value in match.get("headers", {}).items()]
    for unit in ("tokens", "bytes"):
        least, most = match.get(f"min_input_{unit}", 0), match.get(f"max_input_{unit}", 0)
        if least or most:
            words.append(f"{least:,} to {most:,} {unit}" if most else f"from {least:,} {unit}")
    words += [_window_words(window) for window in match.get("times", ())]
    return "\n".join(words)


def changes_text(changes: Sequence[Mapping[str, Any]]) -> Text:
    """What has changed, a line for each field; green is new, red is gone."""
    text = Text()
    for change in changes:
        sign, colour = _SIGNS.get(change["change"], ("~", "yellow"))
        if change["change"] != "changed" or not change.get("fields"):
            text.append(f"{sign} {change['text']}\n", style=colour)
            continue
        text.append(f"{sign} rule '{change['rule']}'\n", style=colour)
        for field in change["fields"]:
            text.append(f"    {field['field']}: ")
            text.append(_value(field["before"]), style="red")
            text.append(" -> ")
            text.append(f"{_value(field['after'])}\n", style="green")
    text.rstrip()
    return text


def dry_run_words(found: Mapping[str, Any]) -> Iterator[str]:
    """What would have become of the requests, in sentences."""
    count = found["requests"]
    if not count:
        yield "no requests are recorded yet: nothing to try the rules on"
        return
    of = f"of the last {count:,} requests" if count > 1 else "of the last request"
    moves = found["moves"]
    if not moves:
        yield f"{of}, none would move"
    elif len(moves) == 1:
        yield f"{of}, {_number(moves[0]['requests'])} would move from {moves[0]['from']} to {moves[0]['to']}"
    else:
        yield f"{of}, {_number(found['moved'])} would move:"
        yield from (f"  {_number(move['requests'])} from {move['from']} to {move['to']}" for move in moves)
    if found["refused_before"] or found["refused_after"]:
        yield f"no rule takes {found['refused_after']:,} of them (now {found['refused_before']:,})"
    for rule in found["rules"]:
        if rule["before"] != rule["after"]:
            yield f"  rule '{rule['rule']}' takes {_number(rule['after'])} (now {_number(rule['before'])})"
    if found["unrecorded_headers"]:
        names = ", ".join(found["unrecorded_headers"])
        yield f"not told by what is recorded: the headers {names}; such requests count as without them"


def _split(rule: Mapping[str, Any]) -> str:
    split = rule["split"]
    if len(split) == 1:
        return place(split[0])
    is_weighted = rule["strategy"] == "weighted"
    lines = [f"{place(target)}  {target['weight']}" if is_weighted else place(target) for target in split]
    how = [] if is_weighted else [rule["strategy"]]
    if rule.get("sticky_by", "request") != "request":
        how.append(f"sticky by {rule['sticky_by']}")
    return "\n".join([*lines, *([f"({', '.join(how)})"] if how else [])])


def _also(rule: Mapping[str, Any]) -> Iterator[str]:
    if shadow := rule.get("shadow"):
        compared = "" if shadow.get("compare", True) else ", not compared"
        yield f"shadow {place(shadow)} {shadow.get('percent', 100):g} %{compared}"
    if guard := rule.get("guard"):
        yield "guard: " + ", ".join(guard_words(guard))
    for limit in rule.get("limits", ()):
        yield f"limit {limit_words(limit)}"
    if rule.get("retries"):
        yield f"retries {rule['retries']}"
    if rule.get("hedge"):
        yield "hedged"
    for name, unit in (("timeout_ms", "timeout"), ("attempt_timeout_ms", "attempt timeout")):
        if rule.get(name):
            yield f"{unit} {rule[name]:,} ms"
    yield from policy_words(rule)


def policy_words(told: Mapping[str, Any]) -> Iterator[str]:
    """Order, kept answers and the loss of the store, where they are not as usual."""
    if ordering := told.get("ordering"):
        yield f"order: {ordering['mode']}, up to {ordering['max_queue_size']:,}"
    if cache := told.get("cache"):
        yield f"cache {cache['ttl_s']:,} s, shared by {cache['shared_by']}"
    if told.get("on_store_down", "local") != "local":
        yield f"store down: {told['on_store_down']}"
    if told.get("idempotency", "refuse") != "refuse":
        yield f"idempotency: {told['idempotency']}"


def guard_words(guard: Mapping[str, Any]) -> Iterator[str]:
    """What a canary may not do, and of how many requests in which time that is judged."""
    for name, word in _RATIOS.items():
        if guard.get(name) is not None:
            yield f"{word} <= {percent(guard[name])}"
    for name, word in _TIMES.items():
        if guard.get(name) is not None:
            yield f"{word} <= {guard[name]:,} ms"
    yield f"of {guard.get('min_requests', 200):,} in {guard.get('window_s', 60):,} s"


def limit_words(limit: Mapping[str, Any]) -> str:
    """`requests=60/minute shared_by=tenant`."""
    kind = next(kind for kind in ("requests", "tokens", "usd", "concurrent") if kind in limit)
    rest = {name: value for name, value in limit.items() if name not in (kind, "per")}
    per = f"/{limit['per']}" if "per" in limit else ""
    return " ".join((f"{kind}={limit[kind]:g}{per}", *(f"{name}={value}" for name, value in rest.items())))


def _window_words(window: Mapping[str, Any]) -> str:
    days = window.get("days", ())
    those = "" if len(days) in (0, 7) else f"{','.join(days)} "
    return f"{those}{window.get('from', '00:00')}-{window.get('to', '24:00')} {window.get('timezone', 'UTC')}"


def _value(value: object) -> str:
    if value is None:
        return "none"
    text = visible(json.dumps(value, ensure_ascii=False))
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def _number(requests: float) -> str:
    """Shares by weight need not be whole."""
    return f"{requests:,.0f}" if float(requests).is_integer() else f"{requests:,.1f}"
