"""Long commands of the tests that are told to end: what they have started ends with them."""

import asyncio
import os
import sys

import pytest

from tests.kit.serving import descendants
from tests.kit.stack import is_running
from tests.kit.wait import until

UNDER_WAY = 3  # processes: while the parts are starting


@pytest.mark.parametrize(
    "words",
    [("chaos", "--quick"), ("bench", "--quick", "--only", "tensors"), ("fuzz", "--only", "planes")],
    ids=lambda words: words[0],
)
@pytest.mark.timeout(120)
async def test_nothing_is_left(words, tmp_path):
    name, *options = words
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"tests.{name}", *options),
        *(() if name == "fuzz" else ("--output", str(tmp_path / "report"))),
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        await until(lambda: len(descendants(process.pid)) >= UNDER_WAY, timeout_s=60)
        started = descendants(process.pid)
        process.terminate()
        said, _ = await asyncio.wait_for(process.communicate(), 60)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode, said.decode()
    assert not [command for pid, command in started.items() if is_running(pid)]
    assert not list(temporary.iterdir())
