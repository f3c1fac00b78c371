"""How much two answers to one request are alike: what a shadow answered, held against what the caller got.

Every measure is symmetric, is 1 for an answer and itself, and looks at a bounded part of each answer, so that a long
one costs no more than a few milliseconds. `reading` and `compare` are two steps for that reason, too: between them a
caller can let others have their turn.

| answers | `what` | similarity | agreed |
|---|---|---|---|
| labels | `label` | share of labels in both; or what the scores have in common | the best label is the same |
| embeddings | `embedding` | the cosine, of several vectors the least | at least 0.99 |
| text (chat, completions, OCR) | `text` | ROUGE-L of tokens, of several choices the least | at least 0.9 |
| tool calls | `tool_calls` | the same of the calls, each as one token | all calls are the same |
| a probability | `probability` | 1 less the difference | they differ by at most 0.05 |
| tensors | `tensors` | share of elements that are the same, floats within a tolerance | all elements are |

ROUGE-L is Lin's (2004) F-measure with beta = 1: twice the length of the longest common subsequence of tokens, over the
tokens of both. Tokens are words, single characters of scripts without spaces, and single signs; white space is none.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from gateway.core.shadows import said
from gateway.core.tensors import BF16, BYTES, DTYPES
from gateway.core.types import STREAMED, Answer, Delta, Message, Part, Tensor, Tensors, singly

What = Literal["label", "embedding", "text", "tool_calls", "probability", "tensors", "nothing"]

MAX_TOKENS: Final = 2_000  # of a text; the longest common subsequence of two such takes about 2 ms
MAX_CHARACTERS: Final = 20_000  # in which 2,000 tokens are looked for: English has five or six characters a word
AGREED_COSINE: Final = 0.99
AGREED_TEXT: Final = 0.9
AGREED_PROBABILITY: Final = 0.05
RELATIVE: Final = 1e-2  # of floats: two roundings of BF16, which keeps eight bits, are 2^-8 together
ABSOLUTE: Final = 1e-3

_ALONE: Final = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
"""Scripts without spaces: Thai, Lao, Burmese, Khmer, Kana, Han."""
_TOKEN: Final = re.compile(rf"[{_ALONE}]|[^\W{_ALONE}]+|[^\w\s]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What came of it.

    Attributes:
        agreed: None where the answers cannot be compared; `reason` says why, or why they do not agree.
        similarity: 1 = the same; None where it has no meaning (other sizes). A cosine may be negative.
    """

    agreed: bool | None
    similarity: float | None
    what: What
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """An answer as it is compared; `value` depends on `kind`. Of `nothing`, `reason` says why it cannot be."""

    kind: Literal["labels", "scores", "embedding", "choices", "probability", "tensors", "nothing"]
    value: Any = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Tokens:
    """A text's; `is_whole` is false where it has more."""

    tokens: Sequence[str]
    is_whole: bool


@dataclass(frozen=True, slots=True)
class _Choice:
    """One of an answer's choices."""

    text: _Tokens
    calls: Sequence[str]


def reading(parts: Sequence[Part]) -> Reading:
    """The parts of one whole answer, ready to be compared. Never raises."""
    first = parts[0] if parts else None
    try:
        if isinstance(first, Tensors):
            return Reading(kind="tensors", value=[part.outputs for part in parts if isinstance(part, Tensors)])
        if isinstance(first, Answer):
            return _of_output(first.output)
        if isinstance(first, Message):
            return _of_choices(said.in_body(first.body))
        if isinstance(first, STREAMED):
            events = [one for part in parts for one in singly(part) if isinstance(one, Delta)]
            return _of_choices(said.in_stream(events))
    except (said.Unreadable, LookupError, TypeError, ValueError, AttributeError) as error:
        reason = str(error) if isinstance(error, said.Unreadable) else "an answer is not of the form that it should be"
        return Reading(kind="nothing", reason=reason)
    return Reading(kind="nothing", reason="an answer is empty")


def compare(real: Reading, shadow: Reading) -> Comparison:
    """Hold them against each other. Never raises."""
    for one in (real, shadow):
        if one.kind == "nothing":
            return Comparison(agreed=None, similarity=None, what="nothing", reason=one.reason)
    if real.kind != shadow.kind:
        return Comparison(agreed=None, similarity=None, what="nothing", reason="the answers are of two kinds")
    return _COMPARED[real.kind](real.value, shadow.value)


def tokens_of(text: str) -> Sequence[str]:
    """The first tokens of a text."""
    return [found[0] for found in islice(_TOKEN.finditer(text[:MAX_CHARACTERS]), MAX_TOKENS)]


def common(one: Sequence[str], other: Sequence[str]) -> int:
    """The length of the longest common subsequence.

    By bit vectors (Hyyrö, "Bit-parallel LCS-length computation revisited", 2004): each token of `other` costs a few
    operations on a number of `len(one)` bits.
    """
    places: dict[str, int] = {}
    for at, token in enumerate(one):
        places[token] = places.get(token, 0) | 1 << at
    every = (1 << len(one)) - 1
    left = every
    for token in other:
        met = left & places.get(token, 0)
        left = ((left + met) | (left - met)) & every
    return len(one) - left.bit_count()


def alike(one: Sequence[str], other: Sequence[str]) -> float:
    """ROUGE-L of two lists of tokens, 0 to 1; two empty ones are the same."""
    if one == other:
        return 1.0
    # Once the shorter one's bits are the number, the longer one costs the least.
    short, long = (one, other) if len(one) <= len(other) else (other, one)
    return 2 * common(short, long) / (len(one) + len(other))


# --- reading ------------------------------------------------------------------------------------


def _of_output(output: Mapping[str, Any]) -> Reading:
    if "labels" in output:
        return Reading(kind="labels", value=[entry["name"] for entry in output["labels"]])
    if "label" in output:
        return Reading(kind="scores", value=(output["label"], list(output.get("scores", ()))))
    if "embeddings" in output or "embedding" in output:
        vectors = np.asarray(output["embeddings"] if "embeddings" in output else output["embedding"], np.float64)
        return Reading(kind="embedding", value=np.atleast_2d(vectors))
    if "speech_probability" in output:
        return Reading(kind="probability", value=float(output["speech_probability"]))
    if "message" in output or "text" in output:
        return _of_choices(
            [said.of_message(output["message"]) if "message" in output else said.Choice(text=output["text"])]
        )
    return Reading(kind="nothing", reason="there is no measure for answers of this task")


def _of_choices(choices: Iterable[said.Choice]) -> Reading:
    value = []
    for choice in choices:
        tokens = tokens_of(choice.text)
        is_whole = choice.is_whole and len(choice.text) <= MAX_CHARACTERS and len(tokens) < MAX_TOKENS
        value.append(_Choice(_Tokens(tokens, is_whole), sorted(choice.calls)))
    return Reading(kind="choices", value=value)


# --- comparing ----------------------------------------------------------------------------------


def _labels(one: Sequence[str], other: Sequence[str]) -> Comparison:
    in_both = (Counter(one) & Counter(other)).total()
    similarity = in_both / (max(len(one), len(other)) or 1) if one or other else 1.0
    return _by_label(one[:1] == other[:1], similarity)


def _scores(one: tuple[str, Sequence[float]], other: tuple[str, Sequence[float]]) -> Comparison:
    (label, scores), (other_label, other_scores) = one, other
    is_same = label == other_label
    if not scores or len(scores) != len(other_scores):
        return _by_label(is_same, float(is_same))
    in_common = sum(min(pair) for pair in zip(scores, other_scores, strict=True))
    return _by_label(is_same, 1.0 if scores == other_scores else max(0.0, min(1.0, in_common)))


def _by_label(is_same: bool, similarity: float) -> Comparison:  # noqa: FBT001 - what it is about
    reason = "" if is_same else "the best label is another one"
    return Comparison(agreed=is_same, similarity=similarity, what="label", reason=reason)


def _embedding(one: NDArray[Any], other: NDArray[Any]) -> Comparison:
    if one.shape != other.shape:
        return Comparison(agreed=False, similarity=None, what="embedding", reason="they have other sizes")
    if not (np.isfinite(one).all() and np.isfinite(other).all()):
        return Comparison(agreed=None, similarity=None, what="embedding", reason="an embedding is not of numbers")
    if np.array_equal(one, other):
        return Comparison(agreed=True, similarity=1.0, what="embedding")
    lengths = np.linalg.norm(one, axis=-1) * np.linalg.norm(other, axis=-1)
    cosines = np.divide((one * other).sum(axis=-1), lengths, out=np.zeros_like(lengths), where=lengths > 0)
    least = float(np.clip(cosines.min(), -1.0, 1.0))
    agreed = least >= AGREED_COSINE
    return Comparison(
        agreed=agreed, similarity=least, what="embedding", reason="" if agreed else "a vector points elsewhere"
    )


def _probability(one: float, other: float) -> Comparison:
    difference = abs(one - other)
    agreed = difference <= AGREED_PROBABILITY
    reason = "" if agreed else "the probabilities differ"
    return Comparison(agreed=agreed, similarity=max(0.0, 1.0 - difference), what="probability", reason=reason)


def _choices(one: Sequence[_Choice], other: Sequence[_Choice]) -> Comparison:
    if len(one) != len(other):
        return Comparison(agreed=False, similarity=0.0, what="text", reason="one has more choices")
    has_calls = any(choice.calls for choice in (*one, *other))
    least, agreed = 1.0, True
    for mine, others in zip(one, other, strict=True):
        if mine.calls or others.calls:  # a text beside a call is commentary
            similarity = alike(mine.calls, others.calls)
            agreed = agreed and mine.calls == others.calls
        else:
            similarity = _text(mine.text, others.text)
            agreed = agreed and similarity >= AGREED_TEXT
        least = min(least, similarity)
    what: What = "tool_calls" if has_calls else "text"
    reason = "" if agreed else "the calls are others" if has_calls else "the texts differ"
    return Comparison(agreed=agreed, similarity=least, what=what, reason=reason)


def _text(one: _Tokens, other: _Tokens) -> float:
    """Where only the beginning of one is known, the other's beginning is held against it."""
    known = min((len(text.tokens) for text in (one, other) if not text.is_whole), default=None)
    return alike(one.tokens[:known], other.tokens[:known])


def _tensors(one: Sequence[Sequence[Tensor]], other: Sequence[Sequence[Tensor]]) -> Comparison:
    if len(one) != len(other):
        return _unlike("one has more answers")
    same = total = 0
    for mine, others in zip(one, other, strict=True):
        theirs = {tensor.name: tensor for tensor in others}
        if len(theirs) != len(mine) or any(tensor.name not in theirs for tensor in mine):
            return _unlike("the outputs have other names")
        for tensor in mine:
            match = theirs[tensor.name]
            if (tensor.datatype, tensor.shape) != (match.datatype, match.shape):
                return _unlike("an output has another datatype or shape")
            found, of = _elements(tensor, match)
            same, total = same + found, total + of
    if same == total:
        return Comparison(agreed=True, similarity=1.0, what="tensors")
    return Comparison(agreed=False, similarity=same / total, what="tensors", reason="elements differ")


def _unlike(reason: str) -> Comparison:
    return Comparison(agreed=False, similarity=0.0, what="tensors", reason=reason)


def _elements(one: Tensor, other: Tensor) -> tuple[int, int]:
    """How many elements are the same, of how many. Texts and broken tensors are looked at as a whole."""
    count = int(np.prod(one.shape, dtype=np.float64)) or 1
    if one.data == other.data:
        return count, count
    dtype = np.dtype("<u2") if one.datatype == BF16 else DTYPES.get(one.datatype)
    size = memoryview(one.data).nbytes
    is_broken = dtype is None or size != memoryview(other.data).nbytes or size != count * dtype.itemsize
    if one.datatype == BYTES or is_broken:
        return 0, count
    values, others = (np.frombuffer(tensor.data, dtype) for tensor in (one, other))
    if one.datatype == BF16:  # the upper half of a float of 32 bits
        values, others = ((bits.astype(np.uint32) << 16).view(np.float32) for bits in (values, others))
    if values.dtype.kind != "f":
        return int((values == others).sum()), count
    with np.errstate(invalid="ignore", over="ignore"):
        wide, wide_others = values.astype(np.float64), others.astype(np.float64)
        within = ABSOLUTE + RELATIVE * np.maximum(np.abs(wide), np.abs(wide_others))
        near = np.isfinite(within) & (np.abs(wide - wide_others) <= within)
    same = near | (wide == wide_others) | (np.isnan(wide) & np.isnan(wide_others))
    return int(same.sum()), count


_COMPARED: Final[Mapping[str, Callable[[Any, Any], Comparison]]] = {
    "labels": _labels,
    "scores": _scores,
    "embedding": _embedding,
    "choices": _choices,
    "probability": _probability,
    "tensors": _tensors,
}
