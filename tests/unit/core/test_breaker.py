"""The breaker's states as timelines."""

from dataclasses import replace

from gateway.core.breaker import COOL_DOWN_US, FAILURES_TO_OPEN, BreakerBoard, server_of
from gateway.core.errors import Fault, FaultKind
from gateway.core.types import Place

HERE = Place(backend="b", model="m", version="1")
DOWN, BROKEN = FaultKind.UNAVAILABLE, FaultKind.BROKEN


class Timeline:
    def __init__(self) -> None:
        self.board = BreakerBoard()
        self.now_us = 1

    def end(self, *, answered=False, fault=None):
        self.board.trying(HERE, now_us=self.now_us, within_us=1000)
        if answered:
            self.board.answered(HERE)
        elif fault:
            self.board.failed(HERE, now_us=self.now_us, fault=Fault(kind=fault, message=""))
        else:
            self.board.released(HERE)

    def probe(self, fault=None):
        self.board.probed(HERE, now_us=self.now_us, fault=fault)

    @property
    def why_not(self):
        return self.board.of(HERE).why_not(self.now_us)


def test_failures_in_a_row_open_it():
    line = Timeline()
    for _ in range(FAILURES_TO_OPEN - 1):
        line.end(fault=BROKEN)
        assert line.why_not is None
    line.end(fault=BROKEN)
    assert line.why_not == "breaker open: broken"


def test_a_success_between_starts_the_count_anew():
    line = Timeline()
    for _ in range(10):
        line.end(fault=BROKEN)
        line.end(answered=True)
    assert line.why_not is None


def test_ends_without_a_verdict_change_nothing():
    line = Timeline()
    line.end(fault=BROKEN)
    line.end(fault=BROKEN)
    for _ in range(10):
        line.end()
    assert line.why_not is None
    line.end(fault=BROKEN)
    assert line.why_not is not None


def test_a_probe_that_finds_nobody_opens_at_once_and_one_that_finds_it_closes():
    line = Timeline()
    line.probe(DOWN)
    assert line.why_not == "breaker open: unavailable"
    line.probe()
    assert line.why_not is None


def test_a_slow_probe_counts_as_one_failure():
    line = Timeline()
    line.probe(FaultKind.TIMEOUT)
    assert line.why_not is None


def test_a_probe_cannot_clear_a_backend_that_answers_wrongly():
    line = Timeline()
    for _ in range(FAILURES_TO_OPEN):
        line.end(fault=BROKEN)
    line.probe()
    assert line.why_not is not None


def test_what_probes_opened_a_probe_closes():
    line = Timeline()
    for _ in range(FAILURES_TO_OPEN):
        line.probe(FaultKind.TIMEOUT)
    assert line.why_not == "breaker open: timeout"
    line.probe()
    assert line.why_not is None


def test_good_probes_between_start_the_count_of_probes_anew_and_leave_that_of_requests():
    line = Timeline()
    line.end(fault=BROKEN)
    line.end(fault=BROKEN)
    for _ in range(5):
        line.probe(FaultKind.TIMEOUT)
        line.probe()
    assert line.why_not is None
    line.end(fault=BROKEN)
    assert line.why_not == "breaker open: broken"


def test_half_open_lets_one_request_try_and_its_end_decides():
    line = Timeline()
    for _ in range(FAILURES_TO_OPEN):
        line.end(fault=BROKEN)
    line.now_us += COOL_DOWN_US
    assert line.why_not is None
    line.board.trying(HERE, now_us=line.now_us, within_us=1000)
    assert line.why_not == "breaker half-open: a trial request is under way"
    line.board.failed(HERE, now_us=line.now_us, fault=Fault(kind=BROKEN, message=""))
    assert line.why_not == "breaker open: broken"
    line.now_us += COOL_DOWN_US
    line.end(answered=True)
    assert line.why_not is None


def test_a_trial_without_a_verdict_frees_its_place():
    line = Timeline()
    line.probe(DOWN)
    line.now_us += COOL_DOWN_US
    line.end()
    assert line.why_not is None


def test_a_trial_whose_end_never_comes_holds_the_place_no_longer_than_its_own_time():
    line = Timeline()
    line.probe(DOWN)
    line.now_us += COOL_DOWN_US
    line.board.trying(HERE, now_us=line.now_us, within_us=1000)
    line.now_us += 1000
    assert line.why_not is None


def test_a_trial_that_begins_lets_others_in_and_one_more_failure_shuts_them_out():
    line = Timeline()
    for _ in range(FAILURES_TO_OPEN):
        line.end(fault=BROKEN)
    line.now_us += COOL_DOWN_US
    line.board.trying(HERE, now_us=line.now_us, within_us=1000)
    line.board.began(HERE)
    assert line.why_not is None
    line.board.failed(HERE, now_us=line.now_us, fault=Fault(kind=BROKEN, message=""))
    assert line.why_not == "breaker open: broken"


def test_streams_that_begin_and_always_break_open_it():
    line = Timeline()
    for _ in range(FAILURES_TO_OPEN):
        line.board.trying(HERE, now_us=line.now_us, within_us=1000)
        line.board.began(HERE)
        line.board.failed(HERE, now_us=line.now_us, fault=Fault(kind=BROKEN, message=""))
    assert line.why_not == "breaker open: broken"


def test_breakers_are_apart():
    line = Timeline()
    line.probe(DOWN)
    for other in (replace(HERE, model="o"), replace(HERE, backend="o"), replace(HERE, version="2")):
        assert line.board.of(other).why_not(1) is None
    assert set(line.board.all()) == {HERE}
    line.board.keep_only([], now_us=1)
    assert line.board.all() == {}


def test_late_failures_do_not_hide_that_it_was_away():
    line = Timeline()
    line.probe(DOWN)
    line.end(fault=DOWN)
    line.probe()
    assert line.why_not is None


def test_request_failures_alone_are_not_cleared_by_a_probe():
    line = Timeline()
    for _ in range(FAILURES_TO_OPEN):
        line.end(fault=DOWN)
    line.probe()
    assert line.why_not == "breaker open: unavailable"


# --- a model whose process died, and whole servers ------------------------------------------------

DEAD = Fault(kind=FaultKind.DEAD, message="stub", dead_model="tokenizer")
AWAY = Fault(kind=FaultKind.UNAVAILABLE, message="refused", is_server=True)
NEIGHBOUR = replace(HERE, model="n")
ELSEWHERE = replace(HERE, replica="other")


def test_a_dead_model_opens_at_once_and_no_probe_closes_it():
    line = Timeline()
    line.board.failed(HERE, now_us=line.now_us, fault=DEAD)
    line.probe()
    assert line.why_not == "breaker open: dead"
    assert line.board.of(HERE).dead_model == "tokenizer"
    line.board.healed(HERE)
    assert line.why_not is None
    assert line.board.of(HERE).dead_model == ""


def test_a_server_that_is_away_takes_all_its_models_along_and_no_other_replica():
    board = BreakerBoard()
    for _ in range(FAILURES_TO_OPEN):
        board.failed(HERE, now_us=1, fault=AWAY)
    assert board.of(HERE).failures == 0
    assert board.why_not(HERE, 2) == board.why_not(NEIGHBOUR, 2) == "breaker open: unavailable"
    assert board.why_not(ELSEWHERE, 2) is None


def test_a_server_that_requests_alone_found_away_is_back_when_a_probe_finds_it():
    board = BreakerBoard()
    for _ in range(FAILURES_TO_OPEN):
        board.failed(HERE, now_us=1, fault=AWAY)
    board.probed(server_of(HERE), now_us=2, fault=None)  # it was away for less than a round of probes
    assert board.why_not(HERE, 3) is None


def test_one_trial_decides_for_a_whole_server():
    board = BreakerBoard()
    for _ in range(FAILURES_TO_OPEN):
        board.failed(HERE, now_us=1, fault=AWAY)
    later_us = 2 + COOL_DOWN_US
    assert board.why_not(NEIGHBOUR, later_us) is None
    board.trying(NEIGHBOUR, now_us=later_us, within_us=1000)
    assert board.why_not(HERE, later_us + 1) == "breaker half-open: a trial request is under way"
    board.answered(NEIGHBOUR)
    assert board.why_not(HERE, later_us + 2) is None
    assert board.of(server_of(HERE)).failures == 0


def test_one_request_that_found_nobody_is_forgotten_with_the_next_good_probe():
    board = BreakerBoard()
    board.failed(HERE, now_us=1, fault=AWAY)
    board.probed(server_of(HERE), now_us=2, fault=None)
    board.probed(server_of(HERE), now_us=3, fault=FaultKind.TIMEOUT)  # slow, not away
    assert board.why_not(HERE, 4) is None


# --- places that asked to wait ----------------------------------------------------------------------


def test_a_place_that_asked_to_wait_is_left_alone_until_then_and_no_longer():
    board = BreakerBoard()
    board.cool(HERE, until_us=1000)
    assert board.why_not(HERE, 999) == "it asked to wait"
    assert board.cooling_us(HERE, 400) == 600
    assert board.why_not(replace(HERE, model="other"), 0) is None
    assert board.why_not(HERE, 1000) is None
    assert board.cooling_us(HERE, 0) is None  # what is over is forgotten


def test_the_longest_wait_counts_and_an_answer_to_another_request_does_not_end_it():
    board = BreakerBoard()
    board.cool(HERE, until_us=1000)
    board.cool(HERE, until_us=500)
    board.answered(HERE)
    board.began(HERE)
    assert board.cooling_us(HERE, 0) == 1000


def test_the_shortest_of_several_waits_is_told():
    board, other = BreakerBoard(), replace(HERE, model="other")
    board.cool(HERE, until_us=1000)
    board.cool(other, until_us=300)
    assert board.shortest_cooling_us([(HERE, ""), (other, ""), (replace(HERE, model="third"), "")], 0) == 300
    assert board.shortest_cooling_us([(replace(HERE, model="third"), "")], 0) is None


def test_places_that_no_rule_names_any_more_are_forgotten():
    board = BreakerBoard()
    board.cool(HERE, until_us=1000)
    board.keep_only([], now_us=0)
    assert board.why_not(HERE, 0) is None


def test_a_model_that_callers_name_is_left_alone_for_as_long_as_it_asked():
    board = BreakerBoard()
    board.cool(HERE, until_us=1000)
    board.keep_only([server_of(HERE)], now_us=999)
    assert board.why_not(HERE, 999) == "it asked to wait"
    board.keep_only([server_of(HERE)], now_us=1000)
    assert not board._cooling
