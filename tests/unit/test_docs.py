"""The pages against the code: every route, error code, metric and command that exists is told, and no other metric."""

import json
import re
from pathlib import Path

import pytest
import typer.main
import yaml
from prometheus_client import CollectorRegistry

from gateway.__main__ import app as cli
from gateway.api.app import PATHS
from gateway.api.errors import problem_body
from gateway.api.oip import openapi as openapi_oip
from gateway.core.admissions import refusal
from gateway.core.error_forms import error_headers
from gateway.core.errors import CLOSED_LIST
from gateway.core.rules import parse_rules, unrouted
from gateway.core.types import Limit, LimitState, Verdict
from gateway.settings import Settings
from gateway.telemetry.metrics import Metrics
from gateway.wiring import check
from local_runtime.__main__ import main as local_main
from local_runtime.protocol.metrics import render
from local_runtime.scheduling.stats import StatsRecorder

ROOT = Path(__file__).parents[2]
README, TASKS, ERRORS = ((ROOT / name).read_text() for name in ("README.md", "docs/tasks.md", "docs/errors.md"))
MANUALS = "".join(path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))))


def metric_names() -> set[str]:
    registry = CollectorRegistry()
    Metrics(registry)
    return {family.name + ("_total" if family.type == "counter" else "") for family in registry.collect()}


@pytest.mark.parametrize("path", sorted({path for _, path, _, _ in PATHS}))
def test_every_route_is_told(path):
    stem = path.split("/{")[0]
    assert stem in TASKS


@pytest.mark.parametrize("error", CLOSED_LIST, ids=lambda e: e.code)
def test_every_error_code_is_told_with_its_status(error):
    assert re.search(rf"^\| [^|]*`{error.code}`[^|]* \| {error.status} \|", ERRORS, re.MULTILINE)


def test_no_other_error_is_told():
    rows = re.findall(r"^\| (`[^|]*) \| \d{3} \|", ERRORS, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == {error.code for error in CLOSED_LIST}


METRICS = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()


def test_the_metrics_are_these():
    table = re.findall(r"^\| `(gateway_[a-z_]+)(?:\{([a-z_,]+)\})?` \|", METRICS, re.MULTILINE)
    assert {name for name, _ in table} == metric_names()
    assert len(table) == len(metric_names())


def test_the_metrics_labels_are_these():
    registry = CollectorRegistry()
    Metrics(registry)
    made = {
        metric._name + ("_total" if metric._type == "counter" else ""): set(metric._labelnames)
        for metric in registry._collector_to_names
    }
    made["gateway_worker_rules_revision"] |= {"pid"}  # by the library, of each worker
    table = re.findall(r"^\| `(gateway_[a-z_]+)(?:\{([a-z_,]+)\})?` \|", METRICS, re.MULTILINE)
    assert {name: set(filter(None, labels.split(","))) for name, labels in table} == made


def test_no_other_metric_is_told():
    told = set(re.findall(r"\bgateway_[a-z_]+\b(?!\.py)", MANUALS)) - {"gateway_session"}  # the console's cookie
    histograms = {f"{name}{end}" for name in metric_names() for end in ("_sum", "_count", "_bucket")}
    assert told <= metric_names() | histograms


@pytest.mark.parametrize("name", [n for n, c in typer.main.get_command(cli).commands.items() if not c.hidden])
def test_every_command_is_told(name):
    assert re.search(rf"gateway {name}|make {name}", MANUALS)


RUNTIME = (Path(__file__).parents[2] / "docs" / "local-runtime.md").read_text()


def test_the_local_runtimes_metrics_are_these():
    lines = render([StatsRecorder(name="m", version="1").snapshot()], []).splitlines()
    made = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    told = set()
    for text in re.findall(r"`(nv_[a-z_{},]+?)(?:\{reason\})?`", RUNTIME):
        before, _, rest = text.partition("{")
        choices, _, after = rest.partition("}")
        told |= {before + choice + after for choice in choices.split(",")}
    assert told == made


@pytest.mark.parametrize("option", ["--threads", "--model-control-mode", "--cache-size-bytes", "--exit-timeout-s"])
def test_options_that_the_manual_names_exist(option, capsys):
    with pytest.raises(SystemExit):
        local_main(["serve", "--help"])
    assert option in RUNTIME
    assert option in capsys.readouterr().out


PROTOCOL = (Path(__file__).parents[2] / "docs" / "open-inference-protocol.md").read_text()


def test_the_protocols_paths_are_told():
    for path in openapi_oip.paths():
        last = path.rpartition("/")[2]
        assert path in PROTOCOL or f"/{last}" in PROTOCOL or last.startswith("{"), path


def test_the_protocols_example_is_a_configuration():
    written = yaml.safe_load(re.search(r"```yaml\n(.*?)```", PROTOCOL, re.DOTALL)[1])
    backends = {"triton": {"kind": "triton", "url": "t:8001"}, "local": {"kind": "local", "repository": "models"}}
    settings = Settings.model_validate({"backends": backends, **written})
    check(settings)
    assert unrouted(parse_rules(settings.rules), settings.tasks) == ()


LIMITS = (Path(__file__).parents[2] / "docs" / "limits.md").read_text()


def test_the_limits_examples_are_a_configuration():
    of_keys, of_a_rule, ordering = (
        yaml.safe_load(text) for text in re.findall(r"```yaml(?: fragment)?\n(.*?)```", LIMITS, re.DOTALL)
    )
    rule = {**of_a_rule["rules"][0], "split": [{"backend": "local", "model": "m"}], **ordering}
    settings = Settings.model_validate(
        {
            "backends": {"local": {"kind": "local", "repository": "models"}},
            "tasks": {"general_llm": {"contract": "tensor"}},
            "rules": [rule],
            **of_keys,
        }
    )
    kinds = [limit.limit().kind for limit in (*settings.limits, *(settings.keys[0].limits or ()))]
    assert set(kinds) == {"requests", "tokens", "usd", "concurrent"}
    assert parse_rules(settings.rules)[0].policies.on_store_down == "local"


def test_the_limits_refusal_is_a_real_one():
    limit = Limit(kind="requests", amount=60, per="minute", burst=60)
    hit = LimitState(limit=limit, remaining=0, reset_us=60_000_000, is_refused=True, retry_after_us=2_400_000)
    verdict = Verdict(allowed=False, states=(hit,), refused_by=hit)
    error = refusal(verdict)
    error.verdict = verdict
    written = json.loads(re.search(r"```json\n(\{\n.*?)```", LIMITS, re.DOTALL)[1])
    assert written == problem_body(error)
    for name, value in (("Retry-After", "3"), ("retry-after-ms", "2400")):
        assert f"`{name}: {value}`" in LIMITS
        assert error_headers(error)[name.lower()] == value
