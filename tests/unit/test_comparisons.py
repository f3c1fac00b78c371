"""Secrets are compared by `hmac.compare_digest` alone, wherever somebody shows one."""

import ast
import re
from pathlib import Path

import pytest

GATEWAY = Path(__file__).parents[2] / "gateway"
PLACES = (
    *(GATEWAY / "admin" / "access").glob("*.py"),
    *(GATEWAY / name for name in ("api/auth.py", "api/client_tokens.py", "core/keys.py", "core/client_tokens.py")),
    *(GATEWAY / "stores" / "control").glob("sessions.py"),
)
SECRET = re.compile(r"\b(?:\w+\.)*(?:digest|secret|signature|csrf|proof|mark|password|cookie)\b(?!\()")
BY_LETTERS = (ast.Eq, ast.NotEq, ast.In, ast.NotIn)


@pytest.mark.parametrize("file", PLACES, ids=lambda file: str(file.relative_to(GATEWAY)))
def test_no_secret_is_compared_letter_by_letter(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Compare) and any(isinstance(op, BY_LETTERS) for op in node.ops):
            assert not SECRET.search(ast.unparse(node)), f"{file.name}:{node.lineno}: {ast.unparse(node)}"


def test_a_comparison_by_letters_is_found():
    for text in ("token.proof in proofs", "digest == key.digest", "shown != session.csrf"):
        assert SECRET.search(text)
