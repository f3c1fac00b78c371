"""The snippets of the manuals that call the gateway run as they stand there, and nothing in them is refused."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import skimage

from tests.kit.manuals import ROOT, Block, blocks

DOCUMENTED = "localhost:8080"
PAGES = ("tasks", "batching", "limits", "recall", "llm", "open-inference-protocol")
TOKENS = "client-tokens"  # the one call of docs/keys.md that needs no id of a key
RUN_S = 120
CAT = Path(skimage.__file__).parent / "data" / "chelsea.png"


def calling(*languages: str) -> list:
    """The snippets of these languages with a call of the gateway in them, named by page and line."""
    pages = [(name, (ROOT / "docs" / f"{name}.md").read_text()) for name in (*PAGES, "keys")]
    return [
        pytest.param(block, id=f"{name}-{block.line}")
        for name, text in pages
        for block in blocks(text, *languages)
        if DOCUMENTED in block.text and (name != "keys" or TOKENS in block.text)
    ]


def placed(text: str, stack) -> str:
    """A snippet with the addresses of this stack in the place of the documented ones."""
    of = {DOCUMENTED: stack.data_url, "localhost:8081": stack.ops_urls[0], "localhost:8090": stack.admin_url}
    for documented, url in of.items():
        text = text.replace(documented, url.removeprefix("http://"))
    return text


def written(path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("snippet", calling("bash", ""))
def test_a_shell_snippet_runs(snippet: Block, stack, tmp_path):
    commands = tmp_path / "bin"
    commands.mkdir()
    written(commands / "curl", f'exec {shutil.which("curl")} --fail-with-body "$@"')
    written(commands / "gateway", f'exec {sys.executable} -m gateway "$@"')
    shutil.copy(CAT, tmp_path / "cat.png")
    environ = {
        **os.environ,
        "PATH": f"{commands}:{os.environ['PATH']}",
        "KEY": stack.key,
        "GATEWAY_ADMIN_URL": stack.admin_url,
        "GATEWAY_ADMIN_TOKEN": stack.admin_token,
        "PYTHONPATH": str(ROOT),
    }
    script = placed(snippet.text, stack) + "\nwait\n"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("snippet", calling("python"))
def test_a_program_runs(snippet: Block, stack, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", f"KEY = {stack.key!r}\n{placed(snippet.text, stack)}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
