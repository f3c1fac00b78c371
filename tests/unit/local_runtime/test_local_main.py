import asyncio
import os
import signal
import sys

import pytest
import tritonclient.grpc.aio as triton

from local_runtime.__main__ import main


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit) as left:
        main(["serve", "--help"])
    assert left.value.code == 0
    assert "python -m local_runtime serve --repository triton_models" in capsys.readouterr().out


def test_no_such_repository_is_said_in_one_line(tmp_path, capsys):
    assert main(["serve", "--repository", str(tmp_path / "absent"), "--grpc", f"unix:{tmp_path}/s"]) == 78
    assert capsys.readouterr().err.strip().endswith("is not a folder")


async def test_serves_until_sigterm(repository, tmp_path, write_python):
    write_python("double")
    write_python("broken", "1 / 0")
    command = ["-m", "local_runtime", "serve", "--repository", str(repository), "--grpc", f"unix:{tmp_path}/s"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stderr=asyncio.subprocess.PIPE, env={**os.environ}
    )
    try:
        lines = []
        while not any("serving" in line for line in lines):
            line = await asyncio.wait_for(process.stderr.readline(), 60)
            assert line, lines
            lines.append(line.decode())
        async with triton.InferenceServerClient(f"unix:{tmp_path}/s") as client:
            assert await client.is_model_ready("double")
        process.send_signal(signal.SIGTERM)
        rest = (await asyncio.wait_for(process.stderr.read(), 60)).decode()
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert f"serving 1 models on grpc unix:{tmp_path}/s: double/1" in lines[-1]
    assert "model broken is not served: ZeroDivisionError: division by zero" in rest
    assert rest.strip().endswith("local_runtime: stopped")
