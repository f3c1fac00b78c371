"""Callers who share a model behind the gateway: each gets its own answer, whatever the others send or do.

The batching is real Triton's or the local runtime's; cases DB-01 to DB-14 and TN-11 of the public fault cases.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
import tritonclient.grpc

from tests.kit.servers import TARGETS, Server, gateway_to

# X's sum by row, and for each row of which execution it was, with how many rows, how wide. By the first value of X:
# 444 sleeps, 555 answers with a row too few, 556 without rows, 666 fails, 777 answers with what is no text, and 888
# fails with a text of 200 kB.
PROBE = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.executions = 0

    def execute(self, requests):
        self.executions += 1
        inputs = [pb_utils.get_input_tensor_by_name(request, "X").as_numpy() for request in requests]
        rows = sum(len(x) for x in inputs)
        if any(x.size and x[0, 0] == 444 for x in inputs):
            time.sleep(0.2)
        return [self.answer(x, rows) for x in inputs]

    def answer(self, x, rows):
        kind = x[0, 0] if x.size else 0
        if kind == 666:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("poison"))
        if kind == 888:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("no: " + "\\u00e9" * 100_000))
        total = x.sum(axis=1, keepdims=True)
        total = {555: total[1:], 556: total[:, 0]}.get(kind, total)
        told = np.array([[self.executions, rows, x.shape[1]]] * len(x), np.int32)
        text = np.full((len(x), 1), b"\\xff" if kind == 777 else b"text", object)
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("SUM", total), pb_utils.Tensor("TOLD", told), pb_utils.Tensor("TEXT", text)]
        )
"""
CONFIG = """name: "%s"
backend: "python"
max_batch_size: %d
input [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [
  { name: "SUM" data_type: TYPE_FP32 dims: [ 1 ] },
  { name: "TOLD" data_type: TYPE_INT32 dims: [ 3 ] },
  { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }
]
dynamic_batching { %s }
"""
BATCHED = ("n_batched", 8, "max_queue_delay_microseconds: 50000")
NARROW = ("n_narrow", 1, "default_queue_policy { max_queue_size: 2 }")
SLOW = ("n_slow", 1, "")
PENDING = "nv_inference_pending_request_count{"
# Triton hands on an answer of the wrong shape, which the gateway refuses; the local runtime refuses it itself.
BROKEN = {"triton": (502, "the backend's answer is broken"), "local": (500, "model 'n_batched' returned ")}


@pytest.fixture(scope="module", params=TARGETS)
def gateway(
    request: pytest.FixtureRequest, serving: Callable[[str], Server], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    behind = serving(request.param)
    with tritonclient.grpc.InferenceServerClient(behind.grpc) as asked:
        for model in (BATCHED, NARROW, SLOW):
            behind.add_model(model[0], config=CONFIG % model, model=PROBE)
            asked.load_model(model[0])
        if request.param == "triton":
            yield serving("gateway")
        else:
            with gateway_to(behind, tmp_path_factory.mktemp("neighbours")) as before:
                yield before
        for name, *_ in (BATCHED, NARROW, SLOW):
            asked.unload_model(name)


@pytest_asyncio.fixture
async def http(gateway: Server) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    url = f"http://{gateway.http}"
    async with httpx.AsyncClient(
        base_url=url, headers=gateway.headers, trust_env=False, timeout=30, limits=limits
    ) as http:
        yield http


async def ask(http: httpx.AsyncClient, rows: list[list[float]], *, model: str = "n_batched") -> httpx.Response:
    data = [value for row in rows for value in row]
    tensor = {"name": "X", "datatype": "FP32", "shape": [len(rows), len(rows[0])], "data": data}
    return await http.post(f"/v2/models/{model}/infer", json={"inputs": [tensor]})


def told(reply: httpx.Response) -> dict[str, Any]:
    assert reply.status_code == 200, reply.content
    return {output["name"]: output["data"] for output in reply.json()["outputs"]}


async def executions(http: httpx.AsyncClient) -> int:
    """How often the server has run the batching model."""
    return (await http.get("/v2/models/n_batched/stats")).json()["model_stats"][0]["execution_count"]


async def test_requests_of_many_shapes_get_their_own_sums_in_batches_of_one_shape(http: httpx.AsyncClient):
    """DB-01, DB-03."""
    requests = [[[i + row / 4.0] * (3, 5, 16)[i // 15] for row in range(1 + i % 5)] for i in range(45)]
    answers = [told(reply) for reply in await asyncio.gather(*(ask(http, rows) for rows in requests))]
    widths: dict[int, set[int]] = defaultdict(set)
    for rows, answer in zip(requests, answers, strict=True):
        assert answer["SUM"] == [sum(row) for row in rows]
        execution, in_batch, width = answer["TOLD"][:3]
        assert len(rows) <= in_batch <= 8
        assert width == len(rows[0])
        widths[execution].add(width)
    assert all(len(found) == 1 for found in widths.values())
    assert len(widths) < len(requests)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (666, (500, "poison")),
        (777, (400, "'TEXT' holds bytes that are not UTF-8")),
        (555, BROKEN),
        (556, BROKEN),
        (888, (500, "no: ééé")),
    ],
    ids=["poison", "no text", "a row too few", "no rows", "long error"],
)
async def test_one_that_fails_leaves_its_batch_alone(
    request: pytest.FixtureRequest, http: httpx.AsyncClient, kind: float, expected: Any
):
    """DB-02, DB-12: eight at once, of which the fourth fails; and so often that a breaker would have opened."""
    status, text = expected[request.node.callspec.params["gateway"]] if expected is BROKEN else expected
    for _ in range(6):
        requests = [[[kind if i == 3 else float(i), 1.0]] for i in range(8)]
        replies = await asyncio.gather(*(ask(http, rows) for rows in requests))
        bad = replies.pop(3)
        assert (bad.status_code, text in bad.json()["error"]) == (status, True), bad.content
        assert [told(reply)["SUM"] for reply in replies] == [[i + 1.0] for i in range(8) if i != 3]


async def test_what_fits_no_input_never_reaches_the_batch(http: httpx.AsyncClient):
    """DB-02, TN-02."""
    tensors: list[dict[str, Any]] = [
        {"name": "X", "datatype": "INT32", "shape": [1, 2], "data": [1, 2]},
        {"name": "X", "datatype": "FP32", "shape": [2], "data": [1, 2]},
        {"name": "X", "datatype": "FP32", "shape": [-1, 2], "data": [1, 2]},
        {"name": "X", "datatype": "FP32", "shape": [9, 1], "data": [1] * 9},
        {"name": "X" * 70_000, "datatype": "FP32", "shape": [1, 1], "data": [1]},
    ]
    before = await executions(http)
    bad = (http.post("/v2/models/n_batched/infer", json={"inputs": [tensor]}) for tensor in tensors * 10)
    assert {reply.status_code for reply in await asyncio.gather(*bad)} == {400}
    assert await executions(http) == before
    bad = (http.post("/v2/models/n_batched/infer", json={"inputs": [tensor]}) for tensor in tensors * 10)
    good = (ask(http, [[float(i), 0.5]]) for i in range(20))
    replies = await asyncio.gather(*bad, *good)
    assert {reply.status_code for reply in replies[:50]} == {400}
    assert [told(reply)["SUM"] for reply in replies[50:]] == [[i + 0.5] for i in range(20)]
    assert await executions(http) > before


async def test_an_empty_tensor_and_a_full_one_meet(http: httpx.AsyncClient):
    """TN-11."""
    empty, full = await asyncio.gather(ask(http, [[]]), ask(http, [[1.0, 2.0]]))
    assert told(empty)["SUM"] == [0.0]
    assert told(full)["SUM"] == [3.0]


async def waiting(metrics: httpx.AsyncClient, model: str) -> int:
    """How many requests wait for the model, as the gauge of its server has it."""
    page = (await metrics.get("/metrics")).text
    [line] = [each for each in page.splitlines() if each.startswith(PENDING) and f'model="{model}"' in each]
    return round(float(line.rpartition(" ")[2]))


async def test_a_full_queue_is_told_at_once_and_the_others_are_served(http: httpx.AsyncClient, gateway: Server):
    """DB-08: two wait, one is under way, if it was taken before the others came, and another is taken ahead."""
    asked = [asyncio.ensure_future(ask(http, [[444.0, float(i)]], model="n_narrow")) for i in range(10)]
    ended: list[asyncio.Future[httpx.Response]] = []
    for call in asked:
        call.add_done_callback(ended.append)
    gauge = []
    async with httpx.AsyncClient(base_url=f"http://{gateway.metrics}", trust_env=False) as metrics:
        while len(ended) < len(asked):
            gauge.append(await waiting(metrics, "n_narrow"))
        assert await waiting(metrics, "n_narrow") == 0
    assert 1 <= max(gauge) <= 2
    assert ended[-1].result().status_code == 200  # who is refused is told while others still wait
    replies = [call.result() for call in asked]
    refused = [reply for reply in replies if reply.status_code != 200]
    assert 6 <= len(refused) <= 8
    for reply in refused:
        assert (reply.status_code, "retry-after" in reply.headers) == (503, True)
        assert "Exceeds maximum queue size" in reply.json()["error"]
    served = [(i, told(reply)["SUM"]) for i, reply in enumerate(replies) if reply.status_code == 200]
    assert all(total == [444.0 + i] for i, total in served)


async def test_callers_who_leave_take_nothing_from_those_who_stay(http: httpx.AsyncClient):
    """DB-05: half of them leave: while they wait, while they run, about when they are answered."""
    calls = [asyncio.create_task(ask(http, [[float(i), 1.0]])) for i in range(200)]
    for i, call in enumerate(calls[::2]):
        await asyncio.sleep(0.002 * (i % 3))
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert [told(call.result())["SUM"] for call in calls[1::2]] == [[i + 1.0] for i in range(1, 200, 2)]
    after = await asyncio.gather(*(ask(http, [[float(i), 2.0]]) for i in range(20)))
    assert [told(reply)["SUM"] for reply in after] == [[i + 2.0] for i in range(20)]


async def test_an_unload_and_a_reload_end_every_request_one_way_or_the_other(http: httpx.AsyncClient):
    """DB-14."""
    for call in ("load", "unload"):
        waiting = [asyncio.create_task(ask(http, [[444.0, float(i)]], model="n_slow")) for i in range(6)]
        await asyncio.sleep(0.05)  # the first is under way; should it not be, the outcome is no other
        assert (await http.post(f"/v2/repository/models/n_slow/{call}")).status_code == 200
        replies = await asyncio.gather(*waiting)
        assert {reply.status_code for reply in replies} <= {200, 404, 503}
        right = [told(reply)["SUM"] == [444.0 + i] for i, reply in enumerate(replies) if reply.status_code == 200]
        assert all(right)
    assert (await ask(http, [[1.0]], model="n_slow")).status_code == 404
    assert (await http.post("/v2/repository/models/n_slow/load")).status_code == 200
    assert told(await ask(http, [[1.0]], model="n_slow"))["SUM"] == [1.0]
