"""The application for Ray Serve without a cluster: what a replica answers, what a proxy is given, the shipped file."""

import warnings
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
import yaml
from tritonclient.grpc import service_pb2 as pb

from local_runtime.errors import ModelLoadError
from local_runtime.protocol.oip_sums import summed
from tests.kit.ray_cluster import FILE, ROOT

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own, while it is imported
    from ray.serve.schema import ServeDeploySchema

    from local_runtime import ray_serve

PLAIN = """
backend: "python"
max_batch_size: 8
input [ { name: "X" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
STATEFUL = PLAIN + "sequence_batching { }"
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 8
input [ { name: "X" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] } ]
ensemble_scheduling { step [ {
  model_name: "%s" model_version: -1 input_map { key: "X" value: "X" } output_map { key: "Y" value: "Y" }
} ] }
"""


class Context:
    """What Serve gives a method to set the call's status with."""

    def __init__(self):
        self.code, self.text = None, ""

    def set_code(self, code):
        self.code = code

    def set_details(self, text):
        self.text = text


@pytest.fixture
async def replica(repository, write_python, monkeypatch):
    """A replica over a model without state, one with it, and ensembles of each."""
    write_python("plain", config=PLAIN)
    write_python("stateful", config=STATEFUL)
    for name, part in (("of_plain", "plain"), ("of_stateful", "stateful"), ("of_both", "of_stateful")):
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(ENSEMBLE % part)
    monkeypatch.setenv("LOCAL_RUNTIME_REPOSITORY", str(repository))
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    runs_on = SimpleNamespace(get_assigned_resources=lambda: {"CPU": 1.0})
    monkeypatch.setattr(ray_serve.ray, "get_runtime_context", lambda: runs_on)
    made = ray_serve.Replica.__new__(ray_serve.Replica)
    await made.__init__()
    yield made
    await made.close()


async def asked(replica, name, request):
    """The answer of the method that Serve calls, or the status that it is refused with."""
    context = Context()
    try:
        return await getattr(replica, name)(request.SerializeToString(), grpc_context=context)
    except ray_serve.Refused:
        return context.code, context.text


def infer(model):
    request = pb.ModelInferRequest(model_name=model, id="7")
    request.inputs.add(name="X", datatype="FP32", shape=[1, 2])
    request.raw_input_contents.append(np.array([3, 4], np.float32).tobytes())
    return request


@pytest.mark.parametrize("model", ["plain", "of_plain"])
async def test_a_model_without_state_answers(replica, model):
    answer = await asked(replica, "ModelInfer", infer(model))
    assert (answer.id, np.frombuffer(answer.raw_output_contents[0], np.float32).tolist()) == ("7", [6, 8])
    assert (await asked(replica, "ModelReady", pb.ModelReadyRequest(name=model))).ready


@pytest.mark.parametrize("model", ["stateful", "of_stateful", "of_both"])
async def test_a_model_with_state_is_not_ready_and_refuses(replica, model):
    code, text = await asked(replica, "ModelInfer", infer(model))
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert f"model '{model}' keeps state between requests" in text
    assert not (await asked(replica, "ModelReady", pb.ModelReadyRequest(name=model))).ready


@pytest.mark.parametrize(
    ("name", "request_"),
    [
        ("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="plain")),
        ("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name="plain")),
    ],
)
async def test_models_do_not_come_and_go_on_one_replica(replica, name, request_):
    code, text = await asked(replica, name, request_)
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert "load their models when they start" in text
    assert (await asked(replica, "ModelReady", pb.ModelReadyRequest(name="plain"))).ready


async def test_what_is_no_message_is_refused(replica):
    context = Context()
    with pytest.raises(ray_serve.Refused):
        await replica.ModelInfer(b"\xff\xff", grpc_context=context)
    assert context.code is grpc.StatusCode.INVALID_ARGUMENT


async def test_streams_are_refused(replica):
    context = Context()
    with pytest.raises(ray_serve.Refused, match="streams are not offered"):
        await anext(replica.ModelStreamInfer(iter(()), grpc_context=context))
    assert context.code is grpc.StatusCode.UNIMPLEMENTED


async def test_http_is_refused(replica):
    answer = await replica(None)
    assert (answer.status_code, b"gRPC" in answer.body) == (501, True)


async def test_statistics_are_those_of_all_replicas(replica):
    async def twice(request):
        return [await replica.statistics_here(request.name, request.version)] * 2

    replica._calls = ray_serve.ReplicaService(replica._runtime, twice).calls()
    await asked(replica, "ModelInfer", infer("plain"))
    told = await asked(replica, "ModelStatistics", pb.ModelStatisticsRequest(name="plain"))
    assert [(one.name, one.inference_count, one.execution_count) for one in told.model_stats] == [("plain", 2, 2)]
    code, _ = await asked(replica, "ModelStatistics", pb.ModelStatisticsRequest(name="nope"))
    assert code is grpc.StatusCode.NOT_FOUND


def statistics(*models):
    response = pb.ModelStatisticsResponse()
    for name, latest, count, batches in models:
        one = response.model_stats.add(name=name, version="1", last_inference=latest)
        one.inference_count, one.execution_count = 2 * count, count
        one.inference_stats.success.count, one.inference_stats.success.ns = count, 10 * count
        for size in batches:
            one.batch_stats.add(batch_size=size).compute_infer.count = count
    return response


def test_counts_are_added_model_by_model_and_batch_by_batch():
    one = statistics(("a", 5, 1, [1, 2]), ("b", 1, 3, []))
    other = statistics(("a", 4, 10, [2, 4]))
    a, b = summed([one, other]).model_stats
    assert (a.name, a.last_inference, a.inference_count, a.execution_count) == ("a", 5, 22, 11)
    assert (a.inference_stats.success.count, a.inference_stats.success.ns) == (11, 110)
    assert {batch.batch_size: batch.compute_infer.count for batch in a.batch_stats} == {1: 1, 2: 11, 4: 10}
    assert b == statistics(("b", 1, 3, [])).model_stats[0]
    assert one == statistics(("a", 5, 1, [1, 2]), ("b", 1, 3, []))


async def test_without_a_repository_it_says_what_to_set(monkeypatch):
    monkeypatch.delenv("LOCAL_RUNTIME_REPOSITORY", raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    with pytest.raises(ModelLoadError, match="LOCAL_RUNTIME_REPOSITORY"):
        await ray_serve.Replica.__new__(ray_serve.Replica).__init__()


def test_a_proxy_offers_the_whole_protocol_and_passes_bytes_on():
    offered = []
    server = SimpleNamespace(add_generic_rpc_handlers=offered.extend)
    ray_serve.add_inference_service(ray_serve.Replica.__new__(ray_serve.Replica), server)
    for name in ray_serve.SERVICE.methods_by_name:
        call = SimpleNamespace(method=f"/inference.GRPCInferenceService/{name}", invocation_metadata=())
        handler = offered[0].service(call)
        assert handler.request_deserializer is None
        assert handler.request_streaming == (name == "ModelStreamInfer")


def test_the_shipped_file_is_one_of_serves_and_lets_batches_form():
    config = ServeDeploySchema.model_validate(yaml.safe_load(FILE.read_text()))
    (application,) = config.applications
    (deployment,) = application.deployments
    assert application.import_path == "local_runtime.ray_serve:application"
    assert deployment.name == ray_serve.application._bound_deployment.name
    assert config.grpc_options.grpc_servicer_functions == ["local_runtime.ray_serve.add_inference_service"]
    scaling = deployment.autoscaling_config
    largest = max(
        int(line.split(":")[1])
        for file in (ROOT / "triton_models").glob("*/config.pbtxt")
        for line in file.read_text().splitlines()
        if line.startswith("max_batch_size")
    )
    assert 1 < scaling["target_ongoing_requests"] < deployment.max_ongoing_requests
    assert deployment.max_ongoing_requests > largest
