"""How many tokens a request and its answer have, told without any model's tokenizer.

`estimate` weighs the kinds of characters. The weights were fitted to Mistral's Tekken (131 thousand tokens, of the kind
that hosted models use), and to SmolLM2's (49 thousand, made for English); where the two disagree, to the former. Errors
on whole corpora of 19 to 163 thousand characters:

| text | Tekken | SmolLM2 |
|---|---|---|
| English prose, two sorts | -7 %, +4 % | -14 %, -3 % |
| Python, JavaScript | +9 %, +5 % | 0 %, -6 % |
| JSON indented, compact | -3 %, +4 % | -15 %, -1 % |
| German | +3 % | -22 % |
| Russian | +4 % | -52 % |
| Chinese, Japanese, Korean | -9 %, +11 %, +14 % | -47 %, -49 %, -68 % |
| what SmolLM2 answers, in prose and code | | -12 % to -24 % |
| short words and emoji | -6 % | +5 % |
| random base64, hex digits, decimal numbers | -19 %, -11 %, -12 % | -24 %, -11 %, -12 % |

SmolLM2 takes such scripts nearly byte by byte. Tokenizers that join three digits into one token (GPT's, Llama 3's) have
fewer of them than is said here. 100,000 characters take half a millisecond, 0.8 of Chinese.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

from gateway.core.types import OpenAIApi, OpenAIPayload, Work

GUESSED_OUTPUT: Final = 338
"""Where a request sets no bound: the mean answer of the ShareGPT conversations (the PagedAttention paper, 2023)."""
MEDIA_TOKENS: Final = 765
"""An image, or a sound or file, of unknown size: OpenAI's count of an image of 1024 x 1024 pixels (85 + 4 x 170)."""
MESSAGE_TOKENS: Final = 4  # role and delimiters: 3 in OpenAI's own recipe for counting, 5 in ChatML
MOST_TOKENS: Final = 100_000_000  # as rules have it for contexts: a bound on what callers may claim
MOST_CHOICES: Final = 128  # OpenAI's own bound of `n`
PREFIX_CHARACTERS: Final = 1024  # of each of the three parts of a prompt's beginning
LONGEST_MEAN: Final = 8  # bytes of text in an event: with more, it is not a token each
BYTES_PER_TOKEN: Final = 4.5  # of streamed text: English has 4.4, Chinese 4.3 (Tekken, the corpora of above)

_TOKEN_FIELDS: Final = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_MEDIA: Final = ("image", "audio", "video", "file", "document")
_NOT_SAID: Final = frozenset(
    ("role", "type", "id", "call_id", "tool_call_id", "status", "annotations", "logprobs", "encrypted_content")
)
"""Fields of messages and answers that are no text of theirs."""


def _kind(byte: int) -> int:
    """The kind of a byte of UTF-8, as the letter that stands for it in `estimate`."""
    if byte >= 0x80:  # noqa: PLR2004 - from here on, the byte tells how many its character has; but the first do not count
        return b" 234"[(byte >= 0xC0) + (byte >= 0xE0) + (byte >= 0xF0)]  # noqa: PLR2004 - UTF-8's own
    character = chr(byte)
    if character.isalpha():
        return b"aA"[character.isupper()]
    if character.isspace():
        return b" n"[character == "\n"]
    return b".0"[character.isdigit()]


_KINDS: Final = bytes(map(_kind, range(256)))


def estimate(text: str) -> int:
    """About how many tokens `text` has; 0 only for the empty one. Takes any text, lone surrogates too."""
    if not text:
        return 0
    count = text.encode("utf-8", "surrogatepass").translate(_KINDS).count
    # In hundredths of a token. White space weighs nothing: it is a part of the word that it stands before.
    words = 21 * count(b"a") + 85 * count(b"A") + 110 * count(b"0") + 45 * count(b".") + 200 * count(b"n")
    longer = 30 * count(b"2") + 75 * count(b"3") + 400 * count(b"4")
    return max(1, (words + longer) // 100)


def work_of(payload: OpenAIPayload) -> Work:
    """What a request will take. Its body is the caller's, of which nothing is sure: no form of it raises."""
    body, prompts = payload.body, 1
    match payload.api:
        case "chat/completions":
            messages = _list(body.get("messages"))
            tools = [body.get("tools"), body.get("functions"), body.get("response_format")]
            input_tokens = _said(messages) + len(messages) * MESSAGE_TOKENS + _written(tools)
        case "responses":
            messages, tools = _asked(body), [body.get("tools"), body.get("text")]
            said = [messages, body.get("instructions")]
            input_tokens = _said(said) + len(messages) * MESSAGE_TOKENS + _written(tools)
        case _:
            input_tokens, prompts = _prompts(_prompt(payload))
    if payload.api == "embeddings":
        return Work(input_tokens=input_tokens, output_tokens=0)
    choices = _positive(body.get("n"), MOST_CHOICES) or 1
    most = 0
    for name in _TOKEN_FIELDS:
        most = most or _positive(body.get(name), MOST_TOKENS)
    return Work(input_tokens=input_tokens, output_tokens=min(MOST_TOKENS, (most or GUESSED_OUTPUT) * choices * prompts))


def prefix_of(payload: OpenAIPayload) -> bytes:
    """A digest of how the prompt begins, which the requests of one conversation share; empty where nothing tells it.

    A caller may name it: `prompt_cache_key`, as OpenAI's API has it.
    """
    body = payload.body
    key = body.get("prompt_cache_key")
    if isinstance(key, str) and key:
        return _digest(("key", key[:PREFIX_CHARACTERS]))
    match payload.api:
        case "chat/completions":
            tools = [body.get("tools"), body.get("functions")]
            return _digest((_beginning(tools), *_beginnings(_list(body.get("messages")))))
        case "responses":
            messages = [{"role": "system", "content": body.get("instructions")}, *_asked(body)]
            return _digest((_beginning([body.get("tools")]), *_beginnings(messages)))
        case _:
            return _digest((_beginning(_prompt(payload)),))


@dataclass(slots=True)
class StreamCount:
    """About how many tokens a stream has brought, without reading its events as JSON.

    Of each event only the length of its text is looked up, by the names that OpenAI's APIs have for it; most engines
    send one token an event, some several. So there are as many as events with a text; where those have more on average
    than single tokens do, as many as their bytes are worth. Without any text under a known name, each event is one.
    """

    _events: int = 0
    _with_text: int = 0
    _bytes: int = 0
    _opening: bytes = b'content":"'  # what the last text stood behind: the next one most likely does too

    def add(self, data: bytes, event: bytes = b"") -> None:
        """One more event, as of `Delta`. Of named ones only deltas count: the others say again what those said."""
        if event and not event.endswith(b"delta"):
            return
        self._events += 1
        size = _text_bytes(data, self._opening) or self._looked_for(data)
        if size:
            self._with_text += 1
            self._bytes += size

    def add_all(self, wire: bytes) -> None:
        """One or several more, as of `Deltas`."""
        if wire.find(b"\n\n") == len(wire) - 2:
            self.add(wire)
        else:
            for data in wire.removesuffix(b"\n\n").split(b"\n\n"):
                self.add(data)

    def _looked_for(self, data: bytes) -> int:
        """The length of the first text under any known name; 0 where there is none."""
        for opening in _OPENINGS:
            size = _text_bytes(data, opening)
            if size:
                self._opening = opening
                return size
        return 0

    @property
    def tokens(self) -> int:
        """The estimate so far."""
        if self._bytes > self._with_text * LONGEST_MEAN:
            return int(self._bytes / BYTES_PER_TOKEN)
        return self._with_text or self._events


def _text_bytes(data: bytes, opening: bytes) -> int:
    """The length of the text that an event brings behind `opening`, as it is escaped in it; 0 where there is none."""
    at = data.find(opening)
    if at < 0:
        return 0
    start = at + len(opening)
    end = data.find(b'"', start)
    while end > start and data[end - 1] == _BACKSLASH:
        end = data.find(b'"', end + 1)
    return max(0, end - start)


_TEXT_NAMES: Final = (b"content", b"text", b"arguments", b"delta", b"reasoning_content", b"reasoning")
_OPENINGS: Final = tuple(name + opening for opening in (b'":"', b'": "') for name in _TEXT_NAMES)
_BACKSLASH: Final = ord("\\")


def of_answer(body: bytes, api: OpenAIApi) -> int:
    """About how many tokens a whole answer has that tells no usage; what cannot be read is counted as text."""
    if api == "embeddings":
        return 0
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return estimate(body.decode("utf-8", "replace"))
    if not isinstance(answer, Mapping):
        return 0
    if api == "responses":
        said: list[object] = [answer.get("output")]
    else:
        choices = [choice for choice in _list(answer.get("choices")) if isinstance(choice, Mapping)]
        said = [choice.get("message" if api == "chat/completions" else "text") for choice in choices]
    return sum(map(_said, said))


# --- prompts ------------------------------------------------------------------------------------


def _asked(body: Mapping[str, Any]) -> list[Any]:
    """The messages of the responses API."""
    asked = body.get("input")
    return [{"role": "user", "content": asked}] if isinstance(asked, str) else _list(asked)


def _prompt(payload: OpenAIPayload) -> object:
    return payload.body.get("prompt" if payload.api == "completions" else "input")


def _beginnings(messages: list[Any]) -> tuple[str, str]:
    """How the leading system messages begin, and how what follows up to the first user's message does."""
    system: list[object] = []
    first: list[object] = []
    for message in messages:
        role = message.get("role") if isinstance(message, Mapping) else None
        content = message.get("content") if isinstance(message, Mapping) else message
        if not first and role in ("system", "developer"):
            system.append(content)
            continue
        first.append(content)
        if role == "user":
            break
    return _beginning(system), _beginning(first)


def _prompts(prompt: object) -> tuple[int, int]:
    """Tokens, and how many prompts there are: a text, a list of texts, of token ids, or of lists of them."""
    if not isinstance(prompt, list) or not prompt:
        return _said(prompt), 1
    if isinstance(prompt[0], int):
        return len(prompt), 1
    said = [one for one in prompt if not isinstance(one, list)]
    numbers = sum(len(one) for one in prompt if isinstance(one, list))
    return numbers + max(_said(said), len(said)), len(prompt)  # joined: a million short texts would take seconds


def _said(value: object) -> int:
    """Tokens of all texts in a message or answer; pictures and the like at their constant."""
    texts, media = [], 0
    for text in _texts(value, with_keys=False):
        if text is None:
            media += 1
        else:
            texts.append(text)
    return estimate(" ".join(texts)) + media * MEDIA_TOKENS


def _written(values: list[Any]) -> int:
    """Tokens of what is given to the model as JSON: names and punctuation count too."""
    if values.count(None) == len(values):  # usually there are none
        return 0
    return estimate('":"'.join(text or "" for text in _texts(values, with_keys=True)))


def _beginning(value: object) -> str:
    """The first characters of a part of a prompt."""
    parts: list[str] = []
    left = PREFIX_CHARACTERS
    for text in _texts(value, with_keys=True, with_media=True):
        part = (text or "")[:left]
        parts.append(part)
        left -= len(part) + 1
        if left <= 0:
            break
    return "\0".join(parts)


def _texts(value: object, *, with_keys: bool, with_media: bool = False) -> Iterator[str | None]:
    """All texts in a JSON value in their order, numbers as texts; None for each picture, sound or file.

    `with_keys`: names of fields too, and none is left out. `with_media`: how each begins, and its length, for None.
    """
    stack = [value]
    while stack:
        one = stack.pop()
        if isinstance(one, str):
            if one[:5] != "data:":
                yield one
            else:
                yield f"{len(one)}:{one[:256]}" if with_media else None
        elif isinstance(one, dict):
            if not with_keys and len(one) == 2 and "role" in one and isinstance(one.get("content"), str):  # noqa: PLR2004
                stack.append(one["content"])  # nearly every message
            elif not with_keys and _is_media(one):
                yield None
            else:
                stack.extend(reversed(list(_fields(one, with_keys=with_keys))))
        elif isinstance(one, list | tuple):
            stack.extend(reversed(one))
        elif isinstance(one, int | float):
            yield repr(one) if not isinstance(one, int) or abs(one) < 1 << 64 else "0"


def _fields(one: Mapping[Any, Any], *, with_keys: bool) -> Iterator[object]:
    for name, value in one.items():
        if with_keys:
            yield name
            yield value
        elif name not in _NOT_SAID:
            yield value


def _is_media(part: Mapping[Any, Any]) -> bool:
    kind = part.get("type")
    return isinstance(kind, str) and any(word in kind for word in _MEDIA)


def _digest(parts: tuple[str, ...]) -> bytes:
    """Of how a prompt begins; empty where it has nothing to tell it by."""
    if not any(parts):
        return b""
    return blake2b("\x01".join(parts).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _positive(value: object, most: int) -> int:
    """A whole number above 0 and not above `most`; 0 for all else."""
    return min(value, most) if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
