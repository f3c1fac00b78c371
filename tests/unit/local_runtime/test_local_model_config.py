import numpy as np
import pytest

from local_runtime.errors import ModelLoadError
from local_runtime.repository.completion import model_filename, place
from local_runtime.repository.model_config import (
    Backend,
    InstanceKind,
    VersionPolicy,
    Warmup,
    WarmupData,
    WarmupInput,
)
from local_runtime.repository.parsing import parse, parse_message, read_json, read_text

TENSORS = """
input [ { name: "X" data_type: TYPE_INT32 dims: [ 2 ] } ]
output [ { name: "Y" data_type: TYPE_STRING dims: [ -1, 3 ] label_filename: "labels.txt" } ]
"""
WARMUP = 'name: "w" batch_size: 1 inputs {{ key: "X" value {{ data_type: TYPE_INT32 {} }} }}'
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


STEP = 'model_name: "a" input_map { key: "I" value: "X" } output_map { key: "O" value: "Y" }'


def ensemble(steps, more=""):
    return f'platform: "ensemble" {TENSORS} ensemble_scheduling {{ step [ {steps} ] }} {more}'


def test_ensemble_steps():
    second = STEP.replace('"a"', '"b" model_version: 3')
    config = parse(ensemble(f"{{ {STEP} model_version: -1 }}, {{ {second} }}"), folder_name="e")
    first, second = config.ensemble_steps
    assert (first.model_name, first.model_version, second.model_version) == ("a", "", "3")
    assert (first.input_map, first.output_map) == ({"I": "X"}, {"O": "Y"})
    assert place(config, cuda_devices=2) == ()


def test_an_ensembles_inputs_may_be_optional():
    text = ensemble(f"{{ {STEP} model_version: -1 }}").replace("dims: [ 2 ]", "dims: [ 2 ] optional: true")
    assert [spec.is_optional for spec in parse(text, folder_name="e").inputs] == [True]


@pytest.mark.parametrize("text", ["{" * 100_000, "max_batch_size: " + "9" * 100_000, "name: 'a\ud800'", "a\0" * 9])
def test_a_text_that_is_no_config_is_refused_in_few_words(text):
    with pytest.raises(ModelLoadError) as refused:
        parse(text, folder_name="m")
    reason = str(refused.value)
    assert reason.startswith("failed to read text proto from m/config.pbtxt: ")
    assert len(reason.encode()) < 2000


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("", VersionPolicy(latest=1)),
        ("version_policy { latest { num_versions: 2 } }", VersionPolicy(latest=2)),
        ("version_policy { all { } }", VersionPolicy(latest=None)),
        ("version_policy { specific { versions: [ 1, 3 ] } }", VersionPolicy(latest=None, specific=(1, 3))),
    ],
)
def test_version_policy(text, policy):
    assert parse(PLAIN + text, folder_name="m").version_policy == policy


def test_warmups_run_once_unless_they_say_otherwise_and_not_at_all_with_batch_size_0():
    given = "{ data_type: TYPE_INT32 dims: [ 2 ] %s }"
    config = parse(
        PLAIN
        + f"""model_warmup [
          {{ name: "w" batch_size: 4 count: 2 inputs {{ key: "X" value {given % "random_data: true"} }} }},
          {{ name: "f" batch_size: 1 inputs {{ key: "X" value {given % 'input_data_file: "x"'} }} }},
          {{ name: "never" inputs {{ key: "X" value {given % "zero_data: true"} }} }} ]""",
        folder_name="m",
    )
    random = WarmupInput(name="X", datatype="INT32", dims=(2,), data=WarmupData.RANDOM)
    file = WarmupInput(name="X", datatype="INT32", dims=(2,), data=WarmupData.FILE, file="x")
    assert config.warmups == (
        Warmup(name="w", batch_size=4, inputs=(random,), count=2),
        Warmup(name="f", batch_size=1, inputs=(file,), count=1),
    )


def test_special_inputs_and_outputs():
    config = parse(
        """backend: "python" max_batch_size: 8
        input [
          { name: "O" data_type: TYPE_BF16 dims: [ 1 ] reshape { shape: [ ] } optional: true },
          { name: "R" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true },
          { name: "I" data_type: TYPE_FP32 dims: [ 3, 4, 4 ] format: FORMAT_NCHW } ]
        output [ { name: "Y" data_type: TYPE_FP32 dims: [ 2, -1, 6 ] reshape { shape: [ 2, 1, -1, 3, 2 ] } } ]
        model_transaction_policy { decoupled: true } dynamic_batching { }""",
        folder_name="m",
    )
    optional, ragged, _ = config.inputs
    assert (optional.reshape, optional.is_optional, optional.datatype) == ((), True, "BF16")
    assert (ragged.reshape, ragged.allow_ragged_batch, ragged.is_optional) == (None, True, False)
    assert config.outputs[0].reshape == (2, 1, -1, 3, 2)
    assert config.is_decoupled


def test_config_in_json_by_proto_names_and_camel_case():
    text = (
        '{"backend": "python", "maxBatchSize": 8, "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [2]}], '
        '"output": [{"name": "Y", "dataType": "TYPE_FP32", "dims": ["2"]}]}'
    )
    config = parse_message(read_json(text, folder_name="m"), folder_name="m")
    assert (config.name, config.max_batch_size, config.outputs[0].dims) == ("m", 8, (2,))


@pytest.mark.parametrize("text", ["", "[1]", "5", '{"no_such_field": 1}', '{"backend": 1}', "[" * 100_000])
def test_config_in_bad_json_is_refused(text):
    with pytest.raises(ModelLoadError, match="failed to read the config override of m: "):
        read_json(text, folder_name="m")


def test_parsing_leaves_the_message_alone():
    message = read_text(PLAIN, folder_name="m")
    assert parse_message(message, folder_name="m").message.name == "m"
    assert not message.name


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
        (PLAIN + "instance_group [ { count: -1 } ]", "instance group count must be positive"),
        (
            PLAIN + 'instance_group [ { name: "g" }, { name: "g" } ]',
            "instance group names must be unique for m",
        ),
        (
            PLAIN + "instance_group [ { kind: KIND_CPU gpus: [ 0 ] } ]",
            "instance group m_0 of model m has kind KIND_CPU but specifies one or more GPUs",
        ),
        (
            PLAIN + "response_cache { enable: true } sequence_batching { }",
            (
                "Response Cache does not currently support model m with sequence batching scheduler. Please disable "
                "the response cache."
            ),
        ),
        (
            PLAIN + "response_cache { enable: true } model_transaction_policy { decoupled: true }",
            (
                "Response Cache does not currently support model m with 'decoupled' transaction policy. Please disable "
                "the response cache."
            ),
        ),
        (
            PLAIN + 'input [ { name: "O" data_type: TYPE_FP32 dims: [ 2 ] format: FORMAT_NHWC } ]',
            "model input NHWC/NCHW require 3 dims for m",
        ),
        *(
            (
                PLAIN + f'input [ {{ name: "O" data_type: TYPE_FP32 dims: {dims} reshape {{ shape: {shape} }} }} ]',
                f"model input 'O' {reason} for m",
            )
            for dims, shape, reason in [
                (
                    "[ 4 ]",
                    "[ 0 ]",
                    "reshape dimensions must be integer >= 1, or -1 to indicate a variable-size dimension",
                ),
                ("[ 4 ]", "[ 5 ]", "has different size for dims and reshape"),
                ("[ 4 ]", "[ ]", "has different size for dims and reshape"),
                ("[ 4 ]", "[ -1 ]", "has different size for dims and reshape"),
                ("[ 2, -1, 3 ]", "[ 3, -1, 2 ]", "has different size for dims and reshape"),
                ("[ -1 ]", "[ -1, -1 ]", "has different number of variable-size dimensions for dims and reshape"),
            ]
        ),
        (
            PLAIN.replace("max_batch_size: 8", "")
            + 'input [ { name: "O" data_type: TYPE_FP32 dims: [ 1 ] reshape { } } ]',
            "model input 'O' cannot have empty reshape for non-batching model",
        ),
        # warm-up
        *(
            (PLAIN + f"model_warmup [ {{ {sample} }} ]", reason)
            for sample, reason in [
                (WARMUP.format("dims: [ -1 ] zero_data: true"), "all variable-size dimensions are specified"),
                (WARMUP.format("dims: [ 2 ]"), "expects input 'X' to have input_data_type set"),
                (WARMUP.format("dims: [ 3 ] zero_data: true"), "unexpected shape for input 'X'. Expected [2], got [3]"),
                (
                    WARMUP.replace("INT32", "FP32").format("dims: [ 2 ] zero_data: true"),
                    "inference input 'X' data-type is 'FP32', but the model expects 'INT32'",
                ),
                (WARMUP.replace('"X"', '"Z"').format("dims: [ 2 ] zero_data: true"), "missing required input 'X'"),
                ("batch_size: 9", "batch_size 9 exceeds max_batch_size 8"),
                (
                    WARMUP.format("dims: [ 2 ] zero_data: true")
                    + ' inputs { key: "Z" value { data_type: TYPE_INT32 dims: [ 1 ] zero_data: true } }',
                    "unexpected inference input 'Z'",
                ),
            ]
        ),
        # what is not honoured is named
        *(
            (PLAIN + text, f"'{field}' is not supported by the local runtime")
            for text, field in [
                ('runtime: "x"', "runtime"),
                ('batch_input [ { target_name: "T" } ]', "batch_input"),
                ('batch_output [ { target_name: "T" } ]', "batch_output"),
                ('metric_tags { key: "a" value: "b" }', "metric_tags"),
                ("model_operations { }", "model_operations"),
                ("model_repository_agents { }", "model_repository_agents"),
                ("model_metrics { }", "model_metrics"),
                ('cc_model_filenames { key: "a" value: "b" }', "cc_model_filenames"),
                ("optimization { eager_batching: true }", "optimization.eager_batching"),
                ("optimization { graph { level: 1 } }", "optimization.graph"),
                ("optimization { cuda { graphs: true } }", "optimization.cuda"),
                ("instance_group [ { passive: true } ]", "instance_group.passive"),
                ("instance_group [ { rate_limiter { priority: 1 } } ]", "instance_group.rate_limiter"),
                ('instance_group [ { host_policy: "x" } ]', "instance_group.host_policy"),
                ("sequence_batching { iterative_sequence: true }", "sequence_batching.iterative_sequence"),
                (
                    "sequence_batching { state [ { use_growable_memory: true } ] }",
                    "sequence_batching.state.use_growable_memory",
                ),
                (
                    "sequence_batching { state [ { use_same_buffer_for_input_output: true } ] }",
                    "sequence_batching.state.use_same_buffer_for_input_output",
                ),
                ('input [ { name: "O" is_shape_tensor: true } ]', "input.is_shape_tensor"),
                ('input [ { name: "O" is_non_linear_format_io: true } ]', "input.is_non_linear_format_io"),
            ]
        ),
        (
            PLAIN.replace("python", "pytorch") + "model_transaction_policy { decoupled: true }",
            "'model_transaction_policy.decoupled' is not supported by the local runtime for pytorch model m",
        ),
        (
            PLAIN.replace("python", "onnxruntime")
            + 'input [ { name: "O" data_type: TYPE_FP32 dims: [ 1 ] allow_ragged_batch: true } ]',
            "'input.allow_ragged_batch' is not supported by the local runtime for onnxruntime model m",
        ),
        (
            PLAIN.replace("python", "onnxruntime") + 'input [ { name: "O" data_type: TYPE_BF16 dims: [ 1 ] } ]',
            "'data_type: TYPE_BF16' is not supported by the local runtime for onnxruntime model m",
        ),
        # incomplete or contradictory
        (TENSORS, "must specify 'platform' or 'backend' for 'm'"),
        (
            f'backend: "python" platform: "pytorch_libtorch" {TENSORS}',
            "unexpected 'platform' and 'backend' pair, got:pytorch_libtorch, python",
        ),
        (
            f'backend: "tensorrt" {TENSORS}',
            "'tensorrt' is not supported by the local runtime, supported are: onnxruntime, python, pytorch",
        ),
        ('backend: "python"', "model must specify at least one input for m"),
        (PLAIN + 'input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]', "names must be unique"),
        (PLAIN + "input [ { data_type: TYPE_FP32 dims: [ 1 ] } ]", "must specify 'name'"),
        (PLAIN + 'input [ { name: "O" dims: [ 1 ] } ]', "must specify 'data_type'"),
        (PLAIN + 'input [ { name: "O" data_type: TYPE_FP32 } ]', "must specify 'dims'"),
        (PLAIN + 'input [ { name: "O" data_type: TYPE_FP32 dims: [ 0 ] } ]', "dimension must be integer >= 1"),
        (f'platform: "ensemble" {TENSORS}', "ensemble scheduling must be set for ensemble m"),
        (PLAIN + 'ensemble_scheduling { step [ { model_name: "a" } ] }', "whose platform is not ensemble"),
        (ensemble(""), "must specify 'step' for ensemble 'm'"),
        (ensemble(f"{{ {STEP} }}, {{ }}"), "must specify 'model_name' in step 1 of ensemble 'm'"),
        (ensemble('{ model_name: "a" }'), "must specify 'input_map' in step 0 of ensemble 'm'"),
        (
            ensemble(f"{{ {STEP} }}", "instance_group [ { count: 1 } ]"),
            "instance group should not be specified for ensemble 'm'",
        ),
        (ensemble(f"{{ {STEP} }}", "optimization { }"), "optimization should not be specified for ensemble 'm'"),
        (
            ensemble(f"{{ {STEP} }}", "model_warmup [ { batch_size: 1 } ]"),
            "model_warmup can not be specified for ensemble 'm'",
        ),
        (ensemble(f'{{ {STEP} model_namespace: "n" }}'), "'ensemble_scheduling.step.model_namespace' is not supported"),
    ],
)
def test_refused_with_the_reason(text, reason):
    with pytest.raises(ModelLoadError) as refused:
        parse(text, folder_name="m")
    assert reason in str(refused.value)
