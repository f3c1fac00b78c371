import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.core import loads
from gateway.core.loads import MAX_PLACES, SAMPLES, STALE_US, TAU_US, USUAL_FOR_US, LoadBoard, Standing
from gateway.core.types import Place

A = Place(backend="x", model="m", replica="one:1")
B = Place(backend="x", model="n", replica="one:1")  # the same server
C = Place(backend="x", model="m", replica="two:1")
S = 1_000_000


def measured(board: LoadBoard, first_token_us: int, *, now_us: int, place: Place = A, is_stream: bool = True) -> None:
    sending = board.sent(place, tokens=1, now_us=now_us - first_token_us)
    board.began(sending, now_us=now_us, is_stream=is_stream)
    board.ended(sending, now_us=now_us)


def first_token(board: LoadBoard, now_us: int) -> float | None:
    return board.standing(A, now_us=now_us).first_token_us


def test_a_place_never_heard_of_has_nothing_to_do():
    assert LoadBoard().standing(A, now_us=5) == Standing()


def test_requests_and_tokens_count_for_the_server_and_for_the_place():
    board = LoadBoard()
    board.sent(A, tokens=100, now_us=0)
    sending = board.sent(B, tokens=50, now_us=10)
    board.sent(C, tokens=7, now_us=20)
    standing = board.standing(A, now_us=30)
    assert (standing.requests, standing.tokens, standing.own_requests, standing.since_sent_us) == (2, 150, 1, 30)
    assert board.standing(C, now_us=30).tokens == 7
    board.ended(sending, now_us=40)
    assert board.standing(A, now_us=40).tokens == 100
    assert board.standing(B, now_us=40) == Standing(requests=1, tokens=100, since_sent_us=30)


def test_ended_twice_changes_nothing():
    board = LoadBoard()
    board.sent(A, tokens=3, now_us=0)
    sending = board.sent(A, tokens=5, now_us=0)
    assert board.ended(sending, now_us=100) == 50
    assert board.ended(sending, now_us=200) == 0
    assert board.share(sending, now_us=200) == 0
    standing = board.standing(A, now_us=200)
    assert (standing.requests, standing.tokens, standing.own_requests) == (1, 3, 1)


# --- first tokens ---------------------------------------------------------------------------------


def test_only_the_first_part_of_a_stream_is_a_measurement():
    board = LoadBoard()
    whole, stream = board.sent(A, tokens=1, now_us=0), board.sent(A, tokens=1, now_us=0)
    board.began(whole, now_us=9 * S, is_stream=False)
    assert not board.standing(A, now_us=9 * S).is_measured
    board.began(stream, now_us=9 * S, is_stream=True)
    board.began(stream, now_us=20 * S, is_stream=True)
    assert first_token(board, 20 * S) == 9 * S
    late = board.sent(A, tokens=1, now_us=20 * S)
    board.ended(late, now_us=21 * S)
    board.began(late, now_us=22 * S, is_stream=True)
    assert first_token(board, 22 * S) == 9 * S


def test_a_sample_weighs_by_the_time_since_the_last_but_never_less_than_a_tenth():
    board = LoadBoard()
    measured(board, 100, now_us=0)
    measured(board, 200, now_us=TAU_US)
    assert first_token(board, TAU_US) == pytest.approx(100 + 100 * (1 - math.exp(-1)))
    board = LoadBoard()
    measured(board, 100, now_us=0)
    measured(board, 200, now_us=0)
    assert first_token(board, 0) == pytest.approx(110)


def test_what_is_old_counts_as_unmeasured_and_starts_anew():
    board = LoadBoard()
    measured(board, 100, now_us=0)
    assert first_token(board, STALE_US) == 100
    assert first_token(board, STALE_US + 1) is None
    measured(board, 300, now_us=STALE_US + 1)
    assert first_token(board, STALE_US + 1) == 300


@pytest.mark.parametrize(("samples", "expected"), [(range(1, 20), None), (range(1, 21), 19), (range(1, 101), 95)])
def test_the_usual_time_is_the_95th_percentile(samples: range, expected: int | None):
    board = LoadBoard()
    for us in reversed(samples):
        measured(board, us, now_us=1000)
    assert board.standing(A, now_us=1000).usual_first_token_us == expected


@given(st.lists(st.integers(0, 1000), min_size=SAMPLES + 1, max_size=3 * SAMPLES))
def test_the_usual_time_is_that_of_the_last_hundred(samples: list[int]):
    board = LoadBoard()
    for us in samples:
        measured(board, us, now_us=5000)
    assert board.standing(A, now_us=5000).usual_first_token_us == sorted(samples[-SAMPLES:])[94]
    kept = board._records[A].streams
    assert len(kept.in_order) == len(kept.samples) == SAMPLES


def test_what_is_usual_for_whole_answers_is_told_apart_from_first_tokens():
    board = LoadBoard()
    for us in range(1, 21):
        measured(board, us, now_us=1000)
        measured(board, 30 * us, now_us=1000, is_stream=False)
    standing = board.standing(A, now_us=1000)
    assert (standing.usual_first_token_us, standing.usual_whole_us) == (19, 570)
    assert board.standing(A, now_us=1001 + USUAL_FOR_US).usual_whole_us is None


def test_what_was_usual_is_forgotten():
    board = LoadBoard()
    for _ in range(30):
        measured(board, 10, now_us=S)
    later = S + USUAL_FOR_US + 1
    assert board.standing(A, now_us=later - 1).usual_first_token_us == 10
    assert board.standing(A, now_us=later).usual_first_token_us is None
    measured(board, 500, now_us=later)
    assert board.standing(A, now_us=later).usual_first_token_us is None


# --- shares of a server -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spans", "shares"),
    [
        pytest.param([(0, 100)], [100], id="alone"),
        pytest.param([(0, 100), (0, 100)], [50, 50], id="two together"),
        pytest.param([(0, 100), (50, 100)], [75, 25], id="one comes later"),
        pytest.param([(0, 30), (0, 90)], [15, 75], id="one leaves earlier"),
        pytest.param([(0, 10), (500, 520)], [10, 20], id="idle time is nobody's"),
        pytest.param([(0, 60), (0, 60), (0, 60), (30, 60)], [17, 17, 17, 8], id="four"),
    ],
)
def test_a_share_is_the_time_divided_by_how_many_were_there(spans: list[tuple[int, int]], shares: list[int]):
    assert played(spans) == pytest.approx(shares, abs=1)


def played(spans: list[tuple[int, int]]) -> list[int]:
    board = LoadBoard()
    moments = sorted(
        [(end, 0, i) for i, (_, end) in enumerate(spans)] + [(at, 1, i) for i, (at, _) in enumerate(spans)]
    )
    sendings: dict[int, Any] = {}
    shares = [0] * len(spans)
    for now_us, is_start, i in moments:
        if is_start:
            sendings[i] = board.sent(A if i % 2 else B, tokens=1, now_us=now_us)
        else:
            shares[i] = board.ended(sendings[i], now_us=now_us)
    assert not board._servers
    return shares


@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 10_000)), min_size=1, max_size=30))
def test_all_shares_together_are_the_time_in_which_the_server_had_work(drawn: list[tuple[int, int]]):
    spans = [(start, start + length) for start, length in drawn]
    shares = played(spans)
    busy = len({us for start, end in spans for us in range(start, end)})
    assert sum(shares) == pytest.approx(busy, abs=len(spans))
    assert all(0 <= share <= end - start + 1 for share, (start, end) in zip(shares, spans, strict=True))


def test_a_share_can_be_asked_for_on_the_way():
    board = LoadBoard()
    sending = board.sent(A, tokens=1, now_us=0)
    assert board.share(sending, now_us=40) == 40
    board.sent(A, tokens=1, now_us=40)
    assert board.share(sending, now_us=60) == 50
    assert board.ended(sending, now_us=60) == 50


# --- what is paid -----------------------------------------------------------------------------------


def test_the_cost_of_a_token_is_weighed_by_tokens_and_the_last_ones_count_most():
    board = LoadBoard()
    board.ended(board.sent(A, tokens=1, now_us=0), now_us=1)
    assert board.standing(A, now_us=1).nano_usd_per_token is None
    board.paid(A, nano_usd=1000, tokens=10)
    assert board.standing(A, now_us=1).nano_usd_per_token == 100
    board.paid(A, nano_usd=1000, tokens=990)
    assert 1.9 < (board.standing(A, now_us=1).nano_usd_per_token or 0) < 2.1
    for _ in range(200):
        board.paid(A, nano_usd=700, tokens=100)
    assert board.standing(A, now_us=1).nano_usd_per_token == pytest.approx(7, abs=0.01)


def test_nothing_is_paid_for_no_tokens_or_at_places_not_known():
    board = LoadBoard()
    board.paid(C, nano_usd=5, tokens=5)
    assert board.standing(C, now_us=0) == Standing()
    board.sent(A, tokens=1, now_us=0)
    board.paid(A, nano_usd=5, tokens=0)
    board.paid(A, nano_usd=-5, tokens=5)
    assert board.standing(A, now_us=0).nano_usd_per_token is None


# --- memory -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kept", "is_kept"),
    [
        (A, True),
        (C, False),
        (Place(backend="x", model="*", replica="one:1"), True),
        (Place(backend="x", model="*", replica="two:1"), False),
    ],
)
def test_places_that_no_rule_names_are_forgotten(kept: Place, is_kept: bool):
    board = LoadBoard()
    measured(board, 100, now_us=S)
    board.keep_only({kept})
    assert board.standing(A, now_us=S).is_measured is is_kept


def test_a_place_with_requests_is_not_forgotten():
    board = LoadBoard()
    sending = board.sent(A, tokens=1, now_us=0)
    board.keep_only(())
    board.began(sending, now_us=5, is_stream=True)
    board.ended(sending, now_us=6)
    assert first_token(board, 6) == 5
    board.keep_only(())
    assert first_token(board, 6) is None


def test_no_number_of_places_fills_the_memory():
    board = LoadBoard()
    for i in range(2 * MAX_PLACES):
        board.ended(board.sent(Place(backend="x", model=f"m{i}"), tokens=1, now_us=i), now_us=i)
        assert len(board._records) <= MAX_PLACES
    assert not board._servers


class AgainstPlainSums(RuleBasedStateMachine):
    """What the board says is what one would sum up from the open requests."""

    def __init__(self) -> None:
        super().__init__()
        self.board = LoadBoard()
        self.now_us = 0
        self.open: list[Any] = []
        self.closed: list[Any] = []

    @rule(place=st.sampled_from([A, B, C]), tokens=st.integers(0, 100), passed_us=st.integers(0, 1000))
    def send(self, place: Place, tokens: int, passed_us: int) -> None:
        self.now_us += passed_us
        self.open.append(self.board.sent(place, tokens=tokens, now_us=self.now_us))

    @precondition(lambda self: self.open)
    @rule(draw=st.data(), passed_us=st.integers(0, 1000), has_begun=st.booleans())
    def end(self, draw: Any, passed_us: int, has_begun: bool) -> None:
        self.now_us += passed_us
        sending = self.open.pop(draw.draw(st.integers(0, len(self.open) - 1)))
        if has_begun:
            self.board.began(sending, now_us=self.now_us, is_stream=True)
        assert 0 <= self.board.ended(sending, now_us=self.now_us) <= self.now_us - sending.sent_us + 1
        self.closed.append(sending)

    @precondition(lambda self: self.closed)
    @rule(draw=st.data())
    def end_again(self, draw: Any) -> None:
        self.board.ended(draw.draw(st.sampled_from(self.closed)), now_us=self.now_us)

    @rule()
    def forget(self) -> None:
        self.board.keep_only({A})

    @invariant()
    def same(self) -> None:
        for place in (A, B, C):
            here = [s for s in self.open if s.place.replica == place.replica]
            standing = self.board.standing(place, now_us=self.now_us)
            assert (standing.requests, standing.tokens) == (len(here), sum(s.tokens for s in here))
            assert standing.own_requests == sum(s.place == place for s in here)


TestAgainstPlainSums = AgainstPlainSums.TestCase


def test_constants_fit_each_other():
    assert 1 - math.exp(-loads.STALE_US / loads.TAU_US) > 0.9  # so old a figure would hardly have counted any more
