"""The recipes of docs/rules-cookbook.md do what they say: which of their rules takes which request."""

import re
from datetime import UTC, datetime

import pytest
import yaml

from gateway.core.rules import parse_rules
from gateway.core.rules.matching import Circumstances, RuleTable
from gateway.core.types import Caller, InferenceRequest
from tests.kit.manuals import ROOT, blocks

PAGE = (ROOT / "docs" / "rules-cookbook.md").read_text()
RECIPES = {
    title: yaml.safe_load(found[0].text)["rules"]
    for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
    if (title := part.partition("\n")[0]) and (found := blocks(part, "yaml"))
}
FRIDAY_NIGHT = datetime(2026, 12, 4, 14, 0, tzinfo=UTC).timestamp()  # 23:00 in Seoul
SATURDAY_MORNING = datetime(2026, 12, 4, 20, 0, tzinfo=UTC).timestamp()  # 05:00 in Seoul: of Friday's window
FRIDAY_NOON = datetime(2026, 12, 4, 3, 0, tzinfo=UTC).timestamp()
ASKED = [
    ("Those who ask for it get the new one", "embeddings-beta", {"task": "text-embedding", "headers": {"x-beta": "1"}}),
    ("Those who ask for it get the new one", "embeddings", {"task": "text-embedding"}),
    ("A tenant's own model", "acme-chat", {"task": "general_llm", "tenant": "acme"}),
    ("A tenant's own model", "chat", {"task": "general_llm", "tenant": "other"}),
    ("By size", "long-prompts", {"task": "general_llm", "tokens": 900}),
    ("By size", "chat", {"task": "general_llm", "tokens": 899}),
    ("By size", "large-images", {"task": "image-classification", "input_bytes": 4_000_000}),
    ("By size", "images", {"task": "image-classification", "input_bytes": 3_999_999}),
    ("By time of day", "bulk-at-night", {"task": "bulk_llm", "now_s": FRIDAY_NIGHT}),
    ("By time of day", "bulk-at-night", {"task": "bulk_llm", "now_s": SATURDAY_MORNING}),
    ("By time of day", "bulk", {"task": "bulk_llm", "now_s": FRIDAY_NOON}),
    ("Jobs apart from people", "embeddings-jobs", {"task": "text-embedding", "priority": "batch"}),
    ("Jobs apart from people", "embeddings", {"task": "text-embedding"}),
    ("In the order in which they came", "carts", {"task": "general_llm", "tenant": "shop"}),
    ("One model of the tensor API", "encoder", {"task": "tensor", "model": "text_encoder"}),
    ("One model of the tensor API", "tensors", {"task": "tensor", "model": "ocr"}),
    ("Keep a tenant out, or slow it down", "acme-slowly", {"task": "text-embedding", "tenant": "acme"}),
    ("Keep a tenant out, or slow it down", "embeddings", {"task": "text-embedding"}),
]


@pytest.mark.parametrize(
    ("recipe", "rule", "asked"), ASKED, ids=[f"{one[0]}-{one[1]}-{i}" for i, one in enumerate(ASKED)]
)
def test_a_recipe_takes_what_it_says(recipe, rule, asked):
    tokens, now_s = asked.get("tokens"), asked.get("now_s", 0.0)
    caller = Caller(tenant=asked.get("tenant", "dev"), key_id="k")
    said = {name: value for name, value in asked.items() if name not in ("tenant", "tokens", "now_s")}
    request = InferenceRequest(id="r", caller=caller, input=None, received_us=0, deadline_us=1, **said)
    found = RuleTable(parse_rules(RECIPES[recipe])).find(
        request, Circumstances(now_s=lambda: now_s, input_tokens=lambda: tokens)
    )
    assert found is not None
    assert found.name == rule


def test_every_rule_of_a_recipe_with_several_is_asked_for():
    several = {(title, rule["name"]) for title, rules in RECIPES.items() if len(rules) > 1 for rule in rules}
    assert several <= {(recipe, rule) for recipe, rule, _ in ASKED}
