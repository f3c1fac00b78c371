"""What is refused leaves nothing that only a search for garbage frees: a flood of it must not hold the others up.

Requests that are answered are held to the same by `test_cost_of_a_request`.
"""

import gc
from contextlib import aclosing

import pytest

from gateway.backends.scripted import ScriptedBackend
from gateway.core.errors import Fault, FaultKind, GatewayError
from gateway.core.types import Caller, InferenceRequest
from gateway.tasks.chat import ChatInput
from gateway.wiring import monotonic_us
from tests.kit.app import Harness, running
from tests.kit.limited import requests

COUNTED = 20
BODY = {"model": "general_llm", "messages": [{"role": "user", "content": "hi"}]}
FREE, LIMITED = Caller(key_id="k", tenant="t"), Caller(key_id="l", tenant="t", limits=(requests(1, "day"),))


async def refused(gw: Harness, caller: Caller) -> str:
    """The error's code."""
    now_us = monotonic_us()
    request = InferenceRequest(
        id="i",
        task="general_llm",
        caller=caller,
        input=ChatInput(body=BODY, stream=False),
        received_us=now_us,
        deadline_us=now_us + 2_000_000,
    )
    try:
        async with aclosing(gw.pipeline.handle(request)) as events:
            async for _ in events:
                pass
    except GatewayError as error:
        return error.code
    return ""


@pytest.mark.parametrize(
    ("caller", "kind", "code"),
    [
        (LIMITED, FaultKind.OVERLOADED, "rate_limited"),
        (FREE, FaultKind.OVERLOADED, "queue_full"),
        (FREE, FaultKind.REFUSED_INPUT, "invalid_input"),
        (FREE, FaultKind.FAILED, "backend_error"),
        (FREE, FaultKind.UNAVAILABLE, "no_healthy_backend"),
        (FREE, FaultKind.BROKEN, "no_healthy_backend"),
        (FREE, FaultKind.TIMEOUT, "deadline_exceeded"),
    ],
)
async def test_a_refusal_leaves_no_cycle(caller, kind, code):
    async with running([ScriptedBackend(name, [Fault(kind=kind, message="no")]) for name in ("llm", "llm2")]) as gw:
        for _ in range(3):
            await refused(gw, caller)
        gc.collect()
        gc.disable()
        try:
            codes = {await refused(gw, caller) for _ in range(COUNTED)}
            gw.seen.records.clear()
            left = gc.collect()
        finally:
            gc.enable()
    assert codes == {code}
    assert left < COUNTED
