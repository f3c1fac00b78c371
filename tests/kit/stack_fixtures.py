"""The stack of the end-to-end tests: one for the whole run, which `--stack up` or `--stack compose` chooses.

Fixtures: `stack`, and `http`, a client of its API. A test of what only one of them has is marked `stack("up")` or
`stack("compose")`, and left out with the other.
"""

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from tests.kit.compose_stack import composed
from tests.kit.stack import Stack, up

STACKS = {"up": up, "compose": composed}
TEST_S = 300  # the first test has to start the stack


def pytest_addoption(parser: pytest.Parser) -> None:
    told = "what the end-to-end tests run against: `gateway up`, or the services of docker-compose.yml"
    parser.addoption("--stack", choices=list(STACKS), default="up", help=told)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    other = [item for item in items if not _runs_on(config.getoption("stack"), item.iter_markers("stack"))]
    if other:
        config.hook.pytest_deselected(items=other)
        items[:] = [item for item in items if item not in other]
    for item in items:
        if "stack" in getattr(item, "fixturenames", ()) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_S))


def _runs_on(stack: str, marks: Iterator[pytest.Mark]) -> bool:
    return all(mark.args == (stack,) for mark in marks)


@pytest.fixture(scope="session")
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with STACKS[request.config.getoption("stack")](tmp_path_factory.mktemp("stack")) as running:
        yield running


@pytest.fixture
async def http(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with stack.http() as client:
        yield client
