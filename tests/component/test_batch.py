"""`POST /v1/infer/batch`: many requests in one body, each answered for itself."""

import asyncio
import json

import jsonschema
import pytest

from gateway.api.batch import MAX_AT_ONCE, MAX_ITEMS
from gateway.backends.local import LocalBackend
from gateway.backends.scripted import ScriptedBackend
from gateway.core.errors import Fault, FaultKind
from gateway.stores.memory_answers import MemoryAnswers
from gateway.tasks.speech_activity import SpeechActivity
from gateway.tasks.tensor import TensorTask
from gateway.wiring import monotonic_us
from tests.kit.app import DEFAULT_RULES, EMBEDDING_KEY, LIMITED_KEY, embedding, running
from tests.kit.wait import until

BATCH = "/v1/infer/batch"
TEXT = {"task": "text-embedding", "input": {"text": "hello"}}
TENSORS = [{"name": "tensors", "match": {"task": "tensor"}, "split": [{"backend": "local", "model": "*"}]}]
CONFIG = """
backend: "python"
max_batch_size: 8
input { name: "X" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] }
dynamic_batching { preferred_batch_size: [ 8 ] max_queue_delay_microseconds: 20000000 }
"""
MODEL = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        def answer(request):
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            return pb_utils.InferenceResponse([pb_utils.Tensor("Y", x * 2)])

        return [answer(request) for request in requests]
"""


class Texts(ScriptedBackend):
    """Tells how long each text is, as its tokens; one of `held` is answered when its event is set."""

    def __init__(self, **held: asyncio.Event) -> None:
        super().__init__("triton", [])
        self.held = held
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.most_at_once = 0

    async def infer(self, call, *, timeout_us):
        text = bytes(call.payload.inputs[0].data)[4:].decode()
        self.begun.append(text)
        self.most_at_once = max(self.most_at_once, len(self.begun) - len(self.ended))
        try:
            if text in self.held:
                await self.held[text].wait()
            yield embedding(tokens=len(text))
        finally:
            self.ended.append(text)


def text(given: str, **more) -> dict:
    return {"task": "text-embedding", "input": {"text": given}, **more}


async def ask(gw, *requests, **headers) -> list[dict]:
    """The responses to `requests`."""
    reply = await gw.post(BATCH, {"requests": list(requests)}, **headers)
    assert reply.status_code == 200, reply.text
    return reply.json()["responses"]


async def test_answers_come_in_the_order_of_the_requests_each_with_its_id_and_status():
    triton = Texts(a=asyncio.Event())
    async with running([triton]) as gw:
        requests = [text("a", id="first"), text("bb"), text("ccc", id="third")]
        asking = asyncio.create_task(gw.post(BATCH, {"requests": requests}))
        await until(lambda: triton.ended == ["bb", "ccc"])
        triton.held["a"].set()
        reply = await asking
        document = (await gw.http.get("/openapi.json")).json()
        alone = await gw.post("/v1/infer", text("a"))
    told, batch = reply.json()["responses"], reply.headers["x-request-id"]
    assert [one["id"] for one in told] == ["first", f"{batch}-1", "third"]
    assert [one["status"] for one in told] == [200, 200, 200]
    assert [one["body"]["usage"]["input_tokens"] for one in told] == [1, 2, 3]
    assert [one["body"]["id"] for one in told] == [f"{batch}-{number}" for number in range(3)]
    assert told[0]["body"].keys() == alone.json().keys()
    assert told[0]["body"]["route"] == alone.json()["route"]
    assert {record.id for record in gw.seen.records} == {*(f"{batch}-{n}" for n in range(3)), alone.json()["id"]}
    assert gw.seen.at_the_door == []
    jsonschema.validate(
        reply.json(), {"$ref": "#/components/schemas/BatchAnswer", "components": document["components"]}
    )


async def test_one_that_is_bad_fails_alone():
    llm = ScriptedBackend("llm", [Fault(kind=FaultKind.OVERLOADED, message="full", retry_after_us=2_500_000)])
    async with running([Texts(), llm]) as gw:
        told = await ask(
            gw,
            text("a"),
            {"task": "nope", "input": {}},
            {"task": "text-embedding", "input": {"text": 5}},
            {"task": "text-embedding"},
            text("b", parameters=[]),
            {"task": "general_llm", "input": {"messages": [{"role": "user", "content": "hi"}]}},
            text("bb"),
        )
        document = (await gw.http.get("/openapi.json")).json()
    assert [one["status"] for one in told] == [200, 404, 422, 422, 422, 429, 200]
    assert [one["body"].get("code") for one in told[1:6]] == [
        "unknown_task",
        *["invalid_input"] * 3,
        "queue_full",
    ]
    assert [one["body"]["errors"][0]["field"] for one in told[2:5]] == ["input.text", "input", "parameters"]
    assert told[5]["body"]["retry_after_s"] == 3
    assert len(gw.seen.at_the_door) == 4
    assert {record.id[-2:] for record in gw.seen.at_the_door} == {"-1", "-2", "-3", "-4"}
    for one in told[1:6]:
        jsonschema.validate(one["body"], {"$ref": "#/components/schemas/Problem", "components": document["components"]})


async def test_a_fault_of_ours_fails_its_item_alone():
    class Broken(Texts):
        async def infer(self, call, *, timeout_us):
            if bytes(call.payload.inputs[0].data)[4:] == b"boom":
                raise RuntimeError("secret")
            async for event in super().infer(call, timeout_us=timeout_us):
                yield event

    async with running([Broken()]) as gw:
        told = await ask(gw, text("boom"), text("a"))
    assert [one["status"] for one in told] == [500, 200]
    assert "secret" not in json.dumps(told)


async def test_a_key_for_one_task_is_refused_the_others():
    async with running([Texts()]) as gw:
        gw.http.headers["authorization"] = f"Bearer {EMBEDDING_KEY}"
        told = await ask(gw, text("a"), {"task": "image-classification", "input": {}})
    assert [one["status"] for one in told] == [200, 403]


async def test_each_is_charged_for_itself():
    async with running([Texts()]) as gw:
        gw.http.headers["authorization"] = f"Bearer {LIMITED_KEY}"
        reply = await gw.post(BATCH, {"requests": [text("a"), text(""), *[text("b")] * 4]})
    told = reply.json()["responses"]
    assert [one["status"] for one in told] == [200, 422, 200, 200, 429, 429]
    assert told[4]["body"]["limit"]["name"] == "3-requests-per-minute"
    assert reply.headers["x-ratelimit-remaining-requests"] == "0"
    assert reply.headers["ratelimit"].startswith('"3-requests-per-minute";r=0')
    assert "retry-after" not in reply.headers


async def test_so_many_at_once_and_no_more():
    triton = Texts(wait=asyncio.Event())
    async with running([triton]) as gw:
        asking = asyncio.create_task(gw.post(BATCH, {"requests": [text("wait")] * (MAX_AT_ONCE + 8)}))
        await until(lambda: len(triton.begun) == MAX_AT_ONCE)
        triton.held["wait"].set()
        assert {one["status"] for one in (await asking).json()["responses"]} == {200}
    assert triton.most_at_once == MAX_AT_ONCE
    assert len(triton.ended) == MAX_AT_ONCE + 8


async def test_the_caller_who_leaves_cancels_all_of_it():
    triton = Texts(wait=asyncio.Event())
    async with running([triton]) as gw:
        asking = asyncio.create_task(gw.post(BATCH, {"requests": [text("wait")] * (MAX_AT_ONCE + 8)}))
        await until(lambda: len(triton.begun) == MAX_AT_ONCE)
        asking.cancel()
        await until(lambda: gw.seen.in_flight == 0 and len(triton.ended) == MAX_AT_ONCE)
    assert {record.code for record in gw.seen.records} == {"client_closed"}
    assert len(triton.begun) == MAX_AT_ONCE  # the rest was never begun
    assert gw.seen.at_the_door == []
    assert gw.loads == {}


@pytest.mark.parametrize("mode", ["serial", "release"])
async def test_items_with_one_ordering_key_go_in_their_order(mode):
    names = [f"a{number}" for number in range(40)]
    triton = Texts(a0=asyncio.Event())
    async with running([triton], rules=[{**DEFAULT_RULES[0], "ordering": {"mode": mode}}]) as gw:
        requests = [one for name in names for one in (text(name, ordering_key="a"), text("other"))]
        asking = asyncio.create_task(gw.post(BATCH, {"requests": requests}))
        # All places are taken by those that wait for the first: to be sent, or to be answered.
        await until(lambda: triton.begun.count("other") >= MAX_AT_ONCE - 1)
        await until(lambda: mode == "serial" or len(triton.begun) - triton.begun.count("other") == MAX_AT_ONCE)
        at_once = [name for name in triton.begun if name != "other"]
        triton.held["a0"].set()
        told = (await asking).json()["responses"]
    assert at_once == (["a0"] if mode == "serial" else names[:MAX_AT_ONCE])
    assert [one.get("ticket") for one in told] == [n for ticket in range(1, 41) for n in (ticket, None)]
    assert [name for name in triton.begun if name != "other"] == names
    assert {one["status"] for one in told} == {200}


@pytest.mark.parametrize("mode", ["serial", "release"])
async def test_their_order_is_the_bodys_too_where_each_looks_first_for_what_is_kept(mode):
    class Hasty(MemoryAnswers):
        """Answers the latest question first."""

        async def claim(self, claim, **bounds):
            self.asked = getattr(self, "asked", 0) + 1
            for _ in range(10 * (50 - self.asked)):
                await asyncio.sleep(0)
            return await super().claim(claim, **bounds)

    triton, names = Texts(), [f"a{number}" for number in range(40)]
    rules = [{**DEFAULT_RULES[0], "ordering": {"mode": mode}}]
    async with running([triton], rules=rules, answers=Hasty(monotonic_us, max_bytes=2**20)) as gw:
        own = await ask(gw, *(text(name, ordering_key="a") for name in names), **{"idempotency-key": "one"})
        again = await ask(gw, *(text(name, ordering_key="a") for name in names), **{"idempotency-key": "one"})
        headed = await ask(gw, *map(text, names), **{"idempotency-key": "two", "x-ordering-key": "b"})
    assert [one["ticket"] for one in own] == [one["ticket"] for one in headed] == list(range(1, 41))
    assert triton.begun == names + names
    assert {one.get("ticket") for one in again} == {None}


async def test_the_header_is_the_key_of_all_that_name_none():
    async with running([Texts()]) as gw:
        told = await ask(gw, text("a"), text("b", ordering_key="own"), text("c"), **{"x-ordering-key": "all"})
    assert [one["ticket"] for one in told] == [1, 1, 2]


@pytest.mark.parametrize("key", ["again", '"again"'])
async def test_a_batch_that_is_sent_again_is_answered_out_of_what_is_kept(key):
    triton = Texts()
    async with running([triton]) as gw:
        first = await ask(gw, text("a"), text("bb"), **{"idempotency-key": key})
        again = await ask(gw, text("a"), text("bb"), **{"idempotency-key": key})
        other = await ask(gw, text("a"), text("ccc"), **{"idempotency-key": key})
        long = await gw.post(BATCH, {"requests": [TEXT]}, **{"idempotency-key": "x" * 252})
    assert triton.begun == ["a", "bb"]
    assert [one["body"]["output"] for one in again] == [one["body"]["output"] for one in first]
    assert [one["status"] for one in other] == [200, 422]
    assert (long.status_code, long.json()["errors"][0]["field"]) == (400, "idempotency-key")


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({}, 422, "requests"),
        ({"requests": []}, 422, "requests"),
        ({"requests": {}}, 422, "requests"),
        ({"requests": [TEXT] * (MAX_ITEMS + 1)}, 422, "requests"),
        ({"requests": [TEXT], "other": 1}, 400, "other"),
        ({"requests": [TEXT, 5]}, 422, "requests[1]"),
        ({"requests": [TEXT, TEXT, TEXT, {"input": {}}]}, 422, "requests[3].task"),
        ({"requests": [{"task": 5, "input": {}}]}, 422, "requests[0].task"),
        ({"requests": [{**TEXT, "inptu": 1}]}, 400, "requests[0].inptu"),
        ({"requests": [{**TEXT, "id": ""}]}, 422, "requests[0].id"),
        ({"requests": [{**TEXT, "id": 7}]}, 422, "requests[0].id"),
        ({"requests": [{**TEXT, "id": "x" * 129}]}, 422, "requests[0].id"),
        ({"requests": [{**TEXT, "id": "a"}, {**TEXT, "id": "a"}]}, 422, "requests[1].id"),
        ({"requests": [{**TEXT, "ordering_key": "x" * 129}]}, 422, "requests[0].ordering_key"),
        ({"requests": [{**TEXT, "ordering_key": "\n"}]}, 422, "requests[0].ordering_key"),
    ],
)
async def test_a_wrong_envelope_is_refused_whole_and_named(body, status, field):
    triton = Texts()
    async with running([triton]) as gw:
        reply = await gw.post(BATCH, body)
    problem = reply.json()
    assert (reply.status_code, problem["errors"][0]["field"]) == (status, field)
    assert triton.begun == []
    assert len(gw.seen.at_the_door) == 1


async def test_sequences_go_one_by_one():
    tasks = {"speech-activity": SpeechActivity()}
    async with running([Texts()], more_tasks=tasks) as gw:
        told = await ask(gw, {"task": "speech-activity", "input": {"audio": "AAAA"}}, text("a"))
        whole = await gw.post(BATCH, {"requests": [TEXT]}, **{"x-sequence-id": "5"})
    assert [one["status"] for one in told] == [422, 200]
    assert told[0]["body"]["errors"][0]["field"] == "task"
    assert (whole.status_code, whole.json()["errors"][0]["field"]) == (422, "x-sequence-id")


async def test_items_of_one_body_meet_in_one_execution(tmp_path):
    folder = tmp_path / "double"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(CONFIG)
    (folder / "1" / "model.py").write_text(MODEL)
    local = await LocalBackend.open("local", tmp_path)
    try:
        async with running([local], rules=TENSORS, more_tasks={"tensor": TensorTask()}, timeout_us=60_000_000) as gw:
            inputs = [[{"name": "X", "datatype": "FP32", "shape": [1, 1], "data": [n]}] for n in range(8)]
            told = await ask(gw, *[{"task": "tensor", "input": {"model": "double", "inputs": one}} for one in inputs])
            (figures,) = await local.figures()
    finally:
        await local.close()
    assert [one["body"]["output"]["outputs"][0]["data"] for one in told] == [[2.0 * n] for n in range(8)]
    assert (figures.inferences, figures.executions) == (8, 1)
