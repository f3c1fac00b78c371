"""`gateway doctor` against scripted answers: where it looks, and what it says of what it could not look at."""

import json

import pytest
import yaml

from tests.kit.commands import Scripted, command, served

PAGE = '# TYPE gateway_requests_total counter\ngateway_requests_total{code="ok"} 3\n'
GOOD = {
    "GET /models": {"items": [], "unreachable": [{"backend": "local", "reason": "it runs elsewhere"}]},
    "GET /backends": {"items": []},
    "GET /requests": {"items": []},
    "GET /overview": {"by": [], "workers": {"live": 1}, "is_stale": False},
    "GET /rules": {"rules": []},
    "GET /keys": {"items": []},
    "GET /metrics": PAGE,
    "POST /v2/repository/index": (200, []),
}


@pytest.fixture
def plane(tmp_path, monkeypatch):
    """Everything at one address, as the stack of this folder has it."""
    document = {
        "backends": {"triton": {"kind": "triton", "url": "127.0.0.1:9"}},
        "tasks": {"tensor": {"contract": "tensor"}},
        "rules": [{"name": "r", "match": {"task": "tensor"}, "split": [{"backend": "triton", "model": "*"}]}],
    }
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gateway.yaml").write_text(yaml.safe_dump(document))
    (tmp_path / ".run").mkdir()
    scripted = Scripted()
    scripted.answers = dict(GOOD)
    with served(scripted.app) as url:
        told = {"admin_url": url, "ops_url": url, "triton_http": url, "admin_token": "t"}
        (tmp_path / ".run" / "stack.json").write_text(json.dumps(told))
        scripted.url = url
        yield scripted


def doctor(*options: str, url: str | None = None):
    environ = {"GATEWAY_ADMIN_TOKEN": "t"} | ({"GATEWAY_ADMIN_URL": url} if url else {"GATEWAY_ADMIN_URL": None})
    done = command(url or "", "doctor", "--config", "gateway.yaml", "--for", "1s", *options, env=environ)
    return done.exit_code, done.stdout, done.stderr


def test_it_looks_where_the_stack_of_this_folder_is(plane):
    status, said, _ = doctor()
    assert status == 0
    asked = [path.partition("?")[0] for path, _ in plane.asked]
    assert asked.count("GET /metrics") == 2
    assert "POST /v2/repository/index" in asked
    assert "not seen: servers of 'local' one by one: it runs elsewhere" in said
    assert "--ops-url" not in said


def test_another_stack_has_other_addresses(plane, tmp_path):
    (tmp_path / ".run" / "stack.json").write_text(json.dumps({"admin_url": "http://127.0.0.1:9", "ops_url": plane.url}))
    status, said, _ = doctor(url=plane.url)
    assert status == 0
    assert not [path for path, _ in plane.asked if "/metrics" in path]
    assert "not seen: queues, batches and refusals of the window: no --ops-url" in said
    assert "not seen: configurations of 'triton': its repository is not on this machine (--server)" in said


def test_what_is_refused_is_not_seen(plane):
    plane.answers["GET /requests"] = (503, {"status": 503, "detail": "Redis does not answer"})
    plane.answers["GET /overview"] = GOOD["GET /overview"] | {"is_stale": True}
    plane.answers["GET /metrics"] = (404, {})
    plane.answers["POST /v2/repository/index"] = (500, {})
    status, said, _ = doctor("--json")
    assert status == 0
    unseen = json.loads(said)["unseen"]
    assert f"metrics: none at {plane.url}/metrics" in unseen
    assert f"configurations at {plane.url}: no model server answers there" in unseen
    assert "the last requests: refused: Redis does not answer" in unseen
    assert "what workers see now: none has told anything for some seconds" in unseen


@pytest.mark.parametrize(
    ("options", "status", "why"),
    [
        (("--for", "soon"), 2, "--for soon: write a time"),
        (("--for", "2h"), 2, "--for: between 1s and 1h"),
        (("--config", "none.yaml"), 2, "none.yaml"),
        (("--admin-url", "http://127.0.0.1:9"), 3, "no control plane answers"),
    ],
)
def test_it_ends_with_a_clear_line(plane, options, status, why):
    code, said, line = doctor(*options)
    assert (code, said) == (status, "")
    assert why in line
