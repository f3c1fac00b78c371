"""What an SLO says, and whether a report held it."""

import pytest

from gateway.tuning.report import Report, Tally, class_report
from gateway.tuning.slo import Slo, parse_slo, verdicts


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("50ms", Slo(ms=50, percent=99)),
        ("1.5s", Slo(ms=1500, percent=99)),
        ("p95=100ms", Slo(ms=100, percent=95)),
        (" P99.9=2S ", Slo(ms=2000, percent=99.9)),
    ],
)
def test_what_is_written(text, slo):
    assert parse_slo(text) == slo


@pytest.mark.parametrize("text", ["", "50", "p99", "p99=", "0ms", "-1ms", "p100=1s", "1h", "9" * 400 + "s"])
def test_what_is_none(text):
    with pytest.raises(ValueError, match="write an SLO as 50ms"):
        parse_slo(text)


def tally(name, *, slo_ms, late=0, sent=100):
    made = Tally(name=name, slo_ms=slo_ms, rows=1, from_s=0, until_s=1)
    for number in range(sent):
        made.due(0.0)
        made.ended(0.0, 0.5 if number < late else 0.005)
    return made


def report(*tallies):
    each = [class_report([one], name=one.name, seconds=1) for one in tallies]
    whole = class_report(tallies, name="all", seconds=1)
    return Report(
        kind="load", title="", setting={}, seconds=1, whole=whole, classes=tuple(each) if len(each) > 1 else ()
    )


def test_each_class_is_judged_by_its_own_slo_and_those_without_are_not():
    found = report(tally("a", slo_ms=10, late=1), tally("b", slo_ms=10, late=2), tally("c", slo_ms=0))
    assert [(one.name, one.is_held, one.sent) for one in verdicts(found)] == [("a", True, 100), ("b", False, 100)]
    assert [one.is_held for one in verdicts(found, percent=98)] == [True, True]
    assert str(verdicts(found)[1]) == "SLO p99=10ms not held: b: 98.00 % of 100 had a right answer within it"


def test_one_class_alone_is_the_whole():
    (one,) = verdicts(report(tally("a", slo_ms=10)))
    assert (one.name, one.share, one.is_held) == ("all", 1.0, True)


def test_where_nothing_was_due_nothing_is_held():
    (one,) = verdicts(report(tally("a", slo_ms=10, sent=0)))
    assert not one.is_held
