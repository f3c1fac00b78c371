"""The OpenAPI document of the data plane, built from the path table's own words and the tasks' contracts.

The hot paths are plain ASGI endpoints (FastAPI's dependency machinery alone costs 90 us a call), so the document
is written here; a test holds it against the routes and against real answers.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from gateway import __version__
from gateway.api import openapi_schemas
from gateway.api.batch import MAX_ID, MAX_ITEMS
from gateway.api.oip import openapi as openapi_oip
from gateway.api.openapi_schemas import ref
from gateway.api.request_headers import MAX_IDEMPOTENCY_KEY, MAX_ORDERING_KEY
from gateway.core.error_schemas import PROBLEM, refusal_answers
from gateway.core.errors import DATA_PLANE
from gateway.core.types import OpenAIApi
from gateway.pipeline import Task
from gateway.tasks.chat import OBJECTS, REALS, WHOLES, Chat

_JSON = "application/json"
_ORDERING_KEY = {"type": "string", "minLength": 1, "maxLength": MAX_ORDERING_KEY}
_HEADERS = [
    {
        "name": "X-Timeout-Ms",
        "in": "header",
        "description": "the request's time in milliseconds, at most the task's own",
        "schema": {"type": "integer", "minimum": 1},
    },
    {
        "name": "X-Request-Id",
        "in": "header",
        "description": "taken over where it is safe, else replaced",
        "schema": {"type": "string", "maxLength": 128, "pattern": "^[A-Za-z0-9._:-]+$"},
    },
    {
        "name": "X-Priority",
        "in": "header",
        "description": "batch lets interactive requests go first where a server is full",
        "schema": {"enum": ["interactive", "batch"], "default": "interactive"},
    },
    {
        "name": "X-Ordering-Key",
        "in": "header",
        "description": "requests of a tenant with the same one go in their order",
        "schema": {"type": "string", "minLength": 1, "maxLength": MAX_ORDERING_KEY},
    },
    {
        "name": "X-Session-Id",
        "in": "header",
        "description": "what the caller's requests belong together by: a rule may keep them on one side of its split",
        "schema": {"type": "string", "minLength": 1, "maxLength": MAX_ORDERING_KEY},
    },
    {
        "name": "Idempotency-Key",
        "in": "header",
        "description": "a request sent again under the same one is not done again: its first answer is given again",
        "schema": {"type": "string", "minLength": 1, "maxLength": MAX_IDEMPOTENCY_KEY},
    },
    {
        "name": "Cache-Control",
        "in": "header",
        "description": "no-store, no-cache or max-age=N, where the rule keeps answers",
        "schema": {"type": "string"},
    },
]
_FLAG = {"enum": ["true", "false"], "default": "false"}
_SEQUENCE = [
    {
        "name": "X-Sequence-Id",
        "in": "header",
        "description": "for tasks that keep state from request to request: a number from 1 to 2^64 - 1, or a text",
        "schema": {"type": "string", "minLength": 1, "maxLength": 128},
    },
    {"name": "X-Sequence-Start", "in": "header", "description": "the sequence's first request", "schema": _FLAG},
    {"name": "X-Sequence-End", "in": "header", "description": "the sequence's last request", "schema": _FLAG},
]
_TOP_K = {"name": "top_k", "in": "query", "description": "with an image/* body", "schema": {"type": "integer"}}
_LIMIT_HEADERS = {
    name: {"schema": {"type": kind}}
    for name, kind in (
        *(
            (f"x-ratelimit-{what}-{unit}", "string" if what == "reset" else kind)
            for unit, kind in (("requests", "integer"), ("tokens", "integer"), ("usd", "number"))
            for what in ("limit", "remaining", "reset")
        ),
        ("ratelimit-policy", "string"),
        ("ratelimit", "string"),
        ("x-ordering-ticket", "integer"),
    )
}
_ANSWER_HEADERS = {
    name: {"schema": {"type": kind}}
    for name, kind in (
        ("x-request-id", "string"),
        ("x-gateway-backend", "string"),
        ("x-gateway-model", "string"),
        ("x-gateway-attempts", "integer"),
        ("x-gateway-rule", "string"),
        ("x-gateway-cost-usd", "number"),
        ("idempotency-replayed", "boolean"),
        ("cache-status", "string"),
        ("age", "integer"),
    )
} | _LIMIT_HEADERS


def document(tasks: Mapping[str, Task], models: Mapping[str, str]) -> dict[str, Any]:
    """OpenAPI 3.1 for these tasks."""
    paths: dict[str, Any] = {
        "/v1/infer": {"post": _post("infer", "Answer any task", _infer_body(tasks), ref("TaskAnswer"), sequences=True)},
        "/v1/infer/batch": {"post": _batch(tasks)},
        "/v1/tasks": {"get": _get("listTasks", "Every task, its schemas, and where it goes now")},
        "/v1/tasks/{task}": {
            "parameters": [_path_parameter("task", list(tasks))],
            "get": _get("getTask", "One task"),
            "post": {
                **_post("inferTask", "Answer one task", _task_content(), ref("TaskAnswer")),
                "parameters": [*_HEADERS, *_SEQUENCE, _TOP_K],
            },
        },
        "/v1/tasks/{task}/stream": {
            "parameters": [_path_parameter("task", [t.name for t in tasks.values() if t.contract.is_sequence])],
            "get": _stream(),
        },
        "/v1/chat/completions": {"post": _generated("createChatCompletion", "chat completions", _chat_body(models))},
        "/v1/completions": {"post": _generated("createCompletion", "plain completions", _completion_body(models))},
        "/v1/responses": {"post": _generated("createResponse", "responses", _responses_body(models))},
        "/v1/embeddings": {
            "post": _post(
                "createEmbedding",
                "OpenAI embeddings",
                {_JSON: {"schema": _embeddings_body(models)}},
                {"type": "object"},
                is_openai=True,
            )
        },
        "/v1/client-tokens": {"post": _client_token()},
        "/v1/models": {"get": _get("listModels", "Every name that a `model` field takes", is_openai=True)},
        "/v1/models/{model}": {
            "parameters": [_path_parameter("model", list(models))],
            "get": _get("getModel", "One model", is_openai=True),
        },
        "/healthz/live": {"get": _probe("live", "The process runs")},
        "/healthz/ready": {"get": _probe("ready", "The process takes requests")},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Hybrid inference gateway", "version": __version__},
        "paths": paths | openapi_oip.paths(headers=[*_HEADERS, *_SEQUENCE]),
        "components": {
            "schemas": openapi_schemas.schemas(tasks) | openapi_oip.schemas(),
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{"key": []}, {"x-api-key": []}],
    }


def _infer_body(tasks: Mapping[str, Task]) -> dict[str, Any]:
    return {_JSON: {"schema": _request(tasks)}}


def _request(tasks: Mapping[str, Task], more: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    one_of = [
        {
            "type": "object",
            "title": name,
            "properties": {
                "task": {"const": name},
                "input": task.contract.input_schema,
                "parameters": {"type": "object"},
                "ordering_key": _ORDERING_KEY,
                **more,
            },
            "required": ["task", "input"],
            "additionalProperties": False,
        }
        for name, task in tasks.items()
    ]
    return {"oneOf": one_of}


def _batch(tasks: Mapping[str, Task]) -> dict[str, Any]:
    own = {
        "id": {"type": "string", "minLength": 1, "maxLength": MAX_ID, "description": "repeated in the answer"},
    }
    requests = {"type": "array", "minItems": 1, "maxItems": MAX_ITEMS, "items": _request(tasks, own)}
    body = {
        "type": "object",
        "properties": {"requests": requests},
        "required": ["requests"],
        "additionalProperties": False,
    }
    return _post("inferBatch", "Answer many requests, each for itself", {_JSON: {"schema": body}}, ref("BatchAnswer"))


def _task_content() -> dict[str, Any]:
    body = {
        "type": "object",
        "properties": {"input": {"type": "object"}, "parameters": {"type": "object"}, "ordering_key": _ORDERING_KEY},
        "required": ["input"],
        "additionalProperties": False,
    }
    binary = {"type": "string", "format": "binary"}
    texts = {"type": "array", "items": {"type": "string"}}
    upload = {
        "type": "object",
        "description": "the fields of the task's input, lists as fields that come several times; `file` is another "
        "name for `image` or `audio`",
        "properties": {
            "image": binary,
            "audio": binary,
            "file": binary,
            "top_k": {"type": "integer"},
            "text": texts,
            "labels": texts,
        },
    }
    return {
        _JSON: {"schema": body},
        "multipart/form-data": {"schema": upload},
        "image/*": {"schema": binary},
        "audio/*": {"schema": binary},
    }


def _chat_body(models: Mapping[str, str]) -> dict[str, Any]:
    messages = {"messages": Chat.input_schema["properties"]["messages"]}
    return _generative_body(models, "chat/completions", messages, required=["messages"])


def _completion_body(models: Mapping[str, str]) -> dict[str, Any]:
    tokens = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
    part = {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 0}, tokens]}
    prompt = {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": part}]}
    return _generative_body(models, "completions", {"prompt": prompt}, required=["prompt"])


def _responses_body(models: Mapping[str, str]) -> dict[str, Any]:
    fields = {
        "input": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]},
        "instructions": {"type": ["string", "null"]},
        "background": {"enum": [False, None]},
    }
    return _generative_body(models, "responses", fields, required=[])


def _generative_body(
    models: Mapping[str, str], api: OpenAIApi, fields: Mapping[str, Any], *, required: list[str]
) -> dict[str, Any]:
    """The fields that are checked; all others pass untouched."""
    wholes = {
        name: {"type": ["integer", "null"], "minimum": low} | ({"maximum": high} if high else {})
        for name, (low, high) in WHOLES[api].items()
    }
    reals = {name: {"type": ["number", "null"], "minimum": low, "maximum": high} for name, (low, high) in REALS.items()}
    return {
        "type": "object",
        "properties": {
            "model": {"type": "string", "examples": list(models)},
            **fields,
            "stream": {"type": ["boolean", "null"]},
            "tools": {"type": ["array", "null"], "items": {"type": "object"}},
            **{name: {"type": ["object", "null"]} for name in OBJECTS[api]},
            **wholes,
            **reals,
        },
        "required": ["model", *required],
    }


def _embeddings_body(models: Mapping[str, str]) -> dict[str, Any]:
    text = {"type": "string"}
    return {
        "type": "object",
        "properties": {
            "model": {"type": "string", "examples": list(models)},
            "input": {"oneOf": [text, {"type": "array", "items": text}]},
            "encoding_format": {"enum": ["float", "base64"]},
            "dimensions": {"type": ["integer", "null"]},
        },
        "required": ["model", "input"],
    }


def _post(
    name: str,
    summary: str,
    content: Mapping[str, Any],
    answer: Mapping[str, Any],
    *,
    is_openai: bool = False,
    streams: bool = False,
    sequences: bool = False,
) -> dict[str, Any]:
    answers: dict[str, Any] = {_JSON: {"schema": answer}}
    if streams:
        answers["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "operationId": name,
        "summary": summary,
        "parameters": [*_HEADERS, *(_SEQUENCE if sequences else ())],
        "requestBody": {"required": True, "content": content},
        "responses": {
            "200": {"description": "the answer", "content": answers, "headers": _ANSWER_HEADERS},
            **_errors(is_openai=is_openai),
        },
    }


def _generated(name: str, summary: str, body: Mapping[str, Any]) -> dict[str, Any]:
    return _post(
        name,
        f"OpenAI {summary}; `stream: true` answers server-sent events",
        {_JSON: {"schema": body}},
        {"type": "object"},
        is_openai=True,
        streams=True,
    )


def _get(name: str, summary: str, *, is_openai: bool = False) -> dict[str, Any]:
    answer = {"description": "the answer", "content": {_JSON: {"schema": {"type": "object"}}}}
    return {
        "operationId": name,
        "summary": summary,
        "responses": {"200": answer, **_errors(is_openai=is_openai, only=(401, 403, 404, 500))},
    }


def _client_token() -> dict[str, Any]:
    answer = {"description": "the token", "content": {_JSON: {"schema": ref("ClientToken")}}}
    return {
        "operationId": "createClientToken",
        "summary": "A short-lived token for a web page, never wider than the key that asks for it",
        "requestBody": {"required": False, "content": {_JSON: {"schema": ref("ClientTokenWish")}}},
        "responses": {"201": answer, **_errors(is_openai=False, only=(400, 401, 403, 413, 415, 422, 500, 501, 503))},
    }


def _stream() -> dict[str, Any]:
    return {
        "operationId": "streamTask",
        "summary": "A WebSocket that carries one sequence: chunks in, results out",
        "responses": {
            "101": {"description": "the handshake is done; browsers offer gateway.v1 and bearer.<key> as protocols"},
            **_errors(is_openai=False, only=(401, 403, 404)),
        },
    }


def _probe(name: str, summary: str) -> dict[str, Any]:
    content = {_JSON: {"schema": {"type": "object"}}}
    return {
        "operationId": name,
        "summary": summary,
        "security": [],
        "responses": {
            "200": {"description": "yes", "content": content},
            "503": {"description": "not now", "content": content},
        },
    }


def _path_parameter(name: str, examples: list[str]) -> dict[str, Any]:
    schema = {"type": "string", "examples": examples}
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _errors(*, is_openai: bool, only: tuple[int, ...] | None = None) -> dict[str, Any]:
    form = {_JSON: {"schema": ref("OpenAIError")}} if is_openai else {PROBLEM: {"schema": ref("Problem")}}
    errors = [e for e in DATA_PLANE if e.status not in (405, 499) and (only is None or e.status in only)]
    told = refusal_answers(errors, lambda _: form)
    if limited := told.get("429"):
        limited["headers"] |= _LIMIT_HEADERS
    return told
