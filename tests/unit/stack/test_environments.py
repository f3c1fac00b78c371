import fcntl
import os
import sys

import pytest

from gateway.stack import environments, triton
from gateway.stack.environments import Environment, SetupError, Stamp, digest


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.setattr(environments, "ROOT", tmp_path)
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "constraints.txt").write_text("a==1\n")
    return tmp_path


@pytest.fixture
def environment(project):
    """An environment whose interpreter is there already: no test waits for `venv`."""
    made = Environment(project / ".venv")
    made.python.parent.mkdir(parents=True)
    made.python.symlink_to(sys.executable)
    (made.path / "lib" / environments.PYTHON).mkdir(parents=True)
    return made


def step(environment, project, install):
    environments.environment_step(environment, [project / "requirements" / "constraints.txt"], install)


def test_a_second_run_with_the_same_requirements_installs_nothing(environment, project):
    calls = []
    for _ in range(2):
        step(environment, project, lambda *_: calls.append(1))
    assert calls == [1]
    (project / "requirements" / "constraints.txt").write_text("a==2\n")
    step(environment, project, lambda *_: calls.append(2))
    assert calls == [1, 2]


def test_a_failed_installation_leaves_no_stamp_and_the_next_run_starts_anew(environment, project, monkeypatch):
    def fail(*_):
        (environment.path / "half-a-package").touch()
        raise SetupError("no network")

    with pytest.raises(SetupError):
        step(environment, project, fail)
    assert not (environment.path / ".stamp").exists()
    commands = []
    monkeypatch.setattr(environments, "call", lambda what, command, **_: commands.append(command))
    step(environment, project, lambda *_: None)
    assert commands == [(sys.executable, "-m", "venv", environment.path)]
    assert not (environment.path / "half-a-package").exists()
    assert (environment.path / ".stamp").exists()
    assert not environment.half_made.exists()


def test_an_environment_made_by_hand_is_used_as_it_is(environment, project, monkeypatch):
    monkeypatch.setattr(environments, "call", lambda *_, **__: pytest.fail("nothing to make"))
    step(environment, project, lambda *_: None)
    assert (environment.path / ".stamp").exists()


def test_an_environment_of_another_python_is_made_anew(environment, project, monkeypatch):
    monkeypatch.setattr(environments, "PYTHON", "python4.2")
    commands = []
    monkeypatch.setattr(environments, "call", lambda what, command, **_: commands.append(command))
    step(environment, project, lambda *_: None)
    assert commands == [(sys.executable, "-m", "venv", environment.path)]


def test_a_digest_depends_on_contents_facts_and_missing_files(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("1")
    seen = {digest([one, two]), digest([two, one]), digest([one]), digest([one], "fact")}
    two.write_text("")
    seen.add(digest([one, two]))
    assert len(seen) == 5


def test_a_command_that_fails_shows_the_end_of_its_log(tmp_path):
    command = (sys.executable, "-I", "-c", "print('first'); print('why'); raise SystemExit(2)")
    with pytest.raises(SetupError, match=r"(?s)installing: failed.*first.*why"):
        environments.call("installing", command, log=tmp_path / "log", cwd=tmp_path)


def test_progress_is_told(tmp_path, capsys):
    environments.call("working", (sys.executable, "-I", "-c", ""), log=tmp_path / "log", cwd=tmp_path)
    first, last = capsys.readouterr().out.splitlines()
    assert first == "working ..."
    assert last.startswith("working: done in ")


def test_a_python_that_cannot_make_environments_names_the_package(project, monkeypatch):
    def fail(*_, **__):
        raise SetupError("... ensurepip is not available ...")

    monkeypatch.setattr(environments, "call", fail)
    with pytest.raises(SetupError, match=r"apt-get install python3\.\d+-venv"):
        environments.make(Environment(project / ".venv"))


def test_two_set_ups_do_not_work_at_once(tmp_path):
    with environments.alone(tmp_path):
        other = os.open(tmp_path, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(other)


def test_weights_are_built_when_missing_or_when_their_sources_changed(environment, project, monkeypatch):
    models = project / "triton_models"
    models.mkdir()
    calls = []

    def build(*_, **__):
        calls.append(1)
        (models / ".build.json").write_text("{}")

    monkeypatch.setattr(environments, "call", build)
    for _ in range(2):
        environments.weights_step(environment)
    assert len(calls) == 1
    (models / "config.pbtxt").write_text("changed")
    environments.weights_step(environment)
    (models / ".build.json").unlink()
    environments.weights_step(environment)
    assert len(calls) == 3


def test_triton_is_left_out_where_it_cannot_run(monkeypatch):
    monkeypatch.setattr(triton, "unsupported", lambda: "no glibc")
    assert environments.triton_reason() == "no glibc"
    monkeypatch.setattr(triton, "unsupported", lambda: "")
    monkeypatch.setattr(environments.sys, "version_info", (3, 14, 0))
    assert "PYTHON=python3.11" in environments.triton_reason()


def test_a_stamp_holds_only_for_its_digest(tmp_path):
    Stamp(path=tmp_path / "s", digest="a").write()
    assert Stamp(path=tmp_path / "s", digest="a").is_there()
    assert not Stamp(path=tmp_path / "s", digest="b").is_there()
    assert not Stamp(path=tmp_path / "none", digest="a").is_there()
