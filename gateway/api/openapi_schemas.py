"""The schemas that the paths of the OpenAPI document share: whole answers, and errors."""

from collections.abc import Mapping
from typing import Any, Final

from gateway.core.error_schemas import problem_schema
from gateway.core.errors import DATA_PLANE
from gateway.pipeline import Task

_REF = "#/components/schemas/"


def told(description: str, kind: str | list[str] = "string", **more: Any) -> dict[str, Any]:
    """A field of this type, and what it is."""
    return {"type": kind, **more, "description": description}


def ref(name: str) -> dict[str, str]:
    """A schema by its name."""
    return {"$ref": _REF + name}


def schemas(tasks: Mapping[str, Task]) -> dict[str, Any]:
    """All of them, by name."""
    return {
        "TaskAnswer": {
            "type": "object",
            "properties": {
                "id": told("the request's, as in the header `X-Request-Id`"),
                "task": {"enum": list(tasks), "description": "that was asked"},
                "output": {
                    "anyOf": [t.contract.output_schema for t in tasks.values()],
                    "description": "as `GET /v1/tasks/{task}` describes it",
                },
                "route": _object("who answered", _ROUTE),
                "usage": _usage(),
                "timing": _object("how long it took", _TIMING),
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
                "error": _object(
                    "in OpenAI's form",
                    {
                        "message": told("what was wrong, for people"),
                        "type": told("OpenAI's kind of error"),
                        "param": told("the field at fault; null: none", ["string", "null"]),
                        "code": told("what was wrong, for programs: docs/errors.md", ["string", "null"]),
                    },
                )
            },
            "required": ["error"],
        },
    }


_ROUTE: Final = {
    "backend": told("its name"),
    "model": told("its name at the backend"),
    "version": told("of the model; null: the backend does not tell", ["string", "null"]),
    "rule": told("that took the request"),
    "attempts": told("how many places were tried", "integer"),
}
_MS: Final = ["number", "null"]
_TIMING: Final = {
    "total_ms": told("milliseconds from its arrival to its answer", _MS),
    "admit_ms": told("milliseconds from its arrival until it was let in", _MS),
    "queue_ms": told("milliseconds in queues, the gateway's and the server's; null: not told", _MS),
    "backend_ms": told("milliseconds at backends", _MS),
}


def _object(description: str, properties: Mapping[str, Any]) -> dict[str, Any]:
    """An object that has all of these fields."""
    return {"type": "object", "description": description, "properties": properties, "required": list(properties)}


def _batch_answer() -> dict[str, Any]:
    one = {
        "type": "object",
        "properties": {
            "id": told("as the request gave it; else the whole one's and a number"),
            "status": told("as the request would have had it alone", "integer"),
            "ticket": told("its number under its ordering key", "integer", minimum=1),
            "body": {"anyOf": [ref("TaskAnswer"), ref("Problem")], "description": "its answer"},
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
        "retry_after_s": told("after so many seconds it may succeed", "integer", minimum=1),
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
            "name": told("as in the header `RateLimit-Policy`"),
            "kind": {
                "enum": ["requests", "tokens", "usd", "concurrent", "queue", "ordering_queue"],
                "description": "what it counts",
            },
            "amount": told("so many of its kind", "number"),
            "per": {
                "enum": ["second", "minute", "hour", "day", "month"],
                "description": "the period; days and months in UTC",
            },
            "remaining": told("what is left of the amount", "number", minimum=0),
            "reset_s": told("seconds until it is whole again", "integer", minimum=0),
        },
        "required": ["name", "kind"],
        "additionalProperties": False,
    }


def _usage() -> dict[str, Any]:
    counts = (
        ("input_tokens", "all tokens that were read, cached ones included"),
        ("output_tokens", "all tokens that were made, reasoning included"),
        ("cached_tokens", "tokens of the input that the engine had in its prefix cache"),
        ("reasoning_tokens", "tokens of the output that were thought and not said"),
    )
    properties: dict[str, Any] = {name: told(words, "integer", minimum=0) for name, words in counts}
    properties["cost_usd"] = told("US dollars; not there where no price is known", "number", minimum=0)
    for name, words in (
        ("estimated", "the tokens were counted by the gateway, as the backend did not tell"),
        ("estimated_scores", "the scores are a model's own guess, not probabilities that it computed"),
    ):
        properties[name] = {"const": True, "description": words}
    used = "what it used up, as far as that is known"
    return {"type": "object", "description": used, "properties": properties, "additionalProperties": False}


def _client_token_wish(tasks: Mapping[str, Task]) -> dict[str, Any]:
    """See `gateway.api.client_tokens.Wish`."""
    names = {"type": "array", "minItems": 1, "items": {"type": "string"}}
    return {
        "type": "object",
        "properties": {
            "tasks": {
                **names,
                "items": {"enum": list(tasks)},
                "maxItems": 64,
                "description": "those that it may ask; by default the key's",
            },
            "models": {**names, "maxItems": 64, "description": "those that it may name; by default the key's"},
            "limits": {**_LIMITS, "maxItems": 8},
            "origins": {**names, "maxItems": 16, "description": "pages that may use it, such as https://app.example"},
            "minutes": told("for which it is good", "integer", minimum=1, maximum=60, default=10),
        },
        "additionalProperties": False,
    }


_LIMITS: Final = {
    "type": "array",
    "items": {"type": "object"},
    "description": "its own, beside the key's: as in the section `limits` of the configuration",
}


def _client_token() -> dict[str, Any]:
    names = {"type": ["array", "null"], "items": {"type": "string"}, "description": "null: all"}
    properties = {
        "id": told("its name in logs"),
        "token": told("goes where a key goes"),
        "expires_at": told("until when it is good: RFC 3339, UTC", format="date-time"),
        "expires_in": told("seconds", "integer"),
        "key_id": told("of the key that it was made with"),
        "tasks": names,
        "models": names,
        "limits": _LIMITS,
        "origins": names,
    }
    return {"type": "object", "properties": properties, "required": list(properties)}
