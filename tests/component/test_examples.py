"""The programs of `examples/` without what they need: one line that says what to set, and no stack trace.

What they do with it, against the running stack: `tests/e2e/test_examples.py`.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = re.findall(r"^\| \[`[^|]+\| `([^`]+)`", (ROOT / "examples" / "README.md").read_text(), re.MULTILINE)
RUNS = {"sh": ["sh"], "python": [sys.executable], "uvicorn": [sys.executable, "-m", "uvicorn"]}
BARE = {name: value for name, value in os.environ.items() if not name.startswith("GATEWAY_")}


def ended(command: str, environment: dict[str, str]) -> tuple[int, str, str]:
    program, *words = shlex.split(command)
    done = subprocess.run(
        [*RUNS[program], *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("key", [None, ""], ids=["not set", "empty"])  # as `$(cat .run/dev-key)` of no file is
@pytest.mark.parametrize("command", TABLE)
def test_an_example_without_a_key_says_where_there_is_one(command, key):
    environment = BARE if key is None else BARE | {"GATEWAY_KEY": key}
    told = "set GATEWAY_KEY: after `make up` it is in .run/dev-key (see examples/README.md)\n"
    assert ended(command, environment) == (2, "", told)


def test_the_example_that_changes_rules_says_where_an_admin_token_is():
    [command] = [one for one in TABLE if "nlu_with_fallback" in one]
    told = "set GATEWAY_ADMIN_TOKEN: after `make up` it is in .run/admin-token (see examples/README.md)\n"
    assert ended(command, BARE | {"GATEWAY_KEY": "key"}) == (2, "", told)
