import json

import pytest

from local_runtime.errors import ModelLoadError
from local_runtime.repository.completion import completed, place, triton_json
from local_runtime.repository.parsing import parse, parse_message, read_json

TENSORS = """
input [ { name: "X" data_type: TYPE_INT32 dims: [ 2 ] } ]
output [ { name: "Y" data_type: TYPE_STRING dims: [ -1, 3 ] label_filename: "labels.txt" } ]
"""
WARMUP = 'name: "w" batch_size: 1 inputs {{ key: "X" value {{ data_type: TYPE_INT32 {} }} }}'
PLAIN = f'backend: "python" max_batch_size: 8 {TENSORS}'


STEP = 'model_name: "a" input_map { key: "I" value: "X" } output_map { key: "O" value: "Y" }'


def ensemble(steps, more=""):
    return f'platform: "ensemble" {TENSORS} ensemble_scheduling {{ step [ {steps} ] }} {more}'


def places(groups, cuda_devices):
    config = parse(PLAIN + groups, folder_name="m")
    return [
        (placement.name, placement.kind.value, placement.device_id)
        for placement in place(config, cuda_devices=cuda_devices)
    ]


@pytest.mark.parametrize(
    ("groups", "cuda_devices", "expected"),
    [
        ("", 0, [("m_0", "KIND_CPU", 0)]),
        ("", 1, [("m_0", "KIND_GPU", 0)]),
        ("instance_group [ { kind: KIND_AUTO } ]", 0, [("m_0_0", "KIND_CPU", 0)]),
        ("instance_group [ { kind: KIND_MODEL } ]", 1, [("m_0_0", "KIND_MODEL", 0)]),
        (
            "instance_group [ { count: 2 kind: KIND_MODEL } ]",
            1,
            [("m_0_0", "KIND_MODEL", 0), ("m_0_1", "KIND_MODEL", 0)],
        ),
        (
            "instance_group [ { count: 2 kind: KIND_CPU } ]",
            1,
            [("m_0_0", "KIND_CPU", 0), ("m_0_1", "KIND_CPU", 0)],
        ),
        (
            "instance_group [ { count: 1 kind: KIND_GPU } ]",
            2,
            [("m_0_0", "KIND_GPU", 0), ("m_0_1", "KIND_GPU", 1)],
        ),
        ("instance_group [ { kind: KIND_GPU gpus: [ 1 ] } ]", 2, [("m_0_0", "KIND_GPU", 1)]),
    ],
)
def test_placement(groups, cuda_devices, expected):
    assert places(groups, cuda_devices) == expected


@pytest.mark.parametrize(
    ("groups", "cuda_devices", "reason"),
    [
        ("instance_group [ { kind: KIND_GPU } ]", 0, "has kind KIND_GPU but no GPUs are available"),
        ("instance_group [ { kind: KIND_GPU gpus: [ 3 ] } ]", 1, "specifies invalid or unsupported gpu id 3"),
        ("instance_group [ { kind: KIND_GPU gpus: [ -1 ] } ]", 1, "specifies invalid or unsupported gpu id -1"),
        ("instance_group [ { gpus: [ 0 ] } ]", 0, "specifies invalid or unsupported gpu id 0"),
    ],
)
def test_placement_refused(groups, cuda_devices, reason):
    with pytest.raises(ModelLoadError, match=reason):
        places(groups, cuda_devices)


def test_json_has_tritons_form():
    config = parse(
        PLAIN
        + 'dynamic_batching { max_queue_delay_microseconds: 100 } parameters { key: "K" value { string_value: "v" } }',
        folder_name="m",
    )
    tree = json.loads(triton_json(completed(config, place(config, cuda_devices=0))))
    assert tree["input"][0]["dims"] == [2]
    assert tree["input"][0]["data_type"] == "TYPE_INT32"
    assert tree["input"][0]["optional"] is False
    assert tree["dynamic_batching"]["max_queue_delay_microseconds"] == 100
    assert tree["dynamic_batching"]["preferred_batch_size"] == [8]
    assert tree["parameters"] == {"K": {"string_value": "v"}}
    assert tree["instance_group"][0]["name"] == "m"
    assert tree["version_policy"] == {"latest": {"num_versions": 1}}
    assert tree["optimization"]["input_pinned_memory"] == {"enable": True}
    assert tree["instance_group"][0]["kind"] == "KIND_CPU"
    assert tree["default_model_filename"] == "model.py"
    assert not config.message.default_model_filename, "the original is left alone"


def test_json_of_an_ensemble_has_number_versions():
    config = parse(ensemble(f"{{ {STEP} model_version: -1 }}"), folder_name="m")
    tree = json.loads(triton_json(completed(config, ())))
    assert tree["ensemble_scheduling"]["step"][0]["model_version"] == -1
    assert "optimization" not in tree


@pytest.mark.parametrize(("engine", "filename"), [("pytorch_libtorch", "model.pt"), ("onnxruntime_onnx", "model.onnx")])
def test_backend_and_platform_are_completed_from_each_other(engine, filename):
    config = parse(f'platform: "{engine}" {TENSORS}', folder_name="m")
    message = completed(config, ())
    assert (message.platform, message.default_model_filename) == (engine, filename)
    assert completed(parse(f'backend: "{message.backend}" {TENSORS}', folder_name="m"), ()).platform == engine


@pytest.mark.parametrize(
    "text",
    [
        "",
        """dynamic_batching { preferred_batch_size: [ 4 ] preserve_ordering: true
            default_queue_policy { timeout_action: DELAY allow_timeout_override: true max_queue_size: 3 } }
           version_policy { specific { versions: [ 2 ] } } response_cache { enable: true }""",
        """dynamic_batching { priority_levels: 3 default_priority_level: 2
            priority_queue_policy { key: 3 value { default_timeout_microseconds: 5 } } }
           parameters { key: "ADAPTIVE_BATCHING" value { string_value: "true" } }""",
        """sequence_batching { oldest { max_candidate_sequences: 2 max_queue_delay_microseconds: 7 }
            control_input [ { name: "C" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] },
                            { name: "S" control [ { fp32_false_true: [ 0, 1 ] } ] } ]
            state [ { input_name: "I" output_name: "O" data_type: TYPE_FP32 dims: [ -1 ]
                      initial_state { name: "z" data_type: TYPE_FP32 dims: [ 2 ] zero_data: true } } ] }""",
        (
            "sequence_batching { direct { minimum_slot_utilization: 0.5 } } "
            f"model_warmup [ {{ {WARMUP.format('dims: [ 2 ] zero_data: true')} }} ]"
        ),
    ],
)
def test_completed_json_can_be_loaded_again_and_then_changes_no_more(text):
    config = parse(PLAIN + text, folder_name="m")
    message = completed(config, place(config, cuda_devices=0))
    again = parse_message(read_json(triton_json(message), folder_name="m"), folder_name="m")
    assert completed(again, place(again, cuda_devices=0)) == message
    assert (again.version_policy, again.warmups, again.parameters) == (
        config.version_policy,
        config.warmups,
        config.parameters,
    )
