"""SECURITY.md: every test, file, page and setting that it names is there, and every threat names one."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "SECURITY.md").read_text()
THREATS = TEXT.split("## Threats", 1)[1].split("\n## ", 1)[0]
ROWS = [line for line in THREATS.splitlines() if line.startswith("| ") and "What holds" not in line]
POINTER = re.compile(r"`([\w./-]+\.(?:py|md|yml|yaml))(?:::(\w+))?`|\]\(([^)#]+)\)")


def pointers(text: str) -> list[tuple[str, str]]:
    return [(path or link, name) for path, name, link in POINTER.findall(text)]


@pytest.mark.parametrize(("path", "name"), sorted(set(pointers(TEXT))))
def test_what_it_points_to_is_there(path, name):
    assert (ROOT / path).exists()
    if name:
        defined = [node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if hasattr(node, "name")]
        assert name in defined


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip()[:40])
def test_every_threat_names_what_holds_it(row):
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert len(cells) == 3
    assert pointers(cells[2])


def test_there_are_threats():
    assert len(ROWS) > 15


def test_folders_and_settings_that_it_names_are_there():
    for folder in re.findall(r"`((?:deploy|requirements|docs)/[\w/]*)`", TEXT):
        assert (ROOT / folder).exists(), folder
    settings = "".join(file.read_text() for file in (ROOT / "gateway" / "settings").glob("*.py"))
    for name in ("ops_host", "admin_host", "record_content", "shared_by", "expires_at"):
        assert f"`{name}" in TEXT
        assert name in settings or name == "expires_at"
