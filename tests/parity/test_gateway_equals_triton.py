"""The same call straight to the real Triton and through the gateway before it: answers equal byte for byte.

Where the gateway answers otherwise on purpose, a test says how.
"""

import asyncio
import gzip
import inspect
import json
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http as client
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

from tests.kit.servers import GATEWAY_BODY_BYTES, Server

from .client_models import COUNTER, DATATYPES, IDENTITY, TOTAL
from .test_clients import VALUES, Bearer

IN_JSON = [name for name in DATATYPES if name not in ("FP16", "BF16")]
LENGTH = "inference-header-content-length"

# Outputs whose names sort otherwise than they come; errors of every kind that a model can make; its own parameters.
ZOO = (
    """name: "g_zoo"
backend: "python"
max_batch_size: 0
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [
  { name: "zeta" data_type: TYPE_FP32 dims: [ -1 ] label_filename: "labels.txt" },
  { name: "alpha" data_type: TYPE_FP32 dims: [ -1 ] },
  { name: "Beta" data_type: TYPE_STRING dims: [ 1 ] }
]
""",
    """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
        if x.size and x[0] == -1:
            raise ValueError("negative")
        if x.size and x[0] == -2:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("not this one"))
        told = np.array([request.parameters().encode()], dtype=object)
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("zeta", x), pb_utils.Tensor("alpha", x + 1), pb_utils.Tensor("Beta", told)]
        )
""",
)
RAW = (
    """name: "g_raw"
backend: "python"
max_batch_size: 2
input [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] } ]
""",
    """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "X").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)]) for x in inputs]
""",
)
MODELS = {"identity": IDENTITY, "total": TOTAL, "counter": COUNTER, "zoo": ZOO, "raw": RAW}


class Pair:
    """Both servers, asked the same."""

    def __init__(self, triton: Server, gateway: Server) -> None:
        self.servers = (triton, gateway)

    def ask(self, method: str, path: str, **options: Any) -> tuple[httpx.Response, httpx.Response]:
        headers = options.pop("headers", {})
        straight, through = (
            httpx.request(
                method,
                f"http://{server.http}{path}",
                headers={"accept-encoding": "identity", **headers, **server.headers},
                trust_env=False,
                timeout=60,
                **options,
            )
            for server in self.servers
        )
        return straight, through

    def same(self, method: str, path: str, **options: Any) -> httpx.Response:
        """The answer of both."""
        straight, through = self.ask(method, path, **options)
        assert through.status_code == straight.status_code, (straight.content, through.content)
        assert through.content == straight.content
        if straight.is_success:
            assert through.headers["content-type"] == straight.headers["content-type"]
        assert through.headers.get(LENGTH) == straight.headers.get(LENGTH)
        return through

    def infer(self, model: str, inputs: list[Any], outputs: list[Any] | None = None, **options: Any) -> httpx.Response:
        """The answer of both to the body that the official client makes."""
        body, length = client.InferenceServerClient.generate_request_body(inputs, outputs, **options)
        headers = {} if length is None else {LENGTH: str(length)}
        return self.same("POST", f"/v2/models/{model}/infer", content=body, headers=headers)


@pytest.fixture(scope="module")
def pair(serving: Callable[[str], Server]) -> Iterator[Pair]:
    triton, gateway = serving("triton"), serving("gateway")
    with tritonclient.grpc.InferenceServerClient(triton.grpc) as asked:
        for name, (config, source) in MODELS.items():
            own = f"g_{name}"
            folder = triton.add_model(own, config=config.replace(f'name: "{name}"', f'name: "{own}"'), model=source)
            (folder / "labels.txt").write_text("cat\ndog\nsofa\n")
            asked.load_model(own)
        yield Pair(triton, gateway)
        for name in MODELS:
            asked.unload_model(f"g_{name}")


def tensor(name: str, array: np.ndarray, *, datatype: str = "", is_binary: bool = True) -> client.InferInput:
    made = client.InferInput(name, list(array.shape), datatype or name.removeprefix("IN_"))
    made.set_data_from_numpy(array, binary_data=is_binary)
    return made


def array_of(datatype: str, values: Any) -> np.ndarray:
    return np.array(values, ml_dtypes.bfloat16 if datatype == "BF16" else triton_to_np_dtype(datatype))


def plain_values(datatype: str) -> Any:
    """Values that JSON has a form for, and that are written alike: a float between 1e-5 and 1e16."""
    if datatype.startswith("FP"):
        return [[0.1, -0.0, 1.0, 1 / 3, 123456789.0, -2.5]]
    return [["", "plain", 'Ångström 日本🙂 \x00 "q" \\ / \n\t']] if datatype == "BYTES" else VALUES[datatype]


# --- inference ------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_asked_binary", [True, False], ids=["answer binary", "answer as default"])
@pytest.mark.parametrize("datatype", DATATYPES)
def test_every_datatype_as_bytes(pair: Pair, datatype: str, is_asked_binary: bool):
    array = array_of(datatype, VALUES[datatype])
    outputs = [client.InferRequestedOutput(f"OUT_{datatype}", binary_data=True)] if is_asked_binary else None
    reply = pair.infer("g_identity", [tensor(f"IN_{datatype}", array)], outputs, request_id="mine")
    assert f'"shape":{json.dumps(list(array.shape), separators=(",", ":"))}'.encode() in reply.content
    assert reply.content.startswith(b'{"id":"mine","model_name":"g_identity","model_version":"1",')


@pytest.mark.parametrize("datatype", IN_JSON)
def test_every_datatype_as_json(pair: Pair, datatype: str):
    array = array_of(datatype, plain_values(datatype))
    sent = tensor(f"IN_{datatype}", array, is_binary=False)
    wanted = client.InferRequestedOutput(f"OUT_{datatype}", binary_data=False)
    assert pair.infer("g_identity", [sent], [wanted]).headers["content-type"] == "application/json"


@pytest.mark.parametrize("datatype", ["INT8", "INT64", "BOOL", "FP64", "BYTES"])
@pytest.mark.parametrize("shape", [(1, 0), (0, 3), (0, 0)])
def test_empty_tensors(pair: Pair, datatype: str, shape: tuple[int, int]):
    empty = np.empty(shape, array_of(datatype, []).dtype)
    pair.infer("g_identity", [tensor(f"IN_{datatype}", empty)])
    wanted = client.InferRequestedOutput(f"OUT_{datatype}", binary_data=False)
    pair.infer("g_identity", [tensor(f"IN_{datatype}", empty, is_binary=False)], [wanted])


@pytest.mark.parametrize("datatype", ["FP32", "FP64"])
@pytest.mark.parametrize("values", [[1e16, 1e20, 1e21, 3e38], [1e-5, 1e-6, 1.17549e-38, 5e-30]], ids=["large", "small"])
def test_floats_that_are_written_otherwise_are_the_same_numbers(pair: Pair, datatype: str, values: list[float]):
    body = one(f"IN_{datatype}", datatype, [1, len(values)], values)
    straight, through = pair.ask("POST", "/v2/models/g_identity/infer", json=body)
    assert through.json() == straight.json()
    assert list(through.json()) == list(straight.json())


def test_many_tensors_in_both_forms(pair: Pair):
    inputs = [tensor(f"IN_{name}", array_of(name, VALUES[name])) for name in DATATYPES]
    for wanted in (DATATYPES, DATATYPES[::-1]):  # the order is the model's, whatever the caller's
        outputs = [
            client.InferRequestedOutput(f"OUT_{name}", binary_data=name not in ("INT8", "BOOL")) for name in wanted
        ]
        pair.infer("g_identity", inputs, outputs)


def test_all_outputs_as_bytes(pair: Pair):
    body = one("IN_INT8", "INT8", [1, 1], [7], parameters={"binary_data_output": True})
    assert pair.same("POST", "/v2/models/g_identity/infer", json=body).content.endswith(b"\x07")


def test_all_outputs_as_bytes_counts_for_named_ones_too(pair: Pair):
    """As the extension is written; Triton forgets it where a request names its outputs."""
    body = one("IN_INT8", "INT8", [1, 1], [7], parameters={"binary_data_output": True}, outputs=[{"name": "OUT_INT8"}])
    straight, through = pair.ask("POST", "/v2/models/g_identity/infer", json=body)
    assert LENGTH not in straight.headers
    assert through.content.endswith(b"\x07")


@pytest.mark.parametrize("is_binary", [True, False])
def test_the_best_classes_with_their_labels(pair: Pair, is_binary: bool):
    x = np.array([0.25, 0.75, 0.5], np.float32)
    outputs = [client.InferRequestedOutput("zeta", binary_data=is_binary, class_count=2)]
    assert b"0.750000:1:dog" in pair.infer("g_zoo", [tensor("x", x, datatype="FP32")], outputs).content


def test_a_raw_body_is_the_only_input(pair: Pair):
    content = np.arange(3, dtype=np.float32).tobytes()
    reply = pair.same("POST", "/v2/models/g_raw/infer", content=content, headers={LENGTH: "0"})
    assert reply.content.endswith(content)


def test_parameters_reach_the_model(pair: Pair):
    x = tensor("x", np.zeros(1, np.float32), datatype="FP32")
    own = {"text": "t", "count": 7, "ok": True, "less": -3}
    body, length = client.InferenceServerClient.generate_request_body([x], parameters=own)
    for reply in pair.ask("POST", "/v2/models/g_zoo/infer", content=body, headers={LENGTH: str(length)}):
        result = client.InferenceServerClient.parse_response_body(
            reply.content, header_length=int(reply.headers[LENGTH])
        )
        assert json.loads(result.as_numpy("Beta")[0]) == own


def test_versions_are_named(pair: Pair):
    body = {"inputs": [{"name": "IN_INT8", "shape": [1, 1], "datatype": "INT8", "data": [7]}]}
    pair.same("POST", "/v2/models/g_identity/versions/1/infer", json=body)
    assert pair.same("POST", "/v2/models/g_identity/versions/7/infer", json=body).status_code == 404


@pytest.mark.parametrize("packed", [gzip.compress, zlib.compress], ids=["gzip", "deflate"])
def test_packed_bodies_and_answers(pair: Pair, packed: Callable[[bytes], bytes]):
    name = packed.__module__.replace("zlib", "deflate")
    body = {"inputs": [{"name": "IN_INT8", "shape": [1, 4000], "datatype": "INT8", "data": [1] * 4000}]}
    headers = {"content-encoding": name, "accept-encoding": name, "content-type": "application/json"}
    reply = pair.same("POST", "/v2/models/g_identity/infer", content=packed(json.dumps(body).encode()), headers=headers)
    assert reply.headers["content-encoding"] == name
    assert len(reply.json()["outputs"][0]["data"]) == 4000


def test_sequences(pair: Pair):
    totals = []
    for step in (1, 2, 3):
        body = one("NUMBER", "INT32", [1, 1], [step])
        flags = {"sequence_start": step == 1, "sequence_end": step == 3}
        for server, sequence in zip(pair.servers, (701, 702), strict=True):
            url = f"http://{server.http}/v2/models/g_total/infer"
            body["parameters"] = {"sequence_id": sequence, **flags}
            reply = httpx.post(url, json=body, headers=server.headers, trust_env=False)
            totals.append(reply.content)
    assert totals[::2] == totals[1::2]
    assert [json.loads(total)["outputs"][0]["data"] for total in totals[::2]] == [[1], [3], [6]]


# --- generate -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "body"),
    [
        ("counter", {"COUNT": 1, "PAUSE_MS": 0, "id": "x"}),
        ("zoo", {"x": [1.0, 2.0]}),
        ("zoo", {"x": 1.5, "id": "me"}),
        ("zoo", {"x": [1.0], "temperature": 0.5, "n": 3, "parameters": {"k": True}}),
    ],
)
def test_generate(pair: Pair, model: str, body: dict[str, Any]):
    straight, through = pair.ask("POST", f"/v2/models/g_{model}/generate", json=body)
    assert (through.status_code, through.headers["content-type"]) == (200, straight.headers["content-type"])
    for one in (straight, through):
        told = json.loads(one.json().get("Beta", "{}"))
        assert told.keys() - {"id"} == body.keys() - {"x", "id", "COUNT", "PAUSE_MS", "parameters"} | (
            body.get("parameters", {}).keys()
        )
    assert without_beta(through.content) == without_beta(straight.content)
    pair.ask("POST", f"/v2/models/g_{model}/generate_stream", json=body)


def without_beta(content: bytes) -> list[tuple[str, Any]]:
    """The members in their order, but for what the model tells of its parameters, whose order means nothing."""
    return [(name, value) for name, value in json.loads(content).items() if name != "Beta"]


@pytest.mark.parametrize("count", [0, 1, 5])
def test_generate_stream(pair: Pair, count: int):
    body = {"COUNT": count, "PAUSE_MS": 1, "id": "x"}
    reply = pair.same("POST", "/v2/models/g_counter/generate_stream", json=body)
    assert reply.content.count(b"data: ") == count


def test_streams_as_lines_and_of_infer(pair: Pair):
    """Two forms that Triton does not have."""
    gateway = pair.servers[1]
    inputs = [
        {"name": name, "shape": [1], "datatype": "INT32", "data": [value]}
        for name, value in (("COUNT", 3), ("PAUSE_MS", 0))
    ]
    with httpx.Client(base_url=f"http://{gateway.http}", headers=gateway.headers, trust_env=False) as http:
        lines = http.post(
            "/v2/models/g_counter/generate_stream",
            json={"COUNT": 3, "PAUSE_MS": 0},
            headers={"accept": "application/x-ndjson"},
        )
        events = http.post(
            "/v2/models/g_counter/infer", json={"id": "x", "inputs": inputs}, headers={"accept": "text/event-stream"}
        )
    assert [json.loads(line)["NUMBER"] for line in lines.text.splitlines()] == [0, 1, 2]
    documents = [json.loads(event.removeprefix("data: ")) for event in events.text.split("\n\n") if event]
    assert [document["outputs"][0]["data"] for document in documents] == [[0], [1], [2]]
    assert {document["id"] for document in documents} == {"x"}


async def test_a_caller_that_leaves_a_stream_ends_it_at_the_server(pair: Pair):
    gateway = pair.servers[1]
    url = f"http://{gateway.http}/v2/models/g_counter/generate_stream"
    async with httpx.AsyncClient(headers=gateway.headers, trust_env=False, timeout=30) as http:
        async with http.stream("POST", url, json={"COUNT": 5000, "PAUSE_MS": 5}) as answer:
            await anext(answer.aiter_lines())

        async def counting() -> int:
            return (await http.post(url.replace("_stream", ""), json={"COUNT": -1, "PAUSE_MS": 0})).json()["NUMBER"]

        async with asyncio.timeout(10):
            while await counting():  # noqa: ASYNC110 - the model has no event of ours
                await asyncio.sleep(0.02)


# --- what there is --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        *(f"/v2/models/g_{name}{rest}" for name in MODELS for rest in ("", "/config", "/versions/1")),
        "/v2/models/g_total/ready",
        "/v2/health/live",
        "/v2/health/ready",
        "/v2/systemsharedmemory/status",
        "/v2/cudasharedmemory/status",
        "/v2/models/nope",
        "/v2/models/nope/config",
        "/v2/models/nope/stats",
        "/v2/models/g_total/versions/9",
        "/v2/models/g_total/versions/9/config",
        "/v2/nothing",
        "/v2/models/g_total/nothing",
        "/v2/models/g_total/versions/x/ready",
    ],
)
def test_what_is_told_is_the_same(pair: Pair, path: str):
    straight, through = pair.ask("GET", path)
    assert (through.status_code, through.content) == (straight.status_code, straight.content)


@pytest.mark.parametrize("path", ["/v2/models/g_identity/stats", "/v2/models/stats"])
def test_statistics_are_the_same(pair: Pair, path: str):
    straight, through = pair.ask("GET", path)
    assert members(through.json()) == members(straight.json())
    assert through.json()["model_stats"] == straight.json()["model_stats"]


def members(document: Any) -> Any:
    """The names in their order, all the way down."""
    if isinstance(document, dict):
        return [(name, members(value)) for name, value in document.items()]
    return [members(value) for value in document] if isinstance(document, list) else None


def test_the_index_is_the_same(pair: Pair):
    pair.same("POST", "/v2/repository/index")
    pair.same("POST", "/v2/repository/index", json={"ready": True})


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
def test_other_methods_are_refused(pair: Pair, method: str):
    gateway = pair.servers[1]
    reply = httpx.request(
        method, f"http://{gateway.http}/v2/models/g_total/infer", headers=gateway.headers, trust_env=False
    )
    assert (reply.status_code, reply.json(), reply.headers["allow"]) == (405, {"error": "Method Not Allowed"}, "POST")


# --- errors ---------------------------------------------------------------------------------------


def one(name: str = "IN_FP32", datatype: str = "FP32", shape: Any = (1, 1), data: Any = (1.0,), **more: Any) -> Any:
    return {"inputs": [{"name": name, "datatype": datatype, "shape": list(shape), "data": list(data)}], **more}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v2/models/nope/infer", one()),
        ("/v2/models/g_identity/infer", one(name="IN_X")),
        ("/v2/models/g_identity/infer", one(name="IN_X", id="me")),
        ("/v2/models/g_identity/infer", one(datatype="INT32", data=[1], id="me")),
        ("/v2/models/g_identity/infer", one(shape=[1])),
        ("/v2/models/g_identity/infer", one(shape=[1, 1, 1], id="me")),
        ("/v2/models/g_identity/infer", one(outputs=[{"name": "X"}])),
        ("/v2/models/g_identity/infer", {"inputs": one()["inputs"] * 2}),
        ("/v2/models/g_total/infer", one("NUMBER", "INT32", [1, 1], [1])),
        ("/v2/models/g_total/infer", one("NUMBER", "INT32", [9, 1], [1] * 9)),
        ("/v2/models/g_counter/infer", one("COUNT", "INT32", [1], [1])),
        ("/v2/models/g_zoo/infer", one("x", "FP32", [1], [-2])),
        ("/v2/models/g_counter/generate", {"COUNT": 1}),
        ("/v2/models/nope/generate", {"COUNT": 1}),
        ("/v2/models/nope/generate_stream", {"COUNT": 1}),
        ("/v2/repository/models/nope/load", {}),
        ("/v2/repository/models/nope/unload", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else json.dumps(value)[:60],
)
def test_errors_are_the_same(pair: Pair, path: str, body: Any):
    pair.same("POST", path, json=body)


def test_a_load_of_what_is_not_there_is_tritons_own_500(pair: Pair):
    for reply in pair.ask("POST", "/v2/repository/models/nope/load", json={}):
        words = "failed to load 'nope', failed to poll from model repository"
        assert (reply.status_code, reply.json()) == (500, {"error": words})


def test_a_body_of_another_size_than_its_shape(pair: Pair):
    head = {"name": "IN_FP32", "shape": [1, 1], "datatype": "FP32", "parameters": {"binary_data_size": 8}}
    content = json.dumps({"inputs": [head]}).encode()
    length = {LENGTH: str(len(content))}
    straight, through = pair.ask("POST", "/v2/models/g_identity/infer", content=content + b"12345678", headers=length)
    words = "input byte size mismatch for input 'IN_FP32' for model 'g_identity'. Expected 4, got 8"
    for reply in (straight, through):
        assert reply.status_code == 400
        assert reply.json()["error"].endswith(words)


@pytest.mark.parametrize(
    ("body", "straight_status", "status", "text"),
    [
        (b"{", 500, 400, "failed to parse the request JSON buffer"),
        (b"[]", 500, 400, "the document is not an object"),
        (json.dumps(one(shape=[-1, 1])), 500, 400, "invalid shape for input 'IN_FP32'"),
        (json.dumps(one(shape=[2, 3])), 500, 400, "Shape does not match true shape of 'data' field of input 'IN_FP32'"),
        (json.dumps(one(data=["a"])), 500, 400, "'data' of input 'IN_FP32'"),
        (json.dumps(one(id=7)), 500, 400, "Unable to parse 'id'"),
        (json.dumps(one("IN_INT8", "INT8", [1, 1], [300])), 200, 400, "a value is out of range of INT8"),
    ],
    ids=["json", "list", "negative", "count", "type", "id", "range"],
)
def test_the_callers_own_faults_are_400_and_named(pair: Pair, body: Any, straight_status: int, status: int, text: str):
    """Where Triton answers 500, or takes what does not fit."""
    straight, through = pair.ask("POST", "/v2/models/g_identity/infer", content=body)
    assert (straight.status_code, through.status_code) == (straight_status, status)
    assert text in through.json()["error"]


def test_a_models_python_text_is_not_passed_on(pair: Pair):
    straight, through = pair.ask("POST", "/v2/models/g_zoo/infer", json=one("x", "FP32", [1], [-1]))
    assert "ValueError" in straight.json()["error"]
    assert (through.status_code, through.json()) == (500, {"error": "the model failed on this request"})


def test_a_float_that_is_no_number_is_a_word_in_json(pair: Pair):
    """Triton writes bare words, which no strict parser takes."""
    body = one("IN_FP32", "FP32", [1, 4], [0.5, 0.5, 0.5, 0.5])
    content = json.dumps(body).replace("[0.5, 0.5, 0.5, 0.5]", "[NaN, Infinity, -Infinity, 0.5]")
    straight, through = pair.ask("POST", "/v2/models/g_identity/infer", content=content)
    assert b"[NaN,Infinity,-Infinity,0.5]" in straight.content
    assert b'["NaN","Infinity","-Infinity",0.5]' in through.content
    result = client.InferenceServerClient.parse_response_body(through.content)
    np.testing.assert_array_equal(result.as_numpy("OUT_FP32"), [[np.nan, np.inf, -np.inf, 0.5]])


def test_bytes_that_are_no_text_are_refused_in_json(pair: Pair):
    """Triton writes them as they are, which is no JSON."""
    raw = tensor("IN_BYTES", np.array([[b"\xff\x00\xfe"]], object))
    body, length = client.InferenceServerClient.generate_request_body(
        [raw], [client.InferRequestedOutput("OUT_BYTES", binary_data=False)]
    )
    straight, through = pair.ask("POST", "/v2/models/g_identity/infer", content=body, headers={LENGTH: str(length)})
    assert b"\xff" in straight.content
    assert through.status_code == 400
    assert "'OUT_BYTES' holds bytes that are not UTF-8" in through.json()["error"]


@pytest.mark.parametrize("path", ["/v2/models/nope/ready", "/v2/models/g_total/versions/9/ready"])
def test_not_ready_is_503(pair: Pair, path: str):
    straight, through = pair.ask("GET", path)
    assert (straight.status_code, through.status_code) == (400, 503)
    assert through.json() == straight.json() == {"error": "Model version not ready"}


def test_only_what_is_offered_is_told(pair: Pair):
    straight, through = (reply.json() for reply in pair.ask("GET", "/v2"))
    missing = set(straight.pop("extensions")) - set(through.pop("extensions"))
    assert missing == {"system_shared_memory", "cuda_shared_memory", "trace", "logging"}
    assert through == straight


# --- clients, and sizes ---------------------------------------------------------------------------


@pytest.mark.parametrize("module", [tritonclient.http, tritonclient.http.aio], ids=["sync", "aio"])
async def test_the_clients_other_calls_end_with_their_own_exception(pair: Pair, module: Any):
    asked = module.InferenceServerClient(pair.servers[1].http)
    asked.register_plugin(Bearer(pair.servers[1].key))

    async def call(method: str, *args: Any) -> Any:
        answer = getattr(asked, method)(*args)
        return await answer if inspect.isawaitable(answer) else answer

    assert await call("get_system_shared_memory_status") == []
    assert await call("get_cuda_shared_memory_status") == []
    for method, *args in (
        ("get_trace_settings",),
        ("get_trace_settings", "g_total"),
        ("get_log_settings",),
        ("register_system_shared_memory", "r", "/r", 8),
        ("unregister_system_shared_memory", "r"),
    ):
        with pytest.raises(InferenceServerException) as refused:
            await call(method, *args)
        assert refused.value.status() == "501"
    await call("close")


async def test_a_client_of_the_plain_protocol(pair: Pair):
    """What the specification says, and nothing of Triton's: live, ready, metadata, infer."""
    gateway = pair.servers[1]
    async with httpx.AsyncClient(
        base_url=f"http://{gateway.http}", headers=gateway.headers, trust_env=False, timeout=30
    ) as http:
        for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/g_total/ready"):
            assert (await http.get(path)).status_code == 200
        server, model = (await http.get("/v2")).json(), (await http.get("/v2/models/g_identity")).json()
        assert {"name", "version", "extensions"} <= server.keys()
        assert {"name", "versions", "platform", "inputs", "outputs"} <= model.keys()
        inputs = [{"name": "IN_FP32", "shape": [2, 2], "datatype": "FP32", "data": [[1, 2], [3, 4]]}]
        answer = (await http.post("/v2/models/g_identity/infer", json={"id": "42", "inputs": inputs})).json()
        [output] = answer["outputs"]
        assert (answer["model_name"], answer["id"]) == ("g_identity", "42")
        assert (output["name"], output["datatype"], output["shape"]) == ("OUT_FP32", "FP32", [2, 2])
        assert np.reshape(output["data"], output["shape"]).tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize("megabytes", [5, 40])
def test_large_tensors_go_both_ways(pair: Pair, megabytes: int):  # TN-13
    array = np.arange(megabytes * 2**20 // 4, dtype=np.float32).reshape(1, -1)
    assert len(pair.infer("g_identity", [tensor("IN_FP32", array)]).content) > array.nbytes - 1


def test_a_body_over_the_limit_is_refused_with_the_limit(pair: Pair):  # TN-13
    gateway = pair.servers[1]
    url, content = f"http://{gateway.http}/v2/models/g_identity/infer", bytes(GATEWAY_BODY_BYTES + 1)
    for headers in ({}, {"content-encoding": "gzip"}):
        sent = gzip.compress(content, 1) if headers else content
        reply = httpx.post(url, content=sent, headers=gateway.headers | headers, trust_env=False, timeout=60)
        assert reply.status_code == 413
        assert str(GATEWAY_BODY_BYTES) in reply.json()["error"]


def test_a_call_without_a_key_is_refused_in_the_protocols_form(pair: Pair):
    for path in ("/v2", "/v2/models/g_total", "/v2/nothing"):
        reply = httpx.get(f"http://{pair.servers[1].http}{path}", trust_env=False)
        assert (reply.status_code, list(reply.json())) == (401, ["error"])
