"""The OpenAPI document against the routes and real answers."""

import jsonschema
from openapi_spec_validator import validate

from gateway.api.app import PATHS
from gateway.api.oip import openapi as openapi_oip
from gateway.backends.scripted import ScriptedBackend
from gateway.core.errors import CLOSED_LIST, DATA_PLANE
from local_runtime.protocol import http_routes
from tests.kit.app import embedding, running

TEXT = {"input": {"text": "hello"}}


async def document(gw) -> dict:
    return (await gw.http.get("/openapi.json")).json()


async def test_it_is_a_valid_document_that_names_every_route():
    async with running([ScriptedBackend("triton", [embedding()])]) as gw:
        written = await document(gw)
    validate(written)
    told = {
        (method.upper(), path) for path, item in written["paths"].items() for method in item if method != "parameters"
    }
    served = {(method, path.replace(":path", "")) for method, path, _, _ in PATHS}
    protocol = {(method, path) for method, path in told if path.startswith("/v2")}
    others = {("GET", path) for path in ("/healthz/live", "/healthz/ready", "/v1/tasks/{task}/stream")}
    assert told - protocol == served | others


async def test_every_header_that_is_read_is_told():
    async with running([ScriptedBackend("triton", [embedding()])]) as gw:
        paths = (await document(gw))["paths"]
    steering = {
        "X-Timeout-Ms",
        "X-Request-Id",
        "X-Priority",
        "X-Ordering-Key",
        "X-Session-Id",
        "Idempotency-Key",
        "Cache-Control",
    }
    of_sequences = {"X-Sequence-Id", "X-Sequence-Start", "X-Sequence-End"}

    def told(path: str) -> set[str]:
        return {one["name"] for one in paths[path]["post"]["parameters"] if one["in"] == "header"}

    for path in ("/v1/infer", "/v1/tasks/{task}", "/v2/models/{model}/infer", "/v2/models/{model}/generate_stream"):
        assert told(path) == steering | of_sequences, path
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"):
        assert told(path) == steering, path


def test_the_protocols_paths_are_its_calls():
    calls = set()
    for path, item in openapi_oip.paths().items():
        found = http_routes.route(path.replace("{model}", "m").replace("{version}", "1").encode())
        methods = [method.upper() for method in item if method != "parameters"]
        assert methods == [http_routes.METHODS[found.call].decode()], path
        calls.add(found.call)
    assert calls == set(http_routes.METHODS) - {"metrics", "not_offered"}


async def test_answers_and_errors_are_as_it_says():
    async with running([ScriptedBackend("triton", [embedding()])]) as gw:
        schemas = (await document(gw))["components"]["schemas"]
        jsonschema.validate((await gw.post("/v1/tasks/text-embedding", TEXT)).json(), schemas["TaskAnswer"])
        jsonschema.validate((await gw.post("/v1/tasks/nope", TEXT)).json(), schemas["Problem"])
        jsonschema.validate((await gw.post("/v1/embeddings", {})).json(), schemas["OpenAIError"])


async def test_every_status_of_the_closed_list_is_told():
    async with running([ScriptedBackend("triton", [embedding()])]) as gw:
        responses = (await document(gw))["paths"]["/v1/infer"]["post"]["responses"]
    assert {int(s) for s in responses} - {200} == {e.status for e in DATA_PLANE} - {405, 499}


def test_codes_are_one_for_one():
    codes = [e.code for e in CLOSED_LIST]
    assert len(set(codes)) == len(codes)
