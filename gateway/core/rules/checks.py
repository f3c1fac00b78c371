"""Whether rules fit the configuration that they are to run with. Each check raises `RuleError`."""

from collections.abc import Callable, Collection, Iterable, Mapping

from gateway.core.rules.fields import RuleError, suggest
from gateway.core.rules.rule import Rule
from gateway.core.types import ANY, Place, Speech


def check_targets(rules: Iterable[Rule], *, backends: Iterable[str], tasks: Iterable[str]) -> None:
    """Raise `RuleError` for a rule that names a backend or a task which the configuration lacks."""
    known_backends, known_tasks = set(backends), set(tasks)
    for rule in rules:
        if rule.match.task != ANY and rule.match.task not in known_tasks:
            raise RuleError(
                f"rule '{rule.name}': match.task: unknown task '{rule.match.task}'"
                + suggest(rule.match.task, known_tasks)
            )
        for where, target in rule.targets:
            if target.backend not in known_backends:
                raise RuleError(
                    f"rule '{rule.name}': {where}.backend: unknown backend '{target.backend}'"
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
        for where, target in rule.targets:
            if target.model == ANY:
                raise RuleError(f"rule '{rule.name}': {where}.model: {told}, so '{ANY}' leads nowhere")


def check_speech(
    rules: Iterable[Rule], *, backends: Mapping[str, Speech], tasks: Mapping[str, frozenset[Speech]]
) -> None:
    """Raise `RuleError` for a target that can never answer the rule's task: tensors to an LLM, a chat to Triton."""
    for rule in rules:
        spoken = tasks.get(rule.match.task)
        if spoken is None:
            continue
        if "openai" not in spoken and (rule.match.min_input_tokens or rule.match.max_input_tokens):
            raise RuleError(
                f"rule '{rule.name}': match: input tokens are counted for tasks that an LLM can answer, which "
                f"'{rule.match.task}' is not: use min_input_bytes and max_input_bytes"
            )
        for where, target in rule.targets:
            if target.backend in backends and backends[target.backend] not in spoken:
                kind = "an LLM endpoint" if backends[target.backend] == "openai" else "a model server"
                raise RuleError(
                    f"rule '{rule.name}': {where}.backend: the task '{rule.match.task}' cannot be answered by "
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


def warnings_of(rules: Iterable[Rule], tasks: Iterable[str]) -> list[str]:
    """What may not be meant, in words."""
    return [f"no enabled rule takes the task '{task}': its requests are refused" for task in unrouted(rules, tasks)]


def check_shared_limits(rules: Iterable[Rule]) -> None:
    """Raise `RuleError` for a limit that all tenants share, where the counters of tenants lie on several servers."""
    for rule in rules:
        for i, limit in enumerate(rule.limits):
            if limit.shared_by == "all":
                raise RuleError(
                    f"rule '{rule.name}': limits[{i}].shared_by: in a Redis Cluster 'all' needs a limit of the "
                    "configuration that is shared by all too, so that all counters lie together; or use 'tenant'"
                )
