"""A short run of the chaos suite: real parts, a small fixed set of faults, and nothing found by who judges."""

import asyncio
import json
import sys

import pytest


@pytest.mark.alone
@pytest.mark.timeout(400)
async def test_a_few_faults_of_each_kind_break_no_promise(tmp_path):
    words = ("-m", "tests.chaos", "--quick", "--seed", "1", "--output", str(tmp_path))
    process = await asyncio.create_subprocess_exec(
        sys.executable, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()[-8000:]
    assert json.loads((tmp_path / "report.json").read_text())["findings"] == []
