"""YAML is read in one way: aliases do not multiply, and faults are one line."""

import pytest

from gateway.settings import ConfigError, load_settings
from gateway.settings.yaml_text import MOST_REPEATED, YamlFault, read_with_nodes, read_yaml
from gateway.tuning.load import traffic_file
from gateway.tuning.load.asks import AskError
from gateway.tuning.simulation.world import WorldError, load_document


def laughs(levels: int, each: int = 9) -> str:
    """Lists of aliases of lists of aliases: nine of nine of nine ..."""
    rest = (f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * each)}]" for level in range(1, levels + 1))
    return "\n".join(["a0: &a0 lol", *rest])


MERGES = "\n".join(
    ["a0: &a0 {k: v}", *(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 12))]
)
BOMBS = {
    "lists": laughs(12),
    "merged": MERGES,
    "one long text": f"a: &a {'x' * 10_000}\nb: [{', '.join(['*a'] * 200)}]",
}


@pytest.mark.parametrize("text", BOMBS.values(), ids=BOMBS)
@pytest.mark.parametrize("read", [read_yaml, read_with_nodes])
def test_what_aliases_may_repeat_is_bounded(read, text):
    with pytest.raises(YamlFault, match=f"not taken: its aliases repeat more than {MOST_REPEATED:,} characters"):
        read(text)


def test_an_alias_in_what_it_repeats_is_refused():
    with pytest.raises(YamlFault, match="not taken: line 1: an alias stands in what it repeats"):
        read_yaml("a: &a [1, *a]")


def test_aliases_as_people_write_them_are_taken():
    text = "usual: &usual {rate: 5, rows: 2}\ntraffic: [{<<: *usual, name: a}, {<<: *usual, name: b}, *usual]"
    assert read_yaml(text)["traffic"] == [
        {"rate": 5, "rows": 2, "name": "a"},
        {"rate": 5, "rows": 2, "name": "b"},
        {"rate": 5, "rows": 2},
    ]
    assert read_yaml(laughs(3))["a3"] == [[["lol"] * 9] * 9] * 9


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid YAML: while parsing a flow node"),
        ("a: 2026-13-41", "not valid YAML: month must be in 1..12"),
        ("a: *b", "not valid YAML: found undefined alias"),
        ("[" * 20_000, "not valid YAML: while increasing flow level exceeded maximum nesting depth"),
        ("[" * 600 + "]" * 600, "not taken: it is nested too deeply"),
        (
            "a0: &a0 []\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 250)),
            "not taken: it is nested too deeply",
        ),
    ],
)
def test_faults_are_one_line(text, words):
    with pytest.raises(YamlFault) as fault:
        read_yaml(text)
    assert str(fault.value).startswith(words)
    assert "\n" not in str(fault.value)


def test_nodes_know_their_lines():
    value, node = read_with_nodes("a: 1\nb: 2\n")
    assert value == {"a": 1, "b": 2}
    assert [key.start_mark.line for key, _ in node.value] == [0, 1]
    assert read_with_nodes("") == (None, None)


def test_configurations_worlds_and_traffic_are_read_so(tmp_path):
    file = tmp_path / "bomb.yaml"
    file.write_text(laughs(12))
    words = f"{file}: not taken: its aliases repeat more than"
    with pytest.raises(ConfigError, match=words):
        load_settings(file)
    with pytest.raises(WorldError, match=words):
        load_document(file)
    with pytest.raises(AskError, match=f"traffic: {words}"):
        traffic_file.read(file, url="http://127.0.0.1:1", key="", environ={})
