"""`gateway models` against a control plane on a real socket, over a model server in memory and folders on disk."""

import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import uvicorn
from typer.testing import CliRunner

from gateway.admin.app import create_admin_app
from gateway.admin.models import deploy_run
from gateway.admin.models.deploys import Deploys
from gateway.admin.models.fleet import Servers
from gateway.admin.models.model_routes import ModelPlane
from gateway.admin.plane import Plane
from gateway.admin.routing import rule_writer
from gateway.admin_ports import NO_NAME, Applied
from gateway.cli import models
from gateway.core.rules import RuleSet, parse_rules
from gateway.core.switches import NO_SWITCHES
from tests.kit.model_server import ModelServerFake
from tests.kit.redis import HOST
from tests.kit.serving import free_port

TOKEN = "admin-secret"  # noqa: S105 - made up here
RULES = [{"name": "mine", "split": [{"backend": "triton", "model": "m"}]}]


class Stores:
    """Rules, deploys and outcomes in memory."""

    def __init__(self) -> None:
        self.rules = RuleSet(revision=1, rules=parse_rules(RULES))
        self.documents: dict[str, str] = {}
        self.claimed: dict[str, str] = {}

    async def get(self):
        return self.rules

    async def put(self, rules, *, expected_revision, at_ms=0, change=NO_NAME):
        assert expected_revision == self.rules.revision
        self.rules = RuleSet(revision=expected_revision + 1, rules=tuple(rules))
        return self.rules.revision

    async def workers(self):
        return []

    async def switches(self):
        return NO_SWITCHES

    async def applied(self, revision, timeout_s=1.0):
        return Applied(workers=0, of=0, ms=0)

    async def save(self, document):
        self.documents[document["id"]] = json.dumps(document)

    async def load(self, deploy_id):
        return json.loads(self.documents[deploy_id]) if deploy_id in self.documents else None

    async def recent(self):
        return [json.loads(text) for text in reversed(self.documents.values())]

    async def claim(self, model, owner):
        return self.claimed.setdefault(model, owner) == owner

    async def owner(self, model):
        return self.claimed.get(model, "")

    async def release(self, model, owner):
        self.claimed.pop(model, None)

    async def read(self, model):
        return {}


@dataclass
class Served:
    """A control plane, what lies behind it, and the repository that its servers read."""

    server: ModelServerFake
    stores: Stores
    url: str
    model: Path

    def run(self, *args: str):
        options = ["--admin-url", self.url, "--admin-token", TOKEN]
        return CliRunner().invoke(models.app, [*args, *options])

    def put(self, *versions: str) -> None:
        """Write version folders."""
        for version in versions:
            (self.model / version).mkdir(exist_ok=True)
            (self.model / version / "model.py").write_text(version)


@pytest.fixture
def plane(tmp_path, monkeypatch) -> Iterator[Served]:
    monkeypatch.setattr(rule_writer, "AHEAD_S", 0)
    monkeypatch.setattr(deploy_run, "TICK_S", 0.01)
    monkeypatch.setattr(models, "POLL_S", 0.01)
    monkeypatch.setenv("COLUMNS", "160")
    model = tmp_path / "repository" / "m"
    model.mkdir(parents=True)
    (model / "config.pbtxt").write_text('name: "m"')
    server, stores, port = ModelServerFake(), Stores(), free_port()
    servers = Servers(
        reachable={"triton": server},
        unreachable={"local": "it cannot be reached"},
        kinds={"triton": "triton", "local": "local"},
        repositories={"triton": str(model.parent)},
    )
    deploys = Deploys(servers=servers, rules=stores, store=stores, outcomes=stores, check=lambda _: None)
    app = create_admin_app(Plane(rules=stores, models=ModelPlane(servers=servers, deploys=deploys)), TOKEN)
    config = uvicorn.Config(app, host=HOST, port=port, log_level="error", lifespan="off", ws="none")
    uvicorn_server = uvicorn.Server(config)
    thread = threading.Thread(target=uvicorn_server.run)
    thread.start()
    while not uvicorn_server.started and thread.is_alive():
        time.sleep(0.01)
    served = Served(server, stores, f"http://{HOST}:{port}", model)
    served.put("1")
    for one in server.servers.values():
        one.folder = model
    yield served
    uvicorn_server.should_exit = True
    thread.join()


@pytest.fixture
def build(tmp_path) -> Path:
    folder = tmp_path / "build"
    folder.mkdir()
    (folder / "model.py").write_text("new")
    return folder


def test_list_shows_each_server_and_what_cannot_be_reached(plane):
    plane.server.servers["b"].down = "connection refused"
    done = plane.run("list")
    assert done.exit_code == 0, done.output
    assert re.search(r"m .* triton .* a .* 1 READY", done.stdout)
    assert re.search(r"m .* triton .* b .* connection refused", done.stdout)
    assert "local: it cannot be reached" in done.stderr
    assert json.loads(plane.run("list", "--json").stdout)["items"][0]["model"] == "m"


def test_stats_shows_requests_batches_and_times(plane):
    plane.server.servers["a"].counts = {"1": (10, 2)}
    for args in ((), ("m",)):
        done = plane.run("stats", *args)
        assert re.search(r"m:1 .* a .* 10 .* 2 .* 3 .* 0\.10 .* 0\.0[67]", done.stdout), done.stdout
    done = plane.run("stats", "nobody")
    assert (done.exit_code, done.stderr) == (
        1,
        "refused: no server that can be reached has the model 'nobody'\n",
    )


def test_load_and_unload_say_what_each_server_did(plane, tmp_path):
    done = plane.run("load", "m")
    assert (done.exit_code, done.stdout) == (0, "triton a: done\ntriton b: done\n")
    (tmp_path / "config.json").write_text('{"version_policy": {"specific": {"versions": [1]}}}')
    assert plane.run("load", "m", "--config", str(tmp_path / "config.json")).exit_code == 0
    assert plane.server.servers["a"].loads == [None, [1]]
    plane.server.servers["b"].broken = {"1": "no memory"}
    done = plane.run("load", "m")
    assert done.exit_code == 1
    assert "triton b: load failed" in done.stderr
    assert done.stderr.endswith("on only 1 of 2 servers\n")
    assert plane.run("unload", "m", "--backend", "triton").exit_code == 0
    assert plane.server.servers["a"].ready == set()
    done = plane.run("load", "m", "--config", "nowhere.json")
    assert (done.exit_code, done.stderr) == (2, "nowhere.json: cannot be read\n")
    done = plane.run("load", "m", "--config", str(plane.model / "config.pbtxt"))
    assert done.exit_code == 2
    assert "is not JSON" in done.stderr


def test_a_deploy_puts_the_folder_there_and_sees_it_through(plane, build):
    done = plane.run("deploy", "m", str(build), "--hold-s", "0")
    assert done.exit_code == 0, done.output
    assert done.stdout.endswith("m: version 2 serves, 1 is retired\n")
    for line in ("m: pin, 0 %", "100 % of the callers", "note: backend 'local' keeps the version"):
        assert line in done.stderr
    assert "version_policy" not in done.stderr
    assert (plane.model / "2" / "model.py").read_text() == "new"
    assert plane.server.servers["b"].ready == {"2"}
    shown = plane.run("deploys").stdout
    assert re.search(r"m .* 1 .* 2 .* done .* 100 %", shown)


def test_what_a_restart_would_serve_otherwise_is_told(plane, build):
    (plane.model / "config.pbtxt").write_text("version_policy { all { } }")
    done = plane.run("deploy", "m", str(build), "--hold-s", "0")
    assert done.exit_code == 0
    assert "versions: [ 2 ]" in done.stderr.replace("\n", " ")


def test_a_version_in_the_repository_needs_no_folder(plane):
    plane.put("2")
    done = plane.run("deploy", "m", "--version", "2", "--hold-s", "0", "--canary", "100")
    assert done.exit_code == 0, done.output
    done = plane.run("deploy", "m")
    assert (done.exit_code, done.stderr) == (
        2,
        "give the folder of the new version, or --version of one in the repository\n",
    )


def test_a_deploy_that_fails_ends_with_its_reason_and_sets_the_version_aside(plane, build):
    plane.server.servers["b"].broken = {"2": "no memory"}
    done = plane.run("deploy", "m", str(build), "--hold-s", "0")
    assert done.exit_code == 1
    assert ": failed: triton@b: load failed for model 'm': version 2" in done.stderr
    assert sorted(path.name for path in plane.model.iterdir()) == [".rolled-back-2", "1", "config.pbtxt"]
    assert plane.server.servers["a"].ready == {"1"}


def test_a_deploy_that_is_refused_leaves_nothing_behind(plane, build):
    plane.server.servers["b"].down = "connection refused"
    done = plane.run("deploy", "m", str(build))
    assert done.exit_code == 1
    assert done.stderr.endswith("refused: triton@b does not answer: connection refused\n")
    assert sorted(path.name for path in plane.model.iterdir()) == ["1", "config.pbtxt"]


def test_a_folder_that_cannot_become_a_version_is_a_usage_error(plane, tmp_path):
    (tmp_path / "empty").mkdir()
    done = plane.run("deploy", "m", str(tmp_path / "empty"))
    assert done.exit_code == 2
    assert done.stderr.endswith("holds no files\n")
    done = plane.run("deploy", "nobody", str(tmp_path / "empty"))
    assert done.exit_code == 2
    assert "give --repository" in done.stderr


def test_rollback_there_and_back_again(plane, build):
    assert plane.run("deploy", "m", str(build), "--hold-s", "0").exit_code == 0
    done = plane.run("rollback", "m")
    assert done.exit_code == 0, done.output
    assert done.stdout.endswith("m: version 1 serves, 2 is retired\n")
    assert (plane.model / ".rolled-back-2").is_dir()
    assert plane.server.servers["a"].ready == {"1"}
    done = plane.run("rollback", "m")
    assert done.exit_code == 0, done.output
    assert plane.server.servers["a"].ready == {"2"}
    assert (plane.model / "2").is_dir()


def test_rollback_and_continue_of_nothing(plane):
    for command in ("rollback", "continue"):
        done = plane.run(command, "m")
        assert (done.exit_code, done.stderr) == (1, "no deploy of 'm' is known\n")


def test_continue_takes_up_what_was_interrupted(plane, build):
    assert plane.run("deploy", "m", str(build), "--hold-s", "0").exit_code == 0
    (name,) = plane.stores.documents
    document = json.loads(plane.stores.documents[name])
    plane.stores.documents[name] = json.dumps(document | {"status": "running", "step": "retire"})
    done = plane.run("continue", "m")
    assert done.exit_code == 0, done.output
    assert done.stdout.endswith("m: version 2 serves, 1 is retired\n")
    assert plane.run("continue", "m").exit_code == 1


def test_without_a_control_plane_it_says_so():
    url = f"http://{HOST}:{free_port()}"
    done = CliRunner().invoke(models.app, ["list", "--admin-url", url, "--admin-token", TOKEN])
    assert (done.exit_code, done.stderr) == (3, f"no control plane answers at {url}\n")


@pytest.mark.parametrize("command", ["list", "stats", "load", "unload", "deploy", "rollback", "continue", "deploys"])
def test_help_has_examples(command):
    done = CliRunner().invoke(models.app, [command, "--help"], env={"COLUMNS": "160"})
    assert done.exit_code == 0
    assert f"gateway models {command}" in done.stdout
