"""`gateway rules check --offline`: rules against a configuration file, where no control plane is at hand."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from gateway.cli.admin_client import EXIT_REFUSED, EXIT_USAGE, Failure
from gateway.cli.rules.files import RuleFile
from gateway.core.rules import parse_rules, rules_document, warnings_of
from gateway.core.rules.diff import changes
from gateway.core.rules.fields import RuleError
from gateway.settings import ConfigError, load_settings
from gateway.wiring import rule_check


def checked(given: RuleFile, config: Path) -> dict[str, Any]:
    """As the control plane would answer, with the configuration's own rules as those in force."""
    try:
        settings = load_settings(config)
        fits = rule_check(settings)
    except ConfigError as error:
        raise Failure(str(error), EXIT_USAGE) from error
    try:
        rules = parse_rules(given.rules)
        fits(rules)
    except RuleError as error:
        raise Failure(f"refused: {given.fault(str(error))}", EXIT_REFUSED) from error
    return {
        "valid": True,
        "rules": rules_document(rules),
        "warnings": warnings_of(rules, settings.tasks),
        "changes": [asdict(change) for change in changes(parse_rules(settings.rules), rules)],
    }
