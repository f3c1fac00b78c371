"""Triton's generate extension for OpenAI's chat/completions and completions. Pure.

The extension (docs/protocol/extension_generate.md in Triton's server repository) is JSON over HTTP: named fields become
a model's inputs, those that it does not have become parameters, which engines ignore. So a field that only newer
engines know does no harm to older ones. Messages become one prompt by a chat template.

- `vllm` (Triton's vLLM backend) takes sampling parameters as one JSON text, and tells finish reason and tokens since
  release 24.12. Its own default of 16 tokens is for completions alone.
- `tensorrt_llm` (the `ensemble` and `tensorrt_llm_bls` models of its repository) takes each as an input of its own. It
  samples greedily unless `top_k` or `top_p` says otherwise, and takes no temperature of 0.

Finish reason: what the engine tells. Where it does not: `length` if as many pieces with text have come as tokens were
asked for (each is one token at least, so the bound was met for certain), else `stop`, as OpenAI clients need a word. A
stream has no end mark of its own: the clean end of its body is its end.

Usage is what the engine tells, else unknown; a caller that asked for it then gets no chunk with it.

Refused as UNSUPPORTED: `n` and `best_of` above 1, `logprobs`, `top_logprobs`, `logit_bias`, `tools`, `functions`, a
`tool_choice` that asks for one, `response_format` other than text, `audio`, `modalities`, `echo`, `suffix`, images and
other parts than text, several prompts or token numbers, the roles of tools. Dropped without a word: `user`, `store`,
`metadata`, `reasoning_effort`, `parallel_tool_calls`, `service_tier`, and fields that are not known here.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal
from urllib.parse import quote

from gateway.backends.llm.chat_templates import ChatTemplate, PromptError
from gateway.backends.llm.codec import Encoded
from gateway.backends.llm.openai_faults import UpstreamError, Waiting, error_in, error_of, fault_for, fault_in_answer
from gateway.backends.llm.openai_writer import (
    Writer,
    broken,
    count,
    read_object,
    refused,
    unsupported,
    wants_usage,
    written,
)
from gateway.backends.triton import faults
from gateway.core import texts
from gateway.core.errors import BackendError, Fault, FaultKind
from gateway.core.sse import DEFAULT_MAX_EVENT_BYTES, SseParser, SseTooLarge
from gateway.core.types import Delta, Message, Metered, OpenAIPayload, Usage

Engine = Literal["vllm", "tensorrt_llm"]

COMPLETION_TOKENS: Final = 16  # OpenAI's own default for completions
_SAMPLING: Final = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty")
_SAMPLING_MORE: Final = ("repetition_penalty", "length_penalty", "min_tokens")  # not OpenAI's, but both engines'
_REALS: Final = frozenset({"temperature", "top_p", "presence_penalty", "frequency_penalty"})
_VLLM_MORE: Final = ("seed", "stop", "min_p", "stop_token_ids", "ignore_eos", "skip_special_tokens")
_UNFINISHED: Final = frozenset({"", "None"})
_ENDED_EARLY: Final = frozenset({"abort", "error"})
# What Triton's own codes become. 400 and 500 tell nothing: the former is the status of every failure of a model.
_CODES: Final[Mapping[int, str]] = {404: "NOT_FOUND", 501: "UNIMPLEMENTED", 503: "UNAVAILABLE"}
_UNTELLING: Final = frozenset({400, 500})
_BAD_REQUEST: Final = 400


def _nothing(value: object) -> bool:
    return not value


_HARMLESS: Final[Mapping[str, Callable[[object], bool]]] = {
    "n": lambda value: value in (None, 1),
    "best_of": lambda value: value in (None, 1),
    "logprobs": lambda value: value is None or value is False,
    **dict.fromkeys(("top_logprobs", "logit_bias", "tools", "functions", "audio", "echo", "suffix"), _nothing),
    "tool_choice": lambda value: value in (None, "none", "auto"),
    "modalities": lambda value: value in (None, [], ["text"]),
    "response_format": lambda value: value is None or (isinstance(value, Mapping) and value.get("type") == "text"),
}


class TritonGenerateCodec:
    """The generate extension behind the address of Triton's HTTP port.

    Args:
        template: makes a prompt of messages.
        max_tokens: bounds a chat's answer where the caller does not: engines have no such thing as "to the end".
        now_us: the wall clock in microseconds since 1970, for `created` and `id`, which the extension lacks.
    """

    probe_path: str = "/v2/health/ready"

    def __init__(
        self, *, engine: Engine, template: ChatTemplate, now_us: Callable[[], int], max_tokens: int = 1024
    ) -> None:
        self._engine = engine
        self._template = template
        self._now_us = now_us
        self._max_tokens = max_tokens

    def headers(self, api_key: str | None) -> Mapping[str, str]:
        """The key as a bearer token: Triton itself has none, a proxy before it may."""
        return {"authorization": f"Bearer {api_key}"} if api_key else {}

    def encode(self, payload: OpenAIPayload, model: str) -> Encoded:
        """The prompt and its parameters; raises `BackendError` UNSUPPORTED or REFUSED_INPUT, naming the field."""
        body = payload.body
        if payload.api not in ("chat/completions", "completions"):
            raise unsupported(f"the generate extension has no /{payload.api}", field="model")
        for name, is_harmless in _HARMLESS.items():
            if not is_harmless(body.get(name)):
                raise unsupported("has no counterpart in Triton's generate extension", field=name)
        is_chat = payload.api == "chat/completions"
        bound = _bound(body, self._max_tokens) if is_chat else _bound(body, COMPLETION_TOKENS)
        fields = _vllm(body, bound) if self._engine == "vllm" else _tensorrt_llm(body, bound)
        text = _messages(body, self._template) if is_chat else _prompt(body)
        request = written({"text_input": text, "stream": payload.stream, "exclude_input_in_output": True, **fields})
        now_us = self._now_us()
        digest = hashlib.blake2b(request, digest_size=12, key=str(now_us).encode()).hexdigest()
        writer = Writer(
            id=f"{'chatcmpl' if is_chat else 'cmpl'}-{digest}",
            created=now_us // 1_000_000,
            model=model,
            api=payload.api,
            with_usage=payload.stream and wants_usage(payload),
        )
        return Encoded(
            path=f"/v2/models/{quote(model, safe='')}/generate{'_stream' if payload.stream else ''}",
            body=request,
            message=lambda answer: _message(answer, writer),
            stream=(lambda: GenerateStream(writer, max_tokens=bound)) if payload.stream else None,
        )

    def fault(self, status: int, body: bytes, waiting: Waiting) -> Fault:
        """The fault behind a status that is not 200, by Triton's own words where it has any."""
        # A stream that fails before its first answer has a status of its own, and its error as an event.
        parts = SseParser().feed(body) if body.startswith(b"data:") and len(body) <= DEFAULT_MAX_EVENT_BYTES else [body]
        error = error_of(parts[0]) if parts else None
        if error is None or error.message is None:
            return fault_for(status, error, waiting)
        if status in _UNTELLING:
            return replace(_told(error.message), retry_after_us=waiting.us)
        if status in _CODES:
            return replace(_plain(faults.fault_of(_CODES[status], error.message)), retry_after_us=waiting.us)
        return fault_for(status, error, waiting)


# --- requests -------------------------------------------------------------------------------------


def _bound(body: Mapping[str, Any], default: int) -> int:
    """How many tokens the answer may have. Engines make one at least: 0, which completions may ask for, they refuse."""
    for name in ("max_completion_tokens", "max_tokens"):
        asked = body.get(name)
        if asked is None:
            continue
        if not isinstance(asked, int) or isinstance(asked, bool) or asked < 0:
            raise refused("must be a whole number", field=name)
        if asked == 0:
            raise unsupported("0 has no counterpart in Triton's generate extension", field=name)
        return asked
    return default


def _messages(body: Mapping[str, Any], template: ChatTemplate) -> str:
    """The prompt of a conversation."""
    messages = body.get("messages")
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise refused("must be a list of messages", field="messages")
    try:
        return template.prompt([_turn(message, f"messages[{i}]") for i, message in enumerate(messages)])
    except PromptError as error:
        text = texts.shown(str(error)) if str(error) else "the model's chat template does not take these messages"
        raise refused(text, field="messages") from error


def _turn(message: object, at: str) -> dict[str, str]:
    role = message.get("role") if isinstance(message, Mapping) else None
    role = "system" if role == "developer" else role
    if not isinstance(message, Mapping) or role not in ("system", "user", "assistant"):
        raise unsupported("the role has no counterpart in a plain prompt", field=f"{at}.role")
    if message.get("tool_calls") or message.get("function_call"):
        raise unsupported("calls have no counterpart in a plain prompt", field=f"{at}.tool_calls")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return {"role": role, "content": content or ""}
    if not isinstance(content, Sequence):
        raise refused("must be a string or a list of parts", field=f"{at}.content")
    said = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
            raise unsupported(f"a part of type {kind} has no counterpart in a plain prompt", field=f"{at}.content[{i}]")
        said.append(part[kind])
    return {"role": role, "content": "".join(said)}


def _prompt(body: Mapping[str, Any]) -> str:
    """The prompt of a completion, as it is."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise unsupported("only one prompt, as a text, has a counterpart in the generate extension", field="prompt")
    return prompt


def _given(body: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Those that the caller gave, numbers in the form that their inputs have."""
    found = {name: body[name] for name in names if body.get(name) is not None}
    return {k: float(v) if k in _REALS and isinstance(v, int) else v for k, v in found.items()}


def _vllm(body: Mapping[str, Any], bound: int) -> dict[str, Any]:
    sampling = _given(body, *_SAMPLING, *_SAMPLING_MORE, *_VLLM_MORE) | {"max_tokens": bound}
    told = ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens")
    return {"sampling_parameters": written(sampling).decode(), **dict.fromkeys(told, True)}


def _tensorrt_llm(body: Mapping[str, Any], bound: int) -> dict[str, Any]:
    fields = _given(body, *_SAMPLING, *_SAMPLING_MORE, "bad_words") | {"max_tokens": bound}
    if fields.get("temperature") == 0:
        del fields["temperature"]
        fields["top_k"] = 1
    elif "temperature" in fields and not fields.keys() & {"top_k", "top_p"}:
        fields["top_p"] = 1.0
    if body.get("stop"):
        fields["stop_words"] = [body["stop"]] if isinstance(body["stop"], str) else body["stop"]
    if body.get("seed") is not None:
        fields |= dict.fromkeys(("seed", "random_seed"), body["seed"])  # its new and its old name
    return fields


# --- answers --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """One answer of the model: the whole text, or what has come since the last. `finish`: None where not told."""

    text: str
    finish: str | None
    input_tokens: int | None
    output_tokens: int | None


def _piece(parsed: Mapping[str, Any]) -> _Piece:
    """Raises `BackendError` for an error, and BROKEN for what has no text."""
    error = error_in(parsed)
    if error is not None:
        raise BackendError(_told(error.message or ""))
    text = _only(parsed.get("text_output"))
    if not isinstance(text, str):
        raise broken("the answer has no text_output")
    finish = _only(parsed.get("finish_reason"))
    return _Piece(
        text=text,
        finish=finish if isinstance(finish, str) else None,
        input_tokens=count(_only(parsed.get("num_input_tokens"))),
        output_tokens=count(_only(parsed.get("num_output_tokens"))),
    )


def _only(value: object) -> object:
    """An output of one element comes as such, or as a list of it."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _message(body: bytes, writer: Writer) -> Message:
    piece = _piece(read_object(body))
    whole: dict[str, Any] = {"text": piece.text}
    if writer.api == "chat/completions":
        whole = {"message": {"role": "assistant", "content": piece.text, "refusal": None}}
    usage = Usage(input_tokens=piece.input_tokens, output_tokens=piece.output_tokens)
    return writer.whole(whole, _finish(piece.finish, is_full=False), usage)


class GenerateStream:
    """Reads of a generate_stream in; `Delta`s in OpenAI's form and `Metered` usage out."""

    def __init__(self, writer: Writer, *, max_tokens: int) -> None:
        self.is_done = False
        self._parser = SseParser()
        self._writer = writer
        self._max_tokens = max_tokens
        self._pieces = 0  # with text
        self._has_begun = False
        self._has_role = False
        self._finish: str | None = None
        self._input_tokens: int | None = None
        self._output_tokens: int | None = None

    def feed(self, read: bytes) -> Iterator[Delta | Metered]:
        """The texts completed by this read; raises `BackendError` at an error and at an event that is no answer."""
        fault: SseTooLarge | None = None
        try:
            payloads = self._parser.feed(read)
        except SseTooLarge as error:
            payloads, fault = error.complete, error
        for payload in payloads:
            piece = _piece(read_object(payload))
            self._keep(piece)
            if piece.text:
                yield from self._said({"content": piece.text}, piece.text)
        if fault is not None:
            raise broken(str(fault)) from fault

    def end(self) -> Iterator[Delta | Metered]:
        """The finish reason, and the usage.

        Raises `BackendError` BROKEN if the body ended inside an event, before the first, or before the engine, where it
        tells finish reasons, told one.
        """
        if not self._parser.at_boundary or not self._has_begun:
            place = "before its first event" if self._parser.at_boundary else "inside an event"
            raise broken(f"the stream ended {place}")
        finish = _finish(self._finish, is_full=self._pieces >= self._max_tokens)
        yield from self._said({}, "", finish)
        usage = Usage(input_tokens=self._input_tokens, output_tokens=self._output_tokens)
        if usage != Usage():
            yield self._writer.used(usage)
        self.is_done = True

    def _keep(self, piece: _Piece) -> None:
        self._has_begun = True
        self._pieces += bool(piece.text)
        self._finish = self._finish if piece.finish is None else piece.finish
        self._input_tokens = self._input_tokens if piece.input_tokens is None else piece.input_tokens
        if piece.output_tokens is not None:
            self._output_tokens = (self._output_tokens or 0) + piece.output_tokens

    def _said(self, delta: Mapping[str, Any], text: str, finish: str | None = None) -> Iterator[Delta]:
        """The role waits for something to be said: until then another endpoint can still be asked."""
        if self._writer.api == "completions":
            yield self._writer.chunk({"text": text}, finish)
            return
        if not self._has_role:
            self._has_role = True
            yield self._writer.chunk({"delta": {"role": "assistant", "content": ""}})
        yield self._writer.chunk({"delta": delta}, finish)


def _finish(told: str | None, *, is_full: bool) -> str:
    """OpenAI's word. Raises `BackendError` BROKEN where the engine says that it has not finished."""
    if told is None:
        return "length" if is_full else "stop"
    if told in _UNFINISHED or told in _ENDED_EARLY:
        raise broken("the answer ended before the engine had finished it")
    return "length" if told == "length" else "stop"


def _told(text: str) -> Fault:
    """The fault that a text tells by itself."""
    fault = fault_in_answer(UpstreamError(message=text))
    return fault if fault.kind is FaultKind.CONTEXT_TOO_LONG else _plain(faults.streamed(text))


def _plain(fault: Fault) -> Fault:
    """As a fault of an LLM endpoint: nobody here can load a model again, and no caller speaks Triton's protocol."""
    kind = FaultKind.BROKEN if fault.kind is FaultKind.DEAD else fault.kind
    status = _BAD_REQUEST if kind is FaultKind.REFUSED_INPUT else 0
    return replace(fault, kind=kind, dead_model="", reply=None, status=status)
