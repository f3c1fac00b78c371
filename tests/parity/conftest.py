"""The two servers, each started once, when the first test asks for it."""

import contextlib
from collections.abc import Callable, Iterator

import pytest

from tests.kit.servers import Server, running


@pytest.fixture(scope="session")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Server]]:
    """`serving("triton")` and `serving("local")` give the running server."""
    started: dict[str, Server | AssertionError] = {}
    with contextlib.ExitStack() as stack:

        def start(target: str) -> Server:
            if target not in started:
                try:
                    started[target] = stack.enter_context(running(target, tmp_path_factory.mktemp(target)))
                except AssertionError as error:
                    started[target] = error
            server = started[target]
            if isinstance(server, AssertionError):
                raise server  # of the first attempt: another would end the same way
            return server

        yield start
