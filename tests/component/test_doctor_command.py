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


MODEL = """
# TYPE gateway_model_requests gauge
gateway_model_requests{backend="triton",model="m",version="1",outcome="ok"} NaN
gateway_model_requests{backend="triton",version="1",outcome="ok"} 3
# TYPE gateway_model_executions gauge
gateway_model_executions{backend="triton",model="m",version="1"} +Inf
"""


@pytest.mark.parametrize(
    ("page", "unseen"),
    [
        (PAGE + MODEL, ""),
        ("# TYPE up gauge\nup 1\n", "metrics: none that begins with gateway_ at {url}/metrics"),
        ("<html>no page of metrics</html>", "metrics: none at {url}/metrics"),
    ],
)
def test_a_page_with_other_things_on_it_makes_no_finding(plane, page, unseen):
    plane.answers["GET /metrics"] = page
    status, said, _ = doctor("--json")
    told = json.loads(said)
    assert (status, told["findings"]) == (0, [])
    assert not unseen or unseen.format(url=plane.url) in told["unseen"]


def test_a_page_that_comes_between_the_looks_is_no_window(plane):
    page = [(404, {}), PAGE.replace(" 3", " 300") + 'gateway_requests_total{code="rate_limited"} 900\n']
    plane.answers["GET /metrics"] = lambda _: page.pop(0) if len(page) > 1 else page[0]
    status, said, _ = doctor("--json")
    assert (status, json.loads(said)["findings"]) == (0, [])


def test_a_server_is_of_the_backend_that_is_named(plane):
    plane.answers["POST /v2/repository/index"] = (200, [{"name": "m"}])
    batching = {"max_queue_delay_microseconds": 9000000, "default_queue_policy": {"default_timeout_microseconds": 5}}
    plane.answers["GET /v2/models/m/config"] = {"name": "m", "max_batch_size": 8, "dynamic_batching": batching}
    status, said, _ = doctor("--json", "--server", f"triton={plane.url}")
    (found,) = json.loads(said)["findings"]
    assert (status, found["symptom"], found["where"]) == (1, "timeout-below-delay", plane.url)
    status, said, _ = doctor("--json", "--server", f"other={plane.url}")
    told = json.loads(said)
    assert (status, told["findings"]) == (0, [])
    assert f"configurations at {plane.url}: no backend 'other' of kind triton is on" in told["unseen"]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((401, {"status": 401, "detail": "not a token of this control plane"}), "refused: not a token"),
        ((403, {"status": 403, "detail": "a viewer may not"}), "refused: a viewer may not"),
        ((503, {"status": 503, "detail": "Redis does not answer"}), "refused: Redis does not answer"),
        ({"status": "UP"}, "is not this gateway's control plane"),
        ("hello", "refused: HTTP 200, not an answer of a control plane"),
    ],
)
def test_findings_alone_have_status_1(plane, answer, why):
    plane.answers["GET /models"] = answer
    status, said, line = doctor()
    assert (status, said) == (3, "")
    assert why in line


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
