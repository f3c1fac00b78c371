"""What requests of a class are, and their bytes. Pure but for an image's file."""

import mimetypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final
from urllib.parse import quote, urlsplit

import orjson
from pydantic import ConfigDict

from gateway.core.types import Tensor
from gateway.tuning.traffic import TrafficClass

DEFAULT_CHAT_TASK: Final = "general_llm"
_PORTS: Final = {"http": 80, "https": 443}


class AskError(ValueError):
    """A request that cannot be made; the text begins with the option."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """The requests of one class. One of `task`, `tensor` and `chat` says what is asked for.

    Attributes:
        url: of a gateway, or of a model server's own HTTP (`tensor`).
        triton: HOST:PORT (gRPC) of Triton or another that speaks its protocol, in place of `url`; for `tensor`.
        key: of the gateway.
        task: of the task API; with `chat` the model that is named, `general_llm` where none is.
        input: its input; several take turns. For `tensor`: values of one row by input, in place of made-up ones.
        image: a file that is the task's whole body.
        tensor / version: a model, by its tensors in binary form.
        shape: dimensions, without the batch, of made-up tensors; of inputs that are not named those of any size are 1.
        chat: a prompt; the answer is streamed, and of at most `max_tokens`.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    url: str = ""
    triton: str = ""
    key: str = field(default="", repr=False)
    task: str = ""
    input: Mapping[str, Any] | Sequence[Mapping[str, Any]] = ()
    image: str = ""
    tensor: str = ""
    version: str = ""
    shape: Mapping[str, Sequence[int]] = field(default_factory=dict)
    chat: str = ""
    max_tokens: int = 32

    def __post_init__(self) -> None:
        if bool(self.tensor) + bool(self.task or self.chat) != 1:
            raise AskError("task, tensor or chat: one of them says what is asked for")
        if self.triton and not self.tensor:
            raise AskError("triton: only tensors are asked for there (tensor)")
        if not self.triton and not self.url:
            raise AskError("url: whom to ask is not known")
        if self.image and (self.input or self.tensor or self.chat):
            raise AskError("image: it is the whole body of a task, which has no other input beside it")
        if self.task and not self.chat and not self.image and not self.input:
            raise AskError("input: the task has none; or give an image")
        if self.shape and not self.tensor:
            raise AskError("shape: is of made-up tensors (tensor)")
        if self.max_tokens < 1 or any(size < 1 for dims in self.shape.values() for size in dims):
            raise AskError("shape, max_tokens: must be at least 1")

    @property
    def inputs(self) -> Sequence[Mapping[str, Any]]:
        """The inputs that take turns."""
        return (self.input,) if isinstance(self.input, Mapping) else self.input

    def __str__(self) -> str:
        what = f"chat {self.task or DEFAULT_CHAT_TASK}" if self.chat else f"task {self.task}"
        where = self.triton or self.url
        return f"{f'tensors of {self.tensor}' if self.tensor else what} at {where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A URL in the parts that a client needs."""

    host: str
    port: int
    is_tls: bool
    path: str

    @property
    def authority(self) -> str:
        """For the `Host` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def address(url: str) -> Address:
    """Raises `AskError` for what is no http or https URL."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise AskError(f"url: {url}: {error}") from error
    if parts.scheme not in _PORTS or not parts.hostname or parts.username or parts.query:
        raise AskError(f"url: '{url}' is not an address like http://127.0.0.1:8080")
    return Address(
        host=parts.hostname,
        port=port or _PORTS[parts.scheme],
        is_tls=parts.scheme == "https",
        path=parts.path.rstrip("/"),
    )


def task_requests(ask: Ask, traffic: TrafficClass) -> list[bytes]:
    """Of the task API, whole: head and body. A text is asked for `rows` times in one request."""
    path = f"/v1/tasks/{quote(ask.task, safe='')}"
    if ask.image:
        if traffic.rows > 1:
            raise AskError("rows: a request with an image has one row")
        kind = mimetypes.guess_type(ask.image)[0] or ""
        if not kind.startswith("image/"):
            raise AskError(f"image: '{ask.image}' does not end like an image's file")
        try:
            body = Path(ask.image).read_bytes()
        except OSError as error:
            raise AskError(f"image: {ask.image}: {error.strerror}") from error
        return [post(ask, path, body, priority=traffic.priority, content_type=kind)]
    return [
        post(ask, path, orjson.dumps({"input": _with_rows(one, traffic.rows)}), priority=traffic.priority)
        for one in ask.inputs
    ]


def chat_request(ask: Ask, traffic: TrafficClass) -> bytes:
    """A streamed chat."""
    body = {
        "model": ask.task or DEFAULT_CHAT_TASK,
        "messages": [{"role": "user", "content": ask.chat}],
        "max_tokens": ask.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return post(ask, "/v1/chat/completions", orjson.dumps(body), priority=traffic.priority)


def tensor_request(ask: Ask, traffic: TrafficClass, inputs: Sequence[Tensor]) -> bytes:
    """Of `/v2`, with its tensors behind a JSON head (Triton's binary extension), and the answer's wanted so too."""
    head = orjson.dumps(
        {
            "inputs": [
                {
                    "name": one.name,
                    "datatype": one.datatype,
                    "shape": list(one.shape),
                    "parameters": {"binary_data_size": len(one.data)},
                }
                for one in inputs
            ],
            "parameters": {"binary_data_output": True},
        }
    )
    return post(
        ask,
        f"{model_path(ask)}/infer",
        b"".join([head, *(bytes(one.data) for one in inputs)]),
        priority=traffic.priority,
        content_type="application/octet-stream",
        more=(f"Inference-Header-Content-Length: {len(head)}",),
    )


def model_path(ask: Ask) -> str:
    """Of the model's own paths on `/v2`."""
    version = f"/versions/{quote(ask.version, safe='')}" if ask.version else ""
    return f"/v2/models/{quote(ask.tensor, safe='')}{version}"


def post(
    ask: Ask,
    path: str,
    body: bytes,
    *,
    priority: str,
    content_type: str = "application/json",
    more: Sequence[str] = (),
) -> bytes:
    """The bytes of a POST."""
    return head(ask, "POST", path, (f"X-Priority: {priority}", f"Content-Type: {content_type}", *more), body) + body


def head(ask: Ask, method: str, path: str, lines: Sequence[str] = (), body: bytes = b"") -> bytes:
    """The head of a request."""
    to = address(ask.url)
    if not ask.key.isascii() or not ask.key.isprintable():
        raise AskError("key: it has other characters than a key may have")
    key = (f"Authorization: Bearer {ask.key}",) if ask.key else ()
    all_lines = (
        f"{method} {to.path}{path} HTTP/1.1",
        f"Host: {to.authority}",
        "User-Agent: gateway-load",
        *key,
        *lines,
        f"Content-Length: {len(body)}",
    )
    return "".join(f"{line}\r\n" for line in (*all_lines, "")).encode("latin-1")


def task_rows(ask: Ask) -> int:
    """The rows that a request has by its input alone."""
    counts = {len(one["text"]) if isinstance(one.get("text"), list) else 1 for one in ask.inputs if not ask.tensor}
    return counts.pop() if len(counts) == 1 else 1


def _with_rows(given: Mapping[str, Any], rows: int) -> Mapping[str, Any]:
    text = given.get("text")
    if rows == 1 or (isinstance(text, list) and len(text) == rows):
        return given
    if not isinstance(text, str):
        raise AskError("rows: only an input with one `text` can be asked for several times in one request")
    return {**given, "text": [text] * rows}
