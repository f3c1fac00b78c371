"""README's three requests as they stand there, against the stack: each answers with what README shows, in shape."""

import itertools
import json
import re
import subprocess

import pytest

from tests.kit.manuals import ROOT, Block, blocks

DOCUMENTED = "localhost:8080"
README = (ROOT / "README.md").read_text()
_SHELL, _SHOWN = ("bash",), ("json", "text")
CURL_S = 120


def asked() -> list[tuple[Block, Block]]:
    """Each snippet that calls the gateway, with the answer that follows it."""
    found = blocks(README, *_SHELL, *_SHOWN)
    return [(one, two) for one, two in itertools.pairwise(found) if DOCUMENTED in one.text and two.language in _SHOWN]


def shape(value: object, *, within: str = "") -> object:
    """A document with kinds in the place of values; of a list its first. What is told only at times is left out."""
    if isinstance(value, dict):
        return {name: shape(item, within=name) for name, item in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    if within.endswith("_ms"):
        return "time"  # or null, where nothing was measured
    return "number" if isinstance(value, int | float) else type(value).__name__


def events(text: str) -> list[object]:
    """The events of a stream; `...` stands for those that README leaves out."""
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


def run(snippet: Block, stack, folder) -> str:
    """A snippet as a newcomer pastes it, but for the address and the folder that it is run in."""
    (folder / ".venv").symlink_to(ROOT / ".venv")
    script = snippet.text.replace(DOCUMENTED, stack.data_url.removeprefix("http://"))
    done = subprocess.run(
        ["bash", "-euc", script],
        cwd=folder,
        env={"KEY": stack.key, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=CURL_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_are_three():
    assert len(asked()) == 3


@pytest.mark.parametrize("number", range(3), ids=["photo", "sentence", "chat"])
def test_the_answer_is_what_the_readme_shows(number, stack, tmp_path):
    snippet, shown = asked()[number]
    answer = run(snippet, stack, tmp_path)
    if shown.language == "json":
        told, got = json.loads(shown.text), json.loads(answer)
        assert shape(got) == shape(told)
        assert got["task"] == told["task"]
        assert got["output"].get("label") == told["output"].get("label")
        assert [one["name"] for one in got["output"].get("labels", ())] == [
            one["name"] for one in told["output"].get("labels", ())
        ]
    else:
        told, got = events(shown.text), events(answer)
        assert len(got) >= len(told)
        assert [shape(got[0]), shape(got[1]), *map(shape, got[-2:])] == [shape(one) for one in told]
        assert got[-1] == "[DONE]"


@pytest.mark.stack("up")
def test_the_key_lies_where_the_readme_reads_it(stack):
    read = re.search(r"^KEY=\$\(cat \.run/(.+)\)$", README, re.MULTILINE)[1]
    assert (stack.parts.run_dir / read).read_text().strip() == stack.key
