"""`/v2`: what servers tell of their models, and changing them, over scripted servers."""

import base64
from typing import Any

import pytest

from gateway.backends.scripted import ScriptedBackend, ScriptedServer, Told
from gateway.core.errors import Fault, FaultKind, Reply
from gateway.core.types import Tensors
from gateway.tasks.tensor import TensorTask
from tests.kit.app import ADMIN_KEY, EMBEDDING_KEY, Harness, running

RULES = [
    {
        "name": "tensors",
        "match": {"task": "tensor"},
        "split": [{"backend": "triton", "model": "*"}],
        "fallback": [{"backend": "local", "model": "*"}],
    }
]
ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
AWAY = Fault(kind=FaultKind.UNAVAILABLE, message="refused at 10.0.0.1:8001", is_server=True)
MISSING = Fault(
    kind=FaultKind.UNKNOWN_MODEL,
    message="x",
    reply=Reply(code="NOT_FOUND", text="Request for unknown model: 'm' is not found"),
)
ROW = {"name": "m", "version": "1", "state": "READY"}
DOCUMENTS: dict[str, Any] = {
    "server": {"name": "triton", "version": "2", "extensions": ["statistics", "trace", "system_shared_memory"]},
    "metadata m": {"name": "m", "versions": ["1"]},
    "config m": {"name": "m", "max_batch_size": 4},
    "statistics m": {"model_stats": [{"name": "m", "batch_stats": [], "memory_usage": [], "response_stats": {}}]},
    "statistics": {"model_stats": [{"name": "m"}, {"name": "n"}]},
    "index": [ROW, {"name": "never loaded"}],
    "index ready": [ROW],
}
TOLD = {
    "/v2": {"name": "triton", "version": "2", "extensions": ["statistics"]},
    "/v2/models/m": DOCUMENTS["metadata m"],
    "/v2/models/m/versions/1": DOCUMENTS["metadata m"],
    "/v2/models/m/config": DOCUMENTS["config m"],
    "/v2/models/m/stats": DOCUMENTS["statistics m"],
    "/v2/models/stats": DOCUMENTS["statistics"],
}


class Servers:
    """The data plane before two scripted model servers, the first one with the named replicas."""

    def __init__(self, *replicas: str, documents: Any = None, other: Any = None) -> None:
        self.triton = ScriptedServer("triton", told=Told(documents=DOCUMENTS if documents is None else documents))
        self.triton.replica_names = replicas
        self.local = ScriptedServer("local", told=Told(documents=other or {}))

    def running(self) -> Any:
        return running([self.triton, self.local], rules=RULES, more_tasks={"tensor": TensorTask()})


async def test_the_first_server_that_answers_tells():
    at = Servers()
    async with at.running() as gw:
        for path, told in TOLD.items():
            reply = await gw.http.get(path)
            assert (reply.status_code, reply.json()) == (200, told), path
            assert reply.headers["content-type"] == "application/json"
            assert (await gw.http.head(path)).status_code == 200
        assert not at.local.asked


async def test_a_models_counters_come_in_the_order_of_tritons_http():
    async with Servers().running() as gw:
        [stats] = (await gw.http.get("/v2/models/m/stats")).json()["model_stats"]
        assert list(stats) == ["name", "response_stats", "batch_stats", "memory_usage"]


async def test_the_next_server_is_asked_where_one_is_away_or_lacks_the_model():
    for fault in (AWAY, MISSING):
        at = Servers(documents=dict.fromkeys(DOCUMENTS, fault), other=DOCUMENTS)
        async with at.running() as gw:
            for path, told in TOLD.items():
                assert (await gw.http.get(path)).json() == told, path


async def test_what_no_server_can_tell_is_an_error():
    for fault, status, text in (
        (AWAY, 503, "the backend could not be reached"),
        (MISSING, 404, "Request for unknown model: 'm' is not found"),
    ):
        documents = dict.fromkeys(DOCUMENTS, fault)
        async with Servers(documents=documents, other=documents).running() as gw:
            for path in TOLD:
                reply = await gw.http.get(path)
                assert (reply.status_code, reply.json()) == (status, {"error": text}), path


async def test_a_backend_that_is_no_model_server_cannot_tell():
    async with running(
        [ScriptedBackend("triton", ()), ScriptedBackend("local", ())], rules=RULES, more_tasks={"tensor": TensorTask()}
    ) as gw:
        assert (await gw.http.get("/v2/models/m")).status_code == 501
        assert (await gw.http.post("/v2/repository/models/m/load", headers=ADMIN)).status_code == 503


async def test_without_a_task_of_tensors_there_is_nothing():
    async with running([ScriptedServer("triton")]) as gw:
        reply = await gw.http.get("/v2/models/m")
        assert (reply.status_code, list(reply.json())) == (404, ["error"])


async def test_a_model_is_ready_where_any_server_has_it():
    at = Servers()
    async with at.running() as gw:
        reply = await gw.http.get("/v2/models/m/ready")
        assert (reply.status_code, reply.content) == (200, b"")
        at.triton.probe_fault = AWAY
        assert (await gw.http.get("/v2/models/m/versions/1/ready")).status_code == 200
        at.local.probe_fault = AWAY
        reply = await gw.http.get("/v2/models/m/ready")
        assert (reply.status_code, reply.json()) == (503, {"error": "Model version not ready"})
        assert reply.headers["content-type"] == "application/json"


async def test_probes_of_the_gateway_itself_need_no_key():
    async with Servers().running() as gw:
        for path in ("/v2/health/live", "/v2/health/ready"):
            for method in ("GET", "HEAD"):
                reply = await gw.http.request(method, path, headers={"authorization": ""})
                assert (reply.status_code, reply.content) == (200, b"")
        gw.stop.set()  # a connection that was open before is still served, and told
        reply = await gw.http.get("/v2/health/ready")
        assert (reply.status_code, reply.content) == (503, b"")


# --- the repository -------------------------------------------------------------------------------


async def test_the_index_of_one_server():
    async with Servers().running() as gw:
        assert (await gw.http.post("/v2/repository/index", headers=ADMIN)).json() == DOCUMENTS["index"]
        ready = await gw.http.post("/v2/repository/index", json={"ready": True}, headers=ADMIN)
        assert ready.json() == DOCUMENTS["index ready"]


async def test_the_index_says_where_replicas_differ():
    unloaded = {"name": "m", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"}
    for other, told in (
        ([ROW], [ROW]),
        ([unloaded], [{**unloaded, "reason": "a: READY, b: UNAVAILABLE"}]),
        ([], [{**ROW, "reason": "a: READY, b: ABSENT"}]),
        (AWAY, [{**ROW, "reason": "a: READY, b: UNREACHABLE"}]),
    ):
        at = Servers("a", "b", documents={"index@a": [ROW], "index@b": other})
        async with at.running() as gw:
            assert (await gw.http.post("/v2/repository/index", headers=ADMIN)).json() == told


async def test_a_load_reaches_every_server():
    at = Servers("a", "b")
    async with at.running() as gw:
        content = base64.b64encode(b"weights").decode()
        parameters = {"config": "{}", "file:1/model.py": content}
        reply = await gw.http.post("/v2/repository/models/m/load", json={"parameters": parameters}, headers=ADMIN)
        assert (reply.status_code, reply.content) == (200, b"")
        assert at.triton.changes == [("load", "m", name, "{}", {"1/model.py": b"weights"}) for name in "ab"]
        assert at.local.changes == [("load", "m", "", "{}", {"1/model.py": b"weights"})]
        body = {"parameters": {"unload_dependents": True}}
        assert (await gw.http.post("/v2/repository/models/m/unload", json=body, headers=ADMIN)).status_code == 200
        assert at.triton.changes[2:] == [("unload", "m", name, True) for name in "ab"]


async def test_a_load_that_one_server_refuses_says_which():
    at = Servers("a", "b")
    words = Reply(code="INTERNAL", text="failed to load 'm', failed to poll from model repository")
    at.triton.told.control_faults = {"b": Fault(kind=FaultKind.FAILED, message="x", reply=words)}
    at.local.told.control_faults = {"": AWAY}
    async with at.running() as gw:
        reply = await gw.http.post("/v2/repository/models/m/load", headers=ADMIN)
        assert reply.status_code == 500
        assert reply.json() == {
            "error": f"load: triton@a: done; triton@b: {words.text}; local: not reached (unavailable)"
        }


async def test_only_admin_keys_control_models():
    at = Servers()
    async with at.running() as gw:
        for path in ("index", "models/m/load", "models/m/unload"):
            reply = await gw.http.post(f"/v2/repository/{path}")
            assert (reply.status_code, list(reply.json())) == (403, ["error"])
        assert not at.triton.changes + at.triton.asked


async def test_bad_control_bodies_are_named():
    at = Servers()
    async with at.running() as gw:
        for path, body, named in (
            ("index", {"ready": "x"}, "ready"),
            ("models/m/load", {"parameters": {"config": 1}}, "config"),
            ("models/m/load", {"parameters": {"other": "x"}}, "other"),
            ("models/m/load", {"parameters": {"file:1/x": "?"}}, "base64"),
            ("models/m/unload", {"parameters": {"unload_dependents": 1}}, "unload_dependents"),
            ("models/m/load", [], "object"),
        ):
            reply = await gw.http.post(f"/v2/repository/{path}", json=body, headers=ADMIN)
            assert (reply.status_code, named in reply.json()["error"]) == (400, True), reply.content
        assert not at.triton.changes


# --- names that lead elsewhere, paths that lead nowhere -------------------------------------------

ESCAPES = ("..%2f..%2fetc", "%2e%2e", "%2e%2e%2fx", "%2fabs", "a%2f..%2f..%2fb", "con%00fig", "a%5cb", "x" * 5000)
ESCAPES += ("../../etc", "a/../../b", "/abs", "%2e%2e/x")


async def raw(gw: Harness, method: str, path: str, **headers: str) -> Any:
    """The path as it stands, dots and all."""
    return await gw.http.request(method, "/", headers=headers, extensions={"target": path.encode()})


@pytest.mark.parametrize("name", ESCAPES, ids=lambda name: name[:20])
async def test_names_that_are_no_folder_are_unknown_models(name: str):  # SC-05
    at = Servers()
    async with at.running() as gw:
        for path in (f"/v2/models/{name}", f"/v2/models/{name}/config", f"/v2/models/{name}/stats"):
            reply = await raw(gw, "GET", path)
            assert (reply.status_code, list(reply.json())) == (404, ["error"]), path
            assert len(reply.content) < 600
        for path in (f"/v2/models/{name}/infer", f"/v2/models/{name}/generate"):
            reply = await gw.http.post("/", json={"inputs": []}, extensions={"target": path.encode()})
            assert reply.status_code == 404, path
        for verb in ("load", "unload"):
            reply = await raw(gw, "POST", f"/v2/repository/models/{name}/{verb}", **ADMIN)
            assert reply.status_code == 404
        assert (await raw(gw, "GET", f"/v2/models/{name}/ready")).status_code in (404, 503)
        assert not at.triton.asked + at.triton.changes + at.triton.calls


async def test_files_of_a_load_stay_in_the_models_folder():  # SC-05
    at = Servers()
    async with at.running() as gw:
        for path in ("../../x", "1/../../x", "/etc/x", "1/", "1", "x/model.py", "1/a\u0000b", "1//x", "0/x"):
            parameters = {"config": "{}", f"file:{path}": ""}
            reply = await gw.http.post("/v2/repository/models/m/load", json={"parameters": parameters}, headers=ADMIN)
            assert reply.status_code == 400, path
            assert reply.json() == {"error": "a file of a load must be named file:<version>/<name>"}
        assert not at.triton.changes


async def test_every_error_has_the_protocols_form():
    async with Servers().running() as gw:
        for method, path, headers, status in (
            ("GET", "/v2/nothing", {}, 404),
            ("GET", "/v2/models", {}, 404),
            ("GET", "/v2%2fmodels/m", {}, 404),
            ("GET", "/v2/models/%ff", {}, 404),
            ("GET", "/v2/models/m/versions/x", {}, 404),
            ("GET", f"/v2/models/m/versions/{'1' * 21}", {}, 404),
            ("GET", f"/v2/models/m/versions/{'1' * 2000}", {}, 404),
            ("POST", f"/v2/models/m/versions/{'1' * 21}/infer", {}, 404),
            ("GET", "/v2/models/m/infer", {}, 405),
            ("POST", "/v2/models/m", {}, 405),
            ("POST", "/v2/health/live", {}, 405),
            ("DELETE", "/v2", {}, 405),
            ("GET", "/v2/models/m", {"authorization": "Bearer nope"}, 401),
            ("GET", "/v2/nothing", {"authorization": ""}, 401),
            ("GET", "/v2/models/m", {"authorization": f"Bearer {EMBEDDING_KEY}"}, 403),
            ("GET", "/v2/logging", {}, 501),
            ("POST", "/v2/logging", {}, 501),
            ("GET", "/v2/models/m/trace/setting", {}, 501),
            ("POST", "/v2/systemsharedmemory/region/r/register", {}, 501),
            ("POST", "/v2/cudasharedmemory/unregister", {}, 501),
        ):
            reply = await raw(gw, method, path, **headers)
            assert (reply.status_code, list(reply.json())) == (status, ["error"]), path
            assert ("allow" in reply.headers) == (status == 405)
        for path in ("/v2/systemsharedmemory/status", "/v2/cudasharedmemory/status"):
            assert (await gw.http.get(path)).json() == []


async def test_names_beyond_ascii_are_one_segment():
    answer = Tensors(outputs=(), version="1")
    at = Servers(documents={"metadata 日 本": {"name": "日 本"}})
    at.triton.scripts = [(answer,)]
    async with at.running() as gw:
        assert (await gw.http.get("/v2/models/日 本")).json() == {"name": "日 本"}
        reply = await gw.http.post("/v2/models/日 本/infer", json={"inputs": []})
        assert (reply.status_code, reply.json()["model_name"]) == (200, "日 本")
        assert reply.headers["x-gateway-model"] == "%E6%97%A5 %E6%9C%AC"
