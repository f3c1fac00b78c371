"""Which line a fault about a rule leads to."""

import pytest
import yaml

from gateway.core.rules import parse_rules
from gateway.core.rules.fields import RuleError
from gateway.settings.lines import below, line_at, rule_line

TEXT = """\
rules:
  - name: first
    match:
      task: embed
      headers:
        X-Beta: "yes"
      times:
        - {days: [mon], from: "08:00"}
    split:
      - {backend: a, model: m}
      - backend: b
        model: n
        parameters: {temperature: 0}
    limits:
      - {requests: 60, per: minute}
    enabled: true
  - name: second
    split: [{backend: a, model: m}]
"""


def node(text: str = TEXT):
    return below(yaml.compose(text, Loader=yaml.SafeLoader), "rules")


def fault(text: str) -> str:
    with pytest.raises(RuleError) as refused:
        parse_rules(yaml.safe_load(text)["rules"])
    return str(refused.value)


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("    enabled:", "    enabld:", 16),
        ("enabled: true", "enabled: maybe", 16),
        ("        model: n", "        modle: n", 12),
        ("- {backend: a, model: m}", "- {backend: '!', model: m}", 10),
        ("temperature: 0", "stream: true", 13),
        ('X-Beta: "yes"', "X-Beta: yes", 6),
        ("days: [mon]", "days: [mon, moon]", 8),
        ("per: minute", "per: fortnight", 15),
        ("      task: embed", "      tsk: embed", 4),
        ("      task: embed", "      min_input_bytes: 9\n      max_input_bytes: 1", 4),
        ("name: second", "name: first", 17),
        ("name: second", "name: '!'", 17),
        ("    split: [{backend: a, model: m}]", "    retries: 1", 17),
        ("  - name: second\n    split: [{backend: a, model: m}]", "  - just text", 17),
    ],
)
def test_a_fault_leads_to_its_line(old, new, line):
    text = TEXT.replace(old, new)
    assert text != TEXT
    assert rule_line(node(text), fault(text)) == line


@pytest.mark.parametrize("words", ["rules: must be a list", "rule 'third': split: x", "rules[9]: must be a mapping"])
def test_words_about_no_rule_of_the_file(words):
    assert rule_line(node(), words) is None
    assert rule_line(None, words) is None


def test_what_does_not_stand_there_is_passed_over():
    assert line_at(node(), [0, "match", "nothing", "task"]) == 4
    assert line_at(node(), [0, "split", 7]) == 9
