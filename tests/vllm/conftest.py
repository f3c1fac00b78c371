from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.kit.serving import KEY, Serving, serving
from tests.vllm.door import Door, door
from tests.vllm.server import NAME, VllmServer, llama

HERE = Path(__file__).parent
TEST_S = 600  # a test may have to start vLLM
TASKS = ("first_vllm", "only_vllm", "least_loaded")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.timeout(TEST_S))


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    server = VllmServer(tmp_path_factory.mktemp("vllm"))
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def vllm(vllm_server: VllmServer) -> VllmServer:
    """A vLLM that runs: another test may have killed it."""
    vllm_server.start()
    return vllm_server


@pytest.fixture(scope="session")
def llama_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with llama(tmp_path_factory.mktemp("llama")) as url:
        yield url


@pytest.fixture
async def gateway(vllm: VllmServer, llama_url: str, tmp_path: Path) -> AsyncIterator[Serving]:
    """A gateway before both engines; the task says how it chooses."""
    targets = [{"backend": "vllm", "model": NAME}, {"backend": "llama", "model": NAME}]
    apis = ["chat/completions", "completions", "responses"]
    sections = {
        "backends": {
            "vllm": {"kind": "openai", "base_url": f"{vllm.url}/v1", "apis": apis},
            "llama": {"kind": "openai", "base_url": f"{llama_url}/v1", "apis": apis},
        },
        "tasks": {task: {"contract": "chat", "timeout_ms": 300_000, "attempt_timeout_ms": 200_000} for task in TASKS},
        "rules": [
            {"name": "fallback", "match": {"task": "first_vllm"}, "split": targets[:1], "fallback": targets[1:]},
            {"name": "alone", "match": {"task": "only_vllm"}, "split": targets[:1]},
            {
                "name": "load",
                "match": {"task": "least_loaded"},
                "split": targets,
                "strategy": "least_in_flight",
            },
        ],
    }
    async with serving(tmp_path, "", **sections) as running:
        yield running


@pytest.fixture
async def straight(vllm: VllmServer) -> AsyncIterator[Door]:
    """vLLM itself."""
    async with door(vllm.url, NAME) as opened:
        yield opened


@pytest.fixture
async def through(gateway: Serving) -> AsyncIterator[Door]:
    """The same vLLM through the gateway."""
    async with door(gateway.url, "only_vllm", key=KEY) as opened:
        yield opened
