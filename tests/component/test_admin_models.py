"""Models in the control plane: what servers have, loads on all of them, deploys; over a real Redis."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from gateway.admin.app import create_admin_app
from gateway.admin.models import deploy_run, deploys
from gateway.admin.models.deploys import Deploys
from gateway.admin.models.fleet import Servers
from gateway.admin.models.model_routes import ModelPlane
from gateway.admin.plane import Plane
from gateway.admin.routing import rule_writer
from gateway.admin_ports import NO_NAME, Applied
from gateway.core.errors import StaleRevision
from gateway.core.rules import check_targets, parse_rules
from gateway.settings import Settings
from gateway.stores.control.rule_store import RedisRuleStore
from gateway.stores.redis_deploys import RedisDeployStore
from gateway.stores.redis_events import RedisEvents
from gateway.stores.redis_outcomes import RedisOutcomes
from gateway.stores.redis_script import connect
from gateway.wiring_control import control_plane
from tests.kit.admin_plane import Asked
from tests.kit.model_server import ModelServerFake
from tests.kit.redis_switch import RedisSwitch
from tests.kit.wait import until, until_async

pytest_plugins = ["tests.kit.redis"]

TOKEN = "admin-secret"  # noqa: S105 - made up here
RULES = [
    {"name": "mine", "match": {"task": "t"}, "split": [{"backend": "triton", "model": "m"}]},
    {"name": "rest", "split": [{"backend": "triton", "model": "*"}], "fallback": [{"backend": "local", "model": "*"}]},
]
LOCAL = "it runs inside the data plane and cannot be reached from the control plane"


class Rules(RedisRuleStore):
    """The real store, which keeps what was put there; `followed` is what `applied` answers, where it is set."""

    followed: Applied | None = None
    conflicts = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, timeout_s=5)
        self.history: list[str] = []

    async def put(self, rules, *, expected_revision, at_ms=0, change=NO_NAME):
        if self.conflicts:
            self.conflicts -= 1
            raise StaleRevision(expected=expected_revision, current=expected_revision + 1)
        revision = await super().put(rules, expected_revision=expected_revision, at_ms=at_ms, change=change)
        told = "; ".join(
            f"{rule.name}: " + " ".join(f"{t.version or '-'}*{t.weight}" for t in rule.split) for rule in rules
        )
        self.history.append(told)
        return revision

    async def applied(self, revision, timeout_s=1.0, *, of_switches=False):
        return self.followed or await super().applied(revision, timeout_s, of_switches=of_switches)


class World:
    """The control plane, and what lies behind it."""

    def __init__(self, rules: Rules, deploys: RedisDeployStore, outcomes: RedisOutcomes, events: RedisEvents) -> None:
        self.server = ModelServerFake()
        self.rules, self.store, self.outcomes, self.events = rules, deploys, outcomes, events
        self.deploys = self.another()
        self.http = self.over(self.deploys)

    def another(self, **more: ModelServerFake) -> Deploys:
        servers = Servers(reachable={"triton": self.server, **more}, unreachable={"local": LOCAL})
        return Deploys(
            servers=servers,
            rules=self.rules,
            store=self.store,
            outcomes=self.outcomes,
            check=lambda rules: check_targets(rules, backends=("triton", "local"), tasks=("t",)),
        )

    def over(self, deploys: Deploys) -> httpx.AsyncClient:
        servers = Servers(
            reachable={"triton": self.server},
            unreachable={"local": LOCAL},
            kinds={"triton": "triton", "local": "local"},
            repositories={"triton": "/models"},
        )
        plane = ModelPlane(servers=servers, deploys=deploys, events=self.events)
        app = create_admin_app(Plane(rules=self.rules, tasks=("t",), models=plane), TOKEN)
        headers = {"authorization": f"Bearer {TOKEN}"}
        transport = Asked(app)
        return httpx.AsyncClient(transport=transport, base_url="http://admin/admin/v1", headers=headers)

    async def deploy(self, **options: Any) -> dict[str, Any]:
        answer = await self.http.post("/models/m/deploy", json={"version": "2", "hold_s": 0, **options})
        assert answer.status_code == 202, answer.text
        return answer.json()

    async def now(self, deploy: dict[str, Any]) -> dict[str, Any]:
        return (await self.http.get(f"/deploys/{deploy['id']}")).json()

    async def ended(self, deploy: dict[str, Any]) -> dict[str, Any]:
        async def is_over() -> bool:
            return (await self.now(deploy))["status"] != "running"

        await until_async(is_over, timeout_s=10)
        return await self.now(deploy)

    async def weighs(self, deploy: dict[str, Any], percent: int) -> None:
        async def is_so() -> bool:
            now = await self.now(deploy)
            return (now["step"], now["weight"]) == ("shift", percent)

        await until_async(is_so, timeout_s=10)

    async def in_force(self) -> list[Any]:
        return (await self.http.get("/rules")).json()["rules"]


@contextlib.asynccontextmanager
async def plane_over(client: Redis, prefix: str) -> AsyncIterator[World]:
    rules = Rules(client, prefix)
    await rules.put(parse_rules(RULES), expected_revision=0)
    rules.history.clear()
    deploys = RedisDeployStore(client, prefix, timeout_s=5)
    made = World(rules, deploys, RedisOutcomes(client, prefix), RedisEvents(client, prefix))
    yield made
    await made.deploys.close()
    await made.http.aclose()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(rule_writer, "AHEAD_S", 0)
    monkeypatch.setattr(rule_writer, "RETRY_S", 0.01)
    monkeypatch.setattr(deploy_run, "TICK_S", 0.01)


@pytest.fixture
async def plane(redis_client, redis_prefix, quick):
    async with plane_over(redis_client, redis_prefix) as made:
        yield made


def is_problem(answer: httpx.Response, status: int, code: str, *words: str) -> None:
    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
    for word in words:
        assert word in answer.json()["detail"]


# --- what servers have ----------------------------------------------------------------------------


async def test_a_backend_that_does_not_answer_is_named(plane):
    for server in plane.server.servers.values():
        server.down = "connection refused"
    body = (await plane.http.get("/models")).json()
    silent = {"backend": "triton", "reason": "it does not answer: connection refused"}
    assert (body["items"], body["unreachable"]) == ([], [{"backend": "local", "reason": LOCAL}, silent])


async def test_models_are_shown_by_server_with_their_counters_and_events(plane):
    plane.server.servers["a"].counts = {"1": (10, 1)}
    plane.server.servers["a"].failed = {"2": "Internal: RuntimeError: no\n\nAt:\n  model.py(6)"}
    plane.server.servers["b"].down = "connection refused"
    await plane.events.add({"backend": "triton", "model": "m", "outcome": "healed"})
    await plane.events.add({"backend": "triton", "model": "other", "outcome": "failed"})
    body = (await plane.http.get("/models")).json()
    assert [one["model"] for one in body["items"]] == ["m", "other"]
    assert body["unreachable"] == [{"backend": "local", "reason": LOCAL}]
    assert body["next"] is None
    (one,) = (await plane.http.get("/models/m")).json()["items"]
    assert one["replicas"] == [
        {
            "replica": "a",
            "ready": True,
            "versions": [
                {"version": "1", "state": "READY", "reason": ""},
                {"version": "2", "state": "UNAVAILABLE", "reason": "Internal: RuntimeError: no"},
            ],
            "error": "",
        },
        {"replica": "b", "ready": False, "versions": [], "error": "connection refused"},
    ]
    assert one["figures"] == [
        {
            "replica": "a",
            "version": "1",
            "requests": 10,
            "failures": 1,
            "inferences": 30,
            "executions": 10,
            "mean_batch_size": 3.0,
            "queue_us": 100,
            "compute_input_us": 10,
            "compute_infer_us": 50,
            "compute_output_us": 5,
            "batch_sizes": {"3": 10},
        }
    ]
    assert one["events"] == [{"backend": "triton", "model": "m", "outcome": "healed"}]


async def test_an_unknown_model_is_a_404(plane):
    for method, path in (("GET", "/models/nobody"), ("POST", "/models/nobody/load")):
        is_problem(await plane.http.request(method, path), 404, "model_not_found", "nobody")
    is_problem(await plane.http.post("/models/nobody/deploy", json={"version": "2"}), 404, "model_not_found")


@pytest.mark.parametrize(
    "name",
    ["..%2f..%2fetc", "%2e%2e%2fx", "%2fabs", "a%2f..%2f..%2fb", "con%00fig", "m%2f..%2fm", "x" * 5000],
    ids=lambda name: name[:20],
)
async def test_a_name_that_leads_elsewhere_is_an_unknown_model(plane, name):  # SC-05
    for method, verb in (
        ("GET", ""),
        ("POST", "/load"),
        ("POST", "/unload"),
        ("POST", "/deploy"),
        ("POST", "/rollback"),
    ):
        url = plane.http.base_url.copy_with(raw_path=f"/models/{name}{verb}".encode())
        answer = await plane.http.request(method, url, json={"version": "2"} if verb == "/deploy" else None)
        assert answer.status_code == 404, (verb, answer.text)
    assert [(server.loads, server.ready) for server in plane.server.servers.values()] == [([], {"1"})] * 2


@pytest.mark.parametrize("version", ["../2", "..", "/2", "2/../1", "2\0"])
async def test_a_version_that_leads_elsewhere_is_none(plane, version):  # SC-05
    is_problem(await plane.http.post("/models/m/deploy", json={"version": version}), 422, "invalid_input")
    assert [(server.loads, server.ready) for server in plane.server.servers.values()] == [([], {"1"})] * 2


async def test_backends_are_probed_server_by_server(plane):
    plane.server.servers["b"].down = "connection refused"
    triton, local = (await plane.http.get("/backends")).json()["items"]
    assert (triton["backend"], triton["reachable"], triton["repository"]) == ("triton", True, "/models")
    first, second = triton["replicas"]
    assert (first["replica"], first["live"], second["live"], second["error"]) == (
        "a",
        True,
        False,
        "connection refused",
    )
    assert first["latency_ms"] >= 0
    assert (local["backend"], local["reachable"], local["detail"]) == ("local", False, LOCAL)


async def test_backends_are_told_as_the_configuration_has_them(monkeypatch):
    monkeypatch.setenv("GATEWAY_ADMIN_TOKEN", TOKEN)
    triton = {"kind": "triton", "url": "127.0.0.1:1"}
    local = {"kind": "local", "repository": "/models"}
    settings = Settings.model_validate(
        {
            "backends": {
                "spare": {**triton, "enabled": False},
                "local": local,
                "old": {**local, "enabled": False},
                "llm": {"kind": "openai", "base_url": "http://127.0.0.1:1/v1"},
            },
            "tasks": {"t": {"contract": "tensor"}},
            "rules": [{"name": "r", "split": [{"backend": "spare", "model": "*"}]}],
            "redis": {"url": "redis://127.0.0.1:1/0"},
        }
    )
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with control_plane(settings) as app:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://admin/admin/v1", headers=headers) as http:
            items = (await http.get("/backends")).json()["items"]
    off = "it is switched off in the configuration"
    assert [(one["backend"], one["kind"], one["detail"]) for one in items] == [
        ("spare", "triton", off),
        ("local", "local", LOCAL),
        ("old", "local", off),
        ("llm", "openai", "not known now: no worker tells anything, or Redis does not answer"),
    ]


async def test_events_are_shown_the_newest_first(plane):
    for n in range(3):
        await plane.events.add({"n": n})
    assert (await plane.http.get("/events?limit=2")).json() == {"items": [{"n": 2}, {"n": 1}], "next": None}
    is_problem(await plane.http.get("/events?limit=0"), 422, "invalid_input")


# --- load and unload ------------------------------------------------------------------------------


async def test_a_load_reaches_every_server(plane):
    body = (await plane.http.post("/models/m/load")).json()
    assert body["applied"] == {"replicas": 2, "of": 2}
    assert [server.ready for server in plane.server.servers.values()] == [{"2"}, {"2"}]
    config = {"version_policy": {"specific": {"versions": [1]}}}
    for one in (config, json.dumps(config)):
        assert (await plane.http.post("/models/m/load", json={"config": one})).status_code == 200
        assert [server.loads[-1] for server in plane.server.servers.values()] == [[1], [1]]
    assert (await plane.http.post("/models/m/unload", json={"backend": "triton"})).json()["action"] == "unload"
    assert [server.ready for server in plane.server.servers.values()] == [set(), set()]


async def test_a_load_that_some_servers_refuse_says_which(plane):
    plane.server.servers["b"].broken = {"2": "no memory"}
    body = (await plane.http.post("/models/m/load")).json()
    assert body["applied"] == {"replicas": 1, "of": 2}
    assert body["outcomes"][0] == {"backend": "triton", "replica": "a", "ok": True, "error": ""}
    assert body["outcomes"][1]["error"].endswith("no memory")
    plane.server.servers["a"].broken = {"2": "no memory"}
    plane.server.servers["a"].ready = plane.server.servers["b"].ready = {"1"}
    is_problem(await plane.http.post("/models/m/load"), 502, "backend_error", "triton@a", "no memory")
    for server in plane.server.servers.values():
        server.down = "connection refused"
    is_problem(await plane.http.post("/models/m/unload"), 502, "backend_error", "no model server answers")


async def test_a_backend_that_cannot_be_reached_is_said_to_be_so(plane):
    answer = await plane.http.post("/models/m/load", json={"backend": "local"})
    is_problem(answer, 404, "model_not_found", LOCAL)
    is_problem(await plane.http.post("/models/m/load", json={"backend": "x"}), 404, "model_not_found", "'x'", "triton")


# --- deploys that go well -------------------------------------------------------------------------


async def test_a_deploy_goes_through_all_its_steps_and_leaves_the_rules_as_they_were(plane):
    before = await plane.in_force()
    done = await plane.ended(await plane.deploy(canary=20))
    assert (done["status"], done["old"], done["new"], done["weight"], done["rules"]) == ("done", "1", "2", 100, [])
    assert done["notes"] == [f"backend 'local' keeps the version that it has: {LOCAL}"]
    assert plane.rules.history == [
        "mine: 1*100; deploy-m-rest: 1*100; rest: -*1",
        "mine: 2*20 1*80; deploy-m-rest: 2*20 1*80; rest: -*1",
        "mine: 2*50 1*50; deploy-m-rest: 2*50 1*50; rest: -*1",
        "mine: 2*100; deploy-m-rest: 2*100; rest: -*1",
        "mine: -*1; rest: -*1",
    ]
    for server in plane.server.servers.values():
        assert server.loads == [[1, 2], [1, 2], [2]]
        assert server.ready == {"2"}
    assert await plane.in_force() == before
    assert (await plane.http.get("/deploys")).json()["items"] == [done]


@pytest.mark.parametrize(("canary", "percents"), [(1, [1, 50, 100]), (50, [50, 100]), (60, [60, 100]), (100, [100])])
async def test_the_shares_begin_with_the_canary(plane, canary, percents):
    deploy = await plane.deploy(canary=canary)
    assert deploy["pace"]["percents"] == percents
    assert (await plane.ended(deploy))["status"] == "done"


async def test_versions_that_others_use_stay(plane):
    for server in plane.server.servers.values():
        server.disk, server.ready = {"1", "3", "7"}, {"1", "3"}
    done = await plane.ended(await plane.deploy(version="7"))
    assert (done["old"], done["new"], done["served"]) == ("3", "7", ["1", "3"])
    assert plane.server.servers["a"].loads == [[1, 3, 7], [1, 3, 7], [1, 7]]


async def test_the_old_version_is_not_retired_while_requests_still_come_to_it(plane, monkeypatch):
    server, figures = plane.server.servers["a"], plane.server.figures
    come = True

    async def busy():
        server.counts["1"] = (server.counts.get("1", (0, 0))[0] + come, 0)
        return await figures()

    monkeypatch.setattr(plane.server, "figures", busy)
    deploy = await plane.deploy()

    async def is_retiring() -> bool:
        return (await plane.now(deploy))["step"] == "retire"

    await until_async(is_retiring)
    count = server.counts["1"][0]
    await until(lambda: server.counts["1"][0] > count + 3)
    assert server.ready == {"1", "2"}
    come = False
    assert (await plane.ended(deploy))["status"] == "done"
    assert server.ready == {"2"}


async def test_what_no_rule_can_hold_back_is_noted(plane):
    plane.server.configs = {
        "m": {"sequence_batching": {"direct": {}}},
        "other": {"ensemble_scheduling": {"step": [{"model_name": "m", "model_version": "-1"}]}},
    }
    deploy = await plane.deploy()
    assert [note.partition(":")[0] for note in deploy["notes"]] == [
        "'m' keeps state",
        "the ensemble 'other' takes the new version as soon as it is loaded",
        "backend 'local' keeps the version that it has",
    ]
    assert (await plane.ended(deploy))["status"] == "done"


async def test_conflicts_with_other_writers_are_tried_again(plane):
    plane.rules.conflicts = 5
    assert (await plane.ended(await plane.deploy()))["status"] == "done"


async def test_a_rule_that_is_switched_off_meanwhile_stays_off(plane):
    deploy = await plane.deploy(hold_s=5)
    await plane.weighs(deploy, 10)
    assert (await plane.http.patch("/rules/mine", json={"enabled": False})).status_code == 200
    await plane.http.post(f"/deploys/{deploy['id']}/rollback")
    assert (await plane.ended(deploy))["status"] == "rolled_back"
    mine, rest = await plane.in_force()
    assert (mine["enabled"], mine["split"][0].get("version"), rest["enabled"]) == (False, "", True)


async def test_rules_of_before_that_are_put_back_meanwhile_do_not_undo_the_shares(plane):
    deploy = await plane.deploy(hold_s=60)
    await plane.weighs(deploy, 10)
    current = (await plane.http.get("/rules")).json()
    before = {
        "revision": current["revision"],
        "rules": [*RULES, {**RULES[0], "name": "late", "match": {"tenant": "x"}}],
    }
    assert (await plane.http.put("/rules", json=before)).status_code == 200
    shares = "mine: 2*10 1*90; deploy-m-rest: 2*10 1*90; rest: -*1; late: 2*10 1*90"
    await until(lambda: plane.rules.history[-1] == shares)
    await plane.http.post("/models/m/rollback")
    assert (await plane.ended(deploy))["status"] == "rolled_back"
    assert plane.rules.history[-1] == "mine: -*1; rest: -*1; late: -*1"


# --- rollbacks ------------------------------------------------------------------------------------


async def test_a_rollback_under_way_goes_back_at_once(plane):
    before = await plane.in_force()
    deploy = await plane.deploy(hold_s=60)
    await plane.weighs(deploy, 10)
    assert (await plane.http.post("/models/m/rollback")).json()["id"] == deploy["id"]
    undone = await plane.ended(deploy)
    assert (undone["status"], undone["undo"], undone["reason"]) == (
        "rolled_back",
        "asked",
        "rolled back by an operator",
    )
    assert plane.rules.history[-2:] == ["mine: 1*100; deploy-m-rest: 1*100; rest: -*1", "mine: -*1; rest: -*1"]
    assert plane.server.servers["b"].ready == {"1"}
    assert await plane.in_force() == before


async def test_a_rollback_during_the_load_does_not_wait_for_it(plane):
    plane.server.servers["b"].hold = asyncio.Event()
    deploy = await plane.deploy()

    async def is_loading() -> bool:
        return (await plane.now(deploy))["step"] == "load"

    await until_async(is_loading)
    await plane.http.post(f"/deploys/{deploy['id']}/rollback")
    await until(lambda: len(plane.rules.history) >= 1)
    plane.server.servers["b"].hold.set()
    assert (await plane.ended(deploy))["status"] == "rolled_back"
    assert [server.ready for server in plane.server.servers.values()] == [{"1"}, {"1"}]


async def test_what_is_done_is_rolled_back_by_a_deploy_back(plane):
    before = await plane.in_force()
    first = await plane.ended(await plane.deploy())
    back = (await plane.http.post("/models/m/rollback")).json()
    assert (back["old"], back["new"], back["pace"]["percents"]) == ("2", "1", [100])
    assert (await plane.ended(back))["status"] == "done"
    assert plane.server.servers["a"].loads[-2:] == [[1, 2], [1]]
    assert await plane.in_force() == before
    again = await plane.http.post(f"/deploys/{first['id']}/rollback")
    is_problem(again, 409, "deploy_conflict", "not the last", back["id"])


async def test_a_deploy_on_one_backend_is_rolled_back_there_alone(plane):
    other = ModelServerFake("other")
    deploys = plane.another(other=other)
    async with plane.over(deploys) as http:
        first = (await http.post("/models/m/deploy", json={"version": "2", "hold_s": 0, "backend": "triton"})).json()
        assert (await plane.ended(first))["status"] == "done"
        back = await http.post(f"/deploys/{first['id']}/rollback")
        assert back.status_code == 202, back.text
        assert (await plane.ended(back.json()))["status"] == "done"
    assert plane.server.servers["a"].ready == {"1"}
    assert other.servers["a"].loads == []
    await deploys.close()


async def test_a_rollback_in_the_moment_in_which_the_deploy_ends_is_not_lost(plane, monkeypatch):
    ending, may_end = asyncio.Event(), asyncio.Event()
    claims = plane.another(other=ModelServerFake("other"))
    release = claims._store.release

    async def held(*claim: str) -> None:
        ending.set()
        await may_end.wait()
        await release(*claim)

    monkeypatch.setattr(claims._store, "release", held)
    async with plane.over(claims) as http:
        first = (await http.post("/models/m/deploy", json={"version": "2", "hold_s": 0, "backend": "triton"})).json()
        await ending.wait()  # it is done, and about to give up its claim
        asking = asyncio.create_task(http.post(f"/deploys/{first['id']}/rollback"))
        await asyncio.wait({asking}, timeout=0.1)
        may_end.set()
        back = (await asking).json()
        assert back["id"] != first["id"]
        assert (await plane.ended(back))["status"] == "done"
    assert plane.server.servers["a"].ready == {"1"}
    await claims.close()


async def test_rollbacks_of_nothing(plane):
    is_problem(await plane.http.post("/models/m/rollback"), 404, "unknown_deploy")
    is_problem(await plane.http.post("/deploys/nope/rollback"), 404, "unknown_deploy")
    is_problem(await plane.http.get("/deploys/nope"), 404, "unknown_deploy")
    plane.server.servers["a"].broken = {"2": "no memory"}
    failed = await plane.ended(await plane.deploy())
    is_problem(await plane.http.post("/models/m/rollback"), 409, "deploy_conflict", "nothing to roll back")
    is_problem(await plane.http.post(f"/deploys/{failed['id']}/continue"), 409, "deploy_conflict", "failed")


# --- deploys that go wrong ------------------------------------------------------------------------


async def test_a_server_that_cannot_load_it_undoes_it_on_all(plane):
    before = await plane.in_force()
    plane.server.servers["b"].broken = {"2": "Internal: RuntimeError: no memory"}
    failed = await plane.ended(await plane.deploy())
    assert (failed["status"], failed["step"], failed["undo"], failed["weight"]) == ("failed", "load", "forced", 0)
    assert failed["reason"].startswith("triton@b: load failed for model 'm'")
    assert "x.py" not in failed["reason"]
    assert [server.ready for server in plane.server.servers.values()] == [{"1"}, {"1"}]
    assert await plane.in_force() == before
    assert not any("2*" in put for put in plane.rules.history)


async def test_a_server_that_does_not_see_the_folder_is_named(plane):
    plane.server.servers["b"].disk = {"1"}
    failed = await plane.ended(await plane.deploy())
    assert failed["reason"] == "triton@b: there is no version 2 of 'm' in the repository"
    assert plane.server.servers["a"].ready == {"1"}


@pytest.mark.parametrize("source", ["servers", "workers"])
async def test_a_version_that_fails_more_than_the_old_one_is_rolled_back(
    plane, redis_client, redis_prefix, monkeypatch, source
):
    figures, asked = plane.server.figures, []

    async def counted() -> Any:
        asked.append(1)
        return await figures()

    monkeypatch.setattr(plane.server, "figures", counted)
    deploy = await plane.deploy(hold_s=60)
    await plane.weighs(deploy, 10)
    before = len(asked)
    await until(lambda: len(asked) > before + 1, timeout_s=10)  # what counts from here on has a beginning
    if source == "servers":
        plane.server.servers["b"].counts = {"1": (1000, 10), "2": (90, 10)}
    else:
        counts = {"1:answered": 1000, "1:failed": 10, "2:answered": 90, "2:failed": 10}
        await redis_client.hset(f"{redis_prefix}outcomes:m", mapping=counts)
    failed = await plane.ended(deploy)
    assert (failed["status"], failed["reason"]) == ("failed", "version 2 failed 10 of 100 requests at 10 %")
    assert plane.server.servers["a"].ready == {"1"}


async def test_failures_that_the_old_version_has_too_are_no_reason(plane):
    deploy = await plane.deploy(hold_s=60)
    await plane.weighs(deploy, 10)
    plane.server.servers["b"].counts = {"1": (900, 100), "2": (90, 10)}
    seen = len(plane.server.servers["a"].loads)
    await asyncio.gather(*(plane.http.get("/models") for _ in range(20)))
    assert (await plane.now(deploy))["status"] == "running"
    assert len(plane.server.servers["a"].loads) == seen


async def test_a_server_that_lost_a_version_gets_it_back(plane):
    deploy = await plane.deploy(hold_s=60)
    await plane.weighs(deploy, 10)
    plane.server.servers["b"].ready = {"2"}  # as after a restart: the newest alone
    await until(lambda: plane.server.servers["b"].ready == {"1", "2"})
    assert (await plane.now(deploy))["status"] == "running"


async def test_a_server_that_is_gone_for_long_undoes_it(plane):
    deploy = await plane.deploy(hold_s=60)
    await plane.weighs(deploy, 10)
    plane.server.servers["b"].down = "connection refused"
    failed = await plane.ended(deploy)
    assert failed["status"] == "failed"
    assert failed["reason"].startswith("triton@b: connection refused; not all could be undone")
    # Callers are on the old version by its number: what the lost server comes back with is not their concern.
    assert plane.rules.history[-1] == "mine: 1*100; deploy-m-rest: 1*100; rest: -*1"
    assert failed["rules"] == ["deploy-m-rest", "mine"]
    is_problem(await plane.http.post("/models/m/deploy", json={"version": "2"}), 409, "deploy_conflict", "roll it back")
    plane.server.servers["b"].down = ""
    assert (await plane.http.post("/models/m/rollback")).status_code == 202
    undone = await plane.ended(deploy)
    assert (undone["status"], undone["rules"]) == ("rolled_back", [])
    assert plane.rules.history[-1] == "mine: -*1; rest: -*1"


async def test_workers_that_do_not_follow_stop_it_before_anything_is_loaded(plane, monkeypatch):
    plane.rules.followed = Applied(workers=1, of=2, ms=9)
    deploy = await plane.deploy()
    failed = await plane.ended(deploy)
    assert "runs on only 1 of 2 workers" in failed["reason"]
    assert plane.server.servers["a"].loads == []


async def test_a_rule_that_was_edited_to_the_old_version_keeps_it_from_being_retired(plane):
    deploy = await plane.deploy(hold_s=60, canary=100)
    await plane.weighs(deploy, 100)
    current = (await plane.http.get("/rules")).json()
    current["rules"][0]["split"] = [{"backend": "triton", "model": "m", "version": "1", "weight": 1}]
    assert (await plane.http.put("/rules", json=current)).status_code == 200
    await plane.deploys.close()
    await plane.http.post(f"/deploys/{deploy['id']}/continue")
    plane.deploys._runs[deploy["id"]][0].deploy = _hastened(plane.deploys._runs[deploy["id"]][0].deploy)
    failed = await plane.ended(deploy)
    assert failed["reason"] == "the rule 'mine', edited meanwhile, still sends to version 1"
    assert failed["notes"][-1] == "the split of rule 'mine' was edited meanwhile and is left as it is"
    assert plane.server.servers["a"].ready == {"1"}
    assert (await plane.in_force())[0]["split"] == current["rules"][0]["split"]


def _hastened(deploy):
    return replace(deploy, pace=replace(deploy.pace, hold_s=0))


async def test_a_redis_that_is_away_for_a_while_delays_it(redis_server, redis_prefix, quick):
    async with RedisSwitch(redis_server.port) as switch:
        client = connect(switch.url)
        async with plane_over(client, redis_prefix) as plane:
            deploy = await plane.deploy(hold_s=0.05)
            await plane.weighs(deploy, 10)
            await switch.refuse()
            is_problem(await plane.http.get("/rules"), 503, "store_unavailable")
            assert (await plane.now(deploy))["status"] == "running"
            await switch.restore()
            done = await plane.ended(deploy)
            assert (done["status"], done["reason"]) == ("done", "")
            assert [rule["split"][0]["version"] for rule in await plane.in_force()] == ["", ""]
        await client.aclose()


# --- what may not be begun ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ready", "version", "words"),
    [
        (({"1"}, {"1"}), "1", ["served already"]),
        (({"5"}, {"5"}), "1", []),
        (({"1"}, {"1", "2"}), "2", ["not all servers serve the same versions"]),
        ((set(), set()), "2", ["is not loaded"]),
        (({"1", "5", "7"}, {"1", "5", "7"}), "2", ["not first"]),
    ],
)
async def test_states_in_which_a_deploy_cannot_begin(plane, ready, version, words):
    for server, versions in zip(plane.server.servers.values(), ready, strict=True):
        server.ready, server.disk = versions, {"1", "2", "5", "7"}
    answer = await plane.http.post("/models/m/deploy", json={"version": version, "hold_s": 0})
    if words:
        is_problem(answer, 409, "deploy_conflict", *words)
    else:
        assert answer.status_code == 202


async def test_a_server_that_is_down_refuses_a_deploy(plane):
    plane.server.servers["b"].down = "connection refused"
    answer = await plane.http.post("/models/m/deploy", json={"version": "2"})
    is_problem(answer, 409, "deploy_conflict", "triton@b", "connection refused")


@pytest.mark.parametrize("body", [{}, {"version": "0"}, {"version": "two"}, {"version": "2", "canary": 0}, {"x": 1}])
async def test_bodies_of_another_shape(plane, body):
    is_problem(await plane.http.post("/models/m/deploy", json=body), 422, "invalid_input")


async def test_one_deploy_of_a_model_at_a_time(plane):
    deploy = await plane.deploy(hold_s=60)
    answer = await plane.http.post("/models/m/deploy", json={"version": "2"})
    is_problem(answer, 409, "deploy_conflict", deploy["id"], "under way")


# --- a control plane that ends ---------------------------------------------------------------------


@pytest.mark.parametrize("then", ["continue", "rollback"])
async def test_another_control_plane_takes_up_what_was_interrupted(plane, then):
    before = await plane.in_force()
    deploy = await plane.deploy(hold_s=0.2, canary=100)
    await plane.weighs(deploy, 100)
    second = plane.another()
    async with plane.over(second) as http:
        shown = (await http.get(f"/deploys/{deploy['id']}")).json()
        assert shown["status"] == "running"
        is_problem(
            await http.post(f"/deploys/{deploy['id']}/rollback"), 409, "deploy_conflict", "another control plane"
        )
        await plane.deploys.close()
        assert (await http.get(f"/deploys/{deploy['id']}")).json()["status"] == "interrupted"
        is_problem(await http.post("/models/m/deploy", json={"version": "2"}), 409, "deploy_conflict", "interrupted")
        assert (await http.post(f"/deploys/{deploy['id']}/{then}")).status_code == 202

        async def is_over() -> bool:
            return (await http.get(f"/deploys/{deploy['id']}")).json()["status"] in ("done", "rolled_back")

        await until_async(is_over)
        ended = (await http.get(f"/deploys/{deploy['id']}")).json()
    assert ended["status"] == {"continue": "done", "rollback": "rolled_back"}[then]
    assert plane.server.servers["a"].ready == {{"continue": "2", "rollback": "1"}[then]}
    assert await plane.in_force() == before
    await second.close()


async def test_what_was_interrupted_is_taken_up_once(plane, monkeypatch):
    deploy = await plane.deploy(hold_s=60)
    await plane.weighs(deploy, 10)
    await plane.deploys.close()
    planes = [plane.another() for _ in range(2)]
    all_have_seen, owner = asyncio.Barrier(3), plane.store.owner

    async def owner_seen_by_all(model: str) -> str:
        found = await owner(model)
        await all_have_seen.wait()
        return found

    monkeypatch.setattr(plane.store, "owner", owner_seen_by_all)
    async with plane.over(planes[0]) as first, plane.over(planes[1]) as second:
        path = f"/deploys/{deploy['id']}/continue"
        answers = await asyncio.gather(first.post(path), first.post(path), second.post(path))
        assert sorted(answer.status_code for answer in answers) == [202, 409, 409]
    for one in planes:
        await one.close()


async def test_a_run_whose_claim_is_anothers_by_now_stops(plane, redis_client, redis_prefix, monkeypatch):
    monkeypatch.setattr(deploys, "RENEW_S", 0.01)
    deploy = await plane.deploy(hold_s=60)
    await plane.weighs(deploy, 10)
    await redis_client.set(f"{redis_prefix}deploying:m", "another")
    await until(lambda: all(task.get_name() != f"deploy {deploy['id']}" for task in asyncio.all_tasks()))
    answer = await plane.http.post(f"/deploys/{deploy['id']}/rollback")
    is_problem(answer, 409, "deploy_conflict", "run by another control plane")
    assert (await redis_client.get(f"{redis_prefix}deploying:m")) == b"another"


# --- the rules' history, and changes that are frozen ------------------------------------------------


async def test_what_a_deploy_changes_is_in_the_history_of_the_rules(plane):
    deploy = await plane.deploy()
    assert (await plane.ended(deploy))["status"] == "done"
    *changed, first = await plane.rules.revisions()
    assert first.change == NO_NAME
    assert {(one.change.by, one.change.action) for one in changed} == {("deploy", "deploy")}
    assert changed[0].change.note == f"deploy {deploy['id']} of m, version 1 -> 2: version 2 serves"


async def test_frozen_rules_stop_a_deploy_and_hinder_none_from_being_taken_back(plane):
    body = {"action": "freeze", "scope": {"everything": True}, "reason": "the audit", "ttl_s": 60}
    before = await plane.in_force()
    first = (await plane.http.post("/switches", json=body)).json()["id"]
    ended = await plane.ended(await plane.deploy())
    assert (ended["status"], "changes are frozen" in ended["reason"]) == ("failed", True)
    await plane.http.delete(f"/switches/{first}")
    assert await plane.in_force() == before
    deploy = await plane.deploy(hold_s=60)
    await plane.weighs(deploy, 10)
    await plane.http.post("/switches", json=body)
    await plane.http.post(f"/deploys/{deploy['id']}/rollback")
    assert (await plane.ended(deploy))["status"] == "rolled_back"
    assert await plane.in_force() == before
    assert (await plane.rules.revisions())[0].change.is_automatic
