"""A rule's limits as documents: the same fields as those of a key."""

from collections.abc import Mapping
from typing import Any, Final

from gateway.core.cost import NANO_USD_PER_USD
from gateway.core.rate_limit import FORMS, MOST_OF, PERIODS, is_sound
from gateway.core.rules.fields import (
    RuleError,
    choice_at,
    count_at,
    list_at,
    mapping_at,
    name_at,
    number_at,
    only_known,
)
from gateway.core.types import Limit

KINDS: Final = ("requests", "tokens", "usd", "concurrent")
MAX_LIMITS: Final = 16
_FIELDS: Final = (*KINDS, "per", "burst", "model", "priority", "shared_by")


def limits_at(entry: object, at: str, *, rule: str) -> tuple[Limit, ...]:
    """The limits of the rule of that name. Raises `RuleError`."""
    entries = list_at(entry, at)
    if len(entries) > MAX_LIMITS:
        raise RuleError(f"{at}: at most {MAX_LIMITS} are taken")
    return tuple(_limit(one, f"{at}[{i}]", rule) for i, one in enumerate(entries))


def limit_document(limit: Limit) -> dict[str, Any]:
    """The inverse for one of them; what is as usual is left out."""
    amount = limit.amount / NANO_USD_PER_USD if limit.kind == "usd" else limit.amount
    document: dict[str, Any] = {limit.kind: amount}
    if limit.per:
        document["per"] = limit.per
    if limit.burst not in (0, limit.amount):
        document["burst"] = limit.burst
    usual: Mapping[str, str] = {"model": "*", "priority": "*", "shared_by": "all"}
    return document | {
        name: getattr(limit, name) for name, is_usual in usual.items() if getattr(limit, name) != is_usual
    }


def _limit(entry: object, at: str, rule: str) -> Limit:
    fields = mapping_at(entry, at)
    only_known(fields, _FIELDS, at)
    kind = _kind(fields, at)
    amount = _amount(fields[kind], kind, f"{at}.{kind}")
    per = ""
    if kind == "concurrent":
        if "per" in fields:
            raise RuleError(f"{at}.per: `concurrent` has no period")
    else:
        per = choice_at(fields.get("per"), PERIODS[FORMS[kind]], f"{at}.per")
    burst = 0
    if FORMS[kind] == "rate":
        burst = count_at(fields.get("burst", amount), MOST_OF["tokens"], f"{at}.burst", least=1)
    elif "burst" in fields:
        raise RuleError(f"{at}.burst: `{kind}` has no burst")
    model = fields.get("model", "*")
    limit = Limit(
        kind=kind,
        amount=amount,
        per=per,
        burst=burst,
        model=model if model == "*" else name_at(model, f"{at}.model"),
        priority=choice_at(fields.get("priority", "*"), ("*", "interactive", "batch"), f"{at}.priority"),
        shared_by=choice_at(fields.get("shared_by", "all"), ("key", "tenant", "all"), f"{at}.shared_by"),
        rule=rule,
    )
    if not is_sound(limit):
        raise RuleError(f"{at}.burst: is too large for so few per period")
    return limit


def _kind(fields: Mapping[str, Any], at: str) -> Any:
    given = [kind for kind in KINDS if kind in fields]
    if len(given) != 1:
        raise RuleError(f"{at}: give one of {', '.join(KINDS)}")
    return given[0]


def _amount(value: object, kind: str, at: str) -> int:
    if kind != "usd":
        return count_at(value, MOST_OF[kind], at, least=1)
    return max(1, round(number_at(value, 0, MOST_OF["usd"] / NANO_USD_PER_USD, at) * NANO_USD_PER_USD))
