import stat

import pytest

from gateway.stack import state
from gateway.stack.state import AlreadyRunningError, RunDir


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_secret_is_made_once_kept_private_and_stable(tmp_path):
    path = tmp_path / "dev-key"
    made = state.secret(path, "gw-dev-")
    assert made.startswith("gw-dev-")
    assert len(made) > 30
    assert mode(path) == 0o600
    path.chmod(0o644)
    assert state.secret(path, "gw-dev-") == made
    assert mode(path) == 0o600


def test_a_damaged_secret_is_made_anew(tmp_path):
    path = tmp_path / "dev-key"
    path.write_text("")
    assert state.secret(path, "gw-dev-").startswith("gw-dev-")
    assert mode(path) == 0o600


def test_json_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "stack.json"
    state.write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        state.write_json(path, {"a": object()})
    assert state.read_json(path) == {"a": 1}
    assert [one.name for one in tmp_path.iterdir()] == ["stack.json"]
    assert mode(path) == 0o600


def test_one_holder_of_a_run_directory_at_a_time(tmp_path):
    run = RunDir(tmp_path / "run")
    assert not state.is_running(run)
    run.create()
    with state.lock(run):
        assert state.is_running(run)
        with pytest.raises(AlreadyRunningError), state.lock(run):
            pass
    assert not state.is_running(run)
