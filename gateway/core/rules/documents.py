"""Rules as documents (YAML, JSON, Redis), read and written.

A rule set is parsed whole or refused whole, so that a bad edit changes nothing. A field that this version does not
honour is refused by name: silence would be a wrong route.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import orjson

from gateway.core.rules import policies
from gateway.core.rules.fields import (
    RuleError,
    choice_at,
    count_at,
    flag_at,
    mapping_at,
    name_at,
    names_secret,
    number_at,
    only_known,
)
from gateway.core.rules.limits import limit_document, limits_at
from gateway.core.rules.match_documents import match_at, match_document
from gateway.core.rules.rule import STICKY_BY, STRATEGIES, Guard, Rule, Shadow, Target
from gateway.core.types import ANY

MAX_RULES: Final = 1000  # a bound on what one edit may ask of every worker
MAX_WEIGHT: Final = 1_000_000
MAX_RETRIES: Final = 5
MAX_TIMEOUT_MS: Final = 3_600_000
MAX_CONTEXT_TOKENS: Final = 100_000_000
MAX_PARAMETERS_BYTES: Final = 16_384
MAX_LEVELS: Final = 100  # of parameters within each other; what shows them takes some 250
MAX_TARGETS: Final = 100
MAX_REQUESTS: Final = 1_000_000
MIN_WINDOW_S, MAX_WINDOW_S = 5, 3600
OURS: Final = ("model", "stream", "stream_options", "messages", "input", "prompt")
"""Fields of an OpenAI body that a target cannot set: the gateway's own, and what was asked."""
_FIELDS: Final = (
    *("name", "match", "split", "strategy", "sticky_by", "fallback", "shadow", "guard", "retries", "hedge"),
    *("timeout_ms", "attempt_timeout_ms", "limits", "enabled", *policies.FIELDS),
)
_GUARDED: Final = ("max_error_ratio", "max_violation_ratio", "max_disagreement", "max_p99_ms", "max_first_token_ms")


def parse_rules(document: object) -> tuple[Rule, ...]:
    """Read a list of rule mappings. Raises `RuleError`; never takes a part of a set."""
    if not isinstance(document, Sequence) or isinstance(document, str | bytes):
        raise RuleError("rules: must be a list")
    if len(document) > MAX_RULES:
        raise RuleError(f"rules: {len(document)} rules, at most {MAX_RULES} are taken")
    rules = tuple(_rule(entry, at=f"rules[{i}]") for i, entry in enumerate(document))
    seen: set[str] = set()
    for rule in rules:
        if rule.name in seen:
            raise RuleError(f"rule '{rule.name}': name is used twice")
        seen.add(rule.name)
    return rules


def rules_document(rules: Iterable[Rule]) -> list[dict[str, Any]]:
    """The inverse of `parse_rules`, in plain lists and dicts."""
    return [_document(rule) for rule in rules]


def _document(rule: Rule) -> dict[str, Any]:
    """Every field that says something; those that a reader looks for first are always there."""
    return {
        "name": rule.name,
        "match": match_document(rule.match),
        "split": _targets_document(rule.split),
        "strategy": rule.strategy,
        "sticky_by": rule.sticky_by,
        "fallback": _targets_document(rule.fallback),
        **({"shadow": _said(asdict(rule.shadow), {"version": ""})} if rule.shadow else {}),
        **({"guard": _said(asdict(rule.guard), dict.fromkeys(_GUARDED))} if rule.guard else {}),
        **_said({"retries": rule.retries, "hedge": rule.hedge}, {"retries": 0, "hedge": False}),
        **_said({"timeout_ms": rule.timeout_ms, "attempt_timeout_ms": rule.attempt_timeout_ms}, _NO_TIMES),
        **({"limits": [limit_document(limit) for limit in rule.limits]} if rule.limits else {}),
        **policies.policies_document(rule.policies),
        "enabled": rule.enabled,
    }


_NO_TIMES: Final = {"timeout_ms": 0, "attempt_timeout_ms": 0}


def _said(fields: Mapping[str, Any], unsaid: Mapping[str, Any]) -> dict[str, Any]:
    """`fields` without those that are as usual."""
    return {name: value for name, value in fields.items() if name not in unsaid or value != unsaid[name]}


def _rule(entry: object, *, at: str) -> Rule:
    fields = mapping_at(entry, at)
    name = name_at(fields.get("name"), f"{at}: name")
    at = f"rule '{name}'"
    only_known(fields, _FIELDS, at)
    split = _targets(fields.get("split", ()), f"{at}: split")
    if not split:
        raise RuleError(f"{at}: split: at least one target is needed")
    if not any(t.weight for t in split) and not fields.get("fallback"):
        raise RuleError(f"{at}: split: every weight is 0 and there is no fallback")
    shadow, guard = fields.get("shadow"), fields.get("guard")
    return Rule(
        name=name,
        match=match_at(fields.get("match", {}), f"{at}: match"),
        split=split,
        strategy=choice_at(fields.get("strategy", "weighted"), STRATEGIES, f"{at}: strategy"),
        sticky_by=choice_at(fields.get("sticky_by", "request"), STICKY_BY, f"{at}: sticky_by"),
        fallback=_targets(fields.get("fallback", ()), f"{at}: fallback"),
        shadow=None if shadow is None else _shadow(shadow, f"{at}: shadow"),
        guard=None if guard is None else guard_at(guard, f"{at}: guard"),
        retries=count_at(fields.get("retries", 0), MAX_RETRIES, f"{at}: retries"),
        hedge=flag_at(fields.get("hedge", False), f"{at}: hedge"),
        timeout_ms=count_at(fields.get("timeout_ms", 0), MAX_TIMEOUT_MS, f"{at}: timeout_ms"),
        attempt_timeout_ms=count_at(fields.get("attempt_timeout_ms", 0), MAX_TIMEOUT_MS, f"{at}: attempt_timeout_ms"),
        limits=limits_at(fields.get("limits", ()), f"{at}: limits", rule=name),
        policies=policies.policies(fields, at),
        enabled=flag_at(fields.get("enabled", True), f"{at}: enabled"),
    )


def guard_at(entry: object, at: str) -> Guard:
    """What a canary may not do. Raises `RuleError`."""
    fields = mapping_at(entry, at)
    only_known(fields, (*_GUARDED, "min_requests", "window_s"), at)
    bounds: dict[str, Any] = {}
    for name in ("max_error_ratio", "max_violation_ratio", "max_disagreement"):
        if fields.get(name) is not None:
            bounds[name] = number_at(fields[name], 0, 1, f"{at}.{name}")
    for name in ("max_p99_ms", "max_first_token_ms"):
        if fields.get(name) is not None:
            bounds[name] = count_at(fields[name], MAX_TIMEOUT_MS, f"{at}.{name}", least=1)
    if not bounds:
        raise RuleError(f"{at}: one of {', '.join(_GUARDED)} is needed")
    return Guard(
        **bounds,
        min_requests=count_at(fields.get("min_requests", 200), MAX_REQUESTS, f"{at}.min_requests", least=1),
        window_s=count_at(fields.get("window_s", 60), MAX_WINDOW_S, f"{at}.window_s", least=MIN_WINDOW_S),
    )


def _shadow(entry: object, at: str) -> Shadow:
    fields = mapping_at(entry, at)
    only_known(fields, ("backend", "model", "version", "percent", "compare"), at)
    target = target_at({name: fields[name] for name in ("backend", "model", "version") if name in fields}, at)
    percent = number_at(fields.get("percent", 100), 0, 100, f"{at}.percent")
    if not percent:
        raise RuleError(f"{at}.percent: must be above 0; leave the shadow out for none")
    return Shadow(
        backend=target.backend,
        model=target.model,
        version=target.version,
        percent=percent,
        compare=flag_at(fields.get("compare", True), f"{at}.compare"),
    )


def _targets(entry: object, at: str) -> tuple[Target, ...]:
    if not isinstance(entry, Sequence) or isinstance(entry, str | bytes):
        raise RuleError(f"{at}: must be a list of targets")
    if len(entry) > MAX_TARGETS:
        raise RuleError(f"{at}: at most {MAX_TARGETS} targets are taken")
    return tuple(target_at(item, f"{at}[{i}]") for i, item in enumerate(entry))


def target_at(entry: object, at: str) -> Target:
    """One place of a rule. Raises `RuleError`."""
    fields = mapping_at(entry, at)
    only_known(fields, ("backend", "model", "version", "weight", "parameters", "context_tokens"), at)
    version = fields.get("version", "")
    if not isinstance(version, str) or not (version == "" or version.isdecimal()):
        raise RuleError(f'{at}.version: must be a quoted number such as "2"')
    return Target(
        backend=name_at(fields.get("backend"), f"{at}.backend"),
        model=ANY if fields.get("model") == ANY else name_at(fields.get("model"), f"{at}.model"),
        version=version,
        weight=count_at(fields.get("weight", 1), MAX_WEIGHT, f"{at}.weight"),
        parameters=_parameters(fields.get("parameters", {}), f"{at}.parameters"),
        context_tokens=count_at(fields.get("context_tokens", 0), MAX_CONTEXT_TOKENS, f"{at}.context_tokens"),
    )


def _parameters(entry: object, at: str) -> Mapping[str, Any]:
    fields = mapping_at(entry, at)
    for name in fields:
        if name in OURS:
            raise RuleError(f"{at}.{name}: is not a target's to set")
        if names_secret(name) and fields[name] is not None:
            raise RuleError(f"{at}.{name}: holds a secret, which no rule may; a backend has its own in `api_key_env`")
    try:
        text = json.dumps(fields, allow_nan=False)
        written: Mapping[str, Any] = json.loads(text)  # with texts as names: YAML has numbers too, as in `logit_bias`
        orjson.dumps(written)  # as requests will be: it takes no number beyond 64 bits, and no 255 levels
    except (TypeError, ValueError, RecursionError):
        raise RuleError(f"{at}: must be JSON: texts, numbers, lists, mappings") from None
    if len(text) > MAX_PARAMETERS_BYTES:
        raise RuleError(f"{at}: is over {MAX_PARAMETERS_BYTES} bytes")
    if not _is_within(written, MAX_LEVELS):
        raise RuleError(f"{at}: has over {MAX_LEVELS} levels")
    return written


def _is_within(value: Any, levels: int) -> bool:
    """Whether lists and mappings stand in each other so many times at most."""
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return not parts or (levels > 0 and all(_is_within(part, levels - 1) for part in parts))


def _targets_document(targets: Iterable[Target]) -> list[dict[str, Any]]:
    return [_said(asdict(target), {"version": "", "parameters": {}, "context_tokens": 0}) for target in targets]
