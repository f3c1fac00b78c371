"""The two servers and a gateway before the real one, each started once, when the first test asks for it."""

import contextlib
from collections.abc import Callable, Iterator

import pytest

from tests.kit.servers import Server, gateway_to, running


@pytest.fixture(scope="session")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Server]]:
    """`serving("triton")` and `serving("local")` give the running server, `serving("gateway")` one before `triton`."""
    started: dict[str, Server | AssertionError] = {}
    with contextlib.ExitStack() as stack:

        def start(target: str) -> Server:
            if target not in started:
                try:
                    folder = tmp_path_factory.mktemp(target)
                    opened = gateway_to(start("triton"), folder) if target == "gateway" else running(target, folder)
                    started[target] = stack.enter_context(opened)
                except AssertionError as error:
                    started[target] = error
            server = started[target]
            if isinstance(server, AssertionError):
                raise server  # of the first attempt: another would end the same way
            return server

        yield start


@pytest.fixture(scope="session", autouse=True)
def _no_leaks(no_leaks: None) -> None:
    """When all is over, nothing that was written holds a secret (tests/kit/leaks.py)."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The gateway speaks HTTP: a test by gRPC would be one of the server behind it."""
    params = {item: getattr(item, "callspec", None) and item.callspec.params for item in items}
    dropped = [
        item
        for item, given in params.items()
        if given and given.get("server") == "gateway" and given.get("client", "").startswith("grpc")
    ]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in dropped]
