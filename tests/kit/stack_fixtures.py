"""The stack of the end-to-end tests, which `--stack up`, `--stack compose` or `--stack each` chooses.

Fixtures: `stack`, and `http`, a client of its API. A test of what only one of them has is marked `stack("up")` or
`stack("compose")`, and left out with the other. With `each`, a test runs on the stack of docker-compose.yml, and where
it is marked `stack("up", "compose")`, on both: what differs between them is how parts are started and watched.
"""

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from tests.kit.compose_stack import composed
from tests.kit.stack import Stack, up

STACKS = {"up": up, "compose": composed}
EACH = "each"
TEST_S = 300  # the first test has to start the stack


def pytest_addoption(parser: pytest.Parser) -> None:
    told = "what the end-to-end tests run against: `gateway up`, the services of docker-compose.yml, or each its own"
    parser.addoption("--stack", choices=[*STACKS, EACH], default="up", help=told)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "stack" in metafunc.fixturenames:
        names = _stacks(metafunc.config, metafunc.definition) or list(STACKS)[:1]  # it will be left out
        metafunc.parametrize("stack", names, indirect=True, scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    other = [item for item in items if not _stacks(config, item)]
    if other:
        config.hook.pytest_deselected(items=other)
        items[:] = [item for item in items if item not in other]
    for item in items:
        if "stack" in getattr(item, "fixturenames", ()) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_S))


def _stacks(config: pytest.Config, test: pytest.Item) -> list[str]:
    """Those that a test runs on."""
    chosen = config.getoption("stack")
    marks = [mark.args for mark in test.iter_markers("stack")]
    names = list(STACKS) if marks else ["compose"]
    return [name for name in (names if chosen == EACH else [chosen]) if all(name in mark for mark in marks)]


@pytest.fixture(scope="session")
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with STACKS[request.param](tmp_path_factory.mktemp("stack")) as running:
        yield running


@pytest.fixture
async def http(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with stack.http() as client:
        yield client
