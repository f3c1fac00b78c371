import json

import pytest

from gateway.tuning.report import Report, ServerReport, Tally, class_report, parse_report, percentiles, timeline


def tally(**fields):
    return Tally(**{"name": "a", "slo_ms": 0.0, "rows": 1, "from_s": 1.0, "until_s": 3.0} | fields)


def test_percentiles_are_times_that_were_measured():
    found = percentiles([float(n) for n in range(1, 1001)])
    assert (found.p50, found.p90, found.p95, found.p99, found.p99_9, found.max) == (500, 900, 950, 990, 999, 1000)
    assert found.mean == 500.5
    assert percentiles([]) is None
    assert percentiles([7.0]).p99_9 == 7.0


def test_only_what_was_due_in_the_counted_time_counts():
    one = tally()
    for due_s in (0.5, 1.0, 2.9, 3.0):
        one.due(due_s)
        one.ended(due_s, due_s + 5.0)
    found = class_report([one], name="a", seconds=2.0)
    assert (found.sent, found.codes, found.qps, found.unfinished) == (2, {"ok": 2}, 1.0, 0)
    assert found.latency.p50 == pytest.approx(5000)


def test_goodput_is_what_was_right_and_in_time():
    one, other = tally(slo_ms=10.0), tally(name="b", rows=4)
    for latency_s, code in ((0.005, "ok"), (0.02, "ok"), (0.001, "overloaded")):
        one.due(1.5)
        one.ended(1.5, 1.5 + latency_s, code)
    one.due(1.6)  # nobody knows what became of it
    other.due(2.5)
    other.ended(2.5, 9.0)
    first = class_report([one], name="a", seconds=2.0)
    assert (first.goodput, first.qps, first.unfinished, first.slo_ms) == (0.5, 1.0, 1, 10.0)
    assert first.codes == {"ok": 2, "overloaded": 1}
    both = class_report([one, other], name="all", seconds=2.0)
    assert (both.sent, both.goodput, both.rows_per_s, both.slo_ms) == (5, 1.0, 3.0, 0.0)


def test_streams_tell_of_their_tokens():
    one = tally()
    one.due(1.5)
    one.streamed(1.5, first_token_s=1.6, gaps_ms=[10.0, 30.0], tokens=3)
    one.ended(1.5, 1.64)
    one.streamed(0.5, first_token_s=0.6, gaps_ms=[1.0], tokens=100)
    found = class_report([one], name="a", seconds=2.0)
    assert found.first_token.p50 == pytest.approx(100)
    assert found.inter_token.max == 30.0
    assert found.tokens_per_s == 1.5


def test_the_timeline_goes_by_when_requests_were_due():
    one = tally()
    one.ended(1.5, 2.5)
    one.ended(1.7, 1.8, "internal")
    one.ended(2.2, 2.3)
    steps = timeline([one])
    assert [(step.at_s, step.answered, step.failed) for step in steps] == [(1.0, 1, 1), (2.0, 1, 0)]
    assert steps[0].p99 == pytest.approx(1000)


def test_a_report_comes_back_out_of_its_json():
    one = tally()
    one.due(1.5)
    one.ended(1.5, 1.6)
    server = ServerReport(
        backend="triton",
        model="m",
        executions=3,
        mean_batch=2.0,
        queue_ms=1.0,
        compute_ms=3.0,
        queue_share=0.25,
        batch_sizes={2: 3},
    )
    made = class_report([one], name="a", seconds=2.0)
    whole = Report(
        kind="load",
        title="t",
        setting={"url": "u"},
        seconds=2.0,
        whole=made,
        classes=(made,),
        servers=(server,),
        timeline=timeline([one]),
        notes=("n",),
    )
    assert parse_report(json.loads(json.dumps(whole.as_json()))) == whole
    with pytest.raises(ValueError, match="form"):
        parse_report({})
    with pytest.raises(ValueError, match="no report"):
        parse_report({"form": "traffic-report/1", "whole": {}, "classes": []})
