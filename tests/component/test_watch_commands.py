"""`gateway explain`, `requests`, `shadows`, `overview`, `rollouts` and `backends list` on a real socket."""

import json
import time
from collections.abc import Iterator, Sequence

import pytest

from gateway.admin.app import create_admin_app
from gateway.admin.models.model_bodies import BackendOut, BackendsOut, EngineOut, ServerOut
from gateway.admin.plane import Plane
from gateway.admin.rollouts.rollouts import Rollouts
from gateway.admin_ports import WorkerState
from gateway.core.errors import RulesUnavailable
from gateway.core.rules import Rule, check_targets
from gateway.core.shadows.shadow_reports import Pair
from gateway.core.shadows.shadow_reports import document as shadow_document
from gateway.core.watching.figures import Series, Tally, step_of
from tests.kit.commands import TOKEN, Scripted, command, served
from tests.kit.control_stores import Counted, Deploys, Requests, Rules, Shadows

RULES = [
    {"name": "vip", "match": {"task": "embed", "tenant": "vip"}, "split": [{"backend": "local", "model": "m"}]},
    {
        "name": "all",
        "match": {"task": "embed"},
        "split": [{"backend": "triton", "model": "m", "version": "1"}],
        "fallback": [{"backend": "local", "model": "m"}],
        "limits": [{"requests": 60, "per": "minute"}],
    },
]
REQUEST = {
    "id": "r1",
    "at_ms": 1_700_000_000_000,
    "worker": "w1",
    "task": "embed",
    "tenant": "acme",
    "key": "k",
    "model": "",
    "version": "",
    "priority": "interactive",
    "stream": False,
    "headers": {"x-beta": "yes"},
    "input_bytes": 10,
    "input_tokens": None,
    "session": "",
    "ordering_key": "",
    "status": 200,
    "code": "ok",
    "rule": "all",
    "revision": 1,
    "switches_revision": 0,
    "place": "local/m",
    "attempts": 2,
    "total_ms": 12.5,
    "backend_ms": 10.0,
    "queue_ms": None,
    "first_token_ms": None,
    "planned": 2,
    "stands_for": 1,
    "notes": [],
    "usage": {"input_tokens": 7, "output_tokens": 0, "cost_usd": None},
    "recalled": "",
    "cursor": "1-1",
    "candidates": ["triton/m:1", "local/m"],
    "why": ["unavailable", "taken after it"],
}
FAILED = {**REQUEST, "id": "r2", "tenant": "other", "status": 503, "code": "no_healthy_backend", "place": ""}
SHADOW = shadow_document(
    "all",
    Pair("embed", "triton/m:1", "local/n"),
    {"sent": 40, "answered": 30, "compared": 30, "agreed": 27, "measured": 30, "distance": 300_000, "failed": 2}
    | {"real_us": 300_000, "shadow_us": 600_000},
    since_ms=1_700_000_000_000,
    last_failure="timeout",
)


class Parts:
    """What a test changes, and the address of the control plane over it."""

    def __init__(self) -> None:
        self.rules, self.requests, self.shadows = Rules(RULES), Requests([REQUEST, FAILED]), Shadows([SHADOW])
        self.figures, self.deploys, self.url = Counted(), Deploys(), ""


@pytest.fixture(scope="module")
def of_module() -> Iterator[Parts]:
    parts = Parts()

    def check(rules: Sequence[Rule]) -> None:
        check_targets(rules, backends=("triton", "local"), tasks=("embed",))

    plane = Plane(
        rules=parts.rules,
        requests=parts.requests,
        shadows=parts.shadows,
        figures=parts.figures,
        rollouts=Rollouts(rules=parts.rules, check=check, store=parts.deploys, figures=parts.figures),
        check=check,
        tasks=("embed",),
    )
    with served(create_admin_app(plane, TOKEN)) as url:
        parts.url = url
        yield parts


@pytest.fixture
def parts(of_module, monkeypatch) -> Parts:
    monkeypatch.setattr("gateway.admin.watching.overview.AGAIN_S", 0.0)  # what a test changes is to be seen
    url = of_module.url
    of_module.rules.__init__(RULES)
    of_module.requests.__init__([REQUEST, FAILED])
    of_module.shadows.__init__([SHADOW])
    of_module.figures.__init__()
    of_module.deploys.__init__()
    of_module.url = url
    return of_module


@pytest.fixture
def gateway(parts):
    return lambda *args, **options: command(parts.url, *args, **options)


def test_explain_tells_rules_candidates_and_limits(gateway):
    done = gateway("explain", "--task", "embed", "--tenant", "acme", "--header", "x-beta=yes", "--input-bytes", "9")
    assert done.exit_code == 0, done.output
    for text in (
        "rule 'all', by rules revision 1",
        "match.tenant is 'vip', the request's is 'acme'",
        "triton/m:1",
        "split[0]",
        "fallback[0]",
        "limit of the rule: ",
    ):
        assert text in done.stdout
    answer = json.loads(gateway("explain", "--task", "embed", "--tenant", "vip", "--json").stdout)
    assert (answer["rule"], [one["place"] for one in answer["candidates"]]) == ("vip", ["local/m"])


def test_explain_tells_the_switches_that_concern_it(gateway):
    gateway("switches", "block", "--tenant", "acme", "--for", "10m", "--reason", "floods us")
    shown = gateway("explain", "--task", "embed", "--tenant", "acme").stdout
    assert "\nrefused by switch" in shown
    assert ": block tenant acme, 10m left: floods us (admin)" in shown


def test_explain_of_a_past_request(gateway):
    shown = gateway("explain", "--request-id", "r1").stdout
    for text in ("rule 'all'", "taken after it", "what became of it:", "200 ok", "12.5 ms"):
        assert text in shown
    done = gateway("explain", "--request-id", "none")
    assert (done.exit_code, done.stderr[:9]) == (1, "refused: ")


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((), "give --request-id, or describe a request"),
        (("--request-id", "r1", "--task", "embed"), "give --request-id, or describe a request"),
        (("--tenant", "acme"), "give the --task"),
        (("--task", "embed", "--header", "x"), "--header x: write it as name=value"),
    ],
)
def test_usage_of_explain(gateway, args, text):
    done = gateway("explain", *args)
    assert done.exit_code == 2
    assert text in done.stderr


def test_requests_are_listed_filtered_and_shown(gateway):
    shown = gateway("requests", "list").stdout
    for text in ("r1", "r2", "503 no_healthy_backend", "local/m", "2023-11-14 22:13"):
        assert text in shown
    found = json.loads(gateway("requests", "list", "--code", "no_healthy_backend", "--json").stdout)["items"]
    assert [one["id"] for one in found] == ["r2"]
    assert gateway("requests", "list", "--tenant", "nobody").stdout == "no such request is recorded\n"
    shown = gateway("requests", "show", "r1").stdout
    for text in ("200 ok", "x-beta: yes", "input tokens 7 ", "taken after it"):
        assert text in shown


def test_shadows_are_listed_and_reset(gateway, parts):
    shown = gateway("shadows", "list").stdout
    for text in ("all", "local/n", "90 %", "0.990", "timeout", "+10.0", "of 40"):
        assert text in shown
    done = gateway("shadows", "reset", "all", "--reason", "new version", "--yes")
    assert (done.exit_code, parts.shadows.documents) == (0, [])
    assert gateway("shadows", "list").stdout == "nothing was sent to a shadow yet\n"


def busy(parts: Parts, *, told_ms: float) -> None:
    """A worker that has told something at that time, and figures of the second before now."""
    state = WorkerState(id="w1", pid=1, revision=1, started=0, state="serving", report={"at_ms": round(told_ms)})
    parts.rules.states = [state]
    series = Series("embed", "all", "triton", "m", "1")
    parts.figures.tallies = {series: Tally(requests=50, errors=5, whole={step_of(12_000): 50})}


def test_the_overview_shows_what_goes_on(gateway, parts):
    busy(parts, told_ms=time.time() * 1000)
    shown = gateway("overview", "--window", "60s").stdout
    for text in ("workers: 1 live", "of the last 1m", "10 %", "triton/m:1", "50", "█"):
        assert text in shown
    assert "STALE" not in shown
    assert json.loads(gateway("overview", "--json").stdout)["window_s"] == 300


def test_the_overview_says_when_its_numbers_are_old(gateway, parts):
    assert "STALE: no worker tells anything" in gateway("overview").stdout
    busy(parts, told_ms=time.time() * 1000 - 90_000)
    assert "STALE: no worker has told anything for 1m 30s" in gateway("overview").stdout


def test_watching_goes_on_while_the_control_plane_is_away_and_says_so(gateway, parts, monkeypatch):
    """The first refresh finds it, the second one does not, Ctrl-C ends it."""
    busy(parts, told_ms=time.time() * 1000)
    read, times = parts.figures.read, []

    def pass_time(_: float) -> None:
        times.append(len(times))
        if len(times) == 2:
            parts.figures.read = gone
        if len(times) == 3:
            parts.figures.read = read
            raise KeyboardInterrupt

    async def gone(*_: int):
        raise RulesUnavailable("Redis does not answer")

    monkeypatch.setattr("gateway.cli.overview.time.sleep", pass_time)
    done = gateway("overview", "--watch")
    assert done.exit_code == 0, done.output
    assert "STALE: the control plane cannot read them now" in done.stdout


def test_a_rollout_is_begun_shown_promoted_and_aborted(gateway, parts):
    guard = ("--max-error-ratio", "0.02", "--max-p99-ms", "300", "--window", "30s", "--sticky-by", "tenant")
    course = ("--to", "triton/m:2", "--steps", "10,50,100", "--hold", "5m", "--note", "faster")
    begun = gateway("rollouts", "start", "all", *course, *guard, "--json")
    assert begun.exit_code == 0, begun.output
    one = json.loads(begun.stdout)
    assert (one["percent"], one["hold_s"], one["guard"]["max_p99_ms"]) == (10, 300, 300)
    assert (one["guard"]["window_s"], one["sticky_by"], one["note"], one["actor"]) == (30, "tenant", "faster", "admin")
    assert [target.weight for target in parts.rules.now.rules[1].split] == [10, 90]
    assert "triton/m:2" in gateway("rollouts", "list").stdout
    done = gateway("rollouts", "promote", one["id"])
    assert done.stdout == f"rollout {one['id']}: all -> triton/m:2: running, 50 %\n"
    done = gateway("rollouts", "start", "all", "--to", "local/m")
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
    done = gateway("rollouts", "abort", one["id"], "--note", "callers complain", "--yes")
    assert done.exit_code == 0, done.output
    assert "aborted" in done.stdout
    shown = gateway("rollouts", "show", one["id"]).stdout
    for text in (
        "10 %, 50 %, 100 %, each held for 300 s",
        "callers complain",
        "errors <= 2 %, p99 <= 300 ms, of 200 in 30 s",
        "new place",
    ):
        assert text in shown
    watched = gateway("rollouts", "show", one["id"], "--watch")
    assert watched.exit_code == 1


def test_watching_a_rollout_to_its_end(gateway, parts, monkeypatch):
    begun = json.loads(gateway("rollouts", "start", "all", "--to", "local/m:3", "--steps", "100", "--json").stdout)
    monkeypatch.setattr(
        "gateway.cli.rollouts.time.sleep", lambda _: gateway("rollouts", "promote", begun["id"], "--json")
    )
    done = gateway("rollouts", "show", begun["id"], "--watch")
    assert done.exit_code == 0, done.output
    assert done.stderr.splitlines()[-1] == "all -> local/m:3: done, 100 %"


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("--to", "triton"), "--to triton: write it as backend/model"),
        (("--to", "triton/m", "--steps", "1;2"), "--steps 1;2: write them as 1,10,50,100"),
        (("--to", "triton/m", "--hold", "5"), "--hold 5: write a time as"),
    ],
)
def test_usage_of_rollouts(gateway, args, text):
    done = gateway("rollouts", "start", "all", *args)
    assert done.exit_code == 2
    assert text in done.stderr


def test_backends_are_listed_with_what_keeps_requests_away():
    server = ServerOut(replica="h:8001", live=True, latency_ms=1.25, in_flight=3)
    shut = ServerOut(replica="h:8002", live=False, latency_ms=None, shut=["two failures in a row"], switches=["3f2a"])
    engine = EngineOut(running=4, waiting=2, kv_used=0.5)
    busy_one = ServerOut(replica="", live=True, latency_ms=None, in_flight=6, waiting=5, engine=engine)
    backends = [
        BackendOut(backend="triton", kind="triton", reachable=True, waiting=7, replicas=[server, shut]),
        BackendOut(backend="vllm", kind="openai", reachable=False, waiting=5, replicas=[busy_one]),
        BackendOut(backend="openai", kind="openai", reachable=False, detail="its key is not set", replicas=[]),
    ]
    plane = Scripted()
    plane.answers["GET /backends"] = BackendsOut(items=backends).model_dump()
    with served(plane.app) as url:
        shown = command(url, "backends", "list").stdout
        narrow = command(url, "backends", "list", env={"COLUMNS": "80"}).stdout
        assert json.loads(command(url, "backends", "list", "--json").stdout)["items"][1]["waiting"] == 5
    for text in ("live, 1.2 ms", "two failures in a row", "3f2a", "7 in all", "4 run, 2 wait, cache 50 %"):
        assert text in shown
    assert "openai: its key is not set\n" in shown
    assert [line for line in narrow.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize(
    "args",
    [
        *(("requests", "list"), ("overview",), ("shadows", "list"), ("rollouts", "list")),
        *(("rules", "get"), ("rules", "history"), ("explain", "--task", "embed"), ("workers",), ("switches", "list")),
    ],
    ids=" ".join,
)
def test_eighty_columns_are_enough(gateway, args):
    shown = gateway(*args, env={"COLUMNS": "80"}).stdout
    assert shown
    assert [line for line in shown.splitlines() if len(line) > 80] == []


def test_an_id_of_the_gateway_is_listed_short_and_found_by_that(gateway, parts):
    one = {**REQUEST, "id": "0f3bc022aa11bb22cc33dd44ee55ff66"}
    parts.requests.documents.insert(0, one)
    assert "0f3bc022 " in gateway("requests", "list").stdout
    assert one["id"] in gateway("requests", "show", "0f3bc022").stdout
    assert one["id"] in gateway("explain", "--request-id", "0f3bc022").stdout
