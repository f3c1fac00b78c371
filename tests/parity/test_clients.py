"""The official clients, unmodified, against both servers: each test by HTTP and gRPC, sync and asyncio.

The gateway before the real Triton is a third one, by HTTP alone.
"""

import asyncio
import inspect
import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from tritonclient.http import InferenceServerClientPlugin
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

from tests.kit.servers import TARGETS, Server

from .client_models import DATATYPES, MODELS

CLIENTS: dict[str, ModuleType] = {
    "http": tritonclient.http,
    "http aio": tritonclient.http.aio,
    "grpc": tritonclient.grpc,
    "grpc aio": tritonclient.grpc.aio,
}
BY_HTTP = pytest.mark.parametrize("client", ["http", "http aio"], indirect=True)
BY_GRPC = pytest.mark.parametrize("client", ["grpc", "grpc aio"], indirect=True)
NUMBERS = itertools.count(1)  # sequence ids, never the same twice

VALUES: dict[str, list[Any]] = {
    "BOOL": [[True, False, True]],
    **{
        name: [[np.iinfo(name.lower()).min, 0, 1, np.iinfo(name.lower()).max]]
        for name in DATATYPES
        if name.startswith(("INT", "UINT"))
    },
    **{name: [[0.5, -0.0, np.nan, np.inf, -np.inf, 1.0]] for name in ("FP32", "FP64")},
    # TN-07: rounded, the largest finite and the smallest number of each as well.
    "FP16": [[0.5, -0.0, np.nan, np.inf, -np.inf, 0.01, 65504.0, 2.0**-24]],
    "BF16": [[0.5, -0.0, np.nan, np.inf, -np.inf, 0.01, 2.0**128 - 2.0**120, 2.0**-133]],
    "BYTES": [[b"", b"a\x00b", "Ångström €".encode(), b"\xff\xfe" * 50]],
}


@pytest.fixture(scope="module", params=(*TARGETS, "gateway"))
def server(request: pytest.FixtureRequest, serving: Callable[[str], Server]) -> Iterator[Server]:
    """A server with all models loaded."""
    running = serving(request.param)
    probe = Path(__file__).with_name("model.py").read_text()
    with tritonclient.grpc.InferenceServerClient(running.grpc) as client:
        for name, (config, source) in MODELS.items():
            running.add_model(name, config=config, model=source or probe)
            client.load_model(name)
        yield running
        for name in MODELS:
            client.unload_model(name)


class Bearer(InferenceServerClientPlugin):
    """Adds the key to each request: the clients' own way of doing so."""

    def __init__(self, key: str) -> None:
        self._key = key

    def __call__(self, request: Any) -> None:
        request.headers["authorization"] = f"Bearer {self._key}"


class Client:
    """One of the four clients; what it returns is awaited where it must be, gRPC messages become dictionaries."""

    def __init__(self, kind: str, server: Server) -> None:
        self.kind = kind
        self.is_http = kind.startswith("http")
        self._module = CLIENTS[kind]
        self._client = self._module.InferenceServerClient(server.http if self.is_http else server.grpc)
        if server.key:
            self._client.register_plugin(Bearer(server.key))

    async def ask(self, method: str, *args: Any, **options: Any) -> Any:
        answer = getattr(self._client, method)(*args, **options)
        return await answer if inspect.isawaitable(answer) else answer

    async def told(self, method: str, *args: Any) -> Any:
        """The same for what describes the server: plain JSON from each client."""
        return await self.ask(method, *args, **({} if self.is_http else {"as_json": True}))

    async def infer(self, model: str, arrays: dict[str, np.ndarray], *, is_binary: bool = True, **options: Any) -> Any:
        inputs = []
        for name, array in arrays.items():
            datatype = name.removeprefix("IN_") if name.startswith("IN_") else "INT32"
            inputs.append(self._module.InferInput(name, list(array.shape), datatype))
            inputs[-1].set_data_from_numpy(array, **({"binary_data": is_binary} if self.is_http else {}))
        if model == "identity" and "outputs" not in options:
            wanted = [name.replace("IN_", "OUT_") for name in arrays]
            form = {"binary_data": is_binary} if self.is_http else {}
            options["outputs"] = [self._module.InferRequestedOutput(name, **form) for name in wanted]
        return await self.ask("infer", model, inputs, **options)

    async def echo(self, datatype: str, array: np.ndarray, *, is_binary: bool = True) -> np.ndarray:
        result = await self.infer("identity", {f"IN_{datatype}": array}, is_binary=is_binary)
        return result.as_numpy(f"OUT_{datatype}")


@pytest.fixture(params=CLIENTS)
async def client(request: pytest.FixtureRequest, server: Server) -> AsyncIterator[Client]:
    made = Client(request.param, server)
    yield made
    await made.ask("close")


def array_of(datatype: str, values: Any) -> np.ndarray:
    return np.array(values, ml_dtypes.bfloat16 if datatype == "BF16" else triton_to_np_dtype(datatype))


def assert_same(got: np.ndarray, sent: np.ndarray) -> None:
    """Same type, shape and values; NaN equals NaN, and 0 is not -0."""
    assert got.dtype == sent.dtype
    assert got.shape == sent.shape
    if sent.dtype == np.object_:
        assert got.tolist() == sent.tolist()
    else:
        assert got.tobytes() == sent.tobytes()


@pytest.mark.parametrize("datatype", DATATYPES)
async def test_every_datatype_comes_back_as_it_was_sent(client: Client, datatype: str):  # TN-07
    sent = array_of(datatype, VALUES[datatype])
    assert_same(await client.echo(datatype, sent), sent)


@pytest.mark.parametrize("shape", [(1, 0), (0, 3), (0, 0)])
@pytest.mark.parametrize("datatype", ["INT32", "BOOL", "BF16", "FP64", "BYTES"])
async def test_empty_tensors_come_back_with_their_shape(client: Client, datatype: str, shape: tuple[int, int]):
    sent = np.empty(shape, array_of(datatype, []).dtype)
    assert_same(await client.echo(datatype, sent), sent)


@BY_HTTP
@pytest.mark.parametrize("datatype", [name for name in DATATYPES if name not in {"FP16", "BF16"}])
async def test_every_datatype_comes_back_by_json(client: Client, datatype: str):
    # JSON has text in place of bytes.
    sent = array_of(datatype, VALUES[datatype] if datatype != "BYTES" else [["", "plain", "Ångström €"]])
    got = await client.echo(datatype, sent, is_binary=False)
    assert got.shape == sent.shape
    if datatype.startswith("FP"):
        np.testing.assert_array_equal(got, sent)
        assert (np.signbit(got) == np.signbit(sent))[np.isfinite(sent)].all()
    else:
        assert got.tolist() == sent.tolist()


@BY_HTTP
async def test_empty_tensors_come_back_by_json(client: Client):
    sent = np.empty((1, 0), np.float32)
    got = await client.echo("FP32", sent, is_binary=False)
    assert got.shape == (1, 0)


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_precision_by_json_is_refused(server: Server, datatype: str):  # TN-07
    body = {"inputs": [{"name": f"IN_{datatype}", "shape": [1, 1], "datatype": datatype, "data": [1.0]}]}
    url = f"http://{server.http}/v2/models/identity/infer"
    reply = httpx.post(url, json=body, headers=server.headers, trust_env=False)
    assert reply.status_code == 400
    assert f"receiving {datatype} data via JSON is not supported" in reply.json()["error"]


async def test_several_tensors_and_the_request_id_come_back(client: Client):
    arrays = {f"IN_{name}": array_of(name, VALUES[name]) for name in DATATYPES}
    result = await client.infer("identity", arrays, request_id="mine")
    for name, sent in arrays.items():
        assert_same(result.as_numpy(name.replace("IN_", "OUT_")), sent)
    told = result.get_response() if client.is_http else result.get_response(as_json=True)
    assert told["id"] == "mine"
    assert told["model_name"] == "identity"
    assert told["model_version"] == "1"


async def test_an_output_that_the_model_leaves_out_is_left_out_of_the_answer(client: Client):
    result = await client.infer("identity", {"IN_INT32": array_of("INT32", [[5]])}, outputs=None)
    assert result.as_numpy("OUT_INT32").tolist() == [[5]]
    assert result.as_numpy("OUT_INT64") is None


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
async def test_compressed_bodies_come_back(client: Client, algorithm: str):
    sent = array_of("FP32", [list(range(1000))])
    options = {"request_compression_algorithm": algorithm, "response_compression_algorithm": algorithm}
    options = options if client.is_http else {"compression_algorithm": algorithm}
    result = await client.infer("identity", {"IN_FP32": sent}, **options)
    assert_same(result.as_numpy("OUT_FP32"), sent)


async def test_the_server_describes_itself_and_its_models(client: Client):
    assert await client.ask("is_server_live")
    assert await client.ask("is_server_ready")
    assert await client.ask("is_model_ready", "identity")
    assert not await client.ask("is_model_ready", "nope")
    assert (await client.told("get_server_metadata"))["name"]
    metadata = await client.told("get_model_metadata", "total")
    assert metadata["name"] == "total"
    assert metadata["versions"] == ["1"]
    [number] = metadata["inputs"]
    assert (number["name"], number["datatype"], [int(size) for size in number["shape"]]) == ("NUMBER", "INT32", [-1, 1])
    config = await client.told("get_model_config", "total")
    config = config if client.is_http else config["config"]
    assert config["name"] == "total"
    assert config["max_batch_size"] == 4
    assert int(config["sequence_batching"]["max_sequence_idle_microseconds"]) == 5_000_000


async def test_the_index_lists_every_model_with_its_state(client: Client):
    index = await client.told("get_model_repository_index")
    index = index if client.is_http else index["models"]
    states = {entry["name"]: entry.get("state") for entry in index}
    assert states.items() >= dict.fromkeys(MODELS, "READY").items()


@pytest.mark.parametrize("is_text", [False, True], ids=["number", "text"])
async def test_two_sequences_keep_their_own_state(client: Client, is_text: bool):
    first, second = (f"stream-{next(NUMBERS)}" if is_text else next(NUMBERS) for _ in range(2))
    totals = []
    for step, last in ((1, False), (10, False), (100, True)):
        for sequence, sign in ((first, 1), (second, -1)):
            result = await client.infer(
                "total",
                {"NUMBER": np.array([[sign * step]], np.int32)},
                sequence_id=sequence,
                sequence_start=step == 1,
                sequence_end=last,
            )
            totals.append(result.as_numpy("TOTAL").item())
    assert totals == [1, -1, 11, -11, 111, -111]


async def test_statistics_count_what_was_done(client: Client):
    async def counted() -> tuple[int, int]:
        [stats] = (await client.told("get_inference_statistics", "identity"))["model_stats"]
        return int(stats.get("inference_count", 0)), int(stats["inference_stats"]["success"].get("count", 0))

    before = await counted()
    for _ in range(3):
        await client.echo("FP32", array_of("FP32", [[1.0]]))
    async with asyncio.timeout(5):  # an answer may be here a little before it is counted
        while (now := await counted()) < (before[0] + 3, before[1] + 3):  # noqa: ASYNC110 - only the server knows
            await asyncio.sleep(0.01)
    assert now == (before[0] + 3, before[1] + 3)


async def test_a_model_is_unloaded_and_loaded_again(client: Client):
    await client.ask("unload_model", "total")
    for _ in range(100):  # an unload is asked for, then done
        if not await client.ask("is_model_ready", "total"):
            break
        await asyncio.sleep(0.02)
    with pytest.raises(InferenceServerException, match="Request for unknown model: 'total' has no available versions"):
        await client.infer("total", {"NUMBER": np.array([[1]], np.int32)}, sequence_id=1, sequence_start=True)
    await client.ask("load_model", "total")
    assert await client.ask("is_model_ready", "total")


async def test_a_model_is_loaded_with_another_configuration(client: Client):
    described = await client.told("get_model_config", "slow")
    config = described if client.is_http else described["config"]
    await client.ask("load_model", "slow", config=json.dumps(_plain(config) | {"max_batch_size": 3}))
    described = await client.told("get_model_config", "slow")
    assert (described if client.is_http else described["config"])["max_batch_size"] == 3
    await client.ask("load_model", "slow", config=json.dumps(_plain(config)))


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """Without the batch sizes that the server filled in: a preferred size may not be above another maximum."""
    batching = {key: value for key, value in config["dynamic_batching"].items() if key != "preferred_batch_size"}
    return config | {"dynamic_batching": batching}


@pytest.mark.parametrize(
    ("model", "arrays", "code", "status", "text"),
    [
        ("nope", {}, "NOT_FOUND", "404", "Request for unknown model: 'nope' is not found"),
        (
            "identity",
            {"NONE": np.zeros((1, 1), np.int32)},
            "INVALID_ARGUMENT",
            "400",
            "unexpected inference input 'NONE' for model 'identity'",
        ),
    ],
    ids=["unknown model", "unknown input"],
)
async def test_a_refusal_is_the_clients_own_exception(
    client: Client, model: str, arrays: dict[str, np.ndarray], code: str, status: str, text: str
):
    with pytest.raises(InferenceServerException) as caught:
        await client.infer(model, arrays, outputs=None)
    assert caught.value.message().endswith(text)
    assert caught.value.status() == (status if client.is_http else f"StatusCode.{code}")
