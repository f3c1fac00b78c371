"""`gateway load` against the real ones: Triton and the local runtime by HTTP and gRPC, and a gateway before them."""

import asyncio
import json
import subprocess

import pytest

from gateway.tuning.report import parse_report
from tests.kit.servers import TARGETS, gateway_to, running
from tests.kit.serving import KEY, serving
from tests.kit.stack import gateway
from tests.kit.upstream import DONE, Upstream, delta, event, sse_head, usage_chunk

CONFIG = """
backend: "python"
max_batch_size: 8
input [ { name: "X" data_type: TYPE_INT32 dims: [ 2 ] }, { name: "T" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_INT32 dims: [ 2 ] }, { name: "U" data_type: TYPE_STRING dims: [ 1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
dynamic_batching { }
"""
MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([
                pb_utils.Tensor("Y", pb_utils.get_input_tensor_by_name(one, "X").as_numpy() + 1),
                pb_utils.Tensor("U", pb_utils.get_input_tensor_by_name(one, "T").as_numpy()),
            ])
            for one in requests
        ]
"""
TIMES = ("--rate", "40", "--duration", "1s", "--warmup", "0s", "--json")


@pytest.fixture(scope="module", params=TARGETS)
def server(request, tmp_path_factory):
    with running(request.param, tmp_path_factory.mktemp(request.param)) as one:
        one.add_model("plus", config=CONFIG, model=MODEL)
        subprocess.run(
            ["curl", "-sf", "-X", "POST", f"http://{one.http}/v2/repository/models/plus/load"], check=True, timeout=60
        )
        yield one


def load(*options):
    done = gateway("load", *options, *TIMES)
    assert done.returncode == 0, done.stderr
    report = parse_report(json.loads(done.stdout))
    assert report.whole.codes == {"ok": report.whole.sent}, report.notes
    assert report.whole.sent > 10
    return report


def test_a_model_by_http(server):
    report = load("--url", f"http://{server.http}", "--tensor", "plus", "--rows", "3")
    assert report.whole.rows_per_s == 3 * report.whole.qps


def test_a_model_by_grpc_with_what_the_server_counted(server):
    report = load("--triton", server.grpc, "--tensor", "plus", "--rows", "2", "--input", '{"X": [3, 4]}')
    (counted,) = report.servers
    assert (counted.backend, counted.model) == (server.grpc, "plus")
    assert sum(rows * count for rows, count in counted.batch_sizes.items()) == 2 * report.whole.sent
    assert counted.executions == sum(counted.batch_sizes.values())
    assert counted.compute_ms > 0


def test_a_model_and_a_task_through_a_gateway(server, tmp_path):
    row = {"name": "X", "datatype": "INT32", "shape": [1, 2], "data": [1, 2]}
    text = {"name": "T", "datatype": "BYTES", "shape": [1, 1], "data": ["a"]}
    with gateway_to(server, tmp_path) as before:
        whom = ("--url", f"http://{before.http}", "--key", before.key)
        load(*whom, "--tensor", "plus")
        load(*whom, "--task", "tensor", "--input", json.dumps({"model": "plus", "inputs": [row, text]}))


async def test_a_chat_through_a_gateway(tmp_path):
    words = [event(delta(word)) for word in "abc"]
    async with (
        Upstream([sse_head(), *words, event(usage_chunk(completion=3)) + DONE]) as up,
        serving(tmp_path, up.base_url) as one,
    ):
        report = await asyncio.to_thread(
            load, "--url", one.url, "--ops-url", one.ops_url, "--key", KEY, "--chat", "hello"
        )
    assert report.whole.tokens_per_s == pytest.approx(3 * report.whole.qps)
    assert report.whole.first_token.p50 <= report.whole.latency.p50
