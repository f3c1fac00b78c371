"""The whole data plane over LLM endpoints: the real backend class, scripted upstreams on raw sockets.

    up1, up2 = Upstream(error_reply(503, {...})), Upstream(json_reply(200, completion()))
    async with llm_plane(up1, up2) as gw:
        answer = await gw.post(CHAT, ASK)
        ... up1.requests[0].json(), gw.seen.records[0].usage

The endpoints are backends called `up1`, `up2`, ...; by default one rule sends `general_llm` to `up1`, model `model-1`,
and falls back to the others, each with a model of its own. What a plain upstream does not say (a base URL where nobody
listens, keys, limits, replicas, other protocols) is said with `Endpoint`.
"""

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import openai

from gateway.backends.llm.backend import Limits, LLMBackend
from gateway.backends.llm.codec import Codec
from gateway.backends.llm.openai_codec import OpenAICodec
from tests.kit.app import KEY, Harness, running
from tests.kit.upstream import LAST_CHUNK, Script, Step, Upstream, event, named, sse_head

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
TASK, ALIAS = "general_llm", "org/smollm2"
ASK: Mapping[str, Any] = {"model": TASK, "messages": [{"role": "user", "content": "hi"}]}
ASK_COMPLETION: Mapping[str, Any] = {"model": TASK, "prompt": "hi"}
ASK_RESPONSE: Mapping[str, Any] = {"model": TASK, "input": "hi"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One LLM backend as a configuration would have it. `upstreams`: served by the kit, one base URL each."""

    upstreams: Sequence[Upstream] = ()
    base_urls: Sequence[str] = ()
    codec: Codec = field(default_factory=OpenAICodec)
    api_key: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    models: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    is_hosted: bool = False

    def backend(self, name: str) -> LLMBackend:
        """The running backend; its upstreams must be listening."""
        return LLMBackend(
            name,
            codec=self.codec,
            base_urls=[*self.base_urls, *(up.base_url for up in self.upstreams)],
            api_key=self.api_key,
            headers=self.headers,
            models=self.models,
            limits=self.limits,
            is_hosted=self.is_hosted,
        )


@contextlib.asynccontextmanager
async def llm_plane(
    *endpoints: Upstream | Endpoint, rules: Sequence[Mapping[str, Any]] | None = None, **options: Any
) -> AsyncIterator[Harness]:
    """Serve until the block ends, the upstreams included. `options` are those of `tests.kit.app.running`."""
    asked = [Endpoint(upstreams=(one,)) if isinstance(one, Upstream) else one for one in endpoints]
    async with contextlib.AsyncExitStack() as stack:
        for up in (up for endpoint in asked for up in endpoint.upstreams):
            await stack.enter_async_context(up)
        backends = [endpoint.backend(f"up{number}") for number, endpoint in enumerate(asked, start=1)]
        for backend in backends:
            stack.push_async_callback(backend.close)
        yield await stack.enter_async_context(running(backends, rules=rules or [chat_rule(len(asked))], **options))


def chat_rule(endpoints: int = 1, **fields: Any) -> dict[str, Any]:
    """`general_llm` goes to `up1` and falls back to the others; `fields` stand above that."""
    first, *others = [{"backend": f"up{number}", "model": f"model-{number}"} for number in range(1, endpoints + 1)]
    return {"name": "chat", "match": {"task": TASK}, "split": [first], "fallback": others, **fields}


def pool_rule(endpoints: int, strategy: str, **fields: Any) -> dict[str, Any]:
    """`general_llm` goes to all endpoints alike, as `strategy` says."""
    split = [{"backend": f"up{number}", "model": f"model-{number}"} for number in range(1, endpoints + 1)]
    return chat_rule(split=split, strategy=strategy, **fields)


def sdk(gw: Harness, *, max_retries: int = 0, key: str = KEY) -> openai.AsyncOpenAI:
    """The official client on this gateway."""
    return openai.AsyncOpenAI(base_url=f"{gw.url}/v1", api_key=key, max_retries=max_retries)


# --- answers to script with, beside those of `tests.kit.upstream` --------------------------------------------


def stream_of(*events: str | Mapping[str, Any]) -> list[Step]:
    """A whole chat or completions stream, `[DONE]` included."""
    return [sse_head(), *(event(one) for one in (*events, "[DONE]")), LAST_CHUNK]


def text_completion(text: str = "hi") -> dict[str, Any]:
    """A whole answer of the completions API."""
    choice = {"index": 0, "text": text, "finish_reason": "stop", "logprobs": None}
    head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m"}
    return {**head, "choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}}


def text_delta(text: str, *, finish: str | None = None) -> dict[str, Any]:
    """A piece of a streamed answer of the completions API."""
    return {**text_completion(), "choices": [{"index": 0, "text": text, "finish_reason": finish}], "usage": None}


def response(text: str = "hi") -> dict[str, Any]:
    """A whole answer of the responses API."""
    part = {"type": "output_text", "text": text, "annotations": []}
    said = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "model": "m",
        "status": "completed",
        "error": None,
        "output": [said],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": 3,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": 2,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 5,
        },
    }


def response_events(*pieces: str) -> list[dict[str, Any]]:
    """All events of a streamed answer of the responses API, in order."""
    whole = response("".join(pieces))
    at = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    item = whole["output"][0]
    part = item["content"][0]
    begun = whole | {"status": "in_progress", "output": [], "usage": None}
    empty_item = item | {"status": "in_progress", "content": []}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.output_item.added", "output_index": 0, "item": empty_item},
        {"type": "response.content_part.added", **at, "part": part | {"text": ""}},
        *({"type": "response.output_text.delta", **at, "delta": piece, "logprobs": []} for piece in pieces),
        {"type": "response.output_text.done", **at, "text": part["text"], "logprobs": []},
        {"type": "response.content_part.done", **at, "part": part},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": whole},
    ]
    return [{**one, "sequence_number": number} for number, one in enumerate(events)]


def responses_stream(*pieces: str) -> Script:
    """A whole stream of the responses API."""
    return [sse_head(), *(named(one["type"], one) for one in response_events(*pieces)), LAST_CHUNK]
