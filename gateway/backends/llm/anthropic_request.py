"""OpenAI chat bodies as requests of Anthropic's Messages API. Pure.

What becomes of each field:

- `messages`: those of `system` and `developer` become `system`, wherever they stand, in their order; neighbours of one
  role become one turn, as a turn must answer all tool calls before it; images come along as data or as URLs. The names
  of messages and an assistant's former `reasoning_content` are dropped (thoughts cannot be sent back unsigned).
  `cache_control` of a part, which OpenAI does not know, is kept.
- `max_completion_tokens`, or `max_tokens`: the API wants one, so a configured bound stands in where there is none.
- `temperature`: the API's scale ends at 1, OpenAI's at 2; what is above 1 is refused as REFUSED_INPUT, as a lower one
  in its place would be another request.
- `top_p`, `top_k`, `thinking`: as they are. `stop`: `stop_sequences`. `user`, `safety_identifier`: `metadata.user_id`.
- `reasoning_effort`: `output_config.effort` (`minimal` is `low`, `none` switches thinking off). Models that do not know
  it refuse.
- `response_format`: of kind `json_schema` becomes `output_config.format`; `text` is nothing to ask for.
- `tools`, `tool_choice`, `parallel_tool_calls`: their counterparts.

Refused as UNSUPPORTED, as the answer would mean something else without them: `n` above 1, `logprobs`, `top_logprobs`,
`logit_bias`, `presence_penalty`, `frequency_penalty`, `audio`, other `modalities` than text, `functions`,
`function_call`, `web_search_options`, `response_format` of other kinds, tools other than functions, parts of messages
other than text and images. Dropped without a word: `seed`, `store`, `metadata`, `service_tier`, `prediction`,
`verbosity`, `prompt_cache_key`, `stream_options` (the stream's reader obeys it), and fields that are not known here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import orjson

from gateway.backends.llm.openai_writer import refused, unsupported

Block = dict[str, Any]

HIGHEST_TEMPERATURE: Final = 1.0
MAX_ARGUMENT_PARTS: Final = 100_000  # as of a body: its JSON within a text is not seen where bodies are counted
_EFFORTS: Final = {"minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "max"}
_CHOICES: Final = {"auto": "auto", "none": "none", "required": "any"}


def _nothing(value: object) -> bool:
    return not value


_HARMLESS: Final[Mapping[str, Callable[[object], bool]]] = {
    "n": lambda value: value in (None, 1),
    "logprobs": _nothing,
    "top_logprobs": _nothing,
    "logit_bias": _nothing,
    "presence_penalty": _nothing,
    "frequency_penalty": _nothing,
    "audio": _nothing,
    "modalities": lambda value: value in (None, [], ["text"]),
    "functions": _nothing,
    "function_call": _nothing,
    "web_search_options": lambda value: value is None,
}


def messages_body(body: Mapping[str, Any], model: str, *, stream: bool, max_tokens: int) -> dict[str, Any]:
    """The request's body. Raises `BackendError` UNSUPPORTED or REFUSED_INPUT, naming the field."""
    for name, is_harmless in _HARMLESS.items():
        if not is_harmless(body.get(name)):
            raise unsupported("has no counterpart in the Messages API", field=name)
    system, turns = _turns(body.get("messages"))
    asked = body.get("max_completion_tokens") or body.get("max_tokens") or max_tokens
    request: dict[str, Any] = {"model": model, "max_tokens": asked, "messages": turns, "stream": stream}
    if system:
        request["system"] = system
    request |= _output(body)
    request |= _sampling(body)
    request |= _tools(body)
    return request


# --- messages -------------------------------------------------------------------------------------


def _turns(messages: object) -> tuple[list[Block], list[Block]]:
    """The system prompt, and the turns of user and assistant."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise refused("must be a list of messages", field="messages")
    system: list[Block] = []
    turns: list[Block] = []
    for i, message in enumerate(messages):
        at = f"messages[{i}]"
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str) or role not in _READERS:
            raise unsupported("has no counterpart in the Messages API", field=f"{at}.role")
        speaker, blocks = _READERS[role](message, at)
        if speaker == "system":
            system += blocks
        elif turns and turns[-1]["role"] == speaker:
            turns[-1]["content"] += blocks
        elif blocks:
            turns.append({"role": speaker, "content": blocks})
    return system, turns


def _system(message: Mapping[str, Any], at: str) -> tuple[str, list[Block]]:
    blocks = list(_blocks(message.get("content"), f"{at}.content"))
    if any(block["type"] != "text" for block in blocks):
        raise unsupported("a system prompt is text alone", field=f"{at}.content")
    return "system", blocks


def _user(message: Mapping[str, Any], at: str) -> tuple[str, list[Block]]:
    # A turn of nothing stays one, for the endpoint to judge.
    return "user", list(_blocks(message.get("content"), f"{at}.content")) or [{"type": "text", "text": ""}]


def _assistant(message: Mapping[str, Any], at: str) -> tuple[str, list[Block]]:
    blocks = list(_blocks(message.get("content"), f"{at}.content"))
    calls = message.get("tool_calls") or []
    if message.get("function_call"):
        raise unsupported("has no counterpart in the Messages API", field=f"{at}.function_call")
    if not isinstance(calls, list):
        raise refused("must be a list of calls", field=f"{at}.tool_calls")
    return "assistant", [*blocks, *(_call(call, f"{at}.tool_calls[{i}]") for i, call in enumerate(calls))]


def _tool(message: Mapping[str, Any], at: str) -> tuple[str, list[Block]]:
    content = message.get("content")
    said = content if isinstance(content, str) else list(_blocks(content, f"{at}.content"))
    return "user", [{"type": "tool_result", "tool_use_id": message.get("tool_call_id"), "content": said}]


_READERS: Final[Mapping[object, Callable[[Mapping[str, Any], str], tuple[str, list[Block]]]]] = MappingProxyType(
    {"system": _system, "developer": _system, "user": _user, "assistant": _assistant, "tool": _tool}
)


def _call(call: object, at: str) -> Block:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise unsupported("only calls of functions have a counterpart", field=at)
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str) and arguments.count("{") + arguments.count("[") > MAX_ARGUMENT_PARTS:
        raise refused(f"holds more than {MAX_ARGUMENT_PARTS} lists and objects", field=f"{at}.function.arguments")
    try:
        given = orjson.loads(arguments)
    except orjson.JSONDecodeError as error:
        raise refused("must be a JSON object", field=f"{at}.function.arguments") from error
    if not isinstance(given, dict):
        raise refused("must be a JSON object", field=f"{at}.function.arguments")
    return {"type": "tool_use", "id": call.get("id"), "name": function.get("name"), "input": given}


def _blocks(content: object, at: str) -> Iterator[Block]:
    """A message's content as blocks; empty texts, which the API refuses, are left out."""
    if content is None or isinstance(content, str):
        if content:
            yield {"type": "text", "text": content}
        return
    if not isinstance(content, Sequence):
        raise refused("must be a string or a list of parts", field=at)
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in ("text", "refusal"):
            block = {"type": "text", "text": part.get(kind)}
        elif kind == "image_url":
            block = {"type": "image", "source": _source(part.get("image_url"), f"{at}[{i}].image_url.url")}
        else:
            raise unsupported(f"no counterpart to a part of type {kind}", field=f"{at}[{i}].type")
        if "cache_control" in part:
            block["cache_control"] = part["cache_control"]
        if block.get("text") != "":
            yield block


def _source(image: object, at: str) -> Block:
    """An image's source from its URL."""
    url = image.get("url") if isinstance(image, Mapping) else image
    if not isinstance(url, str) or not url.startswith(("data:", "http://", "https://")):
        raise refused("must be a data: URL or an http(s) URL", field=at)
    if not url.startswith("data:"):
        return {"type": "url", "url": url}
    head, comma, payload = url[len("data:") :].partition(",")
    media_type, *options = head.split(";")
    if not comma or "base64" not in options:
        raise refused("a data: URL must be in base64", field=at)
    return {"type": "base64", "media_type": media_type, "data": payload}


# --- the rest -------------------------------------------------------------------------------------


def _sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    request = {name: body[name] for name in ("top_p", "top_k", "thinking") if body.get(name) is not None}
    temperature = body.get("temperature")
    if temperature is not None:
        if isinstance(temperature, int | float) and temperature > HIGHEST_TEMPERATURE:
            raise refused("must be between 0 and 1 for the models behind this endpoint", field="temperature")
        request["temperature"] = temperature
    stop = body.get("stop")
    if stop:
        request["stop_sequences"] = [stop] if isinstance(stop, str) else stop
    user = body.get("user") or body.get("safety_identifier")
    if user:
        request["metadata"] = {"user_id": user}
    return request


def _output(body: Mapping[str, Any]) -> dict[str, Any]:
    """Effort and format of the answer."""
    request: dict[str, Any] = {}
    config: dict[str, Any] = {}
    effort = body.get("reasoning_effort")
    if effort == "none":
        request["thinking"] = {"type": "disabled"}
    elif effort is not None:
        config["effort"] = _EFFORTS.get(effort, effort) if isinstance(effort, str) else effort
    wanted = body.get("response_format")
    kind = wanted.get("type") if isinstance(wanted, Mapping) else None
    if isinstance(wanted, Mapping) and kind == "json_schema":
        named = wanted.get("json_schema")
        schema = named.get("schema") if isinstance(named, Mapping) else None
        if not isinstance(schema, Mapping):
            raise refused("must be a JSON schema", field="response_format.json_schema.schema")
        config["format"] = {"type": "json_schema", "schema": schema}
    elif wanted is not None and kind != "text":
        raise unsupported("only a schema has a counterpart in the Messages API", field="response_format")
    if config:
        request["output_config"] = config
    return request


def _tools(body: Mapping[str, Any]) -> dict[str, Any]:
    tools = body.get("tools")
    if not tools:
        return {}
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise refused("must be a list of tools", field="tools")
    request: dict[str, Any] = {"tools": [_definition(tool, f"tools[{i}]") for i, tool in enumerate(tools)]}
    choice = _choice(body.get("tool_choice"))
    if body.get("parallel_tool_calls") is False and choice != {"type": "none"}:
        choice = (choice or {"type": "auto"}) | {"disable_parallel_tool_use": True}
    if choice:
        request["tool_choice"] = choice
    return request


def _definition(tool: object, at: str) -> Block:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        raise unsupported("only functions have a counterpart in the Messages API", field=f"{at}.type")
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    definition = {"name": function.get("name"), "input_schema": schema}
    if function.get("description"):
        definition["description"] = function["description"]
    if function.get("strict"):
        definition["strict"] = True
    return definition


def _choice(choice: object) -> Block | None:
    if choice is None:
        return None
    if isinstance(choice, str) and choice in _CHOICES:
        return {"type": _CHOICES[choice]}
    function = choice.get("function") if isinstance(choice, Mapping) else None
    if isinstance(function, Mapping):
        return {"type": "tool", "name": function.get("name")}
    raise unsupported("has no counterpart in the Messages API", field="tool_choice")
