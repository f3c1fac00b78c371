"""World files: what they may say, and which field a fault is told of."""

from pathlib import Path
from typing import Any

import pytest

from gateway.tuning.simulation.world import WorldError, changed, load_document, parse_world
from local_runtime.repository.model_config import OldestStrategy

WORLD: dict[str, Any] = {
    "models": {"m": {"curve": {"compute_us": {"1": 1000}}, "max_batch_size": 4, "dynamic_batching": {}}},
    "backends": {"triton": {"replicas": 2}},
    "traffic": [{"rate": 10.0}],
}
CONFIG = """
name: "embed" platform: "tensorrt_plan" max_batch_size: 16
dynamic_batching { preferred_batch_size: [ 8 ] max_queue_delay_microseconds: 700 }
instance_group [ { count: 2 kind: KIND_GPU gpus: [ 0, 1 ] } ]
"""


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("speed", 1, "speed: unknown field"),
        ("models", {}, "models: must have at least one"),
        ("models.m.curve", {"compute_us": {"0": 1}}, "models.m.curve.compute_us: must have whole numbers from 1 on"),
        ("models.m.curve", "no.json", "models.m.curve: no.json cannot be read: No such file"),
        ("models.m.config", "no.pbtxt", "models.m.config: no.pbtxt cannot be read"),
        ("models.m.max_batch_size", -1, "models.m.max_batch_size: must be greater than or equal to 0"),
        ("models.m.dynamic_batching", {"delay": 1}, "models.m: failed to read 'dynamic_batching' of m"),
        ("models.m.dynamic_batching.preferred_batch_size", [5], "models.m: dynamic batching preferred size must be <="),
        ("models.m.instances", 0, "models.m.instances: must be greater than or equal to 1"),
        ("backends.triton.replicas", 0, "backends.triton.replicas: must be greater than or equal to 1"),
        ("backends.triton.overhead_us", [-1], "backends.triton.overhead_us: must be numbers from 0 on"),
        ("rules", [{"name": "r", "split": [{"backend": "tritom", "model": "m"}]}], "unknown backend 'tritom'"),
        ("rules", [{"name": "r", "split": [{"backend": "triton", "model": "n"}]}], "split[0].model: 'n' is not among"),
        ("rules", [{"name": "r", "splits": []}], "rule 'r'"),
        ("traffic.0.rate", "many", "traffic.0.rate: Input should be a valid number"),
        ("traffic.0.concurrency", 2, "all: one of rate, concurrency and trace"),
        ("traffic.0.rows", 5, "traffic.0.rows: the model 'm' takes 4 at most"),
        ("traffic.0.task", "t", "traffic.0.task: unknown task 't'"),
        ("traffic.0.ordering_keys", -1, "traffic.0.ordering_keys: must be greater"),
        ("traffic", [{"rate": 1.0}, {"rate": 1.0}], "traffic.0.name: 'all' is used twice"),
        ("limits", {"nobody": [{"concurrent": 1}]}, "limits.nobody: no traffic has this tenant"),
        ("limits", {"load": [{"requests": 1}]}, "limits.load.0: `requests` needs `per`"),
        ("failures", [{"at_s": 1, "backend": "x"}], "failures.0.backend: unknown backend 'x'"),
        (
            "failures",
            [{"at_s": 1, "backend": "triton", "replica": 2}],
            "failures.0.replica: 'triton' has the replicas 0 to 1",
        ),
        ("failures", [{"at_s": 1, "backend": "triton", "kind": "slow"}], "failures.0.times: how many times as long"),
        ("failures", [{"at_s": 1, "backend": "triton", "kind": "sad"}], "failures.0.kind: must be 'dead', 'slow' or"),
        ("warmup_s", 10, "warmup_s: must be less than duration_s"),
    ],
)
def test_a_fault_is_told_with_its_field(path: str, value: object, words: str):
    with pytest.raises(WorldError) as refused:
        parse_world(changed(WORLD, path, value), folder=Path())
    assert words in str(refused.value)


def test_rules_are_needed_only_where_there_is_a_choice():
    (rule,) = parse_world(WORLD).rules
    assert [(target.backend, target.model) for target in rule.split] == [("triton", "m")]
    two = changed(WORLD, "models.n", WORLD["models"]["m"])
    with pytest.raises(WorldError, match=r"^rules: must say which of the models"):
        parse_world(two)


def test_tasks_are_those_of_the_rules_where_none_are_given():
    rule = {"name": "r", "match": {"task": "embed"}, "split": [{"backend": "triton", "model": "m"}]}
    world = parse_world(changed(WORLD, "rules", [rule]))
    assert list(world.tasks) == ["embed"]
    assert world.traffic[0].task == "embed"


def test_a_config_says_how_a_model_batches_whatever_computes_it_and_the_world_has_the_last_word(tmp_path: Path):
    (tmp_path / "config.pbtxt").write_text(CONFIG)
    (tmp_path / "curve.json").write_text('{"form": "latency-curve/1", "compute_us": {"1": [900, 1100]}}')
    given = {"models": {"embed": {"curve": "curve.json", "config": "config.pbtxt"}}}
    model = parse_world(WORLD | given, folder=tmp_path).models["embed"]
    assert model.instances == 4
    assert model.config.max_batch_size == 16
    assert model.config.dynamic_batching is not None
    assert model.config.dynamic_batching.preferred_batch_size == (8,)
    assert model.config.dynamic_batching.max_queue_delay_microseconds == 700
    changes = {"instances": 1, "max_batch_size": 32, "dynamic_batching": {"max_queue_delay_microseconds": 5}}
    given["models"]["embed"] |= changes
    model = parse_world(WORLD | given, folder=tmp_path).models["embed"]
    assert (model.instances, model.config.max_batch_size) == (1, 32)
    assert model.config.dynamic_batching is not None
    assert model.config.dynamic_batching.preferred_batch_size == ()


def test_a_config_of_a_model_that_keeps_sequences_is_taken_as_it_is_and_an_ensemble_is_not():
    folder = Path(__file__).parents[3] / "triton_models"
    config = str(folder / "speech_activity" / "config.pbtxt")
    model = {"curve": {"compute_us": {"1": 1}}, "config": config}
    streams = {"rate": 1.0, "sequence_length": 100, "sequence_gap_ms": 32.0}
    world = parse_world(WORLD | {"models": {"speech_activity": model}, "traffic": [streams]})
    batching = world.models["speech_activity"].config.sequence_batching
    assert batching is not None
    assert batching.max_sequence_idle_microseconds == 10_000_000
    assert isinstance(batching.strategy, OldestStrategy)
    assert batching.strategy.max_candidate_sequences == 256
    model["config"] = str(folder / "text_embedding" / "config.pbtxt")
    with pytest.raises(WorldError, match=r"models\.text_embedding: .* is an ensemble"):
        parse_world(WORLD | {"models": {"text_embedding": model}})


def test_one_field_is_changed_in_a_copy():
    made = changed(WORLD, "traffic.0.rate", 20.0)
    assert (made["traffic"][0]["rate"], WORLD["traffic"][0]["rate"]) == (20.0, 10.0)
    for path, words in (
        ("traffic.1.rate", "traffic.1: there are"),
        ("traffic.x", "traffic.x: there are"),
        ("traffic.0.rate.x", "has no fields"),
    ):
        with pytest.raises(WorldError, match=words):
            changed(WORLD, path, 1)


@pytest.mark.parametrize(
    ("text", "words"), [("[1", "not valid YAML"), ("[1]", "must be a mapping"), ("", "must be a mapping")]
)
def test_a_file_that_is_no_world_is_told(tmp_path: Path, text: str, words: str):
    file = tmp_path / "w.yaml"
    file.write_text(text)
    with pytest.raises(WorldError, match=words):
        load_document(file)
    with pytest.raises(WorldError, match="No such file"):
        load_document(tmp_path / "none.yaml")
