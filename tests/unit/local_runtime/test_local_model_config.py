import json

import numpy as np
import pytest

from local_runtime.errors import ModelLoadError
from local_runtime.repository.completion import completed, model_filename, place, triton_json
from local_runtime.repository.model_config import Backend, InstanceKind, parse

TENSORS = """
input [ { name: "X" data_type: TYPE_INT32 dims: [ 2 ] } ]
output [ { name: "Y" data_type: TYPE_STRING dims: [ -1, 3 ] label_filename: "labels.txt" } ]
"""
PLAIN = f'backend: "python" max_batch_size: 8 {TENSORS}'


def test_everything_honoured_is_read():
    config = parse(
        PLAIN
        + """
        name: "m"
        instance_group [ { count: 2 kind: KIND_CPU }, { name: "other" kind: KIND_AUTO } ]
        dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100 }
        parameters { key: "FILE" value { string_value: "a.pt" } }
        default_model_filename: "other.py"
        """,
        folder_name="m",
    )
    assert (config.name, config.backend, config.max_batch_size) == ("m", Backend.PYTHON, 8)
    x, y = config.inputs[0], config.outputs[0]
    assert (x.datatype, x.dims, x.numpy_type) == ("INT32", (2,), np.int32)
    assert (y.datatype, y.dims, y.label_filename, y.numpy_type) == ("BYTES", (-1, 3), "labels.txt", object)
    assert config.full_shape(y) == (-1, -1, 3)
    assert [(group.name, group.count, group.kind) for group in config.instance_groups] == [
        ("m_0", 2, InstanceKind.CPU),
        ("other", 1, InstanceKind.AUTO),
    ]
    assert config.dynamic_batching.preferred_batch_size == (4, 8)
    assert config.dynamic_batching.max_queue_delay_microseconds == 100
    assert config.parameters == {"FILE": "a.pt"}
    assert model_filename(config) == "other.py"


def test_name_comes_from_the_folder():
    assert parse(PLAIN, folder_name="folder").name == "folder"


def test_ensemble_steps():
    config = parse(
        f"""platform: "ensemble" {TENSORS}
        ensemble_scheduling {{ step [ {{ model_name: "a" model_version: -1
            input_map {{ key: "I" value: "X" }} output_map {{ key: "O" value: "Y" }} }},
            {{ model_name: "b" model_version: 3 }} ] }}""",
        folder_name="e",
    )
    first, second = config.ensemble_steps
    assert (first.model_name, first.model_version, second.model_version) == ("a", "", "3")
    assert (first.input_map, first.output_map) == ({"I": "X"}, {"O": "Y"})
    assert place(config, cuda_devices=2) == ()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        # Triton's own refusals
        ("no_such_field: 1", "failed to read text proto from m/config.pbtxt"),
        (PLAIN + "dynamic_batching { } sequence_batching { }", "failed to read text proto from m/config.pbtxt"),
        (
            PLAIN + "dynamic_batching { preferred_batch_size: [ 16 ] }",
            "dynamic batching preferred size must be <= max batch size for m",
        ),
        (
            PLAIN + "dynamic_batching { preferred_batch_size: [ 0 ] }",
            "dynamic batching preferred size must be positive for m",
        ),
        (PLAIN + 'name: "other"', "unexpected directory name 'm' for model 'other'"),
        (f'backend: "python" max_batch_size: -1 {TENSORS}', "'max_batch_size' must be non-negative"),
        # what is not honoured is named
        (PLAIN + "version_policy { all { } }", "'version_policy' is not supported"),
        (PLAIN + "sequence_batching { }", "'sequence_batching' is not supported"),
        (PLAIN + "response_cache { enable: true }", "'response_cache' is not supported"),
        (PLAIN + "dynamic_batching { preserve_ordering: true }", "'dynamic_batching.preserve_ordering'"),
        (
            PLAIN + "dynamic_batching { default_queue_policy { max_queue_size: 1 } }",
            "'dynamic_batching.default_queue_policy' is not supported",
        ),
        (
            PLAIN + "dynamic_batching { priority_queue_policy { key: 1 value { max_queue_size: 1 } } }",
            "'dynamic_batching.priority_queue_policy' is not supported",
        ),
        (PLAIN + "instance_group [ { passive: true } ]", "'instance_group.passive' is not supported"),
        (PLAIN + "instance_group [ { kind: KIND_MODEL } ]", "kind KIND_MODEL of m is not supported"),
        (PLAIN + "instance_group [ { count: -1 } ]", "instance group count must be positive"),
        (
            PLAIN + 'input [ { name: "O" data_type: TYPE_FP32 dims: [ 1 ] optional: true } ]',
            "'input.optional' is not supported",
        ),
        (
            PLAIN + 'input [ { name: "O" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ ] } } ]',
            "'input.reshape' is not supported",
        ),
        (PLAIN + 'input [ { name: "O" data_type: TYPE_BF16 dims: [ 1 ] } ]', "TYPE_BF16 is not supported"),
        # incomplete or contradictory
        (TENSORS, "must specify one matching 'platform' or 'backend' for m"),
        (f'backend: "python" platform: "pytorch_libtorch" {TENSORS}', "must specify one matching"),
        (f'backend: "tensorrt" {TENSORS}', "'tensorrt' is not supported"),
        ('backend: "python"', "model must specify at least one input for m"),
        (PLAIN + 'input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]', "names must be unique"),
        (PLAIN + "input [ { data_type: TYPE_FP32 dims: [ 1 ] } ]", "must specify 'name'"),
        (PLAIN + 'input [ { name: "O" dims: [ 1 ] } ]', "must specify 'data_type'"),
        (PLAIN + 'input [ { name: "O" data_type: TYPE_FP32 } ]', "must specify 'dims'"),
        (PLAIN + 'input [ { name: "O" data_type: TYPE_FP32 dims: [ 0 ] } ]', "dimension must be integer >= 1"),
        (f'platform: "ensemble" {TENSORS}', "ensemble scheduling must be set for ensemble m"),
        (PLAIN + 'ensemble_scheduling { step [ { model_name: "a" } ] }', "whose platform is not ensemble"),
        (
            (
                f'platform: "ensemble" {TENSORS} ensemble_scheduling {{ step [ {{ model_name: "a" }} ] }} '
                "instance_group [ { count: 1 } ]"
            ),
            "instance group should not be specified for ensemble 'm'",
        ),
    ],
)
def test_refused_with_the_reason(text, reason):
    with pytest.raises(ModelLoadError) as refused:
        parse(text, folder_name="m")
    assert reason in str(refused.value)


def places(groups, cuda_devices):
    config = parse(PLAIN + groups, folder_name="m")
    return [
        (placement.name, placement.kind.value, placement.device_id)
        for placement in place(config, cuda_devices=cuda_devices)
    ]


@pytest.mark.parametrize(
    ("groups", "cuda_devices", "expected"),
    [
        ("", 0, [("m_0_0", "KIND_CPU", 0)]),
        ("", 1, [("m_0_0", "KIND_GPU", 0)]),
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
        ("instance_group [ { kind: KIND_GPU } ]", 0, "no GPU is available"),
        ("instance_group [ { kind: KIND_GPU gpus: [ 3 ] } ]", 1, "GPU 3 of 1"),
        ("instance_group [ { kind: KIND_CPU gpus: [ 0 ] } ]", 1, "KIND_CPU but lists gpus"),
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
    assert tree["instance_group"][0]["name"] == "m_0"
    assert tree["instance_group"][0]["kind"] == "KIND_CPU"
    assert tree["default_model_filename"] == "model.py"
    assert not config.message.default_model_filename, "the original is left alone"


def test_json_of_an_ensemble_has_number_versions():
    text = f'platform: "ensemble" {TENSORS} ensemble_scheduling {{ step [ {{ model_name: "a" model_version: -1 }} ] }}'
    config = parse(text, folder_name="m")
    tree = json.loads(triton_json(completed(config, ())))
    assert tree["ensemble_scheduling"]["step"][0]["model_version"] == -1
