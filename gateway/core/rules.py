"""Routing rules: what they are, and how they are read from documents (YAML, JSON, Redis).

A rule set is parsed whole or refused whole, so that a bad edit changes nothing. A field that this version does not
honour is refused by name: silence would be a wrong route.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, get_args

import orjson

from gateway.core import policies
from gateway.core.policies import Policies
from gateway.core.rule_fields import (
    RuleError,
    choice_at,
    count_at,
    flag_at,
    mapping_at,
    name_at,
    only_known,
    suggest,
)
from gateway.core.types import InferenceRequest, Place, Speech

ANY = "*"
MAX_RULES = 1000  # a bound on what one edit may ask of every worker
MAX_WEIGHT = 1_000_000
MAX_RETRIES = 5
MAX_CONTEXT_TOKENS = 100_000_000
MAX_PARAMETERS_BYTES = 16_384
OURS: Final = ("model", "stream", "stream_options", "messages", "input", "prompt")
"""Fields of an OpenAI body that a target cannot set: the gateway's own, and what was asked."""
Strategy = Literal["weighted", "ordered", "least_in_flight", "fastest", "cheapest", "prefix_affinity"]
"""How the places of a split are put in order; see `core.strategies`."""
STRATEGIES: Final[tuple[Strategy, ...]] = get_args(Strategy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A place in a rule, with its weight in a split (0 = never). Model `*` is the one that the caller names.

    Attributes:
        parameters: fields of an OpenAI body that are set for this place alone; None takes a field out.
        context_tokens: how long a prompt and its answer may be there together; 0 = not told. After "context too long"
            only places with more are tried.
    """

    backend: str
    model: str
    version: str = ""
    weight: int = 1
    parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)
    context_tokens: int = 0

    @property
    def place(self) -> Place:
        """The same without its weight."""
        return Place(backend=self.backend, model=self.model, version=self.version)

    def place_for(self, *, model: str, version: str) -> Place:
        """Where it sends a caller that names `model` and `version` (empty: it does not).

        The version that a caller names stands above the target's.
        """
        return Place(
            backend=self.backend,
            model=model if self.model == ANY else self.model,
            version=version or self.version,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Which requests a rule takes; `*` takes all. `model` is the one that a caller of a tensor task names."""

    task: str = ANY
    tenant: str = ANY
    model: str = ANY

    def takes(self, *, task: str, tenant: str, model: str = "") -> bool:
        """Whether a request of `tenant` for `task`, and for `model` where the caller names one, is this rule's."""
        return self.task in (ANY, task) and self.tenant in (ANY, tenant) and self.model in (ANY, model)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """`split` shares requests as `strategy` says; `fallback` follows in order when none of them can answer.

    Attributes:
        retries: further rounds over places that failed for a moment, each after a pause.
        hedge: an interactive request that has no first part after the usual time (the 95th percentile, of streams or
            of whole answers as it is one) is sent to the next place too, and whichever begins first answers.
    """

    name: str
    match: Match
    split: tuple[Target, ...]
    strategy: Strategy = "weighted"
    sticky_by: Literal["request", "tenant"] = "request"
    fallback: tuple[Target, ...] = ()
    retries: int = 0
    hedge: bool = False
    policies: Policies = policies.DEFAULT
    enabled: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleSet:
    """A whole set of rules under one revision; `revision` 0 is the configuration file's own."""

    revision: int
    rules: tuple[Rule, ...]

    def rule_of(self, request: InferenceRequest) -> Rule | None:
        """The first enabled rule that takes `request`."""
        return self.rule_for(task=request.task, tenant=request.caller.tenant, model=request.model)

    def rule_for(self, *, task: str, tenant: str, model: str = "") -> Rule | None:
        """The first enabled rule that takes such a request."""
        for rule in self.rules:
            if rule.enabled and rule.match.takes(task=task, tenant=tenant, model=model):
                return rule
        return None


# --- rules as documents (YAML, JSON, Redis) -----------------------------------------------------


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
    unsaid = {"retries": 0, "hedge": False}
    fields = {k: v for k, v in asdict(rule).items() if k not in unsaid or v != unsaid[k]}
    del fields["policies"]
    targets = {"split": _targets_document(rule.split), "fallback": _targets_document(rule.fallback)}
    return {**fields, **targets, **policies.policies_document(rule.policies)}


def check_targets(rules: Iterable[Rule], *, backends: Iterable[str], tasks: Iterable[str]) -> None:
    """Raise `RuleError` for a rule that names a backend or a task which the configuration lacks."""
    known_backends, known_tasks = set(backends), set(tasks)
    for rule in rules:
        if rule.match.task != ANY and rule.match.task not in known_tasks:
            raise RuleError(
                f"rule '{rule.name}': match.task: unknown task '{rule.match.task}'"
                + suggest(rule.match.task, known_tasks)
            )
        for side, targets in (("split", rule.split), ("fallback", rule.fallback)):
            for i, target in enumerate(targets):
                if target.backend not in known_backends:
                    raise RuleError(
                        f"rule '{rule.name}': {side}[{i}].backend: unknown backend '{target.backend}'"
                        + suggest(target.backend, known_backends)
                    )


def check_models(rules: Iterable[Rule], *, naming: Collection[str]) -> None:
    """Raise `RuleError` for a rule that needs the caller to name a model, of a task not among `naming`, whose do."""
    for rule in rules:
        if rule.match.task in (ANY, *naming):
            continue
        told = f"callers of the task '{rule.match.task}' name no model"
        if rule.match.model != ANY:
            raise RuleError(f"rule '{rule.name}': match.model: {told}")
        for side, targets in (("split", rule.split), ("fallback", rule.fallback)):
            for i, target in enumerate(targets):
                if target.model == ANY:
                    raise RuleError(f"rule '{rule.name}': {side}[{i}].model: {told}, so '{ANY}' leads nowhere")


def check_speech(
    rules: Iterable[Rule], *, backends: Mapping[str, Speech], tasks: Mapping[str, frozenset[Speech]]
) -> None:
    """Raise `RuleError` for a target that can never answer the rule's task: tensors to an LLM, a chat to Triton."""
    for rule in rules:
        spoken = tasks.get(rule.match.task)
        for side, targets in (("split", rule.split), ("fallback", rule.fallback)):
            for i, target in enumerate(targets):
                if spoken is not None and target.backend in backends and backends[target.backend] not in spoken:
                    kind = "an LLM endpoint" if backends[target.backend] == "openai" else "a model server"
                    raise RuleError(
                        f"rule '{rule.name}': {side}[{i}].backend: the task '{rule.match.task}' cannot be answered by "
                        f"{kind} such as '{target.backend}'"
                    )


def check_prices(rules: Iterable[Rule], *, has_price: Callable[[Place], bool]) -> None:
    """Raise `RuleError` for a rule that is to take the cheapest of places of which one has no price."""
    for rule in rules:
        if rule.strategy != "cheapest":
            continue
        for i, target in enumerate(rule.split):
            if target.model != ANY and not has_price(target.place):
                raise RuleError(
                    f"rule '{rule.name}': split[{i}]: the strategy 'cheapest' needs a price of '{target.model}' on "
                    f"'{target.backend}': add it to the price table, or `usd_per_hour` to the backend"
                )


def unrouted(rules: Iterable[Rule], tasks: Iterable[str]) -> tuple[str, ...]:
    """The tasks that no enabled rule takes: their requests would all be refused."""
    routed = {rule.match.task for rule in rules if rule.enabled and rule.match.model == ANY}
    return () if ANY in routed else tuple(task for task in tasks if task not in routed)


def _rule(entry: object, *, at: str) -> Rule:
    fields = mapping_at(entry, at)
    name = name_at(fields.get("name"), f"{at}: name")
    at = f"rule '{name}'"
    known = ("name", "match", "split", "strategy", "sticky_by", "fallback", "retries", "hedge", "enabled")
    only_known(fields, (*known, *policies.FIELDS), at)
    split = _targets(fields.get("split", ()), f"{at}: split")
    if not split:
        raise RuleError(f"{at}: split: at least one target is needed")
    if not any(t.weight for t in split) and not fields.get("fallback"):
        raise RuleError(f"{at}: split: every weight is 0 and there is no fallback")
    return Rule(
        name=name,
        match=_match(fields.get("match", {}), f"{at}: match"),
        split=split,
        strategy=choice_at(fields.get("strategy", "weighted"), STRATEGIES, f"{at}: strategy"),
        sticky_by=choice_at(fields.get("sticky_by", "request"), ("request", "tenant"), f"{at}: sticky_by"),
        fallback=_targets(fields.get("fallback", ()), f"{at}: fallback"),
        retries=count_at(fields.get("retries", 0), MAX_RETRIES, f"{at}: retries"),
        hedge=flag_at(fields.get("hedge", False), f"{at}: hedge"),
        policies=policies.policies(fields, at),
        enabled=flag_at(fields.get("enabled", True), f"{at}: enabled"),
    )


def _match(entry: object, at: str) -> Match:
    fields = mapping_at(entry, at)
    only_known(fields, ("task", "tenant", "model"), at)
    return Match(**{k: v if v == ANY else name_at(v, f"{at}.{k}") for k, v in fields.items()})


def _targets(entry: object, at: str) -> tuple[Target, ...]:
    if not isinstance(entry, Sequence) or isinstance(entry, str | bytes):
        raise RuleError(f"{at}: must be a list of targets")
    return tuple(_target(item, f"{at}[{i}]") for i, item in enumerate(entry))


def _target(entry: object, at: str) -> Target:
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
    try:
        text = json.dumps(fields, allow_nan=False)
        written: Mapping[str, Any] = json.loads(text)  # with texts as names: YAML has numbers too, as in `logit_bias`
        orjson.dumps(written)  # as requests will be: it takes no number beyond 64 bits, and no 255 levels
    except (TypeError, ValueError, RecursionError):
        raise RuleError(f"{at}: must be JSON: texts, numbers, lists, mappings") from None
    if len(text) > MAX_PARAMETERS_BYTES:
        raise RuleError(f"{at}: is over {MAX_PARAMETERS_BYTES} bytes")
    return written


def _targets_document(targets: Iterable[Target]) -> list[dict[str, Any]]:
    unsaid = {"version": "", "parameters": {}, "context_tokens": 0}
    return [{k: v for k, v in asdict(t).items() if k not in unsaid or v != unsaid[k]} for t in targets]
