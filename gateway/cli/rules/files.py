"""Files of rules: read with their lines, and written so that `apply` takes them and two exports can be compared."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gateway.cli.admin_client import EXIT_USAGE, Failure
from gateway.settings.lines import below, rule_line
from gateway.settings.yaml_text import YamlFault, read_with_nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleFile:
    """The list of rules of a file; what is in the rules is the control plane's to judge.

    `node` is the list as YAML has read it, with its lines.
    """

    name: str
    rules: list[Any]
    node: yaml.Node | None

    def fault(self, words: str) -> str:
        """What was refused, with the line that it is about, where it is about one: `rules.yaml:12: rule 'x': ...`."""
        line = rule_line(self.node, words)
        return f"{self.name}:{line}: {words}" if line else f"{self.name}: {words}"


def read(file: str) -> RuleFile:
    """YAML or JSON: `rules:` with a list, or the list; `-` is stdin. Ends the command where that cannot be read."""
    name = "stdin" if file == "-" else file
    try:
        text = stdin_text() if file == "-" else Path(file).read_text(encoding="utf-8")
        document, node = read_with_nodes(text)
    except (OSError, UnicodeDecodeError) as error:
        raise Failure(f"{name}: cannot be read", EXIT_USAGE) from error
    except YamlFault as error:
        mark, why = (getattr(error.__cause__, one, None) for one in ("problem_mark", "problem"))
        told = f":{mark.line + 1}: not valid YAML{f': {why}' if why else ''}" if mark else f": {error}"
        raise Failure(f"{name}{told}", EXIT_USAGE) from error
    is_whole = isinstance(document, Mapping)
    rules = document.get("rules") if isinstance(document, Mapping) else document
    if not isinstance(rules, list):
        raise Failure(f"{name}: must be a list of rules, or a mapping with `rules:`", EXIT_USAGE)
    return RuleFile(name=name, rules=rules, node=below(node, "rules") if is_whole else node)


def stdin_text() -> str:
    """All that is piped in."""
    return sys.stdin.read()


def written(rules: Sequence[Mapping[str, Any]]) -> str:
    """The same rules as YAML: always in the same form, a rule a block, its targets a line each."""
    return yaml.safe_dump(
        {"rules": list(rules)}, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True
    )
