"""The presets of `deploy/presets`: read by the real parsers, and by the simulator better than without them."""

import dataclasses
from pathlib import Path

import pytest
import yaml

from gateway.cli.check_models import advice
from gateway.core.rules import RuleSet, parse_rules
from gateway.settings import load_settings
from gateway.tuning.load import traffic_file
from gateway.tuning.simulation.models import configured
from gateway.tuning.simulation.run import simulate
from gateway.tuning.simulation.world import parse_world
from local_runtime.repository import parsing
from triton_models import build

FOLDER = Path(__file__).parents[3] / "deploy" / "presets"
PRESETS = ("mixed", "throughput-latency")
KEYS = {"GATEWAY_KEY_PEOPLE": "people", "GATEWAY_KEY_BULK": "bulk"}
CONFIGS = sorted(FOLDER.glob("*/*.pbtxt"))
CURVE = {"compute_us": {"1": 4250, "64": 20_000}, "overhead_us": 500}  # 4 ms, and 250 us each row


def settings(preset: str, monkeypatch):
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    return load_settings(FOLDER / preset / "gateway.yaml")


def classes(preset: str):
    return traffic_file.read(FOLDER / preset / "traffic.yaml", url="http://127.0.0.1:8080", key="", environ=KEYS)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_gateway_takes_the_rules_and_every_class_of_traffic_meets_one(preset, monkeypatch):
    read = settings(preset, monkeypatch)
    rules = RuleSet(revision=1, rules=parse_rules(read.rules))
    assert {target.backend for rule in rules.rules for _, target in rule.targets} == read.backends.keys()
    callers = {key.key_env: key for key in read.keys}
    for part in classes(preset):
        assert part.ask.task in read.tasks
        key = next(callers[name] for name, secret in KEYS.items() if secret == part.ask.key)
        assert key.priority == part.traffic.priority
        assert part.traffic.rows == (32 if part.traffic.priority == "batch" else 1)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_lines_go_into_a_config_of_the_shipped_model(path):
    lines = parsing.read_text(path.read_text(), folder_name="text_encoder")
    fields = [field.name for field, _ in lines.ListFields()]
    assert set(fields) <= {"max_batch_size", "dynamic_batching", "instance_group"}
    own = parsing.read_text(
        (build.REPOSITORY / "text_encoder" / "config.pbtxt").read_text(), folder_name="text_encoder"
    )
    for field in fields:
        own.ClearField(field)
    own.MergeFrom(lines)
    read = parsing.parse_message(own, folder_name="text_encoder")
    assert read.max_batch_size == lines.max_batch_size
    assert read.dynamic_batching is not None


def test_only_the_levels_have_what_tritons_batcher_is_slow_with():
    warned = set()
    for path in CONFIGS:
        message = parsing.read_text(path.read_text(), folder_name="m")
        document = parsing.json_format.MessageToDict(message, preserving_proto_field_name=True)
        if any("0.5 s" in reason for _, _, reason in advice(document)):
            warned.add(path.name)
    assert warned == {"levels.pbtxt"}


# --- before and after ------------------------------------------------------------------------------------


def traffic(preset: str, **of_class: dict):
    """The file's classes for the simulator; `of_class` has more of each by its name."""
    found = []
    for part in classes(preset):
        given = {
            field.name: getattr(part.traffic, field.name)
            for field in dataclasses.fields(part.traffic)
            if getattr(part.traffic, field.name) != field.default
        }
        given.pop("tenant", None)
        found.append({**given, "tenant": part.ask.key, "task": part.ask.task, **of_class.get(part.traffic.name, {})})
    return found


def run(preset: str, models, backends, rules, **of_class: dict):
    """Interactive p99 in ms, and bulk rows per second."""
    world = {
        "models": {name: {"curve": CURVE, "config": config} for name, config in models.items()},
        "backends": backends,
        "rules": rules,
        "tasks": {"text-embedding": {"timeout_ms": 60_000, "attempt_timeout_ms": 30_000}},
        "traffic": traffic(preset, **of_class),
        "duration_s": 22.0,
        "warmup_s": 2.0,
    }
    report = simulate(parse_world(world, folder=FOLDER / preset), seed=1)
    by_name = {one.name: one for one in report.classes}
    assert set(report.whole.codes) == {"ok"}
    return by_name["interactive"].latency.p99, by_name["bulk"].rows_per_s


def test_mixed_traffic_by_the_gateways_queue(monkeypatch):
    read = settings("mixed", monkeypatch)
    models, rules = {"text_embedding": "config.pbtxt"}, [dict(rule) for rule in read.rules]
    gate = read.backends["triton"].max_in_flight
    p99_without, bulk_without = run("mixed", models, {"triton": {}}, rules)
    p99_with, bulk_with = run("mixed", models, {"triton": {"max_in_flight": gate}}, rules)
    assert p99_without > 150
    assert p99_with < 80
    assert bulk_with > 0.95 * bulk_without


def test_mixed_traffic_by_the_models_own_queue(monkeypatch):
    rules = [dict(rule) for rule in settings("mixed", monkeypatch).rules]
    levels = configured("text_embedding", (FOLDER / "mixed" / "levels.pbtxt").read_text())
    assert levels.dynamic_batching.priority_levels == 2
    p99_without, bulk_without = run("mixed", {"text_embedding": "config.pbtxt"}, {"triton": {}}, rules)
    first = {"interactive": {"model_priority": 1}}
    p99_with, bulk_with = run("mixed", {"text_embedding": "levels.pbtxt"}, {"triton": {}}, rules, **first)
    assert p99_with < 0.4 * p99_without
    assert bulk_with > 0.95 * bulk_without


def test_one_server_for_throughput_and_one_for_latency(monkeypatch):
    read = settings("throughput-latency", monkeypatch)
    gates = {name: {"max_in_flight": one.max_in_flight} for name, one in read.backends.items()}
    own = yaml.safe_load(yaml.safe_dump([dict(rule) for rule in read.rules]))
    for rule in own:  # one name on two servers is two models to the simulator
        for target in (*rule["split"], *rule.get("fallback", ())):
            target["model"] = target["backend"]
    models = {"throughput": "throughput.pbtxt", "latency": "latency.pbtxt"}
    p99_with, bulk_with = run("throughput-latency", models, gates, own)
    alike = [
        {"name": "all", "match": {"task": "text-embedding"}, "split": [{"backend": "both", "model": "throughput"}]}
    ]
    both = {"both": {"replicas": 2, "max_in_flight": 16}}
    p99_without, bulk_without = run("throughput-latency", {"throughput": "throughput.pbtxt"}, both, alike)
    assert p99_with < 0.5 * p99_without
    assert bulk_with > 0.95 * bulk_without
