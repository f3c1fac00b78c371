"""What rules name and no model server has: a name with a typo is a good rule that leads nowhere."""

from collections.abc import Iterator, Sequence
from typing import Final

from gateway.admin.models.fleet import READY, Servers, everywhere, versions_of
from gateway.core.errors import Fault
from gateway.core.rules import Rule, Target
from gateway.core.rules.fields import suggest
from gateway.core.types import ANY
from gateway.ports import JsonObject

ASK_S: Final = 2.0  # somebody waits for a verdict on the rules
_Index = Sequence[JsonObject]


async def absent_models(servers: Servers, rules: Sequence[Rule]) -> list[str]:
    """A warning for each target of an enabled rule that no server of its backend can answer now.

    Nothing is said of backends that are not reached from here, nor of one whose servers do not all answer.
    """
    wanted = [
        (rule, target)
        for rule in rules
        if rule.enabled
        for target in _targets(rule)
        if target.model != ANY and target.backend in servers.reachable
    ]
    asked = {name: servers.reachable[name] for name in dict.fromkeys(target.backend for _, target in wanted)}
    found = await everywhere(asked, lambda server, replica: server.index(replica), timeout_s=ASK_S)
    indexes: dict[str, list[_Index]] = {}
    for name in asked:
        answers = [answer for spot, answer in found.items() if spot.backend == name]
        told: list[_Index] = [answer for answer in answers if not isinstance(answer, Fault)]
        if told and len(told) == len(answers):
            indexes[name] = told
    warnings = (
        f"rule '{rule.name}': no server of '{target.backend}' {lack}"
        for rule, target in wanted
        if target.backend in indexes and (lack := _lack(target, indexes[target.backend]))
    )
    return list(dict.fromkeys(warnings))


def _targets(rule: Rule) -> Iterator[Target]:
    yield from (*rule.split, *rule.fallback)
    if rule.shadow:
        yield Target(backend=rule.shadow.backend, model=rule.shadow.model, version=rule.shadow.version)


def _lack(target: Target, indexes: Sequence[_Index]) -> str:
    """What none of the servers has; empty where one has all that the target needs."""
    names = {str(entry["name"]) for index in indexes for entry in index}
    if target.model not in names:
        return f"has a model '{target.model}'{suggest(target.model, names)}"
    ready = {
        version for index in indexes for version, one in versions_of(index, target.model).items() if one.state == READY
    }
    if not ready:
        return f"has '{target.model}' loaded now"
    if target.version and target.version not in ready:
        return f"serves version {target.version} of '{target.model}' now; there are: {', '.join(sorted(ready))}"
    return ""
