"""docs/releasing.md and docs/upgrading.md against what there is."""

import re
from pathlib import Path

import pytest
import typer.main
from prometheus_client import CollectorRegistry

from gateway.__main__ import app
from gateway.telemetry.metrics import Metrics
from release.notes import sections
from release.packages import version

ROOT = Path(__file__).parents[3]
RELEASING, UPGRADING = ((ROOT / "docs" / name).read_text() for name in ("releasing.md", "upgrading.md"))
PAGES = pytest.mark.parametrize("page", [RELEASING, UPGRADING], ids=["releasing", "upgrading"])
CODE = r"```[a-z]*\n.*?```|`[^`\n]+`"


def test_every_version_says_what_is_to_be_done_for_it():
    released = {one.version for one in sections((ROOT / "CHANGELOG.md").read_text())} - {"Unreleased"}
    assert {version(), *released} <= set(re.findall(r"^## To (\S+)$", UPGRADING, re.MULTILINE))


@PAGES
def test_what_it_says_to_type_exists(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    code = " ".join(re.findall(CODE, page, re.DOTALL))
    for words in re.findall(r"(?:^|[`\n ])gateway ((?:[a-z]+ )?[a-z]+)", code):
        command = typer.main.get_command(app)
        for word in words.split():
            if not hasattr(command, "commands"):
                break
            assert word in command.commands, words
            command = command.commands[word]
    assert set(re.findall(r"make ([a-z]+)", code)) <= targets


@PAGES
def test_the_variables_and_metrics_that_it_names_exist(page):
    compose = (ROOT / "docker-compose.yml").read_text() + (ROOT / ".env.example").read_text()
    gone = {"GATEWAY_OPS_PORT"}  # the page says so
    made = set(re.findall(r"\b[A-Z]+_[A-Z_]+\b", compose)) | {"GATEWAY_CONFIG"}
    assert not gone & made
    assert set(re.findall(r"`([A-Z]+_[A-Z_]+)`", page)) <= made | gone
    registry = CollectorRegistry()
    Metrics(registry)
    names = {family.name + ("_total" if family.type == "counter" else "") for family in registry.collect()}
    assert set(re.findall(r"`(gateway_[a-z_]+)`", page)) <= names


@PAGES
def test_its_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page):
        assert (ROOT / "docs" / target).exists(), target
