"""From the log-probabilities of a chat answer's tokens to scores of the labels that it could have named."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TOP = 20
"""How many alternatives of a token are asked for, and read: OpenAI's bound on `top_logprobs`, and vLLM's by default."""

_BEGIN = re.compile(r'\s*\{\s*"label"\s*:\s*"')  # of the one document that is asked for, up to the label itself
_SLACK = 1e-3  # a log-probability is at most 0, and rounded


@dataclass(frozen=True, slots=True, kw_only=True)
class _Token:
    """A token that was written, and what could have been, itself included: log-probabilities by text."""

    text: bytes
    choices: Mapping[bytes, float]


def label_scores(logprobs: object, *, text: str, written: str, labels: Sequence[str]) -> list[float] | None:
    """How likely each label is, in the order of `labels`; the sum is 1. None where `logprobs` cannot tell.

    The tokens of `text` (`{"label": "..."}`) are walked from where the label begins. At each, the alternatives that go
    on as one of the labels still possible does are weighed against each other: what the schema forbids has no part,
    whether the server had left it out already or (llama.cpp) not. A written token takes its share on to the next one;
    an alternative's share goes to the labels that go on like it, in equal parts, as the walk does not follow it. An
    alternative that fits every label still possible tells nothing and is left out. The walk ends when one label is
    left.

    Limits: a label that none of the `TOP` alternatives begins has the score 0, which may be a little too low; labels
    that begin alike, but not as the written one does, are not told apart; other spellings of a label as tokens count
    only as far as they are alternatives on the way.

    Args:
        logprobs: OpenAI's `choices[].logprobs`, with the `bytes` of tokens where they have them.
        text: the whole answer.
        written: the label in it.
        labels: all that were allowed, each but once.
    """
    tokens = _tokens(logprobs)
    begin = _BEGIN.match(text)
    if tokens is None or begin is None:
        return None
    joined = b"".join(token.text for token in tokens)
    at = joined.rfind(text.encode())  # thoughts may come before it, an end-of-turn token behind
    if at < 0:
        return None
    start = at + len(begin[0].encode())
    ends = _spelled(labels, written, joined[start:])
    return None if ends is None else _walk(tokens, joined, start, ends)


def _spelled(labels: Sequence[str], written: str, rest: bytes) -> list[bytes] | None:
    """Each label as JSON with its closing quote (so that none begins another), escaped as `rest` has `written`."""
    for is_ascii in (False, True):
        ends = [json.dumps(label, ensure_ascii=is_ascii)[1:].encode() for label in labels]
        if rest.startswith(ends[labels.index(written)]):
            return ends
    return None


def _walk(tokens: Sequence[_Token], joined: bytes, start: int, ends: Sequence[bytes]) -> list[float]:
    scores = [0.0] * len(ends)
    left = list(range(len(ends)))
    mass, behind = 1.0, 0
    for token in tokens:
        first, behind = behind, behind + len(token.text)
        if behind <= start:
            continue
        if len(left) == 1:
            break
        before, so_far = joined[first:start], joined[start:first]  # one of the two is empty
        fits = {
            choice: [i for i in left if _goes_on(ends[i], so_far + choice.removeprefix(before))]
            for choice in token.choices
            if choice.startswith(before)
        }
        likely = {
            choice: token.choices[choice]
            for choice, found in fits.items()
            if choice == token.text or 0 < len(found) < len(left)
        }
        most = max(likely.values())
        shares = {choice: math.exp(value - most) for choice, value in likely.items()}
        whole = sum(shares.values())
        for choice, share in shares.items():
            if choice != token.text:
                for i in fits[choice]:
                    scores[i] += mass * share / whole / len(fits[choice])
        mass *= shares[token.text] / whole
        left = fits[token.text]
    for i in left:
        scores[i] += mass / len(left)
    total = sum(scores)
    return [score / total for score in scores]


def _goes_on(end: bytes, text: bytes) -> bool:
    """Whether `text` is how the label begins, or all of it and nothing but the document's end behind."""
    return end.startswith(text) or (text.startswith(end) and text[len(end) :].strip() in (b"", b"}"))


def _tokens(logprobs: object) -> list[_Token] | None:
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not isinstance(content, list):
        return None
    tokens = []
    for entry in content:
        written = _read(entry)
        if written is None:
            return None
        top = entry.get("top_logprobs")
        read = [_read(other) for other in (top[:TOP] if isinstance(top, list) else ())]
        tokens.append(_Token(text=written[0], choices=dict([one for one in read if one is not None] + [written])))
    return tokens


def _read(entry: object) -> tuple[bytes, float] | None:
    """A token's text and log-probability; its `bytes` where it has them, as a token may be part of a character."""
    if not isinstance(entry, dict):
        return None
    value, text, raw = entry.get("logprob"), entry.get("token"), entry.get("bytes")
    if not isinstance(value, int | float) or isinstance(value, bool) or value > _SLACK:
        return None
    if isinstance(raw, list):
        try:
            return bytes(raw), float(value)
        except (TypeError, ValueError):
            return None
    return (text.encode(), float(value)) if isinstance(text, str) else None
