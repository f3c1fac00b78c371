"""The official gRPC clients, sync and asyncio, on both servers: streams of answers, and calls that are given up."""

import asyncio
import queue
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient import grpc as client
from tritonclient.grpc import aio
from tritonclient.utils import InferenceServerException

from tests.kit.servers import TARGETS, Server

from .client_models import COUNTER, SLOW

WAIT_S = 10


@pytest.fixture(scope="module", params=TARGETS)
def server(request: pytest.FixtureRequest, serving: Callable[[str], Server]) -> Iterator[Server]:
    """A server with the two models loaded."""
    running = serving(request.param)
    probe = Path(__file__).with_name("model.py").read_text()
    with client.InferenceServerClient(running.grpc) as asked:
        for name, (config, source) in (("counter", COUNTER), ("slow", SLOW)):
            running.add_model(f"s_{name}", config=config.replace(f'"{name}"', f'"s_{name}"'), model=source or probe)
            asked.load_model(f"s_{name}")
        yield running
        asked.unload_model("s_counter")
        asked.unload_model("s_slow")


@pytest.fixture
async def asked(server: Server) -> AsyncIterator[aio.InferenceServerClient]:
    async with aio.InferenceServerClient(server.grpc) as made:
        yield made


@pytest.fixture
def blocking(server: Server) -> Iterator[client.InferenceServerClient]:
    with client.InferenceServerClient(server.grpc) as made:
        yield made


def numbers(**values: int) -> list[client.InferInput]:
    inputs = []
    for name, value in values.items():
        inputs.append(client.InferInput(name, [1], "INT32"))
        inputs[-1].set_data_from_numpy(np.array([value], np.int32))
    return inputs


def wish(number: int, sleep_ms: int) -> list[client.InferInput]:
    tensor = client.InferInput("X", [1, 2], "INT32")
    tensor.set_data_from_numpy(np.array([[number, sleep_ms]], np.int32))
    return [tensor]


async def stream(asked: aio.InferenceServerClient, *requests: dict[str, Any]) -> Any:
    """An iterator of (result, error) over one stream that sends `requests` and then no more."""

    async def sent() -> AsyncIterator[dict[str, Any]]:
        for request in requests:
            yield {"model_name": "s_counter"} | request

    return asked.stream_infer(sent())


def number_of(result: client.InferResult) -> int:
    return int(result.as_numpy("NUMBER").item())


async def test_a_stream_brings_each_answer_as_it_is_sent(asked: aio.InferenceServerClient):
    answers = await stream(asked, {"inputs": numbers(COUNT=5, PAUSE_MS=30)})
    came = []
    async for result, error in answers:
        assert error is None
        came.append((number_of(result), time.monotonic()))
    assert [number for number, _ in came] == [0, 1, 2, 3, 4]
    assert came[-1][1] - came[0][1] > 0.06, "all at once"


def test_the_final_answer_is_marked(blocking: client.InferenceServerClient):
    came: queue.Queue[Any] = queue.Queue()
    blocking.start_stream(lambda result, error: came.put(error or result))
    for name, count in (("two", 2), ("none", 0)):
        inputs = numbers(COUNT=count, PAUSE_MS=0)
        blocking.async_stream_infer("s_counter", inputs, request_id=name, enable_empty_final_response=True)
    ends: dict[str, list[bool]] = {"two": [], "none": []}
    for _ in range(4):
        message = came.get(timeout=WAIT_S).get_response()
        ends[message.id].append(message.parameters["triton_final_response"].bool_param)
    blocking.stop_stream()
    assert ends == {"two": [False, False, True], "none": [True]}


async def test_two_requests_share_a_stream(asked: aio.InferenceServerClient):
    requests = [{"inputs": numbers(COUNT=4, PAUSE_MS=20), "request_id": name} for name in ("a", "b")]
    came: list[tuple[str, int]] = []
    async for result, error in await stream(asked, *requests):
        assert error is None
        came.append((result.get_response().id, number_of(result)))
    assert [number for name, number in came if name == "a"] == [0, 1, 2, 3]
    assert [number for name, number in came if name == "b"] == [0, 1, 2, 3]
    assert [name for name, _ in came] not in (["a"] * 4 + ["b"] * 4, ["b"] * 4 + ["a"] * 4), "one after the other"


async def test_an_error_on_a_stream_leaves_the_stream_open(asked: aio.InferenceServerClient):
    requests = [{"model_name": "nope", "inputs": []}, {"inputs": numbers(COUNT=1, PAUSE_MS=0)}]
    seen = [(result, error) async for result, error in await stream(asked, *requests)]
    [error] = [error for _, error in seen if error is not None]
    assert "Request for unknown model: 'nope' is not found" in str(error)
    assert [number_of(result) for result, error in seen if error is None] == [0]


async def test_a_cancelled_stream_reaches_the_model(asked: aio.InferenceServerClient):
    answers = await stream(asked, {"inputs": numbers(COUNT=2000, PAUSE_MS=10)})
    async for result, _ in answers:
        if number_of(result) == 3:
            break
    answers.cancel()

    async def counting() -> int:
        [(result, error)] = [pair async for pair in await stream(asked, {"inputs": numbers(COUNT=-1, PAUSE_MS=0)})]
        assert error is None
        return number_of(result)

    async with asyncio.timeout(WAIT_S):
        while await counting():  # noqa: ASYNC110 - the model has no event of ours
            await asyncio.sleep(0.02)


def test_the_blocking_client_streams(blocking: client.InferenceServerClient):
    came: queue.Queue[Any] = queue.Queue()
    blocking.start_stream(lambda result, error: came.put(error or number_of(result)))
    blocking.async_stream_infer("s_counter", numbers(COUNT=3, PAUSE_MS=1))
    assert [came.get(timeout=WAIT_S) for _ in range(3)] == [0, 1, 2]
    blocking.stop_stream()


def test_the_blocking_client_cancels_a_stream(blocking: client.InferenceServerClient):
    came: queue.Queue[Any] = queue.Queue()
    blocking.start_stream(lambda result, error: came.put(error or number_of(result)))
    blocking.async_stream_infer("s_counter", numbers(COUNT=2000, PAUSE_MS=10))
    assert came.get(timeout=WAIT_S) == 0
    blocking.stop_stream(cancel_requests=True)
    while not isinstance(end := came.get(timeout=WAIT_S), InferenceServerException):
        assert isinstance(end, int)
    assert end.status() == "StatusCode.CANCELLED"


async def test_one_answer_of_a_decoupled_model_is_refused(asked: aio.InferenceServerClient):
    with pytest.raises(InferenceServerException) as caught:
        await asked.infer("s_counter", numbers(COUNT=1, PAUSE_MS=0))
    assert caught.value.status() == "StatusCode.UNIMPLEMENTED"
    assert caught.value.message() == "ModelInfer RPC doesn't support models with decoupled transaction policy"


async def test_a_model_of_one_answer_can_be_asked_over_a_stream(asked: aio.InferenceServerClient):
    async def sent() -> AsyncIterator[dict[str, Any]]:
        for number in range(4):
            yield {"model_name": "s_slow", "inputs": wish(number, 0), "request_id": str(number)}

    ids = [result.get_response().id async for result, error in asked.stream_infer(sent()) if error is None]
    assert sorted(ids) == ["0", "1", "2", "3"]


def executions(result: client.InferResult) -> int:
    """How often the model had run when it made this answer."""
    return int(result.as_numpy("INFO")[0, 0])


async def test_a_cancelled_call_that_waits_is_never_run(asked: aio.InferenceServerClient):
    running = asyncio.create_task(asked.infer("s_slow", wish(0, 400)))
    await asyncio.sleep(0.1)
    waiting = asyncio.create_task(asked.infer("s_slow", wish(1, 0)))
    await asyncio.sleep(0.1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert executions(await asked.infer("s_slow", wish(2, 0))) == executions(await running) + 1


async def test_a_call_past_its_deadline_is_never_run(asked: aio.InferenceServerClient):
    running = asyncio.create_task(asked.infer("s_slow", wish(0, 400)))
    await asyncio.sleep(0.1)
    with pytest.raises(InferenceServerException) as caught:
        await asked.infer("s_slow", wish(1, 0), client_timeout=0.1)
    assert caught.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    assert executions(await asked.infer("s_slow", wish(2, 0))) == executions(await running) + 1


def test_the_blocking_client_cancels_a_call(blocking: client.InferenceServerClient):
    ends: queue.Queue[Any] = queue.Queue()
    first: queue.Queue[Any] = queue.Queue()
    blocking.async_infer("s_slow", wish(0, 400), lambda result, error: first.put(error or result))
    time.sleep(0.1)
    blocking.async_infer("s_slow", wish(1, 0), lambda result, error: ends.put(error or result)).cancel()
    assert ends.get(timeout=WAIT_S).status() == "StatusCode.CANCELLED"
    after = blocking.infer("s_slow", wish(2, 0))
    assert executions(after) == executions(first.get(timeout=WAIT_S)) + 1
