"""The rules and switches as Redis holds them: the names of keys and fields, and how they are read and written.

All in one slot of a Redis Cluster, so that a worker needs one node alone to follow:
- `{prefix}{rules}`: a hash of `revision`, `rules` (the JSON of `core.rules.rules_document`), `at_ms` (from when they
  are in force, in Unix milliseconds; 0 or missing = at once), `switches_revision`, `switches` (the JSON of
  `core.switches.switches_document`; both missing = there are none), `frozen_until_ms` (until when rules may not be
  changed, by the clock of Redis) and `changed_ms` (when somebody changed rules or switches last, by the same clock, and
  always later than before; missing = nobody has);
- `{prefix}{rules}:history`: a hash of the newest revisions, each in two fields: `<revision>`, its heading, and
  `<revision>:rules`;
- `{prefix}{rules}:worker:<id>`: a hash that a worker renews twice a second and that expires 5 s after its last word;
- `{prefix}{rules}:workers`: the set of their ids;
- `{prefix}rules:changed`: the channel on which a new revision of either is announced.
"""

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Final

import orjson

from gateway.admin_ports import Change, Revision
from gateway.core.rules import Rule, parse_rules, rules_document
from gateway.core.rules.fields import RuleError
from gateway.core.switches import NO_SWITCHES, Switch, Switches, parse_switches, switches_document

RULES: Final = ("revision", "rules", "at_ms")
SWITCHES: Final = ("switches_revision", "switches")
STORED: Final = (*RULES, *SWITCHES, "changed_ms")
"""What a worker reads, always all of it in one call."""
REPORTED: Final = ("pid", "revision", "started", "state", "detail", "switches", "report")
"""What a worker says of itself."""
KEPT: Final = 200
"""Revisions in the history."""
_KEY: Final = "{rules}"  # in braces: a hash tag
_TIMES: Final = ("created_ms", "expires_ms")

Stored = tuple[Any, ...]
"""The values of some of `STORED`, as bytes or text; None where missing."""


class SwitchesError(ValueError):
    """Stored switches that cannot be read."""


def rules_key(prefix: str) -> str:
    """The hash of what is in force."""
    return f"{prefix}{_KEY}"


def history_key(prefix: str) -> str:
    """The hash of what was in force."""
    return f"{prefix}{_KEY}:history"


def worker_key(prefix: str, worker_id: str) -> str:
    """What a worker says of itself."""
    return f"{prefix}{_KEY}:worker:{worker_id}"


def workers_key(prefix: str) -> str:
    """The set of workers."""
    return f"{prefix}{_KEY}:workers"


def channel(prefix: str) -> str:
    """Where changes are announced."""
    return f"{prefix}rules:changed"


def text(value: Any) -> str:
    """A reply as text, whether or not the client decodes; missing is empty."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")


def number(value: Any) -> int:
    """A reply as a whole number; 0 where it is missing or none."""
    try:
        return int(value or 0)
    except ValueError:
        return 0


def switches_of(stored: Stored) -> Stored:
    """The values of `SWITCHES` out of those of `STORED`."""
    return stored[len(RULES) : len(RULES) + len(SWITCHES)]


def rules_text(rules: Sequence[Rule]) -> str:
    """As they are stored."""
    return json.dumps(rules_document(rules), separators=(",", ":"))


def read_rules(stored: Stored) -> tuple[int, tuple[Rule, ...]]:
    """The revision and the rules out of the values of `RULES`. Raises `RuleError`."""
    try:
        revision, document = int(stored[0]), json.loads(stored[1])
    except (TypeError, ValueError, RecursionError) as error:
        raise RuleError("rules: not a revision and a JSON list") from error
    return revision, parse_rules(document)


def switches_text(switches: Sequence[Switch]) -> str:
    """As they are stored."""
    return json.dumps(switches_document(switches), separators=(",", ":"))


def read_switches(stored: Stored) -> Switches:
    """What the values of `SWITCHES` say. Raises `SwitchesError`.

    Every field's type is looked at here, as nothing is that routes requests by them.
    """
    if stored == (None, None):
        return NO_SWITCHES
    try:
        switches = parse_switches(json.loads(stored[1]), int(stored[0]))
    except (TypeError, ValueError, KeyError, RecursionError) as error:
        raise SwitchesError("switches: not a revision and a JSON list of switches") from error
    for one in switches.items:
        texts = [one.scope.name, *(getattr(one, f.name) for f in fields(one) if f.name not in ("scope", *_TIMES))]
        times = [getattr(one, name) for name in _TIMES]
        if not all(isinstance(value, str) for value in texts) or not all(type(value) is int for value in times):
            raise SwitchesError("switches: a field is not of its type")
    return switches


def frozen_until_ms(switches: Sequence[Switch]) -> int:
    """Until when the longest freeze lasts; 0 where there is none."""
    return max([one.expires_ms for one in switches if one.action == "freeze"], default=0)


def heading_text(change: Change, *, revision: int, at_ms: int, count: int) -> str:
    """A revision without its rules, as it is stored."""
    told = {"by": change.by, "action": change.action, "note": change.note, "is_automatic": change.is_automatic}
    return json.dumps({"revision": revision, "at_ms": at_ms, "count": count, **told}, separators=(",", ":"))


def read_revision(heading: bytes | str, rules: bytes | str | None = None) -> Revision:
    """One of the history, with its rules where they are given. Raises `ValueError` (`RuleError`, too) or `KeyError`."""
    told = orjson.loads(heading)
    change = Change(by=told["by"], action=told["action"], note=told["note"], is_automatic=told["is_automatic"])
    return Revision(
        revision=int(told["revision"]),
        at_ms=int(told["at_ms"]),
        change=change,
        count=int(told["count"]),
        rules=None if rules is None else parse_rules(orjson.loads(rules)),
    )
