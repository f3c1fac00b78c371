"""What a process imports: nothing that it does not serve with. Its imports are what its start takes."""

import json
import os
import subprocess
import sys

import pytest
import yaml

HEAVY = {
    *("torch", "grpc", "google.protobuf", "tritonclient", "local_runtime.runtime", "PIL"),
    *("fastapi", "nicegui", "jwt", "cryptography.hazmat", "httpx", "jinja2", "rich"),
    *("gateway.admin", "gateway.cli", "gateway.console", "gateway.stack", "gateway.tuning"),
}
WORKER = """
import asyncio, json, sys
from pathlib import Path
from prometheus_client import CollectorRegistry
from gateway import worker

async def main():
    settings = worker.load_settings(Path(sys.argv[1]))
    async with worker.data_plane(settings, CollectorRegistry(), is_draining=lambda: False):
        print(json.dumps(sorted(sys.modules)))

asyncio.run(main())
"""
PARENT = "import gateway.serve, json, sys; print(json.dumps(sorted(sys.modules)))"
COMMAND = """
import json, sys
from gateway.__main__ import app
try:
    app(sys.argv[1:])
except SystemExit:
    print("\\n" + json.dumps(sorted(sys.modules)))
"""
OPENAI = {"kind": "openai", "base_url": "http://127.0.0.1:9/v1"}
GENERATE = {"kind": "triton_generate", "base_url": "http://127.0.0.1:9"}
TRITON = {"kind": "triton", "url": "127.0.0.1:9"}


def modules(code: str, *words: str) -> set[str]:
    """All that are there when it has run."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    done = subprocess.run((sys.executable, "-c", code, *words), capture_output=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return set(json.loads(done.stdout.splitlines()[-1]))


def heavy(found: set[str]) -> set[str]:
    return {name for name in HEAVY if any(one == name or one.startswith(f"{name}.") for one in found)}


@pytest.mark.parametrize(
    ("backend", "brings"),
    [
        (OPENAI, set()),
        (OPENAI | {"kind": "anthropic"}, set()),
        (GENERATE, {"jinja2"}),
        (TRITON, {"grpc", "google.protobuf", "tritonclient"}),
    ],
    ids=["openai", "anthropic", "triton_generate", "triton"],
)
def test_a_worker_imports_what_its_backends_need(backend, brings, tmp_path):
    config = tmp_path / "gateway.yaml"
    contract = "tensor" if backend is TRITON else "chat"
    target = {"backend": "one", "model": "*" if backend is TRITON else "m"}
    document = {
        "backends": {"one": backend},
        "tasks": {"task": {"contract": contract}},
        "rules": [{"name": "all", "split": [target]}],
        "keys": [],
    }
    config.write_text(yaml.safe_dump(document))
    assert heavy(modules(WORKER, str(config))) == brings


def test_the_parent_of_the_workers_imports_no_backend_and_no_store():
    found = modules(PARENT)
    assert not heavy(found)
    assert not found & {"redis", "uvloop", "gateway.wiring", "gateway.stores", "gateway.backends.llm"}


def test_a_command_imports_itself_alone():
    assert not modules(COMMAND, "--version") & {*HEAVY, "pydantic", "numpy", "redis", "gateway.settings"}
    checking = modules(COMMAND, "check", "deploy/gateway.yaml")
    assert heavy(checking) == {"gateway.cli"}
