import io
import shlex
import socket
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from gateway.cli.stack import app
from gateway.stack import launch, packages, parts, state, welcome
from gateway.stack.launch import Options, StackError
from gateway.stack.ports import Ports
from gateway.stack.state import RunDir
from tests.unit.stack.standins import failing, part

KEY = "k"


@pytest.fixture
def run(tmp_path):
    folder = RunDir(tmp_path / "run")
    folder.create()
    return folder


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "gateway.yaml"
    path.write_text("{}")
    return path


def start(run, config, **changes):
    launch.up(Options(run=run, config=config, environ={}, **changes), Console(file=io.StringIO()), tell=False)


def found(*some, missing=()):
    return lambda _: parts.Found(parts=some, missing=tuple(missing))


def test_a_port_in_use_names_the_port_the_part_and_the_option(run, config, monkeypatch, tmp_path):
    one = part("redis", tmp_path)
    monkeypatch.setattr(parts, "find", found(one))
    with socket.socket() as other:
        other.bind(("127.0.0.1", one.ports[0]))
        other.listen()
        with pytest.raises(StackError) as caught:
            start(run, config)
    line = str(caught.value)
    assert str(one.ports[0]) in line
    assert "Redis" in line
    assert "--ports auto" in line


def test_a_fatal_missing_part_is_the_line(run, config, monkeypatch):
    missing = [parts.Missing(name="llm", reason="No LLM.")]
    monkeypatch.setattr(parts, "find", found(missing=missing))
    with pytest.raises(StackError, match=r"^No LLM\.$"):
        start(run, config)


def test_a_running_stack_says_gateway_down(run, config):
    with state.lock(run), pytest.raises(StackError, match="`gateway down --run-dir"):
        start(run, config)


def test_a_missing_configuration_is_one_line(run, tmp_path):
    with pytest.raises(StackError, match="--config"):
        start(run, tmp_path / "nothing.yaml")


def test_a_failing_part_shows_the_end_of_its_log(run, config, monkeypatch):
    monkeypatch.setattr(parts, "find", found(failing("serve")))
    with pytest.raises(StackError, match="Serve did not start: it exited with code 3") as caught:
        start(run, config)
    assert caught.value.details[-1] == "  no luck"


def test_the_command_line_turns_refusals_into_a_line_and_exit_1(run, config, monkeypatch):
    monkeypatch.setattr(parts, "find", found(missing=[parts.Missing(name="weights", reason="Run `make setup`.")]))
    result = CliRunner().invoke(app, ["up", "--run-dir", str(run.path), "--config", str(config)])
    assert result.exit_code == 1
    assert result.stderr == "Run `make setup`.\n"


def test_down_where_nothing_runs(tmp_path):
    result = CliRunner().invoke(app, ["down", "--run-dir", str(tmp_path / "none")])
    assert result.exit_code == 0
    assert result.stdout == "Nothing runs here.\n"
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("command", ["up", "down"])
def test_help_has_examples(command):
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert f"gateway {command}" in result.stdout


def test_options_survive_the_way_into_the_background(run, config):
    options = Options(
        run=run, config=config, auto_ports=True, workers=2, without=frozenset({"triton", "llm"}), environ={}
    )
    command = launch.supervisor_command(options)
    assert command[1:5] == ["-m", "gateway", "up", "--background"]
    assert command[5:] == shlex.split(
        f"--run-dir {run.path} --config {config} --ports auto --workers 2 --without llm --without triton"
    )


def test_stack_json_has_null_for_what_does_not_run():
    class PortsOnly:
        ports = Ports()
        key = KEY
        admin_token = KEY

    addresses = launch.stack_addresses(PortsOnly, parts.Found(parts=(), missing=()))
    assert addresses == {
        "data_url": "http://127.0.0.1:8080",
        "admin_url": "http://127.0.0.1:8090",
        "ops_url": "http://127.0.0.1:8081",
        "key": KEY,
        "admin_token": KEY,
        "triton_grpc": None,
        "triton_http": None,
        "redis_url": "redis://127.0.0.1:16379/0",
        "llm_url": None,
    }


def test_the_three_calls_are_what_a_shell_takes(run, tmp_path):
    image = tmp_path / "a cat's.png"
    for call in welcome.calls("http://127.0.0.1:8080", "gw-dev-k", image):
        words = shlex.split(call)
        assert words[:2] == ["curl", "-s"]
        assert "Authorization: Bearer gw-dev-k" in words
    assert f"@{image}" in shlex.split(welcome.calls("http://h", "k", image)[0])


def test_without_a_photo_a_picture_is_drawn(run, monkeypatch):
    monkeypatch.setattr(packages, "package_dir", lambda _: None)
    path = welcome.example_image(run)
    assert path.is_absolute()
    with Image.open(path) as image:
        assert image.size == (224, 224)
        assert image.convert("RGB").getpixel((223, 0)) == (223 * 255 // 224, 0, 128)


class PortsOnly:
    ports = Ports()
    key = KEY
    admin_token = KEY


def test_a_stack_that_commands_do_not_find_tells_how_they_do(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    usual = RunDir(Path(".run"))
    usual.create()
    stack = launch.stack_addresses(PortsOnly, parts.Found(parts=(), missing=()))
    (line,) = [line for line in welcome.lines(stack, run) if "export" in line]
    urls = f"GATEWAY_ADMIN_URL={stack['admin_url']} GATEWAY_OPS_URL={stack['ops_url']}"
    assert f"{urls} GATEWAY_ADMIN_TOKEN=$(cat {run.path / 'admin-token'})" in line
    assert not any("export" in line for line in welcome.lines(stack, usual))


def test_only_calls_that_work_are_shown(run):
    stack = launch.stack_addresses(PortsOnly, parts.Found(parts=(), missing=()))
    assert not any("general_llm" in line for line in welcome.lines(stack, run))
    with_llm = {**stack, "llm_url": "http://127.0.0.1:1/v1"}
    assert any("general_llm" in line for line in welcome.lines(with_llm, run))
