"""`gateway simulate`: the worlds that are shipped and told of, its forms of output, and its refusals."""

import json
import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from gateway.__main__ import app
from gateway.tuning.report import parse_report
from gateway.tuning.simulation.world import parse_world

ROOT = Path(__file__).parents[2]
WORLDS = sorted((ROOT / "deploy" / "worlds").glob("*.yaml"))
PAGE = (ROOT / "docs" / "simulate.md").read_text()
SHORT = ("--set", "duration_s=3", "--set", "warmup_s=1")


def gateway(*args: object):
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, ["simulate", *map(str, args)])


@pytest.mark.parametrize("world", WORLDS, ids=lambda path: path.stem)
def test_a_world_that_is_shipped_can_be_simulated(world: Path) -> None:
    done = gateway(world, *SHORT, "--json")
    assert done.exit_code in {0, 1}, done.output  # 1 where an SLO is not held: a server dies, and callers are limited
    report = parse_report(json.loads(done.stdout))
    assert report.kind == "simulation"
    assert report.seconds == 2
    assert report.whole.codes["ok"] > 100
    assert report.servers


def test_the_worlds_of_the_page_can_be_simulated(tmp_path: Path) -> None:
    texts = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    for text, model in zip(texts, ("embed", "speech"), strict=True):
        file = tmp_path / "world.yaml"
        file.write_text(text)
        done = gateway(file, *SHORT)
        assert done.exit_code == 0, done.output
        assert f"triton/{model}" in done.stdout


def test_the_page_tells_every_section_and_every_field() -> None:
    from gateway.tuning.simulation import world as worlds  # noqa: PLC0415 - its private forms are what is told

    for form in (worlds._World, worlds._Model, worlds._Backend, worlds._Task, worlds._Failure, worlds._Asked):
        for field in form.model_fields:
            assert re.search(rf"\b{field}\b", PAGE), field


def test_the_shipped_world_is_what_its_comments_say() -> None:
    world = parse_world(yaml.safe_load((ROOT / "deploy" / "worlds" / "replicas.yaml").read_text()))
    assert world.backends["triton"].replicas == 3
    assert {one.traffic.tenant for one in world.traffic} == {"people", "bulk"}
    assert [one.kind for one in world.failures] == ["dead"]


def test_seed_and_changes_decide_what_comes_out(tmp_path: Path) -> None:
    csv, html = tmp_path / "r.csv", tmp_path / "r.html"
    asked = (WORLDS[0], *SHORT, "--json")
    first = gateway(*asked, "--csv", csv, "--html", html).stdout
    assert gateway(*asked).stdout == first
    assert gateway(*asked, "--seed", 1).stdout != first
    fewer = json.loads(gateway(*asked, "--set", "backends.triton.replicas=2", "--set", "failures=[]").stdout)
    assert fewer["servers"][0]["busy"] > json.loads(first)["servers"][0]["busy"]
    assert csv.read_text().count("\n") == 4  # the heading, all, and two classes
    assert html.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("none.yaml",), "none.yaml: No such file or directory"),
        ((WORLDS[0], "--set", "traffic.0.rows=99"), "traffic.0.rows: the model 'embed' takes 8 at most"),
        ((WORLDS[0], "--set", "replicas"), "--set replicas: must be FIELD=VALUE"),
        ((WORLDS[0], "--set", "title=[1"), "--set title: the value is not valid YAML"),
        ((WORLDS[0], "--csv", "/none/x.csv"), "/none/x.csv: there is no such folder"),
    ],
)
def test_a_fault_is_one_line_and_ends_with_2(args: tuple[object, ...], words: str) -> None:
    done = gateway(*args)
    assert done.exit_code == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


ONE = """
models: {m: {curve: {compute_us: {"1": 10000}}}}
backends: {b: {}}
traffic: [{rate: 20, arrivals: constant}, {name: tight, rate: 5, arrivals: constant, slo_ms: 10.5}]
duration_s: 10
"""


@pytest.mark.parametrize(
    ("slo", "changes", "status", "said"),
    [
        ("", (), 0, ["SLO p99=10.5ms held: tight: 100.00 % of"]),
        ("50ms", (), 0, ["SLO p99=50ms held: all: 100.00 % of", "SLO p99=10.5ms held: tight"]),
        ("9ms", (), 1, ["SLO p99=9ms not held: all: 0.00 % of", "SLO p99=10.5ms held: tight"]),
        ("", ("traffic.1.slo_ms=5",), 1, ["SLO p99=5ms not held: tight: 0.00 % of"]),
        ("p50=50ms", (), 0, ["SLO p50=50ms held: all", "SLO p50=10.5ms held: tight"]),
    ],
)
def test_an_slo_has_a_verdict_and_an_exit_code(tmp_path: Path, slo, changes, status, said) -> None:
    file = tmp_path / "world.yaml"
    file.write_text(ONE)
    options = [*(("--slo", slo) if slo else ()), *(part for one in changes for part in ("--set", one))]
    done = gateway(file, *options)
    assert done.exit_code == status, done.output
    told = [line for line in done.stdout.splitlines() if line.startswith("SLO ")]
    assert len(told) == len(said)
    assert all(line.startswith(words) for line, words in zip(told, said, strict=True))


def test_a_long_simulation_says_in_lines_how_far_it_is(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("gateway.cli.tuning.progress.EVERY_S", 0.0)
    (tmp_path / "world.yaml").write_text(ONE)
    done = gateway(tmp_path / "world.yaml")
    assert done.stderr.splitlines()[0] == "simulated: 0.0 of 10 s"
    assert len(done.stderr.splitlines()) > 50
    assert gateway(tmp_path / "world.yaml", "--json").stderr == ""


def test_aliases_that_multiply_are_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 x", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))]
    (tmp_path / "bomb.yaml").write_text("\n".join(lines))
    done = gateway(tmp_path / "bomb.yaml")
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "bomb.yaml: not taken: its aliases repeat more than 1,000,000 characters" in done.stderr
