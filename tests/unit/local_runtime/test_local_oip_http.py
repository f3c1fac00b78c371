"""The HTTP server, asked by Triton's own clients and by a plain one."""

import asyncio
import contextlib
import gzip
import json
import socket
import sys
import zlib

import httpx
import ml_dtypes
import numpy as np
import pytest
import tritonclient.http.aio as triton
from tritonclient.utils import InferenceServerException

from local_runtime.errors import ErrorCode, InferenceError
from local_runtime.messages import ModelState, ModelStatus
from local_runtime.protocol.http_server import HttpServer, start_http
from local_runtime.protocol.oip_http import HttpApp
from tests.kit.local_fake import FakeModel, FakeRuntime, Gate, answer, countdown, echo, failing
from tests.kit.wait import until

LIMIT = 100_000
ARRAYS = {
    "BOOL": np.array([[True, False]]),
    "INT8": np.array([[-128, 127]], np.int8),
    "INT16": np.array([[-(2**15), 1]], np.int16),
    "INT32": np.array([[-(2**31), 1]], np.int32),
    "INT64": np.array([[-(2**63), 2**63 - 1]], np.int64),
    "UINT8": np.array([[0, 255]], np.uint8),
    "UINT16": np.array([[0, 2**16 - 1]], np.uint16),
    "UINT32": np.array([[0, 2**32 - 1]], np.uint32),
    "UINT64": np.array([[0, 2**64 - 1]], np.uint64),
    "FP16": np.array([[np.inf, -0.0]], np.float16),
    "BF16": np.array([[1.5, np.nan]], ml_dtypes.bfloat16),
    "FP32": np.array([[np.nan, -np.inf, 0.1]], np.float32),
    "FP64": np.array([[0.1, 1e300]], np.float64),
    "BYTES": np.array([[b"", b"a\0b", b"\xff\xfe", "日本".encode()]], object),
}


class Served:
    """A fake runtime behind the server, and ways to ask it."""

    def __init__(self, runtime: FakeRuntime, server: HttpServer, plain: httpx.AsyncClient) -> None:
        self.runtime = runtime
        self.server = server
        self.address = f"127.0.0.1:{server.port}"
        self.plain = plain

    async def infer(self, model="echo", **fields):
        document = {"inputs": [{"name": "X", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}], **fields}
        return await self.plain.post(f"/v2/models/{model}/infer", json=document)


@contextlib.asynccontextmanager
async def serving(**models):
    runtime = FakeRuntime(models={"echo": FakeModel(), **models})
    server = start_http(HttpApp(runtime, max_input_bytes=LIMIT), host="127.0.0.1", port=0)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", trust_env=False) as plain:
            yield Served(runtime, server, plain)
    finally:
        await server.stop(grace_s=1)


def tensor(array, datatype, *, binary=True):
    made = triton.InferInput("X", list(array.shape), datatype)
    return made.set_data_from_numpy(array, binary_data=binary)


async def refused(call):
    with pytest.raises(InferenceServerException) as error:
        await call
    return error.value.status(), error.value.message()


# --- tensors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("datatype", ARRAYS)
async def test_every_datatype_is_bit_exact_in_binary(datatype):
    async with serving() as served, triton.InferenceServerClient(served.address) as client:
        result = await client.infer("echo", [tensor(ARRAYS[datatype], datatype)])
    told = result.as_numpy("X")
    assert told.dtype == ARRAYS[datatype].dtype
    if datatype == "BYTES":
        assert told.tolist() == ARRAYS[datatype].tolist()
    else:
        assert told.tobytes() == ARRAYS[datatype].tobytes()


@pytest.mark.parametrize("datatype", [name for name in ARRAYS if name not in ("FP16", "BF16", "BYTES")])
async def test_every_datatype_with_a_json_form_keeps_its_values(datatype):
    wanted = [triton.InferRequestedOutput("X", binary_data=False)]
    async with serving() as served, triton.InferenceServerClient(served.address) as client:
        result = await client.infer("echo", [tensor(ARRAYS[datatype], datatype, binary=False)], outputs=wanted)
    np.testing.assert_array_equal(result.as_numpy("X"), ARRAYS[datatype])


BLOCKING = """
import sys
import numpy as np
import tritonclient.http
from tritonclient.utils import InferenceServerException

with tritonclient.http.InferenceServerClient(sys.argv[1]) as client:
    made = tritonclient.http.InferInput("X", [1, 3], "FP32").set_data_from_numpy(np.ones((1, 3), np.float32))
    assert client.is_server_ready()
    assert client.infer("echo", [made], response_compression_algorithm="gzip").as_numpy("X").tolist() == [[1, 1, 1]]
    later = client.async_infer("echo", [made], request_id="r")
    assert later.get_result().get_response()["id"] == "r"
    try:
        client.infer("nope", [made])
    except InferenceServerException as error:
        print(error.message())
"""


async def test_the_blocking_client_works_too():
    # In a process of its own: it brings an event loop (gevent's) that does not share one with ours.
    async with serving() as served:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", BLOCKING, served.address, stdout=asyncio.subprocess.PIPE
        )
        told, _ = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, told.decode().strip()) == (0, "Request for unknown model: 'nope' is not found")


async def test_texts_in_json_and_empty_tensors():
    texts = np.array(["", "日本🙂"], object)
    wanted = [triton.InferRequestedOutput("X", binary_data=False)]
    async with serving() as served, triton.InferenceServerClient(served.address) as client:
        told = await client.infer("echo", [tensor(texts, "BYTES", binary=False)], outputs=wanted)
        empty = await client.infer("echo", [tensor(np.zeros((2, 0), np.float32), "FP32")])
    assert [item if isinstance(item, str) else item.decode() for item in told.as_numpy("X")] == texts.tolist()
    assert empty.as_numpy("X").shape == (2, 0)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
async def test_compression_both_ways(algorithm):
    array = np.zeros((1, 4000), np.float32)
    async with serving() as served, triton.InferenceServerClient(served.address) as client:
        result = await client.infer(
            "echo",
            [tensor(array, "FP32")],
            request_compression_algorithm=algorithm,
            response_compression_algorithm=algorithm,
        )
        packed = await served.plain.post(
            "/v2/models/echo/infer",
            content=zlib.compress(json.dumps({"inputs": [], "id": "x" * 1024}).encode()),
            headers={"content-encoding": "deflate", "accept-encoding": algorithm},
        )
    np.testing.assert_array_equal(result.as_numpy("X"), array)
    assert packed.headers["content-encoding"] == algorithm


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (gzip.compress(bytes(10 * LIMIT), mtime=0), {"content-encoding": "gzip"}, 413),
        (bytes(LIMIT + 1), {}, 413),
        (gzip.compress(b"{}", mtime=0)[:-3], {"content-encoding": "gzip"}, 400),
        (gzip.compress(b"{}", mtime=0) + b"more", {"content-encoding": "gzip"}, 400),
        (b"{}", {"content-encoding": "gzip"}, 400),
        (b"{}", {"content-encoding": "br"}, 415),
        (b"{}", {"inference-header-content-length": "-1"}, 400),
        (b"{}", {"inference-header-content-length": "9"}, 400),
    ],
)
async def test_bodies_that_are_not_taken(content, headers, status):
    async with serving() as served:
        told = await served.plain.post("/v2/models/echo/infer", content=content, headers=headers)
        assert told.status_code == status
        assert told.json()["error"]
        if status == 413:
            assert str(LIMIT) in told.json()["error"]
        assert (await served.infer()).status_code == 200


async def test_a_body_without_a_length_is_bounded_too():
    async def chunks():
        for _ in range(20):
            yield bytes(LIMIT // 10)

    async with serving() as served:
        told = await served.plain.post("/v2/models/echo/infer", content=chunks())
    assert told.status_code == 413


async def test_a_raw_body_is_the_only_input():
    content = np.array([1, 2, 3], np.float32).tobytes()
    model = FakeModel(inputs=[("X", "FP32", (-1, -1))])
    async with serving(raw=model) as served:
        told = await served.plain.post(
            "/v2/models/raw/infer", content=content, headers={"inference-header-content-length": "0"}
        )
    length = int(told.headers["inference-header-content-length"])
    assert json.loads(told.content[:length])["outputs"][0]["shape"] == [1, 3]
    assert told.content[length:] == content


async def test_best_classes_in_place_of_values():
    wanted = [triton.InferRequestedOutput("X", class_count=2)]
    array = np.array([[0.1, 0.7, 0.2]], np.float32)
    async with serving() as served, triton.InferenceServerClient(served.address) as client:
        result = await client.infer("echo", [tensor(array, "FP32")], outputs=wanted)
    assert result.as_numpy("X").tolist() == [[b"0.700000:1:one", b"0.200000:2"]]


async def test_best_classes_of_a_model_that_is_gone_by_the_time_it_has_answered():
    async def last(request):
        del served.runtime.models["last"]
        yield answer(request)

    outputs = [{"name": "X", "parameters": {"classification": 1}}]
    async with serving(last=FakeModel(answers=last)) as served:
        told = await served.infer("last", outputs=outputs)
        gone = await served.infer("last", outputs=outputs)
    assert told.json()["outputs"][0]["data"] == ["2.000000:1:one"]
    assert (gone.status_code, gone.json()["error"]) == (404, "Request for unknown model: 'last' is not found")


async def test_parameters_and_id_reach_the_runtime_and_come_back():
    async with serving() as served, triton.InferenceServerClient(served.address) as client:
        result = await client.infer(
            "echo",
            [tensor(ARRAYS["FP32"], "FP32")],
            model_version="1",
            request_id="r7",
            sequence_id=5,
            sequence_start=True,
            priority=2,
            timeout=900,
            parameters={"own": 1},
        )
        asked = served.runtime.requests[0]
    assert (asked.request_id, asked.version, asked.sequence_id) == ("r7", "1", 5)
    assert (asked.sequence_start, asked.priority, asked.queue_timeout_us) == (True, 2, 900)
    assert asked.parameters == {"own": 1}
    assert result.get_response()["id"] == "r7"


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("INVALID_ARG", 400),
        ("NOT_FOUND", 404),
        ("UNSUPPORTED", 501),
        ("INTERNAL", 500),
        ("UNAVAILABLE", 503),
        ("CANCELLED", 400),
        ("ALREADY_EXISTS", 400),
        ("UNKNOWN", 400),
        ("DEADLINE", 504),
    ],
)
async def test_status_of_every_error(code, status):
    async with serving(fail=FakeModel(answers=failing)) as served:
        told = await served.infer("fail", parameters={"code": code})
    assert (told.status_code, told.json()) == (status, {"error": "own text"})


async def test_decoupled_models_are_refused_in_tritons_words():
    async with serving(many=FakeModel(answers=countdown, is_decoupled=True)) as served:
        told = await served.infer("many")
    assert (told.status_code, told.json()["error"]) == (
        501,
        "HTTP end point doesn't support models with decoupled transaction policy",
    )


async def test_a_fault_of_the_server_is_logged_and_answered(caplog):
    async def broken(_request):
        raise ZeroDivisionError("secret")
        yield

    async with serving(bad=FakeModel(answers=broken)) as served:
        told = await served.infer("bad")
    assert told.status_code == 500
    assert "secret" not in told.text
    assert "secret" in caplog.text


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2/models/echo/infer", 405),
        ("POST", "/v2", 405),
        ("DELETE", "/v2/models/echo", 405),
        ("GET", "/v2/repository/index", 405),
        ("GET", "/nowhere", 404),
        ("POST", "/v2/models/echo/versions/abc/infer", 404),
        ("GET", "/v2/models/nope", 404),
        ("POST", "/v2/models/..%2F..%2Fetc/infer", 404),
        ("GET", "/v2/trace/setting", 501),
        ("POST", "/v2/logging", 501),
        ("POST", "/v2/systemsharedmemory/region/r/register", 501),
    ],
)
async def test_wrong_verbs_and_paths(method, path, status):
    async with serving() as served:
        body = b'{"inputs": []}' if method == "POST" else None
        told = await served.plain.request(method, path, content=body)
    assert told.status_code == status
    assert told.json()["error"]
    assert ("allow" in told.headers) == (status == 405)


# --- what there is --------------------------------------------------------------------------------


async def test_readiness_follows_the_runtime():
    async with serving() as served, triton.InferenceServerClient(served.address) as client:
        assert await client.is_server_live()
        assert await client.is_server_ready()
        assert await client.is_model_ready("echo")
        served.runtime.is_up = False
        assert await client.is_server_live()
        assert not await client.is_server_ready()
        absent = await served.plain.get("/v2/models/nope/ready")
    assert (absent.status_code, absent.json()) == (503, {"error": "Model version not ready"})


async def test_descriptions():
    async with serving() as served, triton.InferenceServerClient(served.address) as client:
        server = await client.get_server_metadata()
        metadata = await client.get_model_metadata("echo", "1")
        config = await client.get_model_config("echo")
        stats = await client.get_inference_statistics()
        one = await client.get_inference_statistics("echo", "1")
        regions = await client.get_system_shared_memory_status()
    assert server["name"] == "local_runtime"
    assert "binary_tensor_data" in server["extensions"]
    assert "system_shared_memory" not in server["extensions"]
    assert metadata["inputs"] == [{"name": "X", "datatype": "FP32", "shape": [-1, -1]}]
    assert config["dynamic_batching"]["max_queue_delay_microseconds"] == 7
    assert stats == one
    assert stats["model_stats"][0]["inference_stats"]["success"] == {"count": 2, "ns": 348_000}
    assert stats["model_stats"][0]["batch_stats"][0]["batch_size"] == 3
    assert regions == []


async def test_head_is_get_without_a_body():
    async with serving() as served:
        told = await served.plain.head("/v2")
        whole = await served.plain.get("/v2")
        refused_too = await served.plain.head("/v2/repository/index")
    assert (told.status_code, told.content) == (200, b"")
    assert told.headers["content-length"] == whole.headers["content-length"]
    assert (refused_too.status_code, refused_too.headers["allow"]) == (405, "POST")


async def test_metrics_page():
    async with serving() as served:
        told = await served.plain.get("/metrics")
    assert told.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'nv_inference_count{model="echo",version="1"} 3' in told.text


# --- model control --------------------------------------------------------------------------------


async def test_repository_control():
    async with serving() as served, triton.InferenceServerClient(served.address) as client:
        index = await client.get_model_repository_index()
        await client.load_model("m", config="{}", files={"file:1/model.py": b"x\xff"})
        await client.load_model("n")
        await client.unload_model("m", unload_dependents=True)
        ready = await served.plain.post("/v2/repository/index", json={"ready": True})
    assert index == [
        {"name": "echo", "version": "1", "state": "READY", "reason": ""},
        {"name": "broken", "version": "2", "state": "UNAVAILABLE", "reason": "it is broken"},
        {"name": "never"},
    ]
    assert [entry["name"] for entry in ready.json()] == ["echo"]
    assert served.runtime.loads == [
        ("load", "m", "{}", {"1/model.py": b"x\xff"}),
        ("load", "n", None, None),
        ("unload", "m", True),
    ]


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"file:1/x": "?"}, "is not base64"),
        ({"config": {}}, "'config' must be a string"),
        ({"what": ""}, "unrecognized load parameter 'what'"),
        ({"file:\ud800": "", "config": float("nan")}, "failed to parse the request JSON buffer"),
        ([], "'parameters'"),
    ],
)
async def test_load_parameters_that_are_wrong(parameters, text):
    async with serving() as served:
        content = json.dumps({"parameters": parameters})  # as another client writes it: httpx refuses NaN
        told = await served.plain.post("/v2/repository/models/m/load", content=content)
        assert served.runtime.loads == []
    assert told.status_code == 400
    assert text in told.json()["error"]


async def test_a_load_that_fails_says_why():
    async with serving() as served, triton.InferenceServerClient(served.address) as client:
        assert await refused(client.load_model("broken")) == ("400", "it is broken")


# --- generate -------------------------------------------------------------------------------------


async def test_generate_and_its_stream():
    many = FakeModel(answers=countdown, inputs=[("X", "INT32", (1,))], is_decoupled=True)
    async with serving(many=many) as served:
        one = await served.plain.post("/v2/models/many/generate", json={"X": 1})
        none = await served.plain.post("/v2/models/many/generate", json={"X": 0})
        two = await served.plain.post("/v2/models/many/generate", json={"X": 2})
        stream = await served.plain.post("/v2/models/many/generate_stream", json={"X": 2})
        empty = await served.plain.post("/v2/models/many/generate_stream", json={"X": 0})
    assert one.json() == {"model_name": "many", "model_version": "1", "Y": 1}
    assert [none.status_code, two.status_code] == [500, 500]
    assert "exactly 1 response" in two.json()["error"]
    assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = stream.text.split("\n\n")
    assert [json.loads(event.removeprefix("data: "))["Y"] for event in events[:-1]] == [2, 1]
    assert (events[-1], empty.status_code, empty.text) == ("", 200, "")


async def test_a_stream_that_fails_before_it_begins_has_a_status_and_later_an_event():
    async def late(request):
        yield answer(request, is_final=False)
        raise InferenceError(ErrorCode.UNAVAILABLE, "gone")

    async with serving(fail=FakeModel(answers=failing), late=FakeModel(answers=late)) as served:
        early = await served.plain.post("/v2/models/fail/generate_stream", json={"code": "UNAVAILABLE"})
        later = await served.plain.post("/v2/models/late/generate_stream", json={"X": 1})
    assert (early.status_code, early.json()) == (503, {"error": "own text"})
    assert later.status_code == 200
    assert later.text.split("\n\n")[1] == 'data: {"error":"gone"}'


async def test_a_stream_that_breaks_is_logged_and_has_no_clean_end(caplog):
    async def broken(request):
        yield answer(request, is_final=False)
        raise ZeroDivisionError("secret")

    async with serving(broken=FakeModel(answers=broken)) as served:
        with pytest.raises(httpx.RemoteProtocolError):
            await served.plain.post("/v2/models/broken/generate_stream", json={"X": 1})
        assert (await served.infer()).status_code == 200
    assert "secret" in caplog.text


# --- connections ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["infer", "generate", "generate_stream"])
async def test_a_client_that_disconnects_cancels_its_request(path):
    gate = Gate()
    content = b'{"X": 1}' if path != "infer" else b'{"inputs": []}'
    async with serving(gated=FakeModel(answers=gate.answers)) as served:
        _, writer = await asyncio.open_connection("127.0.0.1", served.server.port)
        head = f"POST /v2/models/gated/{path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        await until(lambda: served.runtime.requests)
        writer.close()
        await until(lambda: served.runtime.cancelled)
        assert (await served.infer()).status_code == 200


async def test_pipelined_requests_are_answered_in_order():
    async with serving() as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.server.port)
        writer.write(b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\n\r\nGET /nowhere HTTP/1.1\r\nhost: x\r\n\r\n")
        text = b""
        while b'Not Found"}' not in text:
            text += await asyncio.wait_for(reader.read(4096), 10)
        writer.close()
    assert text.index(b"200 OK") < text.index(b"404 Not Found")


async def test_stopping_finishes_what_is_in_flight_and_closes_idle_connections():
    gate = Gate()
    async with serving(gated=FakeModel(answers=gate.answers)) as served:
        idle, idle_writer = await asyncio.open_connection("127.0.0.1", served.server.port)
        await served.infer()
        waiting = asyncio.create_task(served.infer("gated"))
        await until(lambda: len(served.runtime.requests) == 2)
        stopping = asyncio.create_task(served.server.stop(grace_s=30))
        assert await asyncio.wait_for(idle.read(), 10) == b""
        idle_writer.close()
        with pytest.raises(OSError, match="Connect call failed"):
            await asyncio.open_connection("127.0.0.1", served.server.port)
        assert not stopping.done()
        gate.opened.set()
        assert (await waiting).status_code == 200
        await stopping


async def test_stopping_does_not_wait_beyond_its_grace():
    gate = Gate()
    async with serving(gated=FakeModel(answers=gate.answers)) as served:
        waiting = asyncio.create_task(served.infer("gated"))
        await until(lambda: served.runtime.requests)
        await served.server.stop(grace_s=1)
        assert served.runtime.cancelled
        with contextlib.suppress(httpx.HTTPError):
            await waiting


async def test_a_port_in_use_is_said():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            start_http(HttpApp(FakeRuntime(models={}), max_input_bytes=1), host="127.0.0.1", port=port)


async def test_neighbours_of_an_empty_tensor_are_answered():
    async with serving(echo=FakeModel(answers=echo)) as served:
        told = await asyncio.gather(
            served.infer(), served.infer(inputs=[{"name": "X", "shape": [2, 0], "datatype": "FP32", "data": []}])
        )
    assert [answered.status_code for answered in told] == [200, 200]


class Textless:
    def __str__(self):
        raise ZeroDivisionError


@pytest.mark.parametrize(
    "text", [Textless(), None, "half \udcff", "x" * 1_000_000], ids=["object", "none", "half", "long"]
)
async def test_an_error_of_any_text_is_answered(text):
    async def fails(request):
        raise InferenceError(ErrorCode.UNAVAILABLE, text)
        yield

    async with serving(bad=FakeModel(answers=fails, inputs=(("X", "FP32", (-1,)),))) as served:
        told = [
            await served.infer("bad"),
            await served.plain.post("/v2/models/bad/generate", json={"X": 1}),
            await served.plain.post("/v2/models/bad/generate_stream", json={"X": 1}),
        ]
    assert [answered.status_code for answered in told] == [503] * 3
    assert all(0 < len(answered.json()["error"]) <= 4096 for answered in told)


async def test_an_error_of_no_known_code_is_a_fault_of_the_server(caplog):
    async def fails(request):
        raise InferenceError("what", "text")
        yield

    async with serving(bad=FakeModel(answers=fails)) as served:
        assert (await served.infer("bad")).status_code == 500
    assert "a request failed in the HTTP server" in caplog.text


async def test_the_reason_of_a_model_that_is_not_served_may_be_any_text(monkeypatch):
    status = ModelStatus(name="m", version="1", state=ModelState.UNAVAILABLE, reason="half \udcff" + "x" * 1_000_000)
    async with serving() as served:
        monkeypatch.setattr(served.runtime, "index", lambda **_: (status,))
        told = (await served.plain.post("/v2/repository/index")).json()
    assert told[0]["reason"].startswith("half \\udcff")
    assert len(told[0]["reason"]) <= 4096
