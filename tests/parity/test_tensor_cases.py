"""The public cases of tensors (TN-*) and of names that lead elsewhere (SC-05), whichever server is behind."""

import base64
import json
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote

import httpx
import numpy as np
import orjson
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from tests.kit.servers import TARGETS, Server, gateway_to

from .client_models import IDENTITY

LENGTH = "inference-header-content-length"
INFER = "/v2/models/c_same/infer"
UNKNOWN = ("Not Found", "Request for unknown model: '")
X_TO_Y = """
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""
NAMES = (
    *("..%2f..%2fetc", "%2e%2e%2fx", "%2fabs", "a%2f..%2f..%2fb", "con%00fig", "..%5c..%5cetc", "%2e%2e", "c" * 5000),
    *("..%2fc_same", "c_same%2f1", "c_same%2f..%2fc_same"),  # which exist, looked at from elsewhere
    *("%2e%2e/x", "/abs", "a/../../b", "../../../etc/passwd"),
)
TEXT = 2000  # as much of an error as is compared: the local runtime leaves out the middle of those over 4 KiB
FILES = ("../../x", "..", "/etc/x", "1/../../x", "1/a\u0000b", "")


@pytest.fixture(scope="module", params=TARGETS)
def server(
    request: pytest.FixtureRequest, serving: Callable[[str], Server], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A gateway before it, with the model that gives back what it gets."""
    behind = serving(request.param)
    config, source = IDENTITY
    behind.add_model("c_same", config=config.replace('"identity"', '"c_same"'), model=source)
    behind.add_model("c_needs", config=f'name: "c_needs" backend: "python" {X_TO_Y}', model=source)
    with tritonclient.grpc.InferenceServerClient(behind.grpc) as asked:
        asked.load_model("c_same")
        asked.load_model("c_needs")
        if request.param == "triton":
            yield serving("gateway")
        else:
            with gateway_to(behind, tmp_path_factory.mktemp("gateway")) as before:
                yield before
        asked.unload_model("c_same")
        asked.unload_model("c_needs")


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{server.http}", headers=server.headers, trust_env=False, timeout=60) as http:
        yield http


def tensor(datatype: str, shape: Any, data: Any, change: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    return {"inputs": [{"name": f"IN_{datatype}", "datatype": datatype, "shape": shape, "data": data, **change}]}


def works(http: httpx.Client) -> None:
    reply = http.post(INFER, json=tensor("FP32", [1, 2], [1, 2]))
    assert reply.json()["outputs"][0]["data"] == [1, 2]


def packed(datatype: str, shape: list[int], raw: bytes, *, is_binary: bool) -> tuple[bytes, dict[str, str]]:
    """A body in the binary form, and its header; `is_binary`: whether the answer shall be in it too."""
    one = {"name": f"IN_{datatype}", "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": len(raw)}}
    wanted = {"name": f"OUT_{datatype}", "parameters": {"binary_data": is_binary}}
    head = json.dumps({"inputs": [one], "outputs": [wanted]}).encode()
    return head + raw, {LENGTH: str(len(head))}


def texts(*values: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(value)) + value for value in values)


@pytest.mark.parametrize(
    "data",
    [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7], [[1, 2, 3], [4, 5]], [[[1, 2, 3], [4, 5, 6]]], [[1, 2], [3, 4], [5]], []],
    ids=["few", "many", "ragged", "deep", "ragged the other way", "empty"],
)
def test_data_that_its_shape_does_not_have(http: httpx.Client, data: Any):
    """TN-01."""
    reply = http.post(INFER, json=tensor("FP32", [2, 3], data))
    assert (reply.status_code, "IN_FP32" in reply.json()["error"]) == (400, True)
    works(http)


def test_nested_and_flat_are_the_same(http: httpx.Client):
    """TN-01."""
    flat, nested = (
        http.post(INFER, json=tensor("FP32", [2, 3], data)) for data in ([1, 2, 3, 4, 5, 6.5], [[1, 2, 3], [4, 5, 6.5]])
    )
    assert flat.status_code == nested.status_code == 200
    assert flat.content == nested.content
    assert flat.json()["outputs"][0]["data"] == [1, 2, 3, 4, 5, 6.5]


@pytest.mark.parametrize(
    ("shape", "data"),
    [([-1, 4], [1] * 4), ([-2], [1]), ([1, -1], [1]), ([4], [1] * 4), ([1, 1, 4], [1] * 4)],
    ids=["any", "negative", "any behind", "rank too small", "rank too large"],
)
def test_shapes_that_no_tensor_has(http: httpx.Client, shape: list[int], data: list[int]):
    """TN-02."""
    reply = http.post(INFER, json=tensor("FP32", shape, data))
    assert reply.status_code == 400, reply.content
    works(http)


@pytest.mark.parametrize("shape", [[2], [0], [1, 1], []], ids=str)
def test_a_fixed_dimension_that_is_another(http: httpx.Client, shape: list[int]):
    """TN-02: refused before the model, which is not run."""

    def executed() -> int:
        return http.get("/v2/models/c_needs/stats").json()["model_stats"][0]["execution_count"]

    before = executed()
    data = [1.0] * int(np.prod(shape))
    body = {"inputs": [{"name": "X", "datatype": "FP32", "shape": shape, "data": data}]}
    reply = http.post("/v2/models/c_needs/infer", json=body)
    assert (reply.status_code, "'X'" in reply.json()["error"]) == (400, True), reply.content
    assert executed() == before


@pytest.mark.parametrize(
    ("change", "named"),
    [
        *(({"shape": shape}, "IN_FP32") for shape in ("-1", [1.5, 1], [True, 1], None, {}, [[1, 1]], 1)),
        *(({"datatype": datatype}, "IN_FP32") for datatype in ("STRING", "fp32", None, 5, "FP33", "")),
        *(({"data": data}, "IN_FP32") for data in ({}, "x", None, [None], ["1"], [{}], [True])),
        ({"name": None}, "name"),
        ({"name": "IN_NOPE"}, "IN_NOPE"),
        ({"parameters": []}, "IN_FP32"),
    ],
    ids=str,
)
def test_members_of_another_type(http: httpx.Client, change: dict[str, Any], named: str):
    """TN-04."""
    reply = http.post(INFER, json=tensor("FP32", [1, 1], [1], change))
    assert (reply.status_code, named in reply.json()["error"]) == (400, True), reply.content
    works(http)


@pytest.mark.parametrize("member", ["name", "datatype", "shape", "data"])
def test_members_that_are_not_there(http: httpx.Client, member: str):
    """TN-04."""
    body = tensor("FP32", [1, 1], [1])
    del body["inputs"][0][member]
    reply = http.post(INFER, json=body)
    assert (reply.status_code, (member if member == "name" else "IN_FP32") in reply.json()["error"]) == (400, True)
    works(http)


@pytest.mark.parametrize("inputs", [{}, [], None, "x", [1], [[]]], ids=str)
def test_inputs_of_another_type(http: httpx.Client, inputs: Any):
    """TN-04."""
    reply = http.post("/v2/models/c_needs/infer", json={"inputs": inputs})
    assert (reply.status_code, "input" in reply.json()["error"]) == (400, True), reply.content
    works(http)


def test_parameters_that_nobody_knows_are_the_models(http: httpx.Client):
    """TN-04."""
    body = tensor("FP32", [1, 1], [1]) | {"parameters": {"own": "x", "number": 5}}
    assert http.post(INFER, json=body).json()["outputs"][0]["data"] == [1]
    assert http.post(INFER, json=body | {"parameters": {"own": {"deep": 1}}}).status_code == 400


def test_texts_are_the_same_in_every_form(http: httpx.Client):
    """TN-06."""
    values = ["", "a\u0000b", "日本🙂", "x" * 100_000]
    raw = texts(*(value.encode() for value in values))
    by_json = http.post(INFER, json=tensor("BYTES", [1, 4], values))
    assert by_json.json()["outputs"][0]["data"] == values
    content, headers = packed("BYTES", [1, 4], raw, is_binary=True)
    assert http.post(INFER, content=content, headers=headers).content.endswith(raw)
    content, headers = packed("BYTES", [1, 4], raw, is_binary=False)
    assert http.post(INFER, content=content, headers=headers).json()["outputs"][0]["data"] == values


def test_bytes_that_are_no_text(http: httpx.Client):
    """TN-06."""
    raw = texts(b"\xff\x00\xfe")
    content, headers = packed("BYTES", [1, 1], raw, is_binary=True)
    assert http.post(INFER, content=content, headers=headers).content.endswith(raw)
    content, headers = packed("BYTES", [1, 1], raw, is_binary=False)
    reply = http.post(INFER, content=content, headers=headers)
    assert (reply.status_code, "OUT_BYTES" in reply.json()["error"]) == (400, True)
    assert "\ufffd" not in reply.text


@pytest.mark.parametrize(
    "raw",
    [struct.pack("<I", 900) + b"abc", texts(b"abc") + b"more", texts(b"a", b"b"), b"\x01\x00", b"", b"\xff" * 8],
    ids=["beyond the end", "something behind", "two for one", "half a length", "nothing", "huge"],
)
def test_texts_that_are_badly_framed(http: httpx.Client, raw: bytes):
    """TN-06."""
    content, headers = packed("BYTES", [1, 1], raw, is_binary=True)
    reply = http.post(INFER, content=content, headers=headers)
    assert (reply.status_code, "IN_BYTES" in reply.json()["error"]) == (400, True)
    works(http)


@pytest.mark.parametrize("datatype", ["FP32", "FP64"])
def test_floats_that_are_no_numbers(http: httpx.Client, datatype: str):
    """TN-10: words in JSON, the same bits in binary."""
    raw = np.array([np.nan, np.inf, -np.inf, -0.0], f"<f{int(datatype[2:]) // 8}").tobytes()
    content, headers = packed(datatype, [1, 4], raw, is_binary=False)
    reply = http.post(INFER, content=content, headers=headers)
    assert reply.status_code == 200
    assert orjson.loads(reply.content)["outputs"][0]["data"] == ["NaN", "Infinity", "-Infinity", -0.0]
    content, headers = packed(datatype, [1, 4], raw, is_binary=True)
    assert http.post(INFER, content=content, headers=headers).content.endswith(raw)


def asked_about(http: httpx.Client, name: str) -> Iterator[tuple[str, httpx.Response]]:
    """The answer of each path that names a model; `name` goes out as it stands."""
    for method, path in (
        *(("GET", path) for path in ("", "/config", "/stats", "/versions/1", "/versions/..%2f1")),
        *(("POST", path) for path in ("/infer", "/generate", "/versions/1/infer")),
        *(("POST", path) for path in ("load", "unload")),
    ):
        full = (
            f"/v2/models/{name}{path}" if path.startswith("/") or not path else f"/v2/repository/models/{name}/{path}"
        )
        as_it_stands = {"target": full.encode()}  # a URL would have its dots taken out by the client
        json_body = {"inputs": []} if method == "POST" else None
        yield path, http.request(method, "/", json=json_body, extensions=as_it_stands)


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name[:24])
def test_names_that_lead_elsewhere_lead_nowhere(http: httpx.Client, server: Server, name: str):
    """SC-05: the same words, whether there is something or not; nothing is written outside."""
    before = sorted(server.repository.parent.rglob("*"))
    for path, reply in asked_about(http, name):
        assert reply.status_code == 404, (path, reply.content)
        told = reply.json()["error"]
        assert told.startswith(UNKNOWN)
        assert not any(word in told for word in ("No such file", "directory", str(server.repository)))
    assert sorted(server.repository.parent.rglob("*")) == before
    works(http)


@pytest.fixture(scope="module")
def own(serving: Callable[[str], Server]) -> Server:
    """The local runtime itself, with no gateway before it. Beside its repository lies a model that is not in it."""
    local = serving("local")
    local.add_model("../c_beside", config=f'name: "c_beside" backend: "python" {X_TO_Y}', model=IDENTITY[1])
    return local


@pytest.mark.parametrize("name", [*NAMES, "..%2fc_beside", "..%2fc_absent"], ids=lambda name: name[:24])
def test_the_local_runtimes_own_ports_lead_nowhere(own: Server, name: str):
    """SC-05: Triton's words about what is not there, whether there is something or not, by HTTP and by gRPC.

    To unload what is not there is no fault of Triton's.
    """
    plain = unquote(name)
    unknown = f"Request for unknown model: '{plain}' is not found"[:TEXT]
    not_loaded = f"failed to load '{plain}', failed to poll from model repository"[:TEXT]
    before = sorted(own.repository.parent.rglob("*"))
    with httpx.Client(base_url=f"http://{own.http}", trust_env=False, timeout=60) as http:
        for path, reply in asked_about(http, name):
            told = (reply.status_code, reply.json()["error"][:TEXT] if reply.content else "")
            usual = {"load": (500, not_loaded), "unload": (200, "")}.get(path, (404, unknown))
            assert told in (usual, (404, "Not Found")), path
    with tritonclient.grpc.InferenceServerClient(own.grpc) as asked:
        asked.unload_model(plain)
        for call, words in ((asked.load_model, not_loaded), (asked.get_model_config, unknown)):
            with pytest.raises(InferenceServerException) as refused:
                call(plain)
            assert refused.value.message()[:TEXT] == words
        assert not any(model.name == "c_beside" for model in asked.get_model_repository_index().models)
    assert sorted(own.repository.parent.rglob("*")) == before


@pytest.mark.parametrize("file", FILES)
def test_files_of_a_load_by_the_local_runtimes_own_ports(own: Server, file: str):
    """SC-05."""
    before = sorted(own.repository.parent.rglob("*"))
    config, words = json.dumps({"name": "c_new", "backend": "python"}), "failed to load 'c_new', unsafe file path "
    parameters = {"config": config, f"file:{file}": "eA=="}
    reply = httpx.post(f"http://{own.http}/v2/repository/models/c_new/load", json={"parameters": parameters})
    assert (reply.status_code, reply.json()["error"].startswith(words)) == (400, True), reply.content
    with tritonclient.grpc.InferenceServerClient(own.grpc) as asked:
        with pytest.raises(InferenceServerException) as refused:
            asked.load_model("c_new", config=config, files={f"file:{file}": b"x"})
        assert refused.value.message().startswith(words)
    assert sorted(own.repository.parent.rglob("*")) == before
    assert not Path("/etc/x").exists()


@pytest.mark.parametrize("file", FILES)
def test_files_of_a_load_stay_in_the_models_folder(http: httpx.Client, server: Server, file: str):
    """SC-05."""
    before = sorted(server.repository.parent.rglob("*"))
    parameters = {"config": json.dumps({"name": "c_new", "backend": "python"}), f"file:{file}": "eA=="}
    reply = http.post("/v2/repository/models/c_new/load", json={"parameters": parameters})
    assert (reply.status_code, "file of a load" in reply.json()["error"]) == (400, True), reply.content
    assert sorted(server.repository.parent.rglob("*")) == before
    assert not Path("/etc/x").exists()


def test_a_configuration_that_points_outside_is_no_model(http: httpx.Client, server: Server):
    """SC-05: another's name, a step elsewhere."""
    step = (
        'model_name: "../../etc" model_version: -1 input_map { key: "X" value: "X" } output_map { key: "Y" value: "Y" }'
    )
    configs = {
        "c_other": f'name: "../c_same" backend: "python" {X_TO_Y}',
        "c_step": f'name: "c_step" platform: "ensemble" {X_TO_Y} ensemble_scheduling {{ step [ {{ {step} }} ] }}',
    }
    for name, config in configs.items():
        server.add_model(name, config=config, model=IDENTITY[1])
        reply = http.post(f"/v2/repository/models/{name}/load")
        assert reply.status_code in (400, 500), reply.content  # the server's own status: 500 where it cannot read it
        assert str(server.repository.parent) not in reply.text
        assert http.get(f"/v2/models/{name}/ready").status_code == 503
    works(http)


def test_a_link_that_the_operator_made_is_followed_and_never_written_through(
    http: httpx.Client, server: Server, tmp_path: Path
):
    """SC-05: a version that is a link out of the repository; the files of a load go elsewhere than where it leads."""
    (tmp_path / "model.py").write_text(IDENTITY[1])
    config = IDENTITY[0].replace('"identity"', '"c_linked"')
    folder = server.add_model("c_linked", config=config, model=IDENTITY[1])
    (folder / "1" / "model.py").unlink()
    (folder / "1").rmdir()
    (folder / "1").symlink_to(tmp_path)
    assert http.post("/v2/repository/models/c_linked/load").status_code == 200
    reply = http.post("/v2/models/c_linked/infer", json=tensor("FP32", [1, 1], [5]))
    assert reply.json()["outputs"][0]["data"] == [5]
    told = [http.get(f"/v2/models/c_linked{path}").text for path in ("", "/config", "/stats")]
    assert not any(str(tmp_path) in text for text in told)
    sent = base64.b64encode(f"{IDENTITY[1]}\n# sent".encode()).decode()
    parameters = {"config": http.get("/v2/models/c_linked/config").text, "file:1/model.py": sent}
    loaded = http.post("/v2/repository/models/c_linked/load", json={"parameters": parameters})
    assert loaded.status_code == 200, loaded.content
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["model.py"]
    assert (tmp_path / "model.py").read_text() == IDENTITY[1]
    assert http.post("/v2/repository/models/c_linked/unload").status_code == 200
