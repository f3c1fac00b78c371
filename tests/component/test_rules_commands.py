"""`gateway rules` against a control plane on a real socket."""

import json
import threading
import time
from collections.abc import Iterator, Sequence

import pytest
import uvicorn
import yaml
from typer.testing import CliRunner

from gateway.admin.app import create_admin_app
from gateway.admin_ports import Applied
from gateway.cli.rules import app
from gateway.core.errors import StaleRevision
from gateway.core.rules import Rule, RuleSet, check_targets, parse_rules
from tests.kit.redis import HOST, free_port

TOKEN = "admin-secret"  # noqa: S105 - made up here
RULES = [
    {"name": "canary", "match": {"task": "embed"}, "split": [
        {"backend": "triton", "model": "m", "version": "1", "weight": 90},
        {"backend": "triton", "model": "m", "version": "2", "weight": 10},
    ], "fallback": [{"backend": "local", "model": "m"}]},
    {"name": "team/rest", "split": [{"backend": "local", "model": "m"}]},
]  # fmt: skip


class Store:
    """A `RuleStore` on a variable; `got` is what `applied` answers."""

    def __init__(self) -> None:
        self.now = RuleSet(revision=1, rules=parse_rules(RULES))
        self.got = Applied(workers=2, of=2, ms=40)

    async def get(self) -> RuleSet:
        return self.now

    async def put(self, rules, *, expected_revision: int) -> int:
        if expected_revision != self.now.revision:
            raise StaleRevision(expected=expected_revision, current=self.now.revision)
        self.now = RuleSet(revision=expected_revision + 1, rules=tuple(rules))
        return self.now.revision

    async def workers(self):
        return []

    async def applied(self, revision: int, timeout_s: float = 1.0) -> Applied:
        return self.got


class Served:
    """The store, and the address of the control plane over it."""

    def __init__(self, store: Store, url: str) -> None:
        self.store, self.url = store, url


@pytest.fixture(scope="module")
def plane() -> Iterator[Served]:
    store, port = Store(), free_port()
    tasks = ("embed",)

    def check(rules: Sequence[Rule]) -> None:
        check_targets(rules, backends=("triton", "local"), tasks=tasks)

    served = create_admin_app(store, TOKEN, check, tasks)
    server = uvicorn.Server(uvicorn.Config(served, host=HOST, port=port, log_level="error", lifespan="off", ws="none"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    yield Served(store, f"http://{HOST}:{port}")
    server.should_exit = True
    thread.join()


@pytest.fixture
def store(plane) -> Store:
    plane.store.__init__()
    return plane.store


@pytest.fixture
def gateway_rules(plane, store, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GATEWAY_ADMIN_URL", plane.url)
    monkeypatch.setenv("GATEWAY_ADMIN_TOKEN", TOKEN)
    monkeypatch.setenv("COLUMNS", "120")

    def run(*args: str, stdin: str | None = None):
        return CliRunner().invoke(app, list(args), input=stdin)

    return run


def test_get_shows_a_table(gateway_rules):
    done = gateway_rules("get")
    assert done.exit_code == 0
    for text in ("revision 1", "canary", "team/rest", "triton/m:1  90", "local/m", "yes"):
        assert text in done.stdout


def test_get_json_is_what_apply_takes(gateway_rules, tmp_path):
    shown = gateway_rules("get", "--json")
    assert json.loads(shown.stdout)["revision"] == 1
    (tmp_path / "rules.json").write_text(shown.stdout)
    done = gateway_rules("apply", "rules.json")
    assert done.exit_code == 0
    assert "applied on 2/2 workers in 40 ms" in done.stdout


@pytest.mark.parametrize("document", [RULES[1:], {"rules": RULES[1:]}])
@pytest.mark.parametrize("source", ["file", "stdin"])
def test_apply_reads_yaml(gateway_rules, store, tmp_path, document, source):
    text = yaml.safe_dump(document)
    (tmp_path / "rules.yaml").write_text(text)
    done = gateway_rules("apply", "rules.yaml") if source == "file" else gateway_rules("apply", "-", stdin=text)
    assert done.exit_code == 0, done.output
    assert [r.name for r in store.now.rules] == ["team/rest"]
    assert store.now.revision == 2


def test_apply_from_a_stale_revision_is_refused(gateway_rules, store):
    done = gateway_rules("apply", "-", "--expect", "7", stdin=yaml.safe_dump(RULES))
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
    assert "current revision is 1" in done.stderr
    assert store.now.revision == 1


def test_a_bad_rule_is_refused_with_its_rule_and_field(gateway_rules, store):
    done = gateway_rules("apply", "-", stdin=yaml.safe_dump([{**RULES[1], "splitt": []}]))
    assert (done.exit_code, done.stderr) == (
        1,
        "refused: rule 'team/rest': unknown field 'splitt' (did you mean 'split'?)\n",
    )
    assert store.now.revision == 1


@pytest.mark.parametrize(("command", "enabled"), [("disable", False), ("enable", True)])
def test_a_rule_is_switched(gateway_rules, store, command, enabled):
    done = gateway_rules(command, "team/rest")
    assert done.exit_code == 0, done.output
    assert "applied on 2/2 workers" in done.stdout
    assert [r.enabled for r in store.now.rules] == [True, enabled]


def test_an_unknown_rule(gateway_rules):
    done = gateway_rules("disable", "nobody")
    assert (done.exit_code, done.stderr) == (1, "refused: no rule is named 'nobody'; there are: canary, team/rest\n")


def test_a_partial_application_is_a_failure_that_names_the_counts(gateway_rules, store):
    store.got = Applied(workers=1, of=2, ms=1000)
    done = gateway_rules("disable", "canary")
    assert done.exit_code == 1
    assert done.stderr == "saved as revision 2, but applied on only 1/2 workers after 1000 ms\n"


def test_without_workers_it_is_saved(gateway_rules, store):
    store.got = Applied(workers=0, of=0, ms=1)
    done = gateway_rules("disable", "canary")
    assert done.exit_code == 0
    assert "saved; no worker is running" in done.stdout


def test_a_wrong_token(gateway_rules):
    done = gateway_rules("get", "--admin-token", "wrong")
    assert (done.exit_code, done.stderr) == (1, "refused: the admin token is not the control plane's\n")


def test_no_control_plane_answers(gateway_rules):
    done = gateway_rules("get", "--admin-url", f"http://{HOST}:{free_port()}")
    assert done.exit_code == 3
    assert done.stderr.startswith("no control plane answers at")


@pytest.mark.parametrize(
    ("args", "stdin", "text"),
    [
        (("apply", "missing.yaml"), None, "missing.yaml: cannot be read"),
        (("apply", "-"), "a: [", "line 1: not valid YAML"),
        (("apply", "-"), "just text", "must be a list of rules"),
        (("apply", "-"), "", "must be a list of rules"),
        (("apply",), None, "Missing argument"),
        (("apply", "-", "--expect", "x"), "[]", "--expect"),
        (("get", "--admin-url", "localhost:8090"), None, "not an address"),
    ],
)
def test_usage(gateway_rules, args, stdin, text):
    done = gateway_rules(*args, stdin=stdin)
    assert done.exit_code == 2, done.output
    assert text in done.stderr


def test_it_finds_the_stack_that_runs_in_the_folder(gateway_rules, plane, monkeypatch, tmp_path):
    monkeypatch.delenv("GATEWAY_ADMIN_URL")
    monkeypatch.delenv("GATEWAY_ADMIN_TOKEN")
    done = gateway_rules("get")
    assert done.exit_code == 2
    assert "no control plane" in done.stderr
    (tmp_path / ".run").mkdir()
    (tmp_path / ".run" / "stack.json").write_text(json.dumps({"admin_url": plane.url, "admin_token": TOKEN}))
    assert gateway_rules("get").exit_code == 0


@pytest.mark.parametrize("command", ["get", "apply", "enable", "disable"])
def test_help_has_an_example(gateway_rules, command):
    done = gateway_rules(command, "--help")
    assert done.exit_code == 0
    assert f"gateway rules {command}" in done.stdout
