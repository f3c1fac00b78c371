"""The paths of the Open Inference Protocol in the OpenAPI document; a test holds them against the real calls."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

_JSON: Final = "application/json"
_BYTES: Final = "application/octet-stream"
_MODEL: Final = "/v2/models/{model}"
_OF_MODEL: Final = (_MODEL, f"{_MODEL}/versions/{{version}}")
_INFERENCE: Final = ("infer", "generate", "generate_stream")
_WITHOUT_BODY: Final = ("live", "ready", "load", "unload")  # as in Triton, whose clients read none
_STREAMS: Final = ("text/event-stream", "application/x-ndjson")

# Method, path behind that of the server or of a model, name, what it is for.
_SERVER: Final = (
    ("get", "/v2", "oipServer", "Name, version and extensions of the first model server that answers"),
    ("get", "/v2/health/live", "oipLive", "The process runs; needs no key"),
    ("get", "/v2/health/ready", "oipReady", "The process takes requests; needs no key"),
    ("get", "/v2/models/stats", "oipStatistics", "Counters of all models of the first model server that answers"),
    ("post", "/v2/repository/index", "oipIndex", "Every model and its state (admin keys)"),
    ("post", "/v2/repository/models/{model}/load", "oipLoad", "Load a model on every server (admin keys)"),
    ("post", "/v2/repository/models/{model}/unload", "oipUnload", "Unload a model on every server (admin keys)"),
    ("get", "/v2/systemsharedmemory/status", "oipSharedMemory", "No regions, ever: shared memory is not offered"),
)
_CALLS: Final = (
    ("get", "", "oipMetadata", "A model's inputs and outputs"),
    ("get", "/ready", "oipModelReady", "Whether the model can be asked; 503 where not"),
    ("get", "/config", "oipConfig", "A model's configuration"),
    ("get", "/stats", "oipModelStatistics", "A model's counters"),
    (
        "post",
        "/infer",
        "oipInfer",
        "Inference; JSON, or with the binary tensor extension. Streams where Accept asks so",
    ),
    ("post", "/generate", "oipGenerate", "JSON fields as inputs, outputs as JSON fields"),
    ("post", "/generate_stream", "oipGenerateStream", "The same for many answers, each sent when it comes"),
)


def paths(*, headers: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Every path of `/v2`; `headers` are the parameters that inference takes beside its body."""
    described: dict[str, Any] = {}
    for method, path, name, summary in _all():
        item = described.setdefault(path, {})
        named = [part for part in ("model", "version") if f"{{{part}}}" in path]
        if named:
            item["parameters"] = [
                {"name": part, "in": "path", "required": True, "schema": {"type": "string"}} for part in named
            ]
        item[method] = _operation(path, name, summary)
        if path.rpartition("/")[2] in _INFERENCE:
            item[method]["parameters"] = list(headers)
    return described


def schemas() -> dict[str, Any]:
    """What the paths refer to."""
    tensor = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "description": "its name"},
            "datatype": {"type": "string", "description": "such as FP32, INT64, BYTES"},
            "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}, "description": "its dimensions"},
            "parameters": {"type": "object", "description": "such as `binary_data_size` (bytes)"},
            "data": {"type": "array", "description": "its elements; not there where they follow in binary"},
        },
    }
    tensors = {"type": "array", "items": {**tensor, "required": ["name", "datatype", "shape"]}}
    return {
        "OipRequest": {
            "type": "object",
            "properties": {
                "id": {"type": "string", "description": "repeated in the answer"},
                "parameters": {"type": "object", "description": "of the request"},
                "inputs": {**tensors, "description": "the model's inputs"},
                "outputs": {
                    "type": "array",
                    "items": {"type": "object", "required": ["name"]},
                    "description": "those that are wanted; by default all",
                },
            },
            "required": ["inputs"],
        },
        "OipAnswer": {
            "type": "object",
            "properties": {
                "id": {"type": "string", "description": "the request's"},
                "model_name": {"type": "string", "description": "that answered"},
                "model_version": {"type": "string", "description": "that answered"},
                "parameters": {"type": "object", "description": "of the answer"},
                "outputs": {**tensors, "description": "the model's outputs"},
            },
            "required": ["model_name", "model_version", "outputs"],
        },
        "OipError": {
            "type": "object",
            "properties": {"error": {"type": "string", "description": "what was wrong"}},
            "required": ["error"],
        },
    }


def _all() -> Iterator[tuple[str, str, str, str]]:
    yield from _SERVER
    for base, ending in zip(_OF_MODEL, ("", "OfVersion"), strict=True):
        for method, path, name, summary in _CALLS:
            yield method, base + path, name + ending, summary


def _operation(path: str, name: str, summary: str) -> dict[str, Any]:
    answer, taken = _contents(path)
    operation = {
        "operationId": name,
        "summary": summary,
        "responses": {
            "200": {"description": "the answer", "content": answer} if answer else {"description": "yes; no body"},
            "default": {"description": "an error", "content": {_JSON: {"schema": _ref("OipError")}}},
        },
    }
    if taken:
        operation["requestBody"] = {"content": taken}
    if "/health/" in path:
        operation["security"] = []
    return operation


def _contents(path: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """What a path answers, and what it takes."""
    anything: dict[str, Any] = {"schema": {}}
    binary, text = {"schema": {"type": "string", "format": "binary"}}, {"schema": {"type": "string"}}
    json_object = {_JSON: {"schema": {"type": "object"}}}
    last = path.rpartition("/")[2]
    if last in _WITHOUT_BODY:
        return {}, json_object if last in ("load", "unload") else {}
    if last == "infer":
        answer = {_JSON: {"schema": _ref("OipAnswer")}, _BYTES: binary} | dict.fromkeys(_STREAMS, text)
        return answer, {_JSON: {"schema": _ref("OipRequest")}, _BYTES: binary}
    if last == "generate_stream":
        return dict.fromkeys(_STREAMS, text), json_object
    return {_JSON: anything}, json_object if last in ("generate", "index") else {}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}
