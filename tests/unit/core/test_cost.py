from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.cost import (
    Price,
    PriceError,
    PriceTable,
    cost_nano_usd,
    expected_nano_usd,
    parse_prices,
    share_nano_usd,
)
from gateway.core.types import Usage, Work

MT03 = Price(input=1, cached=Fraction(1, 10), output=2)


@pytest.mark.parametrize(
    ("price", "usage", "expected"),
    [
        pytest.param(MT03, {"input": 1000, "cached": 900, "output": 10}, 210, id="MT-03: the part is taken out"),
        pytest.param(MT03, {"input": 1000, "output": 10}, 1020, id="MT-03: cached missing"),
        pytest.param(MT03, {"input": 1000, "cached": 5000, "output": 10}, 120, id="MT-03: cached over the prompt"),
        pytest.param(MT03, {"input": 1000, "cached": -5, "output": 10}, 1020, id="MT-03: negative part"),
        pytest.param(MT03, {"input": -1000, "cached": 900, "output": -10}, 0, id="MT-03: never negative"),
        pytest.param(MT03, {"cached": 900, "output": 10}, 20, id="a part of nothing"),
        pytest.param(MT03, {}, 0, id="nothing known"),
        pytest.param(Price(input=1, output=2), {"input": 1000, "cached": 900}, 1000, id="no cached price"),
        pytest.param(Price(input=0, output=2, reasoning=3), {"output": 10, "reasoning": 4}, 24, id="reasoning apart"),
        pytest.param(Price(input=0, output=2), {"output": 10, "reasoning": 4}, 20, id="reasoning as output"),
        pytest.param(Price(input=0, output=2, reasoning=3), {"output": 10, "reasoning": 40}, 30, id="reasoning over"),
        pytest.param(Price(input=Fraction(1, 2), output=0), {"input": 1}, 1, id="half goes up"),
        pytest.param(
            Price(input=Fraction(2, 5), output=Fraction(2, 5)), {"input": 1, "output": 1}, 1, id="one rounding"
        ),
    ],
)
def test_cost(price: Price, usage: dict[str, int], expected: int):
    assert cost_nano_usd(price, Usage(**{f"{k}_tokens": v for k, v in usage.items()})) == expected


counts = st.none() | st.integers(-10, 10**9)
prices = st.fractions(0, 10**6)


@given(prices, prices, st.none() | prices, st.none() | prices, st.lists(counts, min_size=4, max_size=4))
def test_cost_lies_between_all_at_the_lowest_and_all_at_the_highest_price(i, o, c, r, tokens):
    usage = Usage(input_tokens=tokens[0], output_tokens=tokens[1], cached_tokens=tokens[2], reasoning_tokens=tokens[3])
    price = Price(input=i, output=o, cached=c, reasoning=r)
    known = [p for p in (i, o, c, r) if p is not None]
    count = max(0, tokens[0] or 0) + max(0, tokens[1] or 0)
    assert min(known) * count - 1 <= cost_nano_usd(price, usage) <= max(known) * count + 1


def test_expected_cost_is_that_of_the_whole_work():
    assert expected_nano_usd(MT03, Work(input_tokens=1000, output_tokens=10)) == 1020


@pytest.mark.parametrize(
    ("per_hour", "share_us", "expected"),
    [(3.6, 1_000_000, 1_000_000), (2.5, 3_600_000_000, 2_500_000_000), (0.0, 10, 0), (1.0, -5, 0), (1.8, 1, 1)],
)
def test_a_share_of_a_server(per_hour, share_us, expected):
    assert share_nano_usd(per_hour, share_us) == expected


def test_a_table_is_read_in_dollars_per_million_tokens():
    table = parse_prices(
        {
            "prices": {
                "claude-sonnet-4.5": {"input": 4.5, "output": 15, "cached_input": 0.45},
                "deepseek": {"input": 0.42, "output": 1.68, "reasoning": 2},
            }
        }
    )
    assert table.of("any", "claude-sonnet-4.5") == Price(input=4500, output=15000, cached=450)
    assert table.of("any", "deepseek") == Price(input=420, output=1680, reasoning=2000)
    assert table.of("any", "unknown") is None


def test_a_price_at_one_backend_stands_before_that_of_the_model():
    table = parse_prices({"prices": {"m": {"input": 1, "output": 1}, "own/m": {"input": 0, "output": 0}}})
    assert table.of("own", "m") == Price(input=0, output=0)
    assert table.of("other", "m") == Price(input=1000, output=1000)


@pytest.mark.parametrize("document", [None, {}, {"prices": None}, {"prices": {}}])
def test_an_empty_table(document: Any):
    assert parse_prices(document) == PriceTable()


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], "the price table: must be a mapping"),
        ({"price": {}}, "unknown field 'price' (did you mean 'prices'?)"),
        ({"prices": [1]}, "prices: must be a mapping"),
        ({"prices": {4: {}}}, "prices: 4: names must be texts"),
        ({"prices": {"m": 3}}, "prices: 'm': must be a mapping"),
        ({"prices": {"m": {"input": 1}}}, "prices: 'm': output is missing"),
        (
            {"prices": {"m": {"input": 1, "output": 1, "cached": 1}}},
            "'m': unknown field 'cached' (did you mean 'cached_",
        ),
        ({"prices": {"m": {"input": 1, "output": 1, "zzz": 1}}}, "'m': unknown field 'zzz' (known: input, output,"),
        *(
            ({"prices": {"m": {"input": 1, "output": bad}}}, "prices: 'm': output: must be US dollars per million")
            for bad in (-1, True, "8", None, float("nan"), float("inf"), 10**7, 10**400, [1])
        ),
    ],
)
def test_what_is_wrong_with_a_table_is_named(document: Any, words: str):
    with pytest.raises(PriceError) as error:
        parse_prices(document)
    assert words in str(error.value)
