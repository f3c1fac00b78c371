"""`gateway rules` against the control plane on a real socket."""

import json
import re
from collections.abc import Iterator, Sequence

import pytest
import yaml

from gateway.admin.app import create_admin_app
from gateway.admin.plane import Plane
from gateway.admin_ports import Applied, WorkerState
from gateway.core.rules import Rule, check_targets, parse_rules
from tests.kit.commands import TOKEN, command, served
from tests.kit.control_stores import Requests, Rules
from tests.kit.redis import HOST
from tests.kit.serving import free_port

RULES = [
    {"name": "canary", "match": {"task": "embed"}, "split": [
        {"backend": "triton", "model": "m", "version": "1", "weight": 90},
        {"backend": "triton", "model": "m", "version": "2", "weight": 10},
    ], "fallback": [{"backend": "local", "model": "m"}]},
    {"name": "team/rest", "split": [{"backend": "local", "model": "m"}]},
]  # fmt: skip
HALVES = [{**RULES[0], "split": [{**target, "weight": 50} for target in RULES[0]["split"]]}, RULES[1]]
REQUEST = {
    "id": "r",
    "at_ms": 1_700_000_000_000,
    "task": "embed",
    "tenant": "acme",
    "key": "k",
    "model": "",
    "version": "",
    "priority": "interactive",
    "stream": False,
    "headers": {},
    "input_bytes": 10,
    "input_tokens": None,
    "session": "",
    "ordering_key": "",
    "status": 200,
    "code": "ok",
    "rule": "canary",
    "stands_for": 10,
}
FULL = {
    "name": "full",
    "match": {
        "task": "embed",
        "tenant": "acme*",
        "key": "k1",
        "priority": "batch",
        "headers": {"x-beta": "yes"},
        "max_input_bytes": 4096,
        "times": [{"days": ["mon", "tue"], "from": "22:00", "to": "06:00"}],
    },
    "split": [{"backend": "triton", "model": "m"}, {"backend": "local", "model": "m"}],
    "strategy": "ordered",
    "sticky_by": "tenant",
    "shadow": {"backend": "local", "model": "n", "percent": 5, "compare": False},
    "guard": {"max_error_ratio": 0.02, "max_p99_ms": 300},
    "limits": [{"requests": 60, "per": "minute", "shared_by": "tenant"}],
    "cache": {"ttl_s": 60},
    "ordering": {"mode": "release"},
    "retries": 1,
    "timeout_ms": 5000,
}


class Served:
    """The store that a test changes, and the address of the control plane over it."""

    def __init__(self) -> None:
        self.rules, self.requests, self.url = Rules(RULES), Requests([REQUEST]), ""


@pytest.fixture(scope="module")
def plane() -> Iterator[Served]:
    shown = Served()

    def check(rules: Sequence[Rule]) -> None:
        check_targets(rules, backends=("triton", "local"), tasks=("embed",))

    parts = Plane(rules=shown.rules, requests=shown.requests, check=check, tasks=("embed",))
    with served(create_admin_app(parts, TOKEN)) as url:
        shown.url = url
        yield shown


@pytest.fixture
def store(plane) -> Rules:
    plane.rules.__init__(RULES)
    return plane.rules


@pytest.fixture
def rules(plane, store, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def run(*args: str, stdin: str | None = None, env=None):
        return command(plane.url, "rules", *args, stdin=stdin, env=env or {})

    return run


def said(document: object) -> str:
    return yaml.safe_dump(document)


def test_get_shows_a_table(rules):
    done = rules("get")
    assert done.exit_code == 0
    for text in ("revision 1", "canary", "team/rest", "triton/m:1  90", "local/m"):
        assert text in done.stdout
    assert "(off)" not in done.stdout
    assert "(off)" in rules("disable", "canary").stdout


def test_get_shows_all_that_a_rule_says_in_short_words(rules, store):
    store.change([FULL])
    shown = rules("get").stdout
    for text in (
        *(
            "embed",
            "tenant acme*",
            "key k1",
            "priority batch",
            "x-beta: yes",
            "0 to 4,096 bytes",
            "mon,tue 22:00-06:00",
        ),
        *("(ordered, sticky by tenant)", "shadow local/n 5 %, not compared", "errors <= 2 %, p99 <= 300 ms"),
        *("limit requests=60/minute shared_by=tenant", "cache 60 s", "order: release", "retries 1", "timeout 5,000 ms"),
    ):
        assert text in shown


def test_get_json_is_what_apply_takes(rules, store, tmp_path):
    shown = rules("get", "--json")
    assert json.loads(shown.stdout)["revision"] == 1
    (tmp_path / "rules.json").write_text(shown.stdout)
    store.change(HALVES)
    done = rules("apply", "--yes", "rules.json")
    assert done.exit_code == 0, done.output
    assert "saved as revision 3; applied on 2/2 workers in 40 ms" in done.stdout
    assert store.now.rules == parse_rules(RULES)


@pytest.mark.parametrize("document", [RULES[1:], {"rules": RULES[1:]}])
@pytest.mark.parametrize("source", ["file", "stdin"])
def test_apply_reads_yaml(rules, store, tmp_path, document, source):
    (tmp_path / "rules.yaml").write_text(said(document))
    done = (
        rules("apply", "--yes", "rules.yaml")
        if source == "file"
        else rules("apply", "--yes", "-", stdin=said(document))
    )
    assert done.exit_code == 0, done.output
    assert [r.name for r in store.now.rules] == ["team/rest"]
    assert store.now.revision == 2


def test_apply_shows_what_changes_and_keeps_the_note(rules, store):
    done = rules("apply", "--yes", "-", "--note", "ticket 812: Hälfte", stdin=said(HALVES))
    assert done.exit_code == 0, done.output
    assert "~ rule 'canary'\n    split[0].weight: 90 -> 50\n    split[1].weight: 10 -> 50\n" in done.stdout
    assert (store.kept[-1].change.note, store.kept[-1].change.by) == ("ticket 812: Hälfte", "admin")


def test_apply_of_what_is_in_force_makes_no_revision(rules, store):
    store.states = [WorkerState(id="w1", pid=1, revision=1, started=0, state="serving")]
    done = rules("apply", "--yes", "-", stdin=said(RULES))
    assert (done.exit_code, store.now.revision) == (0, 1)
    assert "revision 1 is in force on 1/1 workers" in done.stdout
    store.states = [WorkerState(id="w1", pid=1, revision=0, started=0, state="serving")]
    done = rules("apply", "--yes", "-", stdin=said(RULES))
    assert (done.exit_code, done.stderr) == (1, "revision 1 is this set, but only 0/1 workers run it\n")


def test_apply_from_a_stale_revision_is_refused(rules, store):
    done = rules("apply", "--yes", "-", "--expect", "7", stdin=said(RULES))
    assert done.exit_code == 1
    assert "current revision is 1" in done.stderr
    assert store.now.revision == 1


def test_apply_shows_what_another_operator_has_changed_meanwhile(rules, store):
    store.meanwhile = [{**RULES[0], "enabled": False}, RULES[1]]
    done = rules("apply", "--yes", "-", stdin=said(HALVES))
    assert done.exit_code == 1
    assert "changed meanwhile, since revision 1:\n~ rule 'canary'\n    enabled: true -> false\n" in done.stderr
    assert done.stderr.endswith("refused: made from revision 1, but the current revision is 2\n")
    assert store.now.revision == 2


def test_apply_asks_on_a_terminal_unless_told_not_to(rules, store, monkeypatch):
    monkeypatch.setattr("gateway.cli.show.is_terminal", lambda: True)
    monkeypatch.setattr("gateway.cli.rules.files.stdin_text", lambda: said(HALVES))
    done = rules("apply", "-", stdin="n\n")
    assert (done.exit_code, store.now.revision) == (1, 1)
    assert "put this in force in place of revision 1?" in done.stderr
    assert done.stderr.endswith("nothing was changed\n")
    assert rules("apply", "-", stdin="y\n").exit_code == 0
    monkeypatch.setattr("gateway.cli.rules.files.stdin_text", lambda: said(RULES))
    assert rules("apply", "-", "--yes", stdin="").exit_code == 0
    assert store.now.revision == 3


def test_nothing_is_put_in_force_unasked(rules, store):
    store.change(HALVES)
    for asked in (("apply", "-"), ("rollback", "1")):
        done = rules(*asked, stdin=said(RULES))
        assert done.exit_code == 2
        assert "nobody can be asked here (put " in done.stderr
        assert done.stderr.endswith("; say --yes\n")
        assert "split[0].weight: 50 -> 90" in done.stdout  # what would change is shown
    assert store.now.revision == 2


def test_apply_json_is_the_answer_alone(rules):
    answer = json.loads(rules("apply", "--yes", "-", "--json", stdin=said(HALVES)).stdout)
    assert (answer["revision"], answer["applied"]["workers"]) == (2, 2)


BAD = """\
rules:
  - name: canary
    match: {task: embed}
    split:
      - {backend: triton, model: m, weight: 90}
      - backend: triton
        model: m
        wieght: 10
"""


@pytest.mark.parametrize("args", [("apply",), ("check",), ("diff",)])
def test_a_bad_rule_is_refused_with_its_line_and_a_suggestion(rules, store, tmp_path, args):
    (tmp_path / "rules.yaml").write_text(BAD)
    done = rules(*args, "rules.yaml")
    told = "refused: rules.yaml:8: rule 'canary': split[1]: unknown field 'wieght' (did you mean 'weight'?)\n"
    assert (done.exit_code, done.stderr) == (2 if args == ("diff",) else 1, told)
    assert store.now.revision == 1


def test_check_shows_the_changes_and_what_they_would_do(rules, store):
    done = rules("check", "-", stdin=said(HALVES))
    assert done.exit_code == 0, done.output
    assert "stdin: good (2 rules)" in done.stdout
    assert "split[0].weight: 90 -> 50" in done.stdout
    assert "of the last 10 requests, 4 would move from triton/m:1 to triton/m:2" in done.stdout
    assert store.now.revision == 1


def test_check_tells_of_requests_that_no_rule_would_take(rules):
    done = rules("check", "-", stdin=said([{**RULES[0], "enabled": False}]))
    assert "warning: no enabled rule takes the task 'embed'" in done.stderr
    for line in (
        "of the last 10 requests, 10 would move:",
        "  9 from triton/m:1 to refused",
        "no rule takes 10 of them (now 0)",
        "  rule 'canary' takes 0 (now 10)",
    ):
        assert line in done.stdout


def test_check_on_samples(rules, tmp_path):
    (tmp_path / "samples.yaml").write_text(said([{"task": "embed", "tenant": "acme", "headers": {"x-a": "1"}}]))
    only = [{**RULES[1], "name": "a", "match": {"headers": {"x-a": "1"}}}, *RULES]
    done = rules("check", "-", "--samples", "samples.yaml", "--json", stdin=said(only))
    answer = json.loads(done.stdout)
    assert (answer["valid"], answer["dry_run"]["requests"], answer["dry_run"]["moved"]) == (True, 1, 1.0)


CONFIG = """\
backends:
  triton: {kind: triton, url: "127.0.0.1:8001"}
  local: {kind: local, repository: models}
tasks:
  embed: {contract: tensor}
rules:
  - {name: canary, match: {task: embed}, split: [{backend: triton, model: m}]}
"""


def test_check_offline_asks_no_control_plane(rules, tmp_path):
    (tmp_path / "gateway.yaml").write_text(CONFIG)
    args = ("check", "-", "--offline", "--config", "gateway.yaml", "--admin-url", "http://127.0.0.1:1")
    done = rules(*args, stdin=said(RULES))
    assert done.exit_code == 0, done.output
    assert "+ rule 'team/rest': added" in done.stdout
    done = rules(*args, stdin=BAD.replace("wieght", "weight").replace("{backend: triton", "{backend: tritn"))
    assert done.exit_code == 1
    assert "refused: stdin:5: rule 'canary': split[0].backend: unknown backend 'tritn' (did you mean" in done.stderr
    done = rules("check", "-", "--offline", "--config", "none.yaml", stdin=said(RULES))
    assert (done.exit_code, done.stderr) == (2, "none.yaml: No such file or directory\n")


@pytest.mark.parametrize(("document", "status"), [(RULES, 0), (HALVES, 1)])
def test_diff_exits_as_diff_does(rules, document, status):
    done = rules("diff", "-", stdin=said(document))
    assert done.exit_code == status
    assert ("no differences" in done.stdout) == (status == 0)


def test_diff_of_two_revisions(rules, store):
    store.change(HALVES)
    store.change(RULES[1:])
    done = rules("diff", "--from", "2", "--to", "3")
    assert (done.exit_code, done.stdout) == (1, "- rule 'canary': removed from number 1\n")
    changes = json.loads(rules("diff", "--from", "1", "--json").stdout)["changes"]
    assert [(one["rule"], one["change"]) for one in changes] == [("canary", "removed")]
    assert rules("diff", "--from", "9").exit_code == 2


@pytest.mark.parametrize(("name", "enabled"), [("disable", False), ("enable", True)])
def test_a_rule_is_switched(rules, store, name, enabled):
    done = rules(name, "team/rest", "--note", "why")
    assert done.exit_code == 0, done.output
    assert "applied on 2/2 workers" in done.stdout
    assert [r.enabled for r in store.now.rules] == [True, enabled]
    assert store.kept[-1].change.note == "why"


def test_weights(rules, store):
    done = rules("weights", "canary", "50", "50", "--note", "half")
    assert done.exit_code == 0, done.output
    assert "triton/m:2  50" in done.stdout
    assert [target.weight for target in store.now.rules[0].split] == [50, 50]
    done = rules("weights", "canary", "1")
    assert (done.exit_code, done.stderr) == (1, "refused: weights: the split of rule 'canary' has 2 targets\n")


def test_an_unknown_rule(rules):
    done = rules("disable", "nobody")
    assert (done.exit_code, done.stderr) == (1, "refused: no rule is named 'nobody'; there are: canary, team/rest\n")


def test_history_show_and_rollback(rules, store):
    store.change(HALVES)
    assert rules("disable", "canary", "--note", "slow").exit_code == 0
    done = rules("history")
    assert re.findall(r"^ +(\d+) ", done.stdout, re.MULTILINE) == ["3", "2", "1"]
    assert re.search(r" 3 +in force +2023-11-14 22:13 +admin +switch +2 +slow", done.stdout)
    assert [one["in_force"] for one in json.loads(rules("history", "--json").stdout)["items"]] == [True, False, False]
    assert "triton/m:2  50" in rules("show", "2").stdout
    done = rules("rollback", "--yes", "--note", "as before")
    assert done.exit_code == 0, done.output
    assert "enabled: false -> true" in done.stdout
    assert "revision 2 is back as revision 4; applied on 2/2 workers" in done.stdout
    assert rules("rollback", "--yes", "1", "--json").exit_code == 0
    assert store.now.rules == parse_rules(RULES)
    assert [one.change.note for one in store.kept[-2:]] == ["as before", "back to revision 1"]


def test_rollback_of_the_only_revision(rules):
    done = rules("rollback", "--yes")
    assert (done.exit_code, done.stderr) == (1, "refused: no revision before the one in force is kept\n")


def test_an_export_is_taken_and_always_the_same(rules, store, tmp_path):
    store.change([FULL, *RULES])
    done = rules("export", "rules.yaml")
    assert done.exit_code == 0, done.output
    text = (tmp_path / "rules.yaml").read_text()
    assert parse_rules(yaml.safe_load(text)["rules"]) == store.now.rules
    assert rules("export").stdout == text
    assert rules("diff", "rules.yaml").exit_code == 0
    assert rules("export", "old.yaml", "--revision", "1").exit_code == 0
    assert rules("apply", "--yes", "old.yaml").exit_code == 0
    assert store.now.rules == parse_rules(RULES)


def test_a_partial_application_is_a_failure_that_names_the_counts(rules, store):
    store.got = Applied(workers=1, of=2, ms=1000)
    done = rules("disable", "canary")
    assert done.exit_code == 1
    assert done.stderr.endswith("saved as revision 2, but applied on only 1/2 workers after 1000 ms\n")


def test_without_workers_it_is_saved(rules, store):
    store.got = Applied(workers=0, of=0, ms=1)
    done = rules("disable", "canary")
    assert done.exit_code == 0
    assert "saved as revision 2; no worker is running" in done.stdout


def test_a_wrong_token(rules):
    done = rules("get", "--admin-token", "wrong")
    assert (done.exit_code, done.stderr) == (1, "refused: missing or unknown admin token\n")


def test_no_control_plane_answers(rules):
    done = rules("get", "--admin-url", f"http://{HOST}:{free_port()}")
    assert done.exit_code == 3
    assert done.stderr.startswith("no control plane answers at")


@pytest.mark.parametrize(
    ("args", "stdin", "text"),
    [
        (("apply", "missing.yaml"), None, "missing.yaml: cannot be read"),
        (("apply", "-"), "a: [", "stdin:2: not valid YAML: did not find expected node content"),
        (("apply", "-"), "a: 2001-99-01", "stdin: not valid YAML: month must be in 1..12"),
        (("apply", "-"), "[" * 500 + "]" * 500, "stdin: not taken: it is nested too deeply"),
        (("apply", "-"), "a: &a [*a]", "an alias stands in what it repeats"),
        (("apply", "-"), "just text", "must be a list of rules"),
        (("apply", "-"), "", "must be a list of rules"),
        (("apply",), None, "Missing argument"),
        (("apply", "-", "--expect", "x"), "[]", "--expect"),
        (("get", "--admin-url", "localhost:8090"), None, "not an address"),
        (("get", "--admin-token", "geheim\n"), None, "the admin token is not one"),
        (("diff",), None, "give a file, or --from"),
        (("diff", "-", "--to", "2"), "[]", "give a file, or --from"),
        (("check", "-", "--samples", "none.yaml"), "[]", "none.yaml: cannot be read"),
    ],
)
def test_usage(rules, args, stdin, text):
    done = rules(*args, stdin=stdin)
    assert done.exit_code == 2, done.output
    assert text in done.stderr


def test_it_finds_the_stack_that_runs_in_the_folder(rules, plane, tmp_path):
    nothing = {"GATEWAY_ADMIN_URL": None, "GATEWAY_ADMIN_TOKEN": None}
    done = rules("get", env=nothing)
    assert done.exit_code == 2
    assert "no control plane" in done.stderr
    (tmp_path / ".run").mkdir()
    (tmp_path / ".run" / "stack.json").write_text(json.dumps({"admin_url": plane.url, "admin_token": TOKEN}))
    assert rules("get", env=nothing).exit_code == 0
    done = rules("get", "--admin-url", "http://elsewhere", env=nothing)  # the stack's token is not sent there
    assert (done.exit_code, done.stderr[:14]) == (2, "no admin token")
