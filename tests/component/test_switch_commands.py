"""`gateway switches`, `backends drain|resume`, `audit` and `whoami` against the control plane on a real socket."""

import json
import time
from collections.abc import Iterator, Sequence

import pytest

from gateway.admin.access.entry import AdminKey, Entry
from gateway.admin.app import create_admin_app
from gateway.admin.plane import Plane
from gateway.admin_ports import Applied, WorkerState
from gateway.core.rules import Rule, check_targets
from gateway.core.switches import Scope, Switch
from tests.kit.commands import TOKEN, command, served
from tests.kit.control_stores import Audit, Rules

RULES = [{"name": "all", "match": {"task": "embed"}, "split": [{"backend": "triton", "model": "m"}]}]
WHY = ("--for", "10m", "--reason", "floods us")


class Served:
    """The stores, and the address of the control plane over them."""

    def __init__(self) -> None:
        self.rules, self.audit, self.url = Rules(RULES), Audit(), ""


@pytest.fixture(scope="module")
def of_module() -> Iterator[Served]:
    shown = Served()

    def check(rules: Sequence[Rule]) -> None:
        check_targets(rules, backends=("triton", "local"), tasks=("embed",))

    keys = (AdminKey.of_secret("ops", TOKEN, "admin"), AdminKey.of_secret("grafana", "only-looks", "viewer"))
    parts = Plane(rules=shown.rules, audit=shown.audit, check=check, tasks=("embed",))
    with served(create_admin_app(parts, Entry(keys=keys))) as url:
        shown.url = url
        yield shown


@pytest.fixture
def plane(of_module) -> Served:
    of_module.rules.__init__(RULES)
    of_module.audit.__init__()
    return of_module


@pytest.fixture
def gateway(plane):
    return lambda *args, **options: command(plane.url, *args, **options)


def items(plane: Served) -> tuple[Switch, ...]:
    return plane.rules.set_switches.items


@pytest.mark.parametrize(
    ("args", "action", "scope", "value"),
    [
        (("block", "--tenant", "acme"), "block", Scope(kind="tenant", name="acme"), ""),
        (("block", "--model", "ocr:3"), "block", Scope(kind="model", name="ocr:3"), ""),
        (("drain", "--replica", "triton@h:8001"), "drain", Scope(kind="replica", name="triton@h:8001"), ""),
        (("force-backend", "local", "--task", "embed"), "force_backend", Scope(kind="task", name="embed"), "local"),
        (("force-fallback", "--everything"), "force_fallback", Scope(kind="everything"), ""),
        (("freeze",), "freeze", Scope(kind="everything"), ""),
    ],
)
def test_a_switch_is_set(gateway, plane, args, action, scope, value):
    done = gateway("switches", *args, *WHY)
    assert done.exit_code == 0, done.output
    (one,) = items(plane)
    assert (one.action, one.scope, one.value, one.reason, one.owner) == (action, scope, value, "floods us", "ops")
    assert one.expires_ms - one.created_ms == 600_000
    assert f"switch {one.id} (" in done.stdout
    assert "applied on 2/2 workers in 40 ms" in done.stdout


def test_the_list_counts_down(gateway, plane):
    assert gateway("switches", "list").stdout == "no switch is set\n"
    assert gateway("switches", "block", "--key", "k1", "--for", "1h30m", "--reason", "leaked").exit_code == 0
    shown = gateway("switches", "list").stdout
    for text in ("block", "key k1", "1h 30m", "leaked", "ops"):
        assert text in shown
    (one,) = json.loads(gateway("switches", "list", "--json").stdout)["items"]
    assert one["scope"] == {"key": "k1"}


def test_a_switch_is_ended_with_a_reason_in_any_language(gateway, plane):
    assert gateway("switches", "freeze", *WHY).exit_code == 0
    (one,) = items(plane)
    done = gateway("switches", "end", one.id, "--reason", "장애 종료")
    assert done.exit_code == 0, done.output
    assert items(plane) == ()
    assert plane.audit.entries[-1].reason == "장애 종료"
    done = gateway("switches", "end", one.id)
    assert (done.exit_code, done.stderr) == (1, f"refused: no switch has the id '{one.id}'\n")


def test_rules_cannot_be_changed_while_they_are_frozen(gateway, plane):
    assert gateway("switches", "freeze", "--for", "1m", "--reason", "incident 31").exit_code == 0
    assert "changes are frozen until" in gateway("rules", "get").stderr
    done = gateway("rules", "disable", "all")
    assert done.exit_code == 1
    assert "frozen" in done.stderr


def test_a_switch_that_not_all_workers_have_is_a_failure(gateway, plane):
    plane.rules.got = Applied(workers=1, of=2, ms=1000)
    done = gateway("switches", "block", "--tenant", "acme", *WHY)
    assert done.exit_code == 1
    assert "but applied on only 1/2 workers after 1000 ms" in done.stderr


def worker(plane: Served, count: int) -> WorkerState:
    (one,) = items(plane)
    revision = plane.rules.set_switches.revision
    report = {"drains": {one.id: count}}
    return WorkerState(id="w", pid=1, revision=1, started=0, state="serving", switches=revision, report=report)


def test_drain_waits_until_nothing_is_in_flight(gateway, plane, monkeypatch):
    counts = [3, 1, 0]

    def pass_time(_: float) -> None:
        plane.rules.states = [worker(plane, counts.pop(0))]

    monkeypatch.setattr("gateway.cli.switches.time.sleep", pass_time)
    done = gateway("backends", "drain", "triton@h:8001", *WHY, "--wait")
    assert done.exit_code == 0, done.output
    assert done.stderr == "waiting for the workers' counts\n3 in flight\n1 in flight\n"
    assert done.stdout.endswith("drained: nothing is in flight there\n")


def test_waiting_for_a_drain_that_is_taken_away(gateway, plane, monkeypatch):
    monkeypatch.setattr("gateway.cli.switches.time.sleep", lambda _: plane.rules.__init__(RULES))
    done = gateway("switches", "drain", "--backend", "triton", *WHY, "--wait")
    assert done.exit_code == 1
    assert "ended before all was drained" in done.stderr


def test_a_backend_is_drained_and_resumed_and_what_still_closes_it_is_told(gateway, plane):
    assert gateway("backends", "drain", "triton", *WHY).exit_code == 0
    assert gateway("backends", "drain", "triton@h:8001", *WHY).exit_code == 0
    (whole, server) = items(plane)
    assert (whole.scope, server.scope.kind) == (Scope(kind="backend", name="triton"), "replica")
    done = gateway("backends", "resume", "triton@h:8001", "--reason", "new driver")
    assert done.exit_code == 0, done.output
    assert items(plane) == (whole,)
    assert f"warning: requests are kept away by switch {whole.id} (drain backend triton: floods us)" in done.stderr
    assert gateway("backends", "resume", "triton").exit_code == 0
    done = gateway("backends", "resume", "triton")
    assert (done.exit_code, done.stderr) == (1, "no drain is set for triton\n")


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("block", *WHY), "give exactly one of --everything, --tenant, --key, --task, --model, --backend, --replica"),
        (("block", "--tenant", "a", "--task", "embed", *WHY), "give exactly one of"),
        (("force-fallback", "--backend", "triton", *WHY), "No such option"),
        (("block", "--tenant", "a", "--for", "10", "--reason", "x"), "--for 10: write a time as 90s, 10m, 1h30m or 2d"),
        (
            ("block", "--tenant", "a", "--for", "8d", "--reason", "x"),
            "--for 8d: a switch lasts from one second to a week",
        ),
        (("freeze", "--for", "0s", "--reason", "x"), "--for 0s: a switch lasts from one second to a week"),
        (("block", "--tenant", "a", "--reason", "x"), "--for"),
        (("block", "--tenant", "a", "--for", "10m"), "--reason"),
        (("drain", "--for", "10m", "--reason", "x", "--everything", "--tenant", "a"), "give exactly one of"),
    ],
)
def test_usage(gateway, plane, args, text):
    done = gateway("switches", *args)
    assert (done.exit_code, items(plane)) == (2, ())
    assert text in done.stderr


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("block", "--task", "embd", *WHY), "refused: scope/task: unknown task 'embd' (did you mean 'embed'?)"),
        (("force-backend", "trito", "--task", "embed", *WHY), "refused: value: unknown backend 'trito'"),
    ],
)
def test_what_the_control_plane_refuses(gateway, plane, args, text):
    done = gateway("switches", *args)
    assert (done.exit_code, items(plane)) == (1, ())
    assert done.stderr.startswith(text)
    assert done.stderr.count("\n") == 1


def test_whoami_and_a_refusal_that_says_which_role_is_needed(gateway, plane):
    assert json.loads(gateway("whoami", "--json").stdout)["role"] == "admin"
    shown = gateway("whoami", env={"GATEWAY_ADMIN_TOKEN": "only-looks"}).stdout
    for text in ("grafana", "viewer", plane.url):
        assert text in shown
    done = gateway("switches", "freeze", *WHY, env={"GATEWAY_ADMIN_TOKEN": "only-looks"})
    assert (done.exit_code, items(plane)) == (1, ())
    assert done.stderr == "refused: this needs the role operator; 'grafana' has viewer\n"


def test_the_audit_log_is_listed_searched_and_exported(gateway, plane, tmp_path):
    assert gateway("audit", "list").stdout == "there are no such entries\n"
    gateway("switches", "freeze", "--for", "1m", "--reason", "incident 31")
    gateway("switches", "block", "--tenant", "acme", "--for", "1m", "--reason", "floods")
    gateway("rules", "disable", "nobody")
    shown = gateway("audit", "list").stdout
    for text in ("switch.add", "incident 31", "ops (admin)", "unknown_rule", "127.0.0.1"):
        assert text in shown
    found = json.loads(gateway("audit", "list", "--action", "switch.", "--limit", "1", "--json").stdout)["items"]
    assert [(one["action"], one["reason"]) for one in found] == [("switch.add", "floods")]
    done = gateway("audit", "export", str(tmp_path / "audit.ndjson"))
    assert (done.exit_code, done.stderr) == (0, "3 entries\n")
    lines = (tmp_path / "audit.ndjson").read_text().splitlines()
    assert [json.loads(line)["action"] for line in lines[:2]] == ["switch.add", "switch.add"]
    assert gateway("audit", "export", "-").stdout.splitlines() == lines
    assert [path.name for path in tmp_path.iterdir()] == ["audit.ndjson"]
    done = gateway("audit", "export", str(tmp_path), env={"GATEWAY_ADMIN_TOKEN": "only-looks"})
    assert (done.exit_code, done.stderr) == (1, "refused: this needs the role admin; 'grafana' has viewer\n")


def test_workers_that_are_behind_are_a_failure(gateway, plane):
    assert gateway("workers").stdout == "no worker is running\n"
    there = {"pid": 7, "started": int(time.time()), "state": "serving"}
    report = {"in_flight": [["triton", "m", "1", "a", 2], ["local", "m", "", "", 3]]}
    plane.rules.states = [WorkerState(id="w1", revision=1, report=report, **there)]
    done = gateway("workers")
    assert done.exit_code == 0, done.output
    assert " 5" in done.stdout
    plane.rules.states.append(WorkerState(id="w2", revision=0, **there))
    done = gateway("workers")
    assert (done.exit_code, done.stderr) == (1, "behind, or without the rules in force: w2\n")
