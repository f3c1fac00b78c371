"""`/v2`: inference over scripted servers: what is taken, what is refused, what is asked of a server, how it is told."""

import asyncio
import gzip
import json
import struct
import zlib
from typing import Any, Self

import httpx
import numpy as np
import orjson
import pytest

from gateway.backends.scripted import ScriptedServer, Told
from gateway.core.errors import Fault, FaultKind, Reply
from gateway.core.models import ModelFacts, TensorFacts
from gateway.core.tensors import from_numpy
from gateway.core.types import SequenceStep, Tensor, Tensors
from gateway.tasks.tensor import TensorTask
from tests.kit.app import LIMITED_KEY, Harness, running
from tests.kit.wait import until

RULES = [
    {
        "name": "tensors",
        "match": {"task": "tensor"},
        "split": [{"backend": "triton", "model": "*"}],
        "fallback": [{"backend": "local", "model": "*"}],
    }
]
TASKS = {"tensor": TensorTask()}
LENGTH = "inference-header-content-length"
INFER = "/v2/models/m/infer"


def answer(*outputs: Tensor, **fields: Any) -> Tensors:
    return Tensors(outputs=outputs, version="3", **fields)


def floats(*values: float, name: str = "Y") -> Tensor:
    return from_numpy(name, np.array(values, np.float32))


def body(data: Any = (1.0, 2.0), shape: Any = (2,), datatype: Any = "FP32", **document: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "X", "shape": shape, "datatype": datatype, "data": data}], **document}


def binary(*tensors: tuple[str, str, list[int], bytes], **document: Any) -> dict[str, Any]:
    """A request's content and headers in the binary form."""
    inputs = [
        {"name": name, "shape": shape, "datatype": datatype, "parameters": {"binary_data_size": len(raw)}}
        for name, datatype, shape, raw in tensors
    ]
    head = json.dumps({"inputs": inputs, **document}).encode()
    return {"content": head + b"".join(raw for *_, raw in tensors), "headers": {LENGTH: str(len(head))}}


class Gateway:
    """The data plane before two scripted servers, of which the second is the fallback."""

    def __init__(self, *script: Any, told: Told | None = None, **options: Any) -> None:
        self.triton = ScriptedServer("triton", script or (answer(floats(0.5)),), told=told)
        self.local = ScriptedServer("local", (answer(floats(0.25)),))
        self._running = running([self.triton, self.local], rules=RULES, more_tasks=TASKS, **options)

    async def __aenter__(self) -> Self:
        self.gw: Harness = await self._running.__aenter__()
        return self

    async def __aexit__(self, *ended: object) -> None:
        await self._running.__aexit__(*ended)

    async def post(self, path: str = INFER, **options: Any) -> httpx.Response:
        return await self.gw.http.post(path, **options)

    async def refusal(self, status: int = 400, path: str = INFER, **options: Any) -> str:
        """The text of a refusal, which no server has heard of, and after which the next request is served."""
        reply = await self.post(path, **options)
        assert (reply.status_code, reply.headers["content-type"]) == (status, "application/json"), reply.content
        assert not self.triton.calls + self.local.calls
        assert list(reply.json()) == ["error"]
        assert (await self.post(json=body())).status_code == 200
        self.triton.calls.clear()
        return str(reply.json()["error"])

    @property
    def payload(self) -> Any:
        return self.triton.calls[-1].call.payload


# --- what a server is asked, and what a caller is told --------------------------------------------


async def test_json_goes_out_as_bytes_and_comes_back_as_json():
    async with Gateway() as at:
        reply = await at.post(json=body([[1, 2], [3, 4]], [2, 2], id="mine"))
        assert reply.content == (
            b'{"id":"mine","model_name":"m","model_version":"3",'
            b'"outputs":[{"name":"Y","datatype":"FP32","shape":[1],"data":[0.5]}]}'
        )
        assert (reply.headers["x-gateway-backend"], reply.headers["x-gateway-model"]) == ("triton", "m")
        [sent] = at.payload.inputs
        assert (sent.name, sent.datatype, sent.shape) == ("X", "FP32", (2, 2))
        assert bytes(sent.data) == np.array([1, 2, 3, 4], np.float32).tobytes()
        call = at.triton.calls[-1].call
        assert (call.model, call.version) == ("m", "")
        assert call.request_id == reply.headers["x-request-id"] != "mine"


async def test_versions_and_outputs_are_named():
    async with Gateway() as at:
        assert (await at.post("/v2/models/m/versions/7/infer", json=body(outputs=[{"name": "Y"}]))).status_code == 200
        assert at.triton.calls[-1].call.version == "7"
        assert at.payload.outputs == ("Y",)


async def test_bytes_go_both_ways_as_they_are():
    halves = bytes(range(10))
    outputs = (Tensor(name="H", datatype="FP16", shape=(5,), data=halves), floats(1.5))
    async with Gateway(answer(*outputs)) as at:
        sent = binary(("X", "BF16", [5], halves), ("Z", "BYTES", [2], b"\x03\0\0\0\xff\x00\xfe\0\0\0\0"))
        reply = await at.post(**binary_answer(sent))
        head = json.loads(reply.content[: int(reply.headers[LENGTH])])
        assert reply.headers["content-type"] == "application/octet-stream"
        assert [output["parameters"]["binary_data_size"] for output in head["outputs"]] == [10, 4]
        assert reply.content[int(reply.headers[LENGTH]) :] == halves + np.float32(1.5).tobytes()
        assert [(one.datatype, bytes(one.data)) for one in at.payload.inputs] == [
            ("BF16", halves),
            ("BYTES", b"\x03\0\0\0\xff\x00\xfe\0\0\0\0"),
        ]


def binary_answer(sent: dict[str, Any]) -> dict[str, Any]:
    """The same request with all outputs as bytes."""
    length = int(sent["headers"][LENGTH])
    head = json.loads(sent["content"][:length]) | {"parameters": {"binary_data_output": True}}
    text = json.dumps(head).encode()
    return {"content": text + sent["content"][length:], "headers": {LENGTH: str(len(text))}}


async def test_parameters_find_their_places():
    parameters = {
        "priority": 2,
        "timeout": 9,
        "own": 1.5,
        "binary_data_output": False,
        "headers": "x",
        "triton_x": 1,
    }
    outputs = [{"name": "Y", "parameters": {"classification": 2}}]
    async with Gateway() as at:
        assert (await at.post(json=body(parameters=parameters, outputs=outputs))).status_code == 200
        payload = at.payload
        assert (payload.priority, payload.queue_timeout_us, payload.parameters) == (2, 9, {"own": 1.5})
        assert (payload.classes, payload.stream) == ({"Y": 2}, False)


async def test_sequences_are_named_by_parameters():
    async with Gateway(told=Told(facts={"m": ModelFacts(name="m", is_sequence=True)})) as at:
        parameters = {"sequence_id": 5, "sequence_start": True, "sequence_end": True}
        assert (await at.post(json=body(parameters=parameters))).status_code == 200
        step = at.triton.calls[-1].call.sequence
        assert isinstance(step, SequenceStep)
        assert (step.is_start, step.is_end) == (True, True)
        assert (await at.post(json=body(parameters={"sequence_id": 0}))).status_code == 200
        assert at.triton.calls[-1].call.sequence is None


async def test_a_models_own_parameters_come_along():
    async with Gateway(answer(floats(1), parameters={"p": 1, "q": True})) as at:
        told = (await at.post(json=body())).json()
        assert list(told) == ["model_name", "model_version", "parameters", "outputs"]
        assert told["parameters"] == {"p": 1, "q": True}


FACTS = ModelFacts(name="m", inputs={"X": TensorFacts(datatype="FP32", shape=(-1, -1))}, max_batch_size=4)


async def test_a_raw_body_is_the_only_input():
    async with Gateway(told=Told(facts={"m": FACTS})) as at:
        reply = await at.post(content=bytes(12), headers={LENGTH: "0"})
        assert (reply.status_code, LENGTH in reply.headers) == (200, True)
        assert at.payload.inputs[0].shape == (1, 3)
        two = Told(facts={"m": ModelFacts(name="m", inputs=dict(FACTS.inputs) | {"Z": FACTS.inputs["X"]})})
        at.triton.told = two
        refused = await at.post(content=bytes(12), headers={LENGTH: "0"})
        assert (refused.status_code, "must only have 1 input" in refused.json()["error"]) == (400, True)


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress], ids=["gzip", "deflate"])
async def test_packed_bodies_are_unpacked_within_the_bound(pack: Any):
    name = pack.__module__.replace("zlib", "deflate")
    headers = {"content-encoding": name}
    async with Gateway(max_body_bytes=100_000) as at:
        assert (await at.post(content=pack(json.dumps(body()).encode()), headers=headers)).status_code == 200
        at.triton.calls.clear()
        bomb = pack(bytes(10_000_000))
        assert len(bomb) < 100_000
        assert "100000 bytes" in await at.refusal(413, content=bomb, headers=headers)
        assert name in await at.refusal(content=b"nonsense", headers=headers)
        assert await at.refusal(415, content=b"x", headers={"content-encoding": "br"})


async def test_answers_are_packed_as_their_caller_accepts():
    async with Gateway(answer(floats(*[0.5] * 2000))) as at:
        for accepted, packed in (("gzip", "gzip"), ("deflate", "deflate"), ("identity", None), ("br", None)):
            reply = await at.post(json=body(), headers={"accept-encoding": accepted})
            assert reply.headers.get("content-encoding") == packed
            assert len(reply.json()["outputs"][0]["data"]) == 2000


# --- what is refused before a server hears of it ---------------------------------------------------


MISFITS: list[Any] = [
    ([1, 2, 3, 4, 5], [2, 3]),
    ([1, 2, 3, 4, 5, 6, 7], [2, 3]),
    ([[1, 2, 3], [4, 5]], [2, 3]),
    ([[[1, 2, 3], [4, 5, 6]]], [2, 3]),
    ([], [2, 3]),
    ([1], [-1]),
    ([1], [1, -1]),
    ([1], [-2]),
    ([1], [2**62, 2**62]),
    ([], [0, 2**62, 2**62]),
    ([1], [2**32, 2**32]),
    ([1], [1] * 100),
    ([1], "-1"),
    ([1], [1.5]),
    ([1], [True]),
    ([1], None),
    ({}, [1]),
    ("x", [1]),
    (None, [1]),
    ([None], [1]),
    ([True], [1]),
    ([1e39], [1]),
]


async def test_shapes_and_values_that_do_not_fit_name_the_input():  # TN-01, TN-02, TN-04
    async with Gateway() as at:
        for data, shape in MISFITS:
            assert "'X'" in await at.refusal(json=body(data, shape)), (data, shape)


NO_DATATYPES: list[Any] = ["STRING", "fp32", "", None, 32, "FP16", "BF16"]


async def test_datatypes_that_are_none_or_have_no_json_form():  # TN-04
    async with Gateway() as at:
        for datatype in NO_DATATYPES:
            assert "X" in await at.refusal(json=body([1], [1], datatype)), datatype


STRANGE: list[Any] = [
    ({"inputs": {}}, "inputs"),
    ({"inputs": None}, "inputs"),
    ({"inputs": [1]}, "inputs"),
    ({}, "inputs"),
    ([], "object"),
    ({"inputs": [], "id": 5}, "id"),
    ({"inputs": [], "outputs": {}}, "outputs"),
    ({"inputs": [], "parameters": []}, "parameters"),
    ({"inputs": [], "parameters": {"priority": -1}}, "priority"),
    ({"inputs": [], "parameters": {"sequence_id": 1.5}}, "sequence_id"),
    ({"inputs": [], "parameters": {"own": {}}}, "own"),
    ({"inputs": body()["inputs"] * 2}, "X"),
    ({"inputs": [], "id": "a" * 1025}, "id"),
    ({"inputs": [{**body()["inputs"][0], "name": "a" * 1025}]}, "inputs"),
    ({"inputs": [], "outputs": [{"name": "a" * 1025}]}, "outputs"),
    ({"inputs": [{}] * 4097}, "inputs"),
    ({"inputs": [], "outputs": [{"name": "Y", "parameters": {"classification": 2**63}}]}, "classification"),
    ({"inputs": [], "outputs": [{}] * 4097}, "outputs"),
    ({"inputs": [], "parameters": {str(number): 1 for number in range(1025)}}, "parameters"),
    ({"inputs": body([], [500_001], "BYTES")["inputs"]}, "X"),
    ({"inputs": body([], [0, 2**60], "INT8")["inputs"]}, "X"),
]


async def test_members_of_another_kind_are_named():  # TN-04
    async with Gateway() as at:
        for document, named in STRANGE:
            assert named in await at.refusal(json=document), document


NO_JSON: list[Any] = [
    b"",
    b"{",
    b"\xff\xfe",
    b"\xef\xbb\xbf{}",
    b'{"id":"\\ud83d"}',
    b'{"id":"\xed\xa0\xbd"}',
    b"[" * 100_000,
    b"null",
]


async def test_bodies_that_are_no_json():  # SC-12
    async with Gateway() as at:
        for content in NO_JSON:
            assert "failed to parse the request JSON buffer" in await at.refusal(content=content), content[:20]


async def test_half_a_pair_in_a_text_is_refused_and_a_whole_one_is_not():  # SC-12
    async with Gateway() as at:
        half = b'{"inputs":[{"name":"X","shape":[1],"datatype":"BYTES","data":["\\ud83d"]}]}'
        assert "failed to parse" in await at.refusal(content=half)
        assert (await at.post(content=half.replace(b"\\ud83d", b"\\ud83d\\ude42"))).status_code == 200
        assert bytes(at.payload.inputs[0].data) == b"\x04\0\0\0" + "🙂".encode()


async def test_of_two_members_with_one_name_the_last_counts():  # SC-12
    async with Gateway() as at:
        reply = await at.post(content=b'{"id":"a","id":"b","inputs":[]}')
        assert reply.json()["id"] == "b"


async def test_texts_of_every_kind_go_both_ways():  # TN-06
    texts = ["", "a\u0000b", "日本🙂", "x" * 100_000]
    raw = b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in texts)
    async with Gateway(answer(Tensor(name="Y", datatype="BYTES", shape=(4,), data=raw))) as at:
        by_json = await at.post(json=body(texts, [4], "BYTES"))
        assert bytes(at.payload.inputs[0].data) == raw
        assert by_json.json()["outputs"][0]["data"] == texts
        by_bytes = await at.post(**binary_answer(binary(("X", "BYTES", [4], raw))))
        assert bytes(at.payload.inputs[0].data) == raw
        assert by_bytes.content.endswith(raw)


BADLY_FRAMED: list[Any] = [b"\x09\0\0\0abc", b"\x03\0\0\0abcd", b"\x03\0\0", b"\x01\0\0\0a\x01\0\0\0b", b""]


async def test_texts_that_are_not_framed_as_the_shape_says():  # TN-06
    async with Gateway() as at:
        for raw in BADLY_FRAMED:
            assert "'X'" in await at.refusal(**binary(("X", "BYTES", [1], raw))), raw


async def test_sizes_that_contradict_the_body():
    async with Gateway() as at:
        sent = binary(("X", "FP32", [2], bytes(8)))
        assert "unexpected end of binary data for input 'X'" in await at.refusal(
            content=sent["content"][:-1], headers=sent["headers"]
        )
        assert "additional input data" in await at.refusal(content=sent["content"] + b"1", headers=sent["headers"])
        assert "Expected 8, got 4" in await at.refusal(**binary(("X", "FP32", [2], bytes(4))))
        for length in ("9999", "x", "-1", "1.0"):
            assert "Inference-Header-Content-Length" in await at.refusal(
                content=sent["content"], headers={LENGTH: length}
            )


async def test_half_floats_come_as_bytes_only():
    async with Gateway(answer(Tensor(name="Y", datatype="BF16", shape=(1,), data=b"\x80\x3f"))) as at:
        refused = await at.post(json=body())
        assert refused.status_code == 400
        assert "sending BF16 data via JSON is not supported" in refused.json()["error"]
        assert (await at.post(**binary_answer(binary(("X", "FP16", [1], b"\0\x3c"))))).content.endswith(b"\x80\x3f")


@pytest.mark.parametrize("datatype", ["FP32", "FP64"])
async def test_floats_that_are_no_numbers(datatype: str):  # TN-10
    values = np.array([np.nan, np.inf, -np.inf, 0.5], np.dtype(f"f{int(datatype[2:]) // 8}"))
    async with Gateway(answer(from_numpy("Y", values))) as at:
        told = orjson.loads((await at.post(json=body())).content)  # a strict parser
        assert told["outputs"][0]["data"] == ["NaN", "Infinity", "-Infinity", 0.5]
        sent = binary(("X", datatype, [4], values.tobytes()))
        assert (await at.post(**binary_answer(sent))).content.endswith(values.tobytes())
        bare = json.dumps(body([], [4], datatype)).replace("[]", "[NaN, Infinity, -Infinity, 0.5]")
        assert (await at.post(content=bare)).status_code == 200
        assert bytes(at.payload.inputs[0].data) == values.tobytes()


@pytest.mark.parametrize("shape", [[0], [2, 0]])
async def test_empty_tensors_keep_their_shape(shape: list[int]):  # TN-11
    empty = from_numpy("Y", np.empty(shape, np.float32))
    async with Gateway(answer(empty)) as at:
        told = (await at.post(json=body([], shape))).json()["outputs"][0]
        assert (told["shape"], told["data"]) == (shape, [])
        assert at.payload.inputs[0].shape == tuple(shape)
        reply = await at.post(**binary_answer(binary(("X", "FP32", shape, b""))))
        assert reply.json()["outputs"][0]["parameters"] == {"binary_data_size": 0}


async def test_bytes_that_are_no_text_have_no_json_form():  # TN-06
    async with Gateway(answer(Tensor(name="Y", datatype="BYTES", shape=(1,), data=b"\x02\0\0\0\xff\xfe"))) as at:
        refused = await at.post(json=body())
        assert (refused.status_code, "'Y' holds bytes that are not UTF-8" in refused.json()["error"]) == (400, True)


async def test_regions_of_shared_memory_are_not_reachable():
    region = {"name": "X", "shape": [1], "datatype": "FP32", "parameters": {"shared_memory_region": "r"}}
    async with Gateway() as at:
        assert "shared memory" in await at.refusal(501, json={"inputs": [region]})


# --- what goes wrong at the servers ---------------------------------------------------------------

UNKNOWN = Fault(
    kind=FaultKind.UNKNOWN_MODEL,
    message="x",
    reply=Reply(code="NOT_FOUND", text="Request for unknown model: 'm' is not found"),
)


STATUSES: list[Any] = [
    ("INVALID_ARGUMENT", 400),
    ("NOT_FOUND", 404),
    ("UNAVAILABLE", 503),
    ("UNIMPLEMENTED", 501),
    ("INTERNAL", 500),
    ("ALREADY_EXISTS", 400),
    ("UNKNOWN", 400),
]


async def test_a_servers_own_words_and_the_status_of_their_code():
    async with Gateway() as at:
        for code, status in STATUSES:
            reply = Reply(code=code, text="its words")
            at.triton.scripts = [(Fault(kind=FaultKind.REFUSED_INPUT, message="x", reply=reply),)]
            answered = await at.post(json=body())
            assert (answered.status_code, answered.json()) == (status, {"error": "its words"})
            assert ("retry-after" in answered.headers) == (status == 503)


async def test_words_bear_the_callers_id_and_no_internals():
    async with Gateway() as at:
        for text, given, told in (
            ("[request id: {id}] no", "mine", "[request id: mine] no"),
            ("[request id: {id}] no", "", "[request id: <id_unknown>] no"),
            ("failed: ValueError: x\nAt:\n /srv/model.py(3): execute", "", "the model failed on this request"),
            ("cannot read /srv/models/m/1/x.bin", "", "cannot read (path removed)"),
            ("see http://10.0.0.1:8001/x", "", "see (address removed)"),
        ):
            own = text.replace("{id}", "own-id")
            reply = Reply(code="INVALID_ARGUMENT", text=own)
            at.triton.scripts = [(Fault(kind=FaultKind.REFUSED_INPUT, message="x", reply=reply),)]
            answered = await at.post(json=body(id=given), headers={"x-request-id": "own-id"})
            assert answered.json() == {"error": told}


async def test_a_model_that_one_server_lacks_is_asked_of_the_next():
    async with Gateway(UNKNOWN) as at:
        reply = await at.post(json=body())
        assert (reply.status_code, reply.headers["x-gateway-backend"]) == (200, "local")
        at.local.scripts = [(UNKNOWN,)]
        missing = await at.post(json=body())
        assert (missing.status_code, missing.json()) == (404, {"error": "Request for unknown model: 'm' is not found"})
        assert not at.gw.board.all(), "a name of a caller's own opens no breaker"


async def test_what_is_no_servers_word_is_told_in_ours():
    away = Fault(kind=FaultKind.UNAVAILABLE, message="connection refused at 10.0.0.1:8001")
    async with Gateway(away) as at:
        at.local.scripts = [(away,)]
        reply = await at.post(json=body())
        assert (reply.status_code, reply.json()) == (503, {"error": "the backend could not be reached"})
        assert reply.headers["retry-after"] == "1"


async def test_a_model_that_no_rule_takes_is_a_503_that_nobody_is_told_to_repeat():
    async with running([ScriptedServer("triton", (answer(),))], rules=[], more_tasks=TASKS) as gw:
        replies = [await gw.http.post(INFER, json=body()), await gw.http.get("/v2/models/m")]
    for reply in replies:
        assert reply.status_code == 503
        assert reply.json()["error"].startswith("no enabled rule takes this request")
        assert "retry-after" not in reply.headers


async def test_a_decoupled_model_is_refused_in_the_words_of_http():
    text = "ModelInfer RPC doesn't support models with decoupled transaction policy"
    fault = Fault(kind=FaultKind.UNSUPPORTED, message="x", reply=Reply(code="UNIMPLEMENTED", text=text))
    async with Gateway(fault) as at:
        at.local.scripts = [(fault,)]
        reply = await at.post(json=body())
        words = "HTTP end point doesn't support models with decoupled transaction policy"
        assert (reply.status_code, reply.json()) == (501, {"error": words})


async def test_a_limit_is_told_in_the_protocols_form():
    async with Gateway() as at:
        headers = {"authorization": f"Bearer {LIMITED_KEY}"}
        replies = [await at.post(json=body(), headers=headers) for _ in range(4)]
        assert [reply.status_code for reply in replies] == [200, 200, 200, 429]
        assert list(replies[-1].json()) == ["error"]
        assert "retry-after" in replies[-1].headers


# --- streams --------------------------------------------------------------------------------------

STREAM = (answer(floats(1), is_final=False), answer(floats(2), is_final=False), answer())
GENERATE = Told(facts={"m": ModelFacts(name="m", inputs={"X": TensorFacts(datatype="FP32", shape=(1,))})})


def events(reply: httpx.Response) -> list[Any]:
    return [json.loads(event.removeprefix("data: ")) for event in reply.text.split("\n\n") if event]


async def test_generate_stream_tells_every_answer():
    async with Gateway(*STREAM, told=GENERATE) as at:
        reply = await at.post("/v2/models/m/generate_stream", json={"X": 1, "id": "me", "own": "t"})
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert events(reply) == [
            {"Y": value, "id": "me", "model_name": "m", "model_version": "3"} for value in (1.0, 2.0)
        ]
        assert (at.payload.stream, at.payload.wants_empty_final, at.payload.parameters) == (True, True, {"own": "t"})
        lines = await at.post("/v2/models/m/generate_stream", json={"X": 1}, headers={"accept": "application/x-ndjson"})
        assert [json.loads(line)["Y"] for line in lines.text.splitlines()] == [1.0, 2.0]


@pytest.mark.parametrize("kind", ["text/event-stream", "application/x-ndjson"])
async def test_infer_streams_where_that_is_accepted(kind: str):
    async with Gateway(*STREAM) as at:
        reply = await at.post(json=body(id="me"), headers={"accept": kind})
        assert reply.headers["content-type"].startswith(kind)
        parts = events(reply) if "event" in kind else [json.loads(line) for line in reply.text.splitlines()]
        assert [(part["id"], part["outputs"][0]["data"]) for part in parts] == [("me", [1.0]), ("me", [2.0])]


async def test_a_stream_of_answers_has_no_bytes():
    async with Gateway() as at:
        for wanted in (
            {"parameters": {"binary_data_output": True}},
            {"outputs": [{"name": "Y", "parameters": {"binary_data": True}}]},
        ):
            sent = body(**wanted)
            assert "binary data format" in await at.refusal(json=sent, headers={"accept": "text/event-stream"})


async def test_generate_takes_exactly_one_answer():
    async with Gateway(answer(floats(1), is_final=False), answer(), told=GENERATE) as at:
        one = await at.post("/v2/models/m/generate", json={"X": 1})
        assert one.json() == {"Y": 1.0, "model_name": "m", "model_version": "3"}
        for script in (STREAM, (answer(),)):
            at.triton.scripts = [script]
            reply = await at.post("/v2/models/m/generate", json={"X": 1})
            assert (reply.status_code, "exactly 1 response" in reply.json()["error"]) == (400, True)


async def test_a_failure_before_the_first_answer_has_a_real_status():
    async with Gateway(UNKNOWN, told=GENERATE) as at:
        at.local.scripts = [(UNKNOWN,)]
        for path, sent in (("generate_stream", {"X": 1}), ("infer", body())):
            reply = await at.post(f"/v2/models/m/{path}", json=sent, headers={"accept": "text/event-stream"})
            assert (reply.status_code, reply.json()["error"]) == (404, "Request for unknown model: 'm' is not found")


async def test_a_failure_after_the_first_answer_is_told_in_the_stream():
    words = Reply(code="INTERNAL", text="its words")
    broke = Fault(kind=FaultKind.FAILED, message="x", reply=words)
    away = Fault(kind=FaultKind.UNAVAILABLE, message="gone")
    for fault, told in ((broke, "its words"), (away, "the backend broke off: what was received is incomplete")):
        async with Gateway(answer(floats(1), is_final=False), fault, told=GENERATE) as at:
            reply = await at.post("/v2/models/m/generate_stream", json={"X": 1})
            assert reply.status_code == 200
            assert [list(part) for part in events(reply)] == [["Y", "model_name", "model_version"], ["error"]]
            assert events(reply)[-1] == {"error": told}


async def test_an_answer_that_has_no_json_form_ends_its_stream():
    async with Gateway(answer(floats(1)), answer(Tensor(name="Y", datatype="BF16", shape=(1,), data=b"xx"))) as at:
        reply = await at.post(json=body(), headers={"accept": "application/x-ndjson"})
        last = json.loads(reply.text.splitlines()[-1])
        assert "sending BF16 data via JSON is not supported" in last["error"]


async def test_a_caller_that_leaves_takes_its_call_along():
    never = asyncio.Event()
    async with Gateway(answer(floats(1), is_final=False), never, told=GENERATE) as at:
        request = {"url": "/v2/models/m/generate_stream", "json": {"X": 1}}
        async with at.gw.http.stream("POST", **request) as reply:
            await anext(reply.aiter_lines())
        await until(lambda: at.triton.calls[0].is_closed_early)
        await until(lambda: not at.gw.seen.in_flight)


async def test_a_caller_that_leaves_before_the_answer_takes_its_call_along():
    never = asyncio.Event()
    async with Gateway(never) as at:
        asked = asyncio.create_task(at.post(json=body()))
        await until(lambda: at.triton.calls)
        asked.cancel()
        await until(lambda: at.triton.calls[0].is_closed_early)
