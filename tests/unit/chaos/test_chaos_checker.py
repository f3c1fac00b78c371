"""The judge of the chaos suite: a good history has no finding; each property that is broken is found by its name."""

from dataclasses import replace

import pytest

from tests.chaos.allowed import GRACE_S, allowed
from tests.chaos.checker import TIMEOUT_S, check, outcomes
from tests.chaos.history import LINES, Ended, Execution, History, Limit, Sent, Struck, line, read

LIMITS = {"requests": Limit(kind="requests", amount=5, per_s=1.0, burst=8), "places": Limit(kind="places", amount=2)}
SENT = Sent(id="a", kind="chat", at=1.0)
ENDED = Ended(id="a", at=2.0, how="answered", status=200, answer="x", expected="x")


def failed(code: str, *, status: int = 503, **changes: object) -> Ended:
    return replace(ENDED, status=status, code=code, answer="", **changes)


def history(*pairs: tuple[Sent, Ended], **more: object) -> History:
    told = History(limits=LIMITS, **more)
    for sent, ended in pairs:
        told.sent.append(sent)
        told.ended.append(ended)
    return told


def rules(told: History) -> list[str]:
    return [found.rule for found in check(told)]


def test_a_good_history_has_no_finding():
    told = history((SENT, ENDED))
    assert rules(told) == []
    assert outcomes(told) == {"chat": {"ok": 1}}


def test_a_request_without_an_end_and_one_with_two():
    assert rules(History(sent=[SENT])) == ["one end"]
    assert rules(History(sent=[SENT], ended=[ENDED, ENDED])) == ["one end"]
    assert rules(History(ended=[ENDED])) == ["one end"]


@pytest.mark.parametrize("how", ["answered", "streamed"])
def test_a_success_that_says_something_else(how: str):
    assert rules(history((SENT, replace(ENDED, how=how, answer="y")))) == ["right answers"]


@pytest.mark.parametrize(
    ("ended", "struck", "found"),
    [
        (failed("no_healthy_backend"), (), ["errors of the closed list"]),
        (failed("no_healthy_backend"), (Struck(part="llm", action="kill", began=0.5, healed=1.5),), []),
        (failed("no_healthy_backend"), (Struck(part="control", action="kill", began=0.5, healed=1.5),), [1]),
        (failed("internal", status=500), (Struck(part="llm", action="kill", began=0.5, healed=1.5),), [1]),
        (failed("", how="cut", status=0), (Struck(part="worker", action="kill", began=0.5, healed=1.5),), []),
        (failed("", how="cut", status=0), (Struck(part="redis", action="kill", began=0.5, healed=1.5),), [1]),
        (failed("no_healthy_backend"), (Struck(part="llm", action="kill", began=-99, healed=1 - GRACE_S - 0.1),), [1]),
    ],
)
def test_a_failure_needs_a_fault_of_its_time_that_excuses_it(ended: Ended, struck: tuple[Struck, ...], found: list):
    assert rules(history((SENT, ended), struck=list(struck))) == ["errors of the closed list"] * len(found)


def test_one_triton_of_two_excuses_no_tensor():
    sent, one, other = (
        replace(SENT, kind="tensor"),
        Struck(part="triton-0", action="kill", began=0.5, healed=3.0),
        Struck(part="triton-1", action="kill", began=0.5, healed=3.0),
    )
    assert allowed(sent, failed("no_healthy_backend"), [one]) == set()
    assert "no_healthy_backend" in allowed(sent, failed("no_healthy_backend"), [one, other])


def test_what_is_stuck():
    late = 1.0 + TIMEOUT_S + GRACE_S + 0.1
    assert rules(history((SENT, replace(ENDED, at=late)))) == ["nothing stuck"]
    assert "nothing stuck" in rules(history((SENT, failed("", how="silent", status=0))))
    met = Struck(part="llm", action="pause", began=0.5, healed=15.0)
    assert rules(history((SENT, replace(ENDED, at=late)), struck=[met])) == []


def pair(name: str, kind: str, at: float, until: float, ticket: int, **more: object) -> tuple[Sent, Ended]:
    sent = Sent(id=name, kind=kind, at=at, order_key="k")
    return sent, replace(ENDED, id=name, at=until, ticket=ticket, **more)


def test_serial_requests_one_at_a_time():
    first = pair("a", "serial", 1.0, 2.0, 1, execution="e1")
    second = pair("b", "serial", 1.1, 3.0, 2, execution="e2")
    good = [Execution(id="e1", began=1.1, ended=1.9), Execution(id="e2", began=2.0, ended=2.9)]
    assert rules(history(first, second, executions=good)) == []
    assert rules(history(first, second, executions=[good[0], replace(good[1], began=1.5)])) == ["order"]
    assert rules(history(first, second, executions=good[:1])) == ["order"]
    twice = pair("b", "serial", 1.1, 3.0, 1, execution="e2")
    assert "order" in rules(history(first, twice, executions=good))


def test_released_answers_in_the_order_of_their_tickets():
    first = pair("a", "release", 1.0, 2.0, 1, first=5, last=6)
    assert rules(history(first, pair("b", "release", 1.1, 3.0, 2, first=6, last=7))) == []
    assert rules(history(first, pair("b", "release", 1.1, 3.0, 2, first=4, last=7))) == ["order"]
    assert rules(history(first, pair("b", "release", -2.0, 0.5, 2, first=7, last=8))) == ["order"]


def burst(count: int) -> list[tuple[Sent, Ended]]:
    sent = [Sent(id=str(n), kind="requests", at=1.0, key="requests") for n in range(count)]
    return [(one, replace(ENDED, id=one.id, at=1.0)) for one in sent]


def test_a_limit_that_is_overspent():
    assert rules(history(*burst(8))) == []
    assert rules(history(*burst(9))) == ["limits"]
    away = Struck(part="redis", action="kill", began=0.5, healed=1.5)
    assert rules(history(*burst(9), struck=[away])) == []  # each worker decides alone, with its share
    assert rules(history(*burst(99), struck=[away])) == ["limits"]


def test_places_that_are_overspent():
    pairs, works = [], []
    for number in range(3):
        sent = Sent(id=str(number), kind="concurrent", at=1.0, key="places")
        pairs.append((sent, replace(ENDED, id=sent.id, execution=f"e{number}")))
        works.append(Execution(id=f"e{number}", began=1.1 + number / 10, ended=1.9))
    assert rules(history(*pairs[:2], executions=works[:2])) == []
    assert rules(history(*pairs, executions=works)) == ["limits"]


def test_a_log_is_read_back():
    struck = Struck(part="llm", action="kill", began=1.0, healed=2.0)
    told = read([line(one) for one in (SENT, ENDED, Execution(id="e", began=1.0, ended=2.0), struck)], LIMITS)
    assert (told.sent, told.ended, told.struck) == ([SENT], [ENDED], [struck])
    assert set(LINES) == {"sent", "ended", "execution", "struck"}
