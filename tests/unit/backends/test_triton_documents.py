"""Messages as documents. That they are those of Triton's own HTTP answers is held against real Triton elsewhere."""

from tritonclient.grpc import model_config_pb2
from tritonclient.grpc import service_pb2 as pb

from gateway.backends.triton import documents as triton_documents
from gateway.core.models import ModelFacts, TensorFacts


def metadata():
    response = pb.ModelMetadataResponse(name="m", versions=["1", "3"], platform="python")
    response.inputs.add(name="X", datatype="FP32", shape=[-1, 2])
    response.outputs.add(name="Y", datatype="BYTES", shape=[-1, 1])
    return response


def test_numbers_are_numbers_and_defaults_are_there():
    assert triton_documents.document(metadata()) == {
        "name": "m",
        "versions": ["1", "3"],
        "platform": "python",
        "inputs": [{"name": "X", "datatype": "FP32", "shape": [-1, 2]}],
        "outputs": [{"name": "Y", "datatype": "BYTES", "shape": [-1, 1]}],
    }
    config = model_config_pb2.ModelConfig(name="m")
    config.dynamic_batching.priority_queue_policy[2**40].max_queue_size = 5
    config.input.add(name="X", dims=[2**40])
    found = triton_documents.document(config)
    assert found["input"][0]["dims"] == [2**40]
    assert found["max_batch_size"] == 0
    assert found["dynamic_batching"]["priority_queue_policy"][str(2**40)]["max_queue_size"] == 5
    ensemble = model_config_pb2.ModelConfig(name="e")
    ensemble.ensemble_scheduling.step.add(model_name="a")
    assert list(triton_documents.document(ensemble)["ensemble_scheduling"]) == ["step"]


def test_an_index_line_has_what_is_known():
    response = pb.RepositoryIndexResponse()
    response.models.add(name="a", version="1", state="READY")
    response.models.add(name="b", version="1", state="UNAVAILABLE", reason="unloaded")
    response.models.add(name="c")
    assert triton_documents.index(response) == [
        {"name": "a", "version": "1", "state": "READY"},
        {"name": "b", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"},
        {"name": "c"},
    ]


def test_facts_of_a_plain_model():
    config = model_config_pb2.ModelConfig(name="m", max_batch_size=8)
    assert triton_documents.facts(metadata(), config) == ModelFacts(
        name="m",
        versions=("1", "3"),
        inputs={"X": TensorFacts(datatype="FP32", shape=(-1, 2))},
        outputs={"Y": TensorFacts(datatype="BYTES", shape=(-1, 1))},
        max_batch_size=8,
    )


def test_facts_of_a_model_with_everything():
    config = model_config_pb2.ModelConfig(name="m")
    config.model_transaction_policy.decoupled = True
    config.dynamic_batching.priority_levels = 2
    config.dynamic_batching.priority_queue_policy[1].allow_timeout_override = True
    found = triton_documents.facts(metadata(), config)
    assert (found.is_decoupled, found.has_priority_levels, found.allows_timeout) == (True, True, True)
    assert (found.is_sequence, found.max_batch_size) == (False, 0)


def test_facts_of_a_sequence_model():
    config = model_config_pb2.ModelConfig(name="m")
    config.sequence_batching.max_sequence_idle_microseconds = 5
    control = config.sequence_batching.control_input.add(name="C").control.add()
    control.kind = model_config_pb2.ModelSequenceBatching.Control.CONTROL_SEQUENCE_CORRID
    control.data_type = model_config_pb2.TYPE_UINT64
    found = triton_documents.facts(metadata(), config)
    assert (found.is_sequence, found.sequence_idle_us, found.correlation_bits) == (True, 5, 64)
    control.data_type = model_config_pb2.TYPE_INT32
    assert triton_documents.facts(metadata(), config).correlation_bits == 32


def test_figures_are_in_microseconds():
    response = pb.ModelStatisticsResponse()
    stats = response.model_stats.add(name="m", version="1", inference_count=6, execution_count=2)
    stats.inference_stats.success.count = 5
    stats.inference_stats.fail.count = 1
    stats.inference_stats.queue.ns = 7_000
    stats.inference_stats.compute_infer.ns = 9_999
    stats.batch_stats.add(batch_size=3).compute_infer.count = 2
    (one,) = triton_documents.figures(response, replica="r")
    assert (one.replica, one.model, one.version, one.requests, one.failures) == ("r", "m", "1", 5, 1)
    assert (one.inferences, one.executions, one.batch_sizes) == (6, 2, {3: 2})
    assert (one.queue_us, one.compute_infer_us, one.compute_input_us) == (7, 9, 0)


def test_a_load_may_bring_its_files():
    request = triton_documents.load_request("m", config="{}", files={"1/model.py": b"x", "file:2/model.py": b"y"})
    assert request.model_name == "m"
    assert {name: getattr(p, p.WhichOneof("parameter_choice")) for name, p in request.parameters.items()} == {
        "config": "{}",
        "file:1/model.py": b"x",
        "file:2/model.py": b"y",
    }
    assert not triton_documents.load_request("m", config=None, files=None).parameters
