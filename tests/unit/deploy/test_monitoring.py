"""Alerts and dashboards against the code: every metric that they name is there, every alert is tried and told."""

import re
import subprocess

import pytest
import yaml
from prometheus_client import CollectorRegistry

from gateway.core.errors import CLOSED_LIST
from gateway.telemetry.metrics import Metrics
from local_runtime.protocol.metrics import render
from local_runtime.scheduling.stats import StatsRecorder
from tests.kit.prometheus import JOBS, NAMES, RECORDED, ROOT, RULES, queries, tool

RECORDING = (RULES / "recording.yml").read_text()
ALERTS = (RULES / "alerts.yml").read_text()
SCRAPED = (RULES / "prometheus.yml").read_text()
RUNBOOK = (ROOT / "docs" / "alerts.md").read_text()
OF_GPUS = {"nv_gpu_memory_used_bytes", "nv_gpu_memory_total_bytes"}  # Triton's alone, where there is a GPU


RUNTIME = render([StatsRecorder(name="m", version="1").snapshot()], []).splitlines()


def known() -> set[str]:
    """The names of all samples that a gateway and a model server have."""
    registry = CollectorRegistry()
    Metrics(registry)
    found = set(OF_GPUS) | set(re.findall(r"nv_[a-z_]+", "\n".join(RUNTIME)))
    for family in registry.collect():
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}.get(family.type, ("",))
        found |= {family.name + suffix for suffix in suffixes}
    return found


def names() -> list[tuple[str, str]]:
    texts = [("recording.yml", RECORDING), ("alerts.yml", ALERTS), *queries()]
    return sorted({(where, name) for where, text in texts for name in NAMES.findall(text)})


@pytest.mark.parametrize(("where", "name"), names())
def test_every_metric_that_is_named_exists(where: str, name: str):
    assert name in known(), where


def test_every_recorded_name_exists():
    recorded = {rule["record"] for group in yaml.safe_load(RECORDING)["groups"] for rule in group["rules"]}
    for where, text in (("alerts.yml", ALERTS), *queries()):
        assert set(RECORDED.findall(text)) <= recorded, where


def test_every_job_that_is_asked_for_is_scraped():
    assert {"gateway"} <= JOBS <= {job["job_name"] for job in yaml.safe_load(SCRAPED)["scrape_configs"]}


def test_failures_of_ours_are_codes_that_there_are():
    ours = {re.search(r'code=~"([^"]+)"', line)[1] for line in RECORDING.splitlines() if "code=~" in line}
    (pattern,) = ours
    matched = {error.code for error in CLOSED_LIST if re.fullmatch(pattern, error.code)}
    assert {part for part in pattern.split("|") if "*" not in part} <= matched
    by_status = {error.code for error in CLOSED_LIST if error.status >= 500} - {"blocked"}
    assert matched == by_status


def test_every_alert_has_a_runbook_and_a_test():
    tried = (RULES / "alerts_test.yml").read_text()
    for group in yaml.safe_load(ALERTS)["groups"]:
        for alert in group["rules"]:
            name = alert["alert"]
            assert alert["annotations"]["runbook"] == f"docs/alerts.md#{name.lower()}"
            assert f"\n## {name}\n" in RUNBOOK
            assert re.search(rf"alertname: {name}\n\s+exp_alerts:", tried), "it is never seen to fire"
            assert f"alertname: {name}}}" in tried, "it is never seen to be silent"


@pytest.mark.parametrize(
    "words",
    [
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "recording.yml", "alerts.yml"),
        ("test", "rules", "alerts_test.yml"),
    ],
)
def test_promtool_agrees(words: tuple[str, ...]):
    done = subprocess.run([tool("promtool"), *words], cwd=RULES, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
