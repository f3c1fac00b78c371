"""Real Triton in callers' traces: its own spans, sent by its own exporter, hang below the gateway's attempts.

Triton 2.51 does not find the context of about one gRPC request in ten, nor of NVIDIA's own client: so many are sent.
"""

import asyncio
import urllib.request
from contextlib import asynccontextmanager

import httpx
import yaml
from prometheus_client import CollectorRegistry

from gateway.settings import load_settings
from gateway.wiring import data_plane
from tests.kit import servers
from tests.kit.otlp import receiving
from tests.kit.served import served
from tests.kit.wait import until

KEY = "gw-test-traces"
COUNT = 20
TRITONS = ("InferRequest", "echo", "compute")
CONFIG = """
name: "echo"
backend: "python"
max_batch_size: 0
input [{ name: "X", data_type: TYPE_FP32, dims: [ -1 ] }]
output [{ name: "Y", data_type: TYPE_FP32, dims: [ -1 ] }]
instance_group [{ kind: KIND_CPU }]
"""
MODEL = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        echoed = [pb_utils.Tensor("Y", pb_utils.get_input_tensor_by_name(one, "X").as_numpy()) for one in requests]
        return [pb_utils.InferenceResponse([one]) for one in echoed]
"""
INPUT = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1], "data": [1.0]}]}


def options(receiver):
    """Of 1,000,000 requests one is recorded, and all that come in a trace."""
    told = ("mode=opentelemetry", "level=TIMESTAMPS", "rate=1000000")
    sent = (f"opentelemetry,url={receiver.url}/v1/traces", "opentelemetry,bsp_schedule_delay=50")
    return [f"--trace-config={one}" for one in (*told, *sent)]


@asynccontextmanager
async def gateway(folder, *, triton, receiver):
    """A client of a data plane before that Triton, which sends its spans to that receiver."""
    document = {
        "backends": {"triton": {"kind": "triton", "url": triton.grpc}},
        "tasks": {"tensor": {"contract": "tensor"}},
        "rules": [{"name": "all", "match": {"task": "tensor"}, "split": [{"backend": "triton", "model": "*"}]}],
        "keys": [{"id": "t", "tenant": "t", "key_env": "TRACED_KEY"}],
        "telemetry": {"access_log": False, "traces": {"endpoint": receiver.url}},
    }
    path = folder / "gateway.yaml"
    path.write_text(yaml.safe_dump(document))
    plane = data_plane(load_settings(path), CollectorRegistry(), is_draining=lambda: False)
    async with plane as app, served(app) as url:
        headers = {"authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(base_url=url, headers=headers, trust_env=False) as http:
            yield http


async def test_tritons_spans_hang_below_the_attempt_of_sampled_requests_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACED_KEY", KEY)
    with receiving() as receiver, servers.running("triton", tmp_path, *options(receiver)) as triton:
        triton.add_model("echo", config=CONFIG, model=MODEL)
        load = urllib.request.Request(f"http://{triton.http}/v2/repository/models/echo/load", method="POST", data=b"")
        await asyncio.to_thread(urllib.request.urlopen, load)
        async with gateway(tmp_path, triton=triton, receiver=receiver) as http:
            for flags in ("00", "01"):
                for number in range(COUNT):
                    headers = {"traceparent": f"00-{flags}{number + 1:030x}-b7ad6b7169203331-{flags}"}
                    answer = await http.post("/v2/models/echo/infer", json=INPUT, headers=headers)
                    assert answer.status_code == 200, answer.text

        def attempts():
            return {one.span_id: one for one in receiver.spans if one.name == "infer echo"}

        def roots():
            return [one for one in receiver.spans if one.name == "InferRequest" and one.parent_id in attempts()]

        await until(lambda: len(attempts()) == COUNT and len(roots()) >= COUNT // 2)
    spans = receiver.spans  # with what Triton had left when it stopped
    root, parent = roots()[0], attempts()[roots()[0].parent_id]
    assert root.trace_id == parent.trace_id
    (request,) = (one for one in spans if one.name == "echo" and one.parent_id == root.span_id)
    assert any(one.name == "compute" and one.parent_id == request.span_id for one in spans)
    told = [one for one in spans if one.name in TRITONS]
    assert {one.trace_id[:2] for one in told} == {"01"}  # nothing of those that are not sampled
