"""A real Triton that speaks TLS and asks for certificates: whatever the gateway asks of it, each checks who it is."""

from contextlib import AsyncExitStack

import httpx
import numpy as np
import pytest

from gateway.backends.triton.backend import TritonBackend
from gateway.core.errors import BackendError, FaultKind
from gateway.core.types import BackendCall, Place, Tensor, TensorPayload
from gateway.settings import TlsSettings, load_settings
from gateway.wiring_control import _model_servers
from tests.kit import servers
from tests.kit.serving import KEY, serving
from tests.kit.tls import Authority

HOST = "localhost"
MODEL = "twice"
CONFIG = """\
name: "twice"
backend: "python"
max_batch_size: 0
input [{ name: "X", data_type: TYPE_FP32, dims: [ -1 ] }]
output [{ name: "Y", data_type: TYPE_FP32, dims: [ -1 ] }]
instance_group [{ kind: KIND_CPU }]
"""
SOURCE = """\
import triton_python_backend_utils as pb


class TritonPythonModel:
    def execute(self, requests):
        found = [pb.get_input_tensor_by_name(one, "X").as_numpy() for one in requests]
        return [pb.InferenceResponse([pb.Tensor("Y", x * 2)]) for x in found]
"""
LONG_US = 30_000_000
PLACE = Place(backend="triton", model=MODEL)


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def triton(tmp_path_factory, authority):
    """One whose certificate is for HOST, and that takes nobody without one of its authority."""
    own = authority.sign(HOST)
    options = {
        "--grpc-use-ssl": 1,
        "--grpc-use-ssl-mutual": 1,
        "--grpc-server-cert": own.cert,
        "--grpc-server-key": own.key,
        "--grpc-root-cert": authority.cert,
    }
    given = [f"{name}={value}" for name, value in options.items()]
    with servers.running("triton", tmp_path_factory.mktemp("triton"), *given) as server:
        server.add_model(MODEL, config=CONFIG, model=SOURCE)
        yield server


@pytest.fixture
def good(authority):
    own = authority.sign("gateway")
    return {"ca_file": authority.cert, "cert_file": own.cert, "key_file": own.key}


async def opened(triton, tls, *, host=HOST, compression="none"):
    port = triton.grpc.rpartition(":")[2]
    settings = TlsSettings(**tls) if tls is not None else None
    return await TritonBackend.open("triton", f"{host}:{port}", compression=compression, tls=settings)


def call(values):
    tensor = Tensor(name="X", datatype="FP32", shape=values.shape, data=values.tobytes())
    return BackendCall(request_id="r", model=MODEL, version="", payload=TensorPayload(inputs=(tensor,), outputs=("Y",)))


@pytest.mark.parametrize("compression", ["none", "gzip"])
async def test_models_are_loaded_described_probed_asked_and_unloaded_over_tls(triton, good, compression):
    backend = await opened(triton, good, compression=compression)
    try:
        await backend.load(MODEL, replica="")
        await backend.probe(PLACE)
        assert (await backend.facts(PLACE)).name == MODEL
        assert (await backend.server_metadata(""))["name"] == "triton"
        for size in (3, 300_000):  # in one write and one read, and in many
            values = np.arange(size, dtype=np.float32)
            (answer,) = [one async for one in backend.infer(call(values), timeout_us=LONG_US)]
            assert np.array_equal(np.frombuffer(answer.outputs[0].data, np.float32), values * 2)
        await backend.figures()
        await backend.unload(MODEL, replica="")
    finally:
        await backend.close()


WRONG = {
    "another authority": lambda good, other: {**good, "ca_file": other.cert},
    "the system's authorities": lambda good, _: {name: good[name] for name in ("cert_file", "key_file")},
    "another name": lambda good, _: {**good, "server_name": "another.host"},
    "no certificate of its own": lambda good, _: {"ca_file": good["ca_file"]},
    "no tls": lambda _, __: None,
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_server_or_a_gateway_that_is_not_who_it_should_be_is_refused(triton, good, tmp_path, wrong):
    tls = WRONG[wrong](good, Authority(tmp_path, "other"))
    backend = await opened(triton, tls)
    try:
        for ask in (lambda: backend.probe(PLACE), lambda: backend.load(MODEL, replica=""), backend.figures):
            with pytest.raises(BackendError) as refused:
                await ask()
            assert refused.value.fault.kind is FaultKind.UNAVAILABLE
    finally:
        await backend.close()


async def test_a_certificate_is_of_a_name_and_not_of_an_address(triton, good):
    backend = await opened(triton, good, host="127.0.0.1")
    try:
        with pytest.raises(BackendError, match="IP address mismatch"):
            await backend.probe(PLACE)
    finally:
        await backend.close()
    backend = await opened(triton, {**good, "server_name": HOST}, host="127.0.0.1")
    try:
        await backend.server_metadata("")
    finally:
        await backend.close()


async def test_both_planes_of_a_configuration_with_tls(triton, good, tmp_path):
    port = triton.grpc.rpartition(":")[2]
    tls = {name: str(path) for name, path in good.items()}
    sections = {
        "backends": {"triton": {"kind": "triton", "url": f"{HOST}:{port}", "tls": tls}},
        "tasks": {"tensor": {"contract": "tensor"}},
        "rules": [{"name": "tensors", "match": {"task": "tensor"}, "split": [{"backend": "triton", "model": "*"}]}],
        "keys": [{"id": "test", "tenant": "test", "key_env": "SERVING_KEY", "admin": True}],
    }
    async with (
        serving(tmp_path, "", **sections) as gateway,
        httpx.AsyncClient(base_url=gateway.url, trust_env=False, timeout=30) as http,
    ):
        http.headers["authorization"] = f"Bearer {KEY}"
        assert (await http.post(f"/v2/repository/models/{MODEL}/load")).status_code == 200
        inputs = [{"name": "X", "shape": [2], "datatype": "FP32", "data": [1, 2]}]
        answer = await http.post(f"/v2/models/{MODEL}/infer", json={"inputs": inputs})
        assert (answer.status_code, answer.json()["outputs"][0]["data"]) == (200, [2, 4])
    async with AsyncExitStack() as stack:
        servers_ = await _model_servers(load_settings(gateway.config), stack)
        assert [one["name"] for one in await servers_.reachable["triton"].index("")] == [MODEL]
