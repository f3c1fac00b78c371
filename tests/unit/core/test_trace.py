"""W3C Trace Context: what is taken for a trace, and what is sent on."""

import pytest

from gateway.core.trace import incoming, is_sampled

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GOOD = f"00-{TRACE}-{SPAN}-01"


def test_a_trace_is_sent_on_as_it_came():
    headers = {"traceparent": GOOD, "tracestate": "a=1,b@c=x y"}
    trace = incoming(headers)
    assert dict(trace.headers()) == headers
    assert (trace.trace_id, trace.parent_id, trace.span_id, trace.is_recorded) == (TRACE, SPAN, SPAN, False)
    assert dict(trace.headers("00f067aa0ba902b7")) == headers | {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}


@pytest.mark.parametrize(
    "given",
    [
        "",
        "00",
        GOOD.upper(),
        f" {GOOD}",
        f"{GOOD}\n",
        f"{GOOD}-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-0g",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00_{TRACE}_{SPAN}_01",
        f"{GOOD},{GOOD}",
    ],
)
def test_an_invalid_parent_is_no_trace_and_its_state_goes_with_it(given):
    assert incoming({"traceparent": given, "tracestate": "a=1"}) is None


def test_a_state_alone_is_no_trace():
    assert incoming({"tracestate": "a=1"}) is None


def test_a_later_version_is_read_as_far_as_this_one_goes():
    assert dict(incoming({"traceparent": f"cc-{TRACE}-{SPAN}-01-what-is-new"}).headers()) == {"traceparent": GOOD}
    assert incoming({"traceparent": f"cc-{TRACE}-{SPAN}-01what-is-new"}) is None


@pytest.mark.parametrize(("given", "sent"), [("03", "03"), ("02", "02"), ("00", "00"), ("ff", "03"), ("fc", "00")])
def test_of_the_flags_only_those_that_are_known_are_sent_on(given, sent):
    assert dict(incoming({"traceparent": f"00-{TRACE}-{SPAN}-{given}"}).headers())["traceparent"].endswith(f"-{sent}")


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("a=1, b=2 ,,\tc=3", "a=1,b=2,c=3"),
        ("1a-_*/x@y=v", "1a-_*/x@y=v"),
        ("a", None),
        ("A=1", None),
        ("a=1\r\nx: y", None),
        ("a=ä", None),
        ("a=b=c", None),
        (",".join(f"k{i}=v" for i in range(33)), None),
        ("a=" + "v" * 511, None),
        ("", None),
    ],
)
def test_a_state_that_is_not_valid_is_dropped_and_the_trace_goes_on(given, sent):
    told = dict(incoming({"traceparent": GOOD, "tracestate": given}).headers())
    assert told == {"traceparent": GOOD} | ({} if sent is None else {"tracestate": sent})


@pytest.mark.parametrize(("flags", "told"), [("00", False), ("01", True), ("02", False), ("03", True)])
def test_whether_others_are_to_record(flags, told):
    trace = incoming({"traceparent": GOOD[:-2] + flags})
    assert is_sampled(trace.headers()) is told
    assert not is_sampled(())
