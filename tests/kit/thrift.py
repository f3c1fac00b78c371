"""A plugin that saves processor time, and changes nothing else.

The clients of a process share TLS contexts, each of which takes 13 ms to load its certificates. While tests are
collected nothing becomes garbage: without looking for it that takes half the time, and what is there then stays.
"""

import functools
import gc
from collections.abc import Generator

import pytest
from httpx._transports import default

default.create_ssl_context = functools.cache(default.create_ssl_context)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
