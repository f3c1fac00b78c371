import asyncio
from dataclasses import replace

import pytest

from gateway.backends.scripted import Pause, ScriptedBackend, ScriptedServer, Told
from gateway.core.errors import BackendError, Fault, FaultKind
from gateway.core.models import ModelFacts
from gateway.core.types import BackendCall, Delta, OpenAIPayload, Place
from gateway.ports import ModelServer

CALL = BackendCall(request_id="r", model="m", version="", payload=OpenAIPayload(body={}))
A, B = Delta(data=b"a"), Delta(data=b"b")
FULL = Fault(kind=FaultKind.OVERLOADED, message="full")


async def played(backend, timeout_us=1_000_000):
    found = []
    try:
        async for item in backend.infer(CALL, timeout_us=timeout_us):
            found.append(item)  # noqa: PERF401 - what came before a fault must be kept
    except BackendError as error:
        found.append(error.fault)
    return found


async def test_scripts_are_played_in_order_and_the_last_repeats():
    backend = ScriptedBackend("s", [A, Pause(us=1), FULL], [A, B])
    assert [await played(backend) for _ in range(3)] == [[A, FULL], [A, B], [A, B]]
    assert [(call.yielded, call.is_finished, call.is_closed_early) for call in backend.calls] == [
        (1, True, False),
        (2, True, False),
        (2, True, False),
    ]
    assert backend.calls[0].call is CALL


async def test_a_caller_that_leaves_is_noted():
    backend = ScriptedBackend("s", [A, asyncio.Event(), B])
    answer = backend.infer(CALL, timeout_us=1_000_000)
    assert await anext(answer) == A
    await answer.aclose()
    assert backend.calls[0].is_closed_early
    task = asyncio.create_task(played(backend))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert backend.calls[1].is_closed_early


async def test_an_event_lets_the_script_go_on():
    go_on = asyncio.Event()
    backend = ScriptedBackend("s", [go_on, A])
    task = asyncio.create_task(played(backend))
    await asyncio.sleep(0)
    go_on.set()
    assert await task == [A]


async def test_the_timeout_bounds_the_script():
    backend = ScriptedBackend("s", [A, asyncio.Event()])
    first, last = await played(backend, timeout_us=1_000)
    assert (first, last.kind) == (A, FaultKind.TIMEOUT)


async def test_probe_and_close():
    backend = ScriptedBackend("s", [A])
    first, second = (Place(backend="s", model="m", version=version) for version in ("1", "2"))
    await backend.probe(first)
    backend.probe_fault = FULL
    with pytest.raises(BackendError):
        await backend.probe(second)
    assert backend.probes == [first, second]
    assert (await backend.figures(), backend.replicas()) == ((), ())
    await backend.close()
    assert backend.is_closed
    with pytest.raises(ValueError, match="script"):
        ScriptedBackend("s")


async def test_a_scripted_model_server():
    facts, gone = ModelFacts(name="m"), Fault(kind=FaultKind.UNAVAILABLE, message="gone")
    documents = {"config m": {"a": 1}, "config m@r": gone, "index": [{"name": "m"}]}
    server = ScriptedServer("s", told=Told(facts={"m": facts}, documents=documents, control_faults={"r": gone}))
    place = Place(backend="s", model="m")
    assert isinstance(server, ModelServer)
    assert await server.facts(place) == facts
    assert await server.config(place) == {"a": 1}
    assert await server.index("") == [{"name": "m"}]
    await server.load("m", replica="")
    for asked in (
        server.config(replace(place, replica="r")),
        server.metadata(place),
        server.facts(replace(place, model="x")),
        server.unload("m", replica="r"),
    ):
        with pytest.raises(BackendError):
            await asked
    assert server.asked == ["config m", "index", "config m@r", "metadata m"]
    assert [change[:3] for change in server.changes] == [("load", "m", ""), ("unload", "m", "r")]
