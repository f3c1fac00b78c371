"""One world for all of the console's tests: its servers and its browser take seconds to start."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.kit.console import Whole, whole_console


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def whole(tmp_path_factory) -> AsyncIterator[Whole]:
    async with whole_console(tmp_path_factory.mktemp("console")) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="package")
async def fresh(whole: Whole) -> Whole:
    """With the rules as at first, and no switches."""
    await whole.reset()
    return whole
