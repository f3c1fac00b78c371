"""What an answer costs: prices by the token, or a share of a server's time. Exact, and rounded once.

Money is counted in nano-dollars (1e-9 US dollars): a single token of today's cheapest models costs some tens of them.
"""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final

from gateway.core.types import Usage, Work

NANO_USD_PER_USD: Final = 1_000_000_000
HIGHEST_PRICE: Final = 1_000_000  # USD per million tokens; what is above was meant in another unit
_US_PER_HOUR: Final = 3_600_000_000
_FIELDS: Final = ("input", "output", "cached_input", "reasoning")


class PriceError(ValueError):
    """A price table that cannot be taken; the text names the entry and the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Nano-dollars for each token.

    Attributes:
        cached: of input tokens that the engine had in its cache; None = as `input`.
        reasoning: of output tokens that were thought and not said; None = as `output`.
    """

    input: Fraction | int
    output: Fraction | int
    cached: Fraction | int | None = None
    reasoning: Fraction | int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceTable:
    """Prices by their entry's name: `model`, or `backend/model` for one backend alone."""

    entries: Mapping[str, Price] = field(default_factory=dict)

    def of(self, backend: str, model: str) -> Price | None:
        """The price of a model at a backend; None where there is none."""
        return self.entries.get(f"{backend}/{model}") or self.entries.get(model)


def cost_nano_usd(price: Price, usage: Usage) -> int:
    """What `usage` costs, rounded half up.

    Cached tokens are a part of the input and reasoning tokens one of the output: each is taken out of its whole, never
    added to it. A part that is said to be more than its whole is the whole; what is unknown or negative is 0.
    """
    whole_in, whole_out = _count(usage.input_tokens), _count(usage.output_tokens)
    cached = min(_count(usage.cached_tokens), whole_in)
    reasoning = min(_count(usage.reasoning_tokens), whole_out)
    return _rounded(
        (whole_in - cached) * price.input
        + cached * (price.input if price.cached is None else price.cached)
        + (whole_out - reasoning) * price.output
        + reasoning * (price.output if price.reasoning is None else price.reasoning)
    )


def expected_nano_usd(price: Price, work: Work) -> int:
    """What `work` will cost at most, with nothing in the cache."""
    return cost_nano_usd(price, Usage(input_tokens=work.input_tokens, output_tokens=work.output_tokens))


def share_nano_usd(usd_per_hour: float, share_us: int) -> int:
    """What `share_us` microseconds of a server cost that is `usd_per_hour` for an hour."""
    return _rounded(_exact(usd_per_hour) * NANO_USD_PER_USD * max(0, share_us) / _US_PER_HOUR)


def parse_prices(document: object) -> PriceTable:
    """Read a price table. Raises `PriceError`; never takes a part of a table.

    It is a mapping `prices` of entries with `input`, `output`, and where they differ `cached_input` and `reasoning`,
    in US dollars for a million tokens.
    """
    if document is None:
        return PriceTable()
    fields = _mapping(document, "the price table")
    _known(fields, ("prices",), "the price table")
    entries = fields.get("prices")
    if entries is None:
        return PriceTable()
    return PriceTable(entries={name: _price(entry, name) for name, entry in _mapping(entries, "prices").items()})


def _price(entry: object, name: str) -> Price:
    at = f"prices: '{name}'"
    fields = _mapping(entry, at)
    _known(fields, _FIELDS, at)
    for needed in ("input", "output"):
        if needed not in fields:
            raise PriceError(f"{at}: {needed} is missing")
    per_token = {key: _per_token(value, f"{at}: {key}") for key, value in fields.items()}
    return Price(
        input=per_token["input"],
        output=per_token["output"],
        cached=per_token.get("cached_input"),
        reasoning=per_token.get("reasoning"),
    )


def _per_token(value: object, at: str) -> Fraction:
    """Nano-dollars per token, from dollars per million of them."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= HIGHEST_PRICE:  # nan neither
        raise PriceError(f"{at}: must be US dollars per million tokens, a number from 0 to {HIGHEST_PRICE}")
    return _exact(value) * 1000


def _exact(value: float) -> Fraction:
    """The number as it was written: 0.42 is 42/100, not the float that is nearest to it."""
    return Fraction(str(value))


def _rounded(value: Fraction | int) -> int:
    return math.floor(value + Fraction(1, 2))


def _count(tokens: int | None) -> int:
    return max(0, tokens or 0)


def _mapping(value: object, at: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise PriceError(f"{at}: must be a mapping")
    for key in value:
        if not isinstance(key, str) or not key:
            raise PriceError(f"{at}: {key!r}: names must be texts (put it in quotes)")
    return value


def _known(fields: Mapping[str, Any], known: tuple[str, ...], at: str) -> None:
    for name in fields:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            suggestion = f" (did you mean '{close[0]}'?)" if close else f" (known: {', '.join(known)})"
            raise PriceError(f"{at}: unknown field '{name}'{suggestion}")
