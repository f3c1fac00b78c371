"""The schemas that the paths of the OpenAPI document share: whole answers, and errors."""

from collections.abc import Mapping
from typing import Any

from gateway.core.error_schemas import problem_schema
from gateway.core.errors import DATA_PLANE
from gateway.pipeline import Task

_REF = "#/components/schemas/"


def ref(name: str) -> dict[str, str]:
    """A schema by its name."""
    return {"$ref": _REF + name}


def schemas(tasks: Mapping[str, Task]) -> dict[str, Any]:
    """All of them, by name."""
    number_or_null = {"type": ["number", "null"]}
    return {
        "TaskAnswer": {
            "type": "object",
            "properties": {
                "id": {"type": "string"},
                "task": {"enum": list(tasks)},
                "output": {"anyOf": [t.contract.output_schema for t in tasks.values()]},
                "route": {
                    "type": "object",
                    "properties": {
                        "backend": {"type": "string"},
                        "model": {"type": "string"},
                        "version": {"type": ["string", "null"]},
                        "rule": {"type": "string"},
                        "attempts": {"type": "integer"},
                    },
                    "required": ["backend", "model", "version", "rule", "attempts"],
                },
                "usage": _usage(),
                "timing": {
                    "type": "object",
                    "properties": dict.fromkeys(("total_ms", "admit_ms", "queue_ms", "backend_ms"), number_or_null),
                    "required": ["total_ms", "admit_ms", "queue_ms", "backend_ms"],
                },
            },
            "required": ["id", "task", "output", "route", "usage", "timing"],
        },
        "BatchAnswer": _batch_answer(),
        "ClientTokenWish": _client_token_wish(tasks),
        "ClientToken": _client_token(),
        "Problem": problem_schema([error.code for error in DATA_PLANE], _of_limits()),
        "OpenAIError": {
            "type": "object",
            "properties": {
                "error": {
                    "type": "object",
                    "properties": {
                        "message": {"type": "string"},
                        "type": {"type": "string"},
                        "param": {"type": ["string", "null"]},
                        "code": {"type": ["string", "null"]},
                    },
                    "required": ["message", "type", "param", "code"],
                }
            },
            "required": ["error"],
        },
    }


def _batch_answer() -> dict[str, Any]:
    one = {
        "type": "object",
        "properties": {
            "id": {"type": "string"},
            "status": {"type": "integer", "description": "as the request would have had it alone"},
            "ticket": {"type": "integer", "minimum": 1, "description": "its number under its ordering key"},
            "body": {"anyOf": [ref("TaskAnswer"), ref("Problem")]},
        },
        "required": ["id", "status", "body"],
        "additionalProperties": False,
    }
    return {
        "type": "object",
        "properties": {"responses": {"type": "array", "description": "in the order of the requests", "items": one}},
        "required": ["responses"],
    }


def _of_limits() -> dict[str, Any]:
    """What a problem of the data plane tells beside: see `gateway.api.errors.problem_body`."""
    return {
        "retry_after_s": {"type": "integer", "minimum": 1, "description": "after so many seconds it may succeed"},
        "limit": _limit(),
        "violated-policies": {
            "type": "array",
            "items": {"type": "string"},
            "description": "the names of all limits that were hit",
        },
    }


def _limit() -> dict[str, Any]:
    return {
        "type": "object",
        "description": "the limit that was hit, with every 429; money in US dollars",
        "properties": {
            "name": {"type": "string"},
            "kind": {"enum": ["requests", "tokens", "usd", "concurrent", "queue", "ordering_queue"]},
            "amount": {"type": "number"},
            "per": {"enum": ["second", "minute", "hour", "day", "month"]},
            "remaining": {"type": "number", "minimum": 0},
            "reset_s": {"type": "integer", "minimum": 0},
        },
        "required": ["name", "kind"],
        "additionalProperties": False,
    }


def _usage() -> dict[str, Any]:
    counts = ("input_tokens", "output_tokens", "cached_tokens", "reasoning_tokens")
    properties: dict[str, Any] = {name: {"type": "integer", "minimum": 0} for name in counts}
    properties["cost_usd"] = {"type": "number", "minimum": 0}
    for name, told in (
        ("estimated", "the tokens were counted by the gateway, as the backend did not tell"),
        ("estimated_scores", "the scores are a model's own guess, not probabilities that it computed"),
    ):
        properties[name] = {"const": True, "description": told}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _client_token_wish(tasks: Mapping[str, Task]) -> dict[str, Any]:
    """See `gateway.api.client_tokens.Wish`."""
    names = {"type": "array", "minItems": 1, "items": {"type": "string"}}
    return {
        "type": "object",
        "properties": {
            "tasks": {**names, "items": {"enum": list(tasks)}, "maxItems": 64},
            "models": {**names, "maxItems": 64},
            "limits": {"type": "array", "items": {"type": "object"}, "maxItems": 8},
            "origins": {**names, "maxItems": 16, "description": "pages that may use it, such as https://app.example"},
            "minutes": {"type": "integer", "minimum": 1, "maximum": 60, "default": 10},
        },
        "additionalProperties": False,
    }


def _client_token() -> dict[str, Any]:
    names = {"type": ["array", "null"], "items": {"type": "string"}, "description": "null: all"}
    properties = {
        "id": {"type": "string"},
        "token": {"type": "string", "description": "goes where a key goes"},
        "expires_at": {"type": "string", "format": "date-time"},
        "expires_in": {"type": "integer", "description": "seconds"},
        "key_id": {"type": "string"},
        "tasks": names,
        "models": names,
        "limits": {"type": "array", "items": {"type": "object"}},
        "origins": names,
    }
    return {"type": "object", "properties": properties, "required": list(properties)}
