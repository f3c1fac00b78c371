import pytest

from local_runtime.errors import ModelLoadError
from local_runtime.repository.model_config import (
    AdaptiveBatching,
    ControlInput,
    ControlKind,
    DirectStrategy,
    DynamicBatching,
    OldestStrategy,
    QueuePolicy,
    SequenceBatching,
    SequenceState,
    TimeoutAction,
)
from local_runtime.repository.parsing import parse

PLAIN = """backend: "python" max_batch_size: 8
input [ { name: "X" data_type: TYPE_INT32 dims: [ 2 ] } ]
output [ { name: "Y" data_type: TYPE_INT32 dims: [ 2 ] } ] """


def config(text):
    return parse(PLAIN + text, folder_name="m")


def adaptive(**parameters):
    return "".join(
        f' parameters {{ key: "ADAPTIVE_{key}" value {{ string_value: "{value}" }} }}'
        for key, value in parameters.items()
    )


def control(name, text):
    return f'control_input [ {{ name: "{name}" control [ {{ {text} }} ] }} ]'


def state(text, rest='input_name: "I" output_name: "O" data_type: TYPE_FP32 dims: [ 2 ]'):
    return f"state [ {{ {rest} {text} }} ]"


def initial(text):
    return state(f"initial_state [ {{ {text} }} ]")


def test_without_a_scheduler():
    plain = config("")
    assert (plain.dynamic_batching, plain.sequence_batching) == (None, None)


def test_defaults_of_dynamic_batching():
    assert config("dynamic_batching { }").dynamic_batching == DynamicBatching()


def test_all_of_dynamic_batching():
    block = config(
        """dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100
        priority_levels: 3 default_priority_level: 2 default_queue_policy { max_queue_size: 5 }
        priority_queue_policy { key: 1 value {
            timeout_action: DELAY default_timeout_microseconds: 7 allow_timeout_override: true } } }"""
    ).dynamic_batching
    assert block == DynamicBatching(
        preferred_batch_size=(4, 8),
        max_queue_delay_microseconds=100,
        priority_levels=3,
        default_priority_level=2,
        default_queue_policy=QueuePolicy(max_queue_size=5),
        priority_queue_policy={
            1: QueuePolicy(
                timeout_action=TimeoutAction.DELAY, default_timeout_microseconds=7, allow_timeout_override=True
            )
        },
    )


def test_a_delay_action_without_a_timeout_goes_with_preserve_ordering():
    block = config(
        "dynamic_batching { preserve_ordering: true priority_levels: 1 default_priority_level: 1 "
        "default_queue_policy { timeout_action: DELAY } }"
    ).dynamic_batching
    assert block.preserve_ordering


def test_dynamic_batching_without_batch_dimension_is_no_fault():
    text = PLAIN.replace("max_batch_size: 8", "") + "dynamic_batching { }"
    assert parse(text, folder_name="m").dynamic_batching == DynamicBatching()


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        (adaptive(BATCHING="true"), AdaptiveBatching()),
        (
            adaptive(BATCHING="TRUE", LATENCY_TARGET_MICROSECONDS="5000"),
            AdaptiveBatching(latency_target_us=5000),
        ),
        (adaptive(BATCHING="false", LATENCY_TARGET_MICROSECONDS="5000"), None),
    ],
)
def test_adaptive_batching(parameters, expected):
    assert config("dynamic_batching { }" + parameters).dynamic_batching.adaptive == expected


def test_no_strategy_means_direct():
    assert config("sequence_batching { }").sequence_batching == SequenceBatching(
        strategy=DirectStrategy(), max_sequence_idle_microseconds=1_000_000
    )


def test_direct_strategy_with_controls():
    block = config(
        """sequence_batching { max_sequence_idle_microseconds: 5
        direct { max_queue_delay_microseconds: 3 minimum_slot_utilization: 0.5 } control_input [
          { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] },
          { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY fp32_false_true: [ -1, 2.5 ] } ] },
          { name: "END" control [ { kind: CONTROL_SEQUENCE_END bool_false_true: [ false, true ] } ] },
          { name: "CORRID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } ] } ] }"""
    ).sequence_batching
    assert block == SequenceBatching(
        strategy=DirectStrategy(max_queue_delay_microseconds=3, minimum_slot_utilization=0.5),
        max_sequence_idle_microseconds=5,
        controls=(
            ControlInput(name="START", kind=ControlKind.START, datatype="INT32", false_true=(0, 1)),
            ControlInput(name="READY", kind=ControlKind.READY, datatype="FP32", false_true=(-1, 2.5)),
            ControlInput(name="END", kind=ControlKind.END, datatype="BOOL", false_true=(False, True)),
            ControlInput(name="CORRID", kind=ControlKind.CORRID, datatype="BYTES"),
        ),
    )


@pytest.mark.parametrize(("given", "taken"), [("max_candidate_sequences: 3", 3), ("", 8)])
def test_oldest_strategy_has_as_many_candidates_as_rows_unless_it_says_otherwise(given, taken):
    block = config(f"sequence_batching {{ oldest {{ {given} preferred_batch_size: [ 4 ] }} }}").sequence_batching
    assert block.strategy == OldestStrategy(max_candidate_sequences=taken, preferred_batch_size=(4,))


def test_states_start_with_zeros_of_their_own_shape_or_as_told():
    block = config(
        """sequence_batching { state [
          { input_name: "A" output_name: "A_OUT" data_type: TYPE_FP32 dims: [ 2, -1 ] },
          { input_name: "B" output_name: "B_OUT" data_type: TYPE_INT64 dims: [ -1 ]
            initial_state { name: "b" data_type: TYPE_INT64 dims: [ 3 ] data_file: "b.bin" } } ] }"""
    ).sequence_batching
    assert block.states == (
        SequenceState(input_name="A", output_name="A_OUT", datatype="FP32", dims=(2, -1), initial_dims=(2, 1)),
        SequenceState(
            input_name="B",
            output_name="B_OUT",
            datatype="INT64",
            dims=(-1,),
            initial_dims=(3,),
            initial_file="b.bin",
        ),
    )


START = "kind: CONTROL_SEQUENCE_START"
CORRID = "kind: CONTROL_SEQUENCE_CORRID"


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        ("preferred_batch_size: [ 16 ]", "dynamic batching preferred size must be <= max batch size for m"),
        ("preferred_batch_size: [ 0 ]", "dynamic batching preferred size must be positive for m"),
        ("priority_levels: 2", "default priority level must be in range [1, 2] for m"),
        ("priority_levels: 2 default_priority_level: 3", "default priority level must be in range [1, 2] for m"),
        *(
            (
                f"priority_levels: 2 default_priority_level: 1 priority_queue_policy {{ key: {level} value {{ }} }}",
                "priority queue policy must have priority level in range [1, 2] for m",
            )
            for level in (0, 3)
        ),
        (
            "preserve_ordering: true priority_levels: 2 default_priority_level: 1",
            "Only one priority level is allowed when 'preserve_ordering' is true for m",
        ),
        *(
            (
                "preserve_ordering: true priority_levels: 1 default_priority_level: 1 " + policy,
                "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for m",
            )
            for policy in (
                "default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 1 }",
                "priority_queue_policy { key: 1 value { timeout_action: DELAY default_timeout_microseconds: 1 } }",
            )
        ),
    ],
)
def test_dynamic_batching_refused_in_tritons_words(block, reason):
    with pytest.raises(ModelLoadError) as refused:
        config(f"dynamic_batching {{ {block} }}")
    assert str(refused.value) == reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (adaptive(BATCHING="true"), "parameter ADAPTIVE_BATCHING of m needs 'dynamic_batching'"),
        (
            "dynamic_batching { }" + adaptive(BATCHING="yes"),
            "parameter ADAPTIVE_BATCHING of m must be true or false, not 'yes'",
        ),
        (
            "dynamic_batching { }" + adaptive(LATENCY_TARGET_MICROSECONDS="1"),
            "parameter ADAPTIVE_LATENCY_TARGET_MICROSECONDS of m needs ADAPTIVE_BATCHING",
        ),
        *(
            (
                "dynamic_batching { }" + adaptive(BATCHING="true", LATENCY_TARGET_MICROSECONDS=target),
                f"parameter ADAPTIVE_LATENCY_TARGET_MICROSECONDS of m must be a positive whole number, not '{target}'",
            )
            for target in ("", "0", "-5", "1.5", "5ms", "٣")
        ),
    ],
)
def test_adaptive_batching_refused_by_the_parameters_name(text, reason):
    with pytest.raises(ModelLoadError) as refused:
        config(text)
    assert str(refused.value) == reason


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (
            "direct { minimum_slot_utilization: 1.5 }",
            "sequence batching minimum slot utilization must be in range (0.0, 1.0] for m",
        ),
        (
            "oldest { preferred_batch_size: [ 0 ] }",
            "sequence batching preferred batch size must be positive for m",
        ),
        (
            "oldest { preferred_batch_size: [ 9 ] }",
            "sequence batching preferred batch size must be <= max batch size for m",
        ),
        (control("", START), "sequence batching control tensor must have a name for m"),
        (
            control("A", START + " int32_false_true: [ 0, 1 ]") + control("A", CORRID + " data_type: TYPE_UINT64"),
            "sequence batching control tensor 'A' is specified for multiple control kinds for m",
        ),
        (
            control("A", START + " int32_false_true: [ 0, 1 ]") + control("B", START + " int32_false_true: [ 0, 1 ]"),
            "sequence batching specifies multiple CONTROL_SEQUENCE_START tensors for m",
        ),
        (
            control("A", START),
            (
                "sequence batching must specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for "
                "CONTROL_SEQUENCE_START for m"
            ),
        ),
        (
            control("A", START + " int32_false_true: [ 0, 1 ] bool_false_true: [ false, true ]"),
            (
                "sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and "
                "'bool_false_true' for CONTROL_SEQUENCE_START for m"
            ),
        ),
        (
            control("A", START + " fp32_false_true: [ 0 ]"),
            "sequence batching control 'fp32_false_true' must have exactly 2 entries for CONTROL_SEQUENCE_START for m",
        ),
        (
            control("A", CORRID + " data_type: TYPE_UINT64 int32_false_true: [ 0, 1 ]"),
            (
                "sequence batching must not specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' "
                "for CONTROL_SEQUENCE_CORRID for m"
            ),
        ),
        (
            control("A", CORRID + " data_type: TYPE_FP32"),
            (
                "unexpected data type for control CONTROL_SEQUENCE_CORRID for m. Allowed data types are TYPE_UINT64, "
                "TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING"
            ),
        ),
        (
            'control_input [ { name: "A" } ]',
            "'sequence_batching.control_input.control' with 0 entries for 'A' is not supported by the local runtime",
        ),
        (state("", 'output_name: "O"'), "sequence batching state must specify 'input_name' for m"),
        (state("", 'input_name: "I"'), "sequence batching state must specify 'output_name' for m"),
        (state("") + state(""), "State input name 'I' specified more than once."),
        (
            state("", 'input_name: "I" output_name: "O" dims: [ 1 ]'),
            "state 'I' of m must specify a supported 'data_type'",
        ),
        (
            state("", 'input_name: "I" output_name: "O" data_type: TYPE_FP32'),
            "state 'I' of m must specify 'dims' >= 1, or -1 for a variable-size dimension",
        ),
        (
            state("initial_state [ { }, { } ]"),
            "initial_state field for state input 'I' must contain exactly one or zero element. Found '2' elements.",
        ),
        (
            initial('name: "z" data_type: TYPE_INT32 dims: [ 2 ] zero_data: true'),
            "The data type used for 'initial_state' field of state 'I' does not match the state data type.",
        ),
        (
            initial("data_type: TYPE_FP32 dims: [ 2 ] zero_data: true"),
            "Field 'name' must be set when using initial_state for state input 'I'.",
        ),
        (
            initial('name: "z" data_type: TYPE_FP32 dims: [ 2, 1 ] zero_data: true'),
            (
                "Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state input "
                "'I'. 2 != 1"
            ),
        ),
        (
            initial('name: "z" data_type: TYPE_FP32 dims: [ -1 ] zero_data: true'),
            "'initial_state' field for state input name 'I' contains variable dimensions.",
        ),
        (
            initial('name: "z" data_type: TYPE_FP32 dims: [ 3 ] zero_data: true'),
            "'initial_state' dim for input name 'I' doesn't match 'state' dim description. 3 != 2",
        ),
        (
            initial('name: "z" data_type: TYPE_FP32 dims: [ 2 ]'),
            "initial_state setting expects state 'I' to have state_data set",
        ),
    ],
)
def test_sequence_batching_refused_with_the_reason(block, reason):
    with pytest.raises(ModelLoadError) as refused:
        config(f"sequence_batching {{ {block} }}")
    assert str(refused.value) == reason
