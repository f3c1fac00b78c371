"""Calls of an `LLMBackend`, and all that comes back."""

from contextlib import aclosing

from gateway.backends.llm.backend import LLMBackend
from gateway.backends.llm.openai_codec import OpenAICodec
from gateway.core.errors import BackendError
from gateway.core.types import BackendCall, OpenAIPayload, singly
from tests.kit.upstream import Upstream

LONG_US = 5_000_000
SHORT_US = 40_000
APIS = ("chat/completions", "completions", "responses", "embeddings")


def endpoint(*base_urls, apis=APIS, **options):
    return LLMBackend("llm", codec=OpenAICodec(apis), base_urls=base_urls, **options)


def call(*, stream=False, payload=None, api="chat/completions", replica="", model="theirs", **body):
    payload = payload or OpenAIPayload(body={"model": "task", "messages": [], **body}, api=api, stream=stream)
    return BackendCall(request_id="req-1", model=model, version="", replica=replica, payload=payload)


async def events(up, *, timeout_us=LONG_US, backend=None, **asked):
    """All events of one call, then the fault if there was one."""
    own = backend or endpoint(up.base_url)
    found = []
    try:
        async with aclosing(own.infer(call(**asked), timeout_us=timeout_us)) as answer:
            async for item in answer:
                found += singly(item)
    except BackendError as error:
        found.append(error.fault)
    finally:
        if backend is None:
            await own.close()
    return found


async def some(answer, count):
    """At least so many events of a stream, one by one: as many as come together with them."""
    found = []
    while len(found) < count:
        found += singly(await anext(answer))
    return found


async def fault(*script, timeout_us=LONG_US, **asked):
    """The fault of a call that gives nothing else."""
    async with Upstream(script) as up:
        (only,) = await events(up, timeout_us=timeout_us, **asked)
    return only
