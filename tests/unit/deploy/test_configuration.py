"""The shipped configuration: what it promises of a fresh machine, of money and of secrets."""

import re
from pathlib import Path

import pytest
import yaml

from gateway.core.rules import parse_rules
from gateway.settings import AnthropicSettings, OpenAISettings, Settings, load_settings

FOLDER = Path(__file__).parents[3] / "deploy"
SETTINGS = load_settings(FOLDER / "gateway.yaml")
RULES = parse_rules(SETTINGS.rules)
CHATS = [name for name, task in SETTINGS.tasks.items() if task.contract == "chat"]
HOSTED = {name: b for name, b in SETTINGS.backends.items() if getattr(b, "hosted", False)}
PRICES = yaml.safe_load((FOLDER / "prices.yaml").read_text())["prices"]


@pytest.mark.parametrize("task", CHATS)
def test_every_chat_is_answered_on_a_fresh_machine_and_the_small_model_comes_last(task):
    for rule in (rule for rule in RULES if rule.match.task == task):
        targets = [*rule.split, *rule.fallback]
        assert (targets[-1].backend, targets[-1].model) == ("llm", "smollm2"), rule.name
        # Were it a part of a split that chooses, being free and near it would take everything.
        assert all(target.backend != "llm" for target in targets[:-1])


@pytest.mark.parametrize("name", HOSTED)
def test_a_hosted_endpoint_is_off_until_its_own_key_is_set(name):
    backend = HOSTED[name]
    assert isinstance(backend, OpenAISettings | AnthropicSettings)
    assert backend.api_key_env == f"GATEWAY_{name.upper()}_KEY"
    assert backend.base_url.startswith("https://")


def test_every_hosted_model_of_the_rules_has_a_price():
    named = {t.model for rule in RULES for t in (*rule.split, *rule.fallback) if t.backend in HOSTED}
    assert named <= PRICES.keys()
    assert PRICES["llm/smollm2"] == {"input": 0, "output": 0}


def test_the_table_has_the_planned_figures():
    assert {name: (price["input"], price["output"]) for name, price in PRICES.items() if "/" not in name} == {
        "gpt-4.1": (8, 8),
        "claude-sonnet-4-5": (4.5, 15),
        "gemini-2.5-flash": (2.5, 2.5),
        "deepseek-chat": (0.42, 1.68),
    }


def test_the_price_table_lies_beside_the_file():
    assert SETTINGS.prices == FOLDER / "prices.yaml"


def test_tensor_tasks_are_answered_by_no_chat_model_by_default():
    rules = [rule for rule in RULES if rule.match.task not in CHATS]
    assert {t.backend for rule in rules for t in (*rule.split, *rule.fallback)} == {"triton", "local"}


def test_the_manuals_examples_can_be_taken():
    manual = (FOLDER.parent / "docs" / "llm.md").read_text()
    written = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", manual, re.DOTALL)]
    assert len(written) == 3
    backends = {name: backend.model_dump(exclude_unset=True) for name, backend in SETTINGS.backends.items()}
    tasks = {name: task.model_dump() for name, task in SETTINGS.tasks.items()}
    for example in written:
        part = example if isinstance(example, dict) else {"rules": example}
        whole = {"backends": backends | part.get("backends", {}), "tasks": tasks, "rules": part.get("rules", [])}
        Settings.model_validate(whole)
