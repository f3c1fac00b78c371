"""Diffs: the one number changes, and everything else in a file, comments among it, stays as it is."""

import pytest
import yaml

from gateway.tuning.advising.situation import Setting
from gateway.tuning.advising.writing import config_diff, edited, gated, gateway_diff
from local_runtime.repository import parsing

NOW = Setting(max_batch_size=8, delay_us=500)
CONFIG = """# max_batch_size: 3 is what it once had
name: "count: 7"
backend: "python"
max_batch_size: 8   # rows
dynamic_batching {
  # max_queue_delay_microseconds: 9
  max_queue_delay_microseconds: 500
}
instance_group [ { kind: KIND_CPU count: 2 } ]
"""


@pytest.mark.parametrize(
    ("after", "line"),
    [
        (Setting(max_batch_size=16, delay_us=500, instances=2), "+max_batch_size: 16   # rows"),
        (Setting(max_batch_size=8, delay_us=0, instances=2), "+  max_queue_delay_microseconds: 0"),
        (Setting(max_batch_size=8, delay_us=500, instances=3), "+instance_group [ { kind: KIND_CPU count: 3 } ]"),
    ],
)
def test_one_number_changes(after, line):
    before = Setting(max_batch_size=8, delay_us=500, instances=2)
    diff = config_diff(CONFIG, "config.pbtxt", before=before, after=after)
    assert line in diff.splitlines()
    assert [one[0] for one in diff.splitlines()[2:]].count("+") == 1
    assert [one[0] for one in diff.splitlines()[2:]].count("-") == 1


@pytest.mark.parametrize(
    ("text", "after", "wanted"),
    [
        ("dynamic_batching { }", Setting(max_batch_size=8, delay_us=2000), "max_queue_delay_microseconds: 2000"),
        ("", Setting(max_batch_size=8, delay_us=0), "dynamic_batching {  }"),
        ("", Setting(max_batch_size=8, delay_us=500, instances=2), "instance_group [ { count: 2 } ]"),
        ("instance_group { kind: KIND_CPU }", Setting(max_batch_size=8, delay_us=500, instances=2), "count: 2"),
        ("", Setting(max_batch_size=16, delay_us=500), "max_batch_size: 16"),
        ("max_batch_size:8 dynamic_batching{}", Setting(max_batch_size=16, delay_us=500), "max_batch_size:16"),
        ('name: "a" max_batch_size: 8', Setting(max_batch_size=16, delay_us=500), 'name: "a" max_batch_size: 16'),
    ],
)
def test_what_was_not_there_is_put_there(text, after, wanted):
    before = Setting(max_batch_size=8, delay_us=500, is_batching="dynamic" in text or after.delay_us == 500)
    made = edited(text, before, after)
    assert wanted in made
    assert parsing.read_text(made, folder_name="m")


@pytest.mark.parametrize(
    "text",
    [
        "instance_group [ { count: 1 }, { count: 2 } ]",
        "instance_group [ { count: 1 } ] instance_group [ { count: 1 } ]",
        "no configuration",
    ],
)
def test_what_cannot_be_changed_safely_is_told_as_lines(text):
    after = Setting(max_batch_size=8, delay_us=500, instances=3)
    assert edited(text, NOW, after) is None
    assert config_diff(text, "f", before=NOW, after=after) == "+instance_group [ { count: 3 } ]"


def test_without_a_text_the_lines_are_told():
    after = Setting(max_batch_size=16, delay_us=500)
    assert config_diff("", "http://a", before=NOW, after=after) == "+max_batch_size: 16"


BACKENDS = """tasks: {}
backends:
  triton:   # the first
    kind: triton
    # max_in_flight: 3
    url: ${URL:-127.0.0.1:8001}
  other:
    kind: local
    max_in_flight: 9   # few
  flow: {kind: local, max_in_flight: 5}
  short: {kind: local}
rules: []
"""


@pytest.mark.parametrize(
    ("backend", "line"),
    [
        ("triton", "    max_in_flight: 4"),
        ("other", "    max_in_flight: 4   # few"),
        ("flow", "  flow: {kind: local, max_in_flight: 4}"),
        ("short", "  short: {max_in_flight: 4, kind: local}"),
    ],
)
def test_a_gate_changes_and_nothing_else(backend, line):
    made = gated(BACKENDS, backend, 4)
    assert line in made.splitlines()
    wanted = yaml.safe_load(BACKENDS)
    wanted["backends"][backend]["max_in_flight"] = 4
    assert yaml.safe_load(made) == wanted
    assert "# max_in_flight: 3" in made


@pytest.mark.parametrize(
    "text", ["", "backends: []", "backends: {triton: {kind: local}}", "backends:\n  other: {}\n", "a: ["]
)
def test_a_gate_that_cannot_be_changed_safely_is_told_as_lines(text):
    assert gateway_diff(text, "gateway.yaml", backend="triton", max_in_flight=4) == (
        "+backends:\n+  triton: {max_in_flight: 4}"
    )
