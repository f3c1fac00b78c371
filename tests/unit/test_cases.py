"""`docs/cases.md` against the tests: each case has tests that bear its name, and each named case is in the table."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "cases.md").read_text()
CASE = re.compile(r"\b(?:ST|RL|TN|DB|FB|CF|MT|SC)-\d{2}\b")
ROWS = {case: tests for case, _, tests in re.findall(r"^\| ([A-Z]{2}-\d{2}) \| (.+) \| (.+) \|$", PAGE, re.MULTILINE)}


@cache
def functions(file: str) -> dict[str, str]:
    """The functions of a file, each with its text."""
    source = (TESTS / file).read_text()
    lines = source.splitlines()
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name] = "\n".join(lines[node.lineno - 1 : node.end_lineno])
    return found


def test_there_are_fifty():
    assert len(ROWS) == 50


@pytest.mark.parametrize("case", ROWS)
def test_its_tests_exist_and_bear_its_name(case: str):
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", ROWS[case])
    assert named
    for file, function in named:
        assert function in functions(file), f"{file} has no test {function}"
        assert case in (TESTS / file).read_text(), f"{file} does not name {case}"
    assert any(case in functions(file)[function] for file, function in named), f"no test of {case} bears its name"


def test_every_case_that_a_test_names_is_in_the_table():
    named = {
        case for path in TESTS.rglob("test_*.py") if path != Path(__file__) for case in CASE.findall(path.read_text())
    }
    assert named == ROWS.keys()
