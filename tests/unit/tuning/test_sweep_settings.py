import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from gateway.tuning.sweep.settings import (
    Axes,
    Load,
    Setting,
    SweepError,
    configured,
    found_setting,
    measurable,
    parse_cell,
    refusal,
    space,
)

CONFIG = """name: "m" platform: "pytorch_libtorch" max_batch_size: 8
input [ { name: "X" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 4 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
dynamic_batching { preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 7 priority_levels: 2 }
model_warmup { name: "w" batch_size: 8 inputs { key: "X" value { data_type: TYPE_FP32 dims: 4 zero_data: true } } }
response_cache { enable: true }
"""


def message(text=CONFIG):
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def test_what_is_found_is_told_as_it_is_and_asking_changes_nothing():
    config = message()
    assert found_setting(config) == Setting(max_batch_size=8, count=1, delay_us=7, preferred=(4,))
    assert config == message()
    assert found_setting(message('name: "m" max_batch_size: 4')).batching == "none"
    adaptive = CONFIG + 'parameters { key: "ADAPTIVE_BATCHING" value { string_value: "true" } }'
    assert found_setting(message(adaptive)).batching == "adaptive"


def test_the_space_is_every_setting_that_differs_with_what_was_found_first():
    cells = space(message(), Axes(delay_us=(0, 500), preferred=((), (4,)), concurrency=(16,)))
    assert cells[0].setting == found_setting(message())
    assert len(cells) == len(set(cells))
    assert {cell.load for cell in cells} == {Load(concurrency=16)}
    assert {cell.setting.max_batch_size for cell in cells} == {1, 2, 4, 8}
    assert {cell.setting.count for cell in cells} == {1, 2}
    for cell in cells:
        assert all(rows <= cell.setting.max_batch_size for rows in cell.setting.preferred)
    # of one row: one setting each; of 2: two delays; of 4 and 8: two delays, preferred or not
    assert len(cells) == 1 + 2 * (1 + 2 + 4 + 4)


def test_an_axis_that_is_empty_stays_as_the_model_has_it():
    cells = space(message(), Axes(max_batch_size=(), delay_us=(), count=(), concurrency=(1, 4)))
    assert {(cell.setting.max_batch_size, cell.setting.delay_us, cell.setting.count) for cell in cells} == {(8, 7, 1)}
    assert {cell.load.concurrency for cell in cells} == {1, 4}


def test_rates_are_loads():
    assert {cell.load for cell in space(message(), Axes(rate=(50.0,)))} == {Load(rate=50.0)}


def test_a_size_that_is_no_power_of_two_is_tried_as_well():
    sizes = {cell.setting.max_batch_size for cell in space(message(CONFIG.replace(": 8\n", ": 6\n")), Axes())}
    assert sizes == {1, 2, 4, 6}


@pytest.mark.parametrize(
    ("axes", "text", "words"),
    [
        (Axes(max_batch_size=(16,)), CONFIG, "--max-batch-size 16: 'm' takes 8 rows at most"),
        (Axes(preferred=((16,),)), CONFIG, "--preferred 16: 'm' takes 8 rows at most"),
        (Axes(max_batch_size=(2,)), 'name: "m"', "--max-batch-size: 'm' takes no batches"),
        (Axes(delay_us=(2,)), 'name: "m"', "--delay-us: 'm' takes no batches"),
        (Axes(preferred=((2,),)), 'name: "m"', "--preferred: 'm' takes no batches"),
        (Axes(count=(2,)), CONFIG + "instance_group [ { count: 1 } ]", "--count: 'm' has 2 instance_groups"),
    ],
)
def test_what_the_model_cannot_do_is_refused_by_its_option(axes, text, words):
    with pytest.raises(SweepError) as refused:
        space(message(text), axes)
    assert str(refused.value).startswith(words)


def test_a_model_without_batches_is_swept_by_its_instances():
    cells = space(message('name: "m"'), Axes())
    assert [str(cell.setting) for cell in cells] == ["no batches, 1 instance", "no batches, 2 instances"]
    assert configured(message('name: "m"'), cells[1].setting).instance_group[0].count == 2


def test_a_setting_changes_itself_and_nothing_else():
    changed = configured(message(), Setting(max_batch_size=4, count=3, delay_us=500, preferred=(2, 4)))
    assert found_setting(changed) == Setting(max_batch_size=4, count=3, delay_us=500, preferred=(2, 4))
    assert changed.model_warmup[0].batch_size == 4
    assert changed.instance_group[0].kind == model_config_pb2.ModelInstanceGroup.KIND_CPU
    assert changed.dynamic_batching.priority_levels == 2
    assert changed.response_cache.enable
    assert configured(message(), found_setting(message())) == message()


def test_measured_is_without_what_would_distort_it():
    config = measurable(message(), found_setting(message()))
    assert not config.HasField("response_cache")
    assert not config.model_warmup


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('platform: "ensemble" ensemble_scheduling { step { model_name: "b" } step { model_name: "a" } }', "a, b"),
        ("sequence_batching { }", "sequence"),
        ("model_transaction_policy { decoupled: true }", "decoupled"),
    ],
)
def test_models_that_cannot_be_swept_are_told_why(text, words):
    assert words in refusal(message(text))
    assert refusal(message()) is None


def test_a_cell_comes_back_out_of_its_json():
    for cell in space(message(), Axes(rate=(5.0,), concurrency=(2,))):
        assert parse_cell(cell.as_json()) == cell
