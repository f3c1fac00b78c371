"""How limits are told, read back by a strict parser of RFC 9651's Lists of Strings."""

import json
import re

import pytest

from gateway.api.errors import openai_error, problem
from gateway.api.headers import limit_headers, policy_name
from gateway.api.oip.errors import oip_error
from gateway.core.admissions import Ask, Book, refusal, verdict_of
from gateway.core.errors import OrderingQueueFull, QueueFull, RateLimited
from gateway.core.rate_limit import PERIODS_US, counters, takes
from gateway.core.types import Caller, Limit, Verdict

SECOND_US = 1_000_000
NOW_US = 1_767_225_600_000_000 + 3600 * SECOND_US  # one o'clock in the night, UTC
ITEM = re.compile(r'"(?P<name>(?:[ !#-\[\]-~]|\\["\\])*)"(?P<parameters>(?:;[a-z]+=(?:\d{1,15}|"[ !#-\[\]-~]*"))*)')


def limit(kind="requests", amount=60, per="minute", **more) -> Limit:
    burst = amount if kind in ("requests", "tokens") else 0
    return Limit(kind=kind, amount=amount, per="" if kind == "concurrent" else per, **{"burst": burst, **more})


def parsed(field: str) -> dict[str, dict[str, int | str]]:
    """The items of a List by name; every byte of it has to be of the grammar."""
    found, at = {}, 0
    while True:
        match = ITEM.match(field, at)
        assert match, field[at:]
        name = re.sub(r"\\(.)", r"\1", match["name"])
        assert name not in found
        found[name] = {}
        for parameter in filter(None, match["parameters"].split(";")):
            key, _, value = parameter.partition("=")
            found[name][key] = value.strip('"') if value.startswith('"') else int(value)
        at = match.end()
        if at == len(field):
            return found
        assert field[at : at + 2] == ", "
        at += 2


class Door:
    """A book, and what it says of request after request."""

    def __init__(self, *limits: Limit, tokens: int = 0, nano_usd: int = 0) -> None:
        self.book = Book(lease_us=None)
        caller = Caller(key_id="k", tenant="t", limits=limits)
        counted = counters(caller, "task", limits[0].model, "interactive")
        self.takes = takes(counted, tokens=tokens, nano_usd=nano_usd)
        self.count = 0

    def knock(self, now_us: int = NOW_US) -> Verdict:
        self.count += 1
        ask = Ask(id=f"w:{self.count}", owner="o", takes=self.takes)
        return verdict_of(ask, self.book.admit(ask, now_us=now_us)[0])


def told_of(verdict: Verdict, form=problem):
    """The refusal of a verdict as a response."""
    error = refusal(verdict)
    error.verdict = verdict
    return form(error)


def test_one_limit_in_both_forms():
    headers = limit_headers(Door(limit()).knock())
    assert headers == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "ratelimit-policy": '"60-requests-per-minute";q=60;w=60',
        "ratelimit": '"60-requests-per-minute";r=59;t=1',
    }


def test_every_limit_has_its_item_and_the_nearest_of_a_kind_the_openai_form():
    per_second, per_day, places = limit(amount=5, per="second"), limit(amount=1000, per="day"), limit("concurrent", 7)
    tokens = [limit("tokens", 9000, "minute"), limit("tokens", 500, "hour")]
    money = limit("usd", 12_500_000_000, "month")
    headers = limit_headers(Door(per_day, places, *tokens, per_second, money, tokens=100, nano_usd=500_000_000).knock())
    assert parsed(headers["ratelimit-policy"]) == {
        "1000-requests-per-day": {"q": 1000, "w": 86400},
        "7-concurrent": {"q": 7, "qu": "concurrent-requests"},
        "5-requests-per-second": {"q": 5, "w": 1},
    }
    assert parsed(headers["ratelimit"]) == {
        "1000-requests-per-day": {"r": 999, "t": 87},
        "7-concurrent": {"r": 6},
        "5-requests-per-second": {"r": 4, "t": 1},
    }
    assert (headers["x-ratelimit-limit-requests"], headers["x-ratelimit-remaining-requests"]) == ("5", "4")
    assert (headers["x-ratelimit-limit-tokens"], headers["x-ratelimit-remaining-tokens"]) == ("500", "400")
    assert (headers["x-ratelimit-limit-usd"], headers["x-ratelimit-remaining-usd"]) == ("12.5", "12")
    assert headers["x-ratelimit-reset-usd"].startswith(f"{31 * 24 - 1}h0m0s")


@pytest.mark.parametrize(
    ("amount", "per", "burst", "quota"),
    [
        (60, "minute", 60, {"q": 60, "w": 60}),
        (60, "minute", 5, {"q": 5, "w": 5}),
        (60, "minute", 120, {"q": 120, "w": 120}),
        (100, "second", 10, {"q": 100, "w": 1}),
        (7, "minute", 2, {"q": 2, "w": 18}),
        (1, "day", 1, {"q": 1, "w": 86400}),
    ],
)
def test_the_quota_is_what_may_come_at_once_and_the_window_how_long_it_takes_to_come_back(amount, per, burst, quota):
    one = limit(amount=amount, per=per, burst=burst)
    headers = limit_headers(Door(one).knock())
    assert list(parsed(headers["ratelimit-policy"]).values()) == [quota]
    assert quota["q"] * PERIODS_US[per] <= amount * quota["w"] * SECOND_US  # never more than is given
    assert [item["r"] for item in parsed(headers["ratelimit"]).values()] == [burst - 1]
    assert burst <= quota["q"]


def test_limits_that_differ_in_anything_differ_in_their_names():
    changed = [
        {},
        {"amount": 61},
        {"per": "hour"},
        {"burst": 5},
        {"kind": "tokens"},
        {"task": "a"},
        {"model": "a"},
        {"priority": "batch"},
        {"shared_by": "tenant"},
        {"shared_by": "all"},
        {"kind": "usd", "per": "month", "amount": 1},
        {"kind": "concurrent"},
    ]
    names = [policy_name(limit(**change)) for change in changed]
    assert len(set(names)) == len(names)
    assert policy_name(limit(shared_by="tenant", task="a")) == "60-requests-per-minute-tenant-task-a"
    assert "0.000000001-usd-per-month" in names


def test_a_name_of_any_characters_is_a_string_of_the_grammar():
    one = limit(model='a "model"\\ of, José\r\n;q=9')
    headers = limit_headers(Door(one).knock())
    assert list(parsed(headers["ratelimit-policy"])) == list(parsed(headers["ratelimit"])) == [policy_name(one)]
    assert '"model"\\' in policy_name(one)


def test_no_limits_no_headers():
    assert limit_headers(Verdict(allowed=True)) == {}
    assert limit_headers(Verdict(allowed=True, ticket=3)) == {"x-ordering-ticket": "3"}


def test_remaining_falls_to_nothing_and_stays_there():
    door = Door(limit(amount=3))
    verdicts = [door.knock() for _ in range(6)]
    assert [limit_headers(one)["x-ratelimit-remaining-requests"] for one in verdicts] == ["2", "1", "0", "0", "0", "0"]
    assert [parsed(limit_headers(one)["ratelimit"])["3-requests-per-minute"]["r"] for one in verdicts] == [
        2,
        1,
        0,
        0,
        0,
        0,
    ]


@pytest.mark.parametrize("amount", [1, 3, 7, 60, 1000])
@pytest.mark.parametrize("per", list(PERIODS_US))
@pytest.mark.parametrize("form", [problem, openai_error, oip_error])
def test_who_comes_back_when_told_passes(amount, per, form):
    for came_back in ("retry-after", "retry-after-ms"):
        door = Door(limit(amount=amount, per=per))
        now_us = NOW_US
        while (verdict := door.knock(now_us)).allowed:
            now_us += 11
        headers = told_of(verdict, form).headers
        unit_us = 1000 if came_back.endswith("-ms") else SECOND_US
        assert headers[came_back].isdecimal()
        assert 1 <= int(headers[came_back]) <= -(-PERIODS_US[per] // unit_us)
        assert door.knock(now_us + int(headers[came_back]) * unit_us).allowed


def test_retry_after_is_not_before_any_time_that_is_told():
    door = Door(limit(amount=2, per="minute"), limit(amount=3, per="hour"), limit(amount=50, per="day"))
    now_us = NOW_US
    while (verdict := door.knock(now_us)).allowed:
        now_us += 31 * SECOND_US
    headers = told_of(verdict).headers
    told = parsed(headers["ratelimit"])
    assert {name for name, item in told.items() if "t" in item} == {"3-requests-per-hour"}
    assert told["3-requests-per-hour"]["t"] == int(headers["retry-after"])
    assert headers["x-ratelimit-limit-requests"] == "3"  # the one that refused, not the one with less left


def test_the_body_names_the_limit_that_was_hit():
    door = Door(limit(amount=1), limit(amount=900))
    door.knock()
    answer = told_of(door.knock())
    document = json.loads(answer.body)
    assert document["code"] == "rate_limited"
    assert document["detail"] == "limit reached: 1 requests per minute"
    assert document["type"] == "https://iana.org/assignments/http-problem-types#quota-exceeded"
    assert document["violated-policies"] == ["1-requests-per-minute"]
    assert document["retry_after_s"] == int(answer.headers["retry-after"]) == 60
    assert document["limit"] == {
        "name": "1-requests-per-minute",
        "kind": "requests",
        "amount": 1,
        "per": "minute",
        "remaining": 0,
        "reset_s": 60,
    }
    told = json.loads(told_of(door.knock(), openai_error).body)["error"]
    assert told == {
        "message": "limit reached: 1 requests per minute",
        "type": "rate_limit_error",
        "param": None,
        "code": "rate_limited",
    }


def test_money_is_told_in_dollars_and_not_to_be_asked_for_again():
    verdict = Door(limit("usd", 10_500_000_000, "day"), nano_usd=11_000_000_000).knock()
    assert verdict.refused_by.is_hopeless  # more than there ever is
    assert "retry-after" not in told_of(verdict).headers
    door = Door(limit("usd", 10_500_000_000, "day"), nano_usd=6_000_000_000)
    door.knock()
    answer = told_of(door.knock())
    assert answer.headers["x-should-retry"] == "false"
    assert int(answer.headers["retry-after"]) == 23 * 3600  # until midnight
    assert answer.headers["x-ratelimit-remaining-usd"] == "4.5"
    assert "ratelimit" not in answer.headers
    told = json.loads(answer.body)["limit"]
    assert (told["amount"], told["remaining"], told["per"], told["reset_s"]) == (10.5, 4.5, "day", 23 * 3600)


def test_what_can_never_pass_is_told_no_time():
    verdict = Door(limit("tokens", 100), tokens=101).knock()
    answer = told_of(verdict)
    assert "retry-after" not in answer.headers
    assert "retry-after-ms" not in answer.headers
    assert answer.headers["x-should-retry"] == "false"
    document = json.loads(answer.body)
    assert "retry_after_s" not in document
    assert document["limit"]["remaining"] == 100


def test_places_come_back_nobody_knows_when():
    door = Door(limit("concurrent", 1))
    door.knock()
    answer = told_of(door.knock())
    assert answer.headers["retry-after"] == "1"
    assert "retry-after-ms" not in answer.headers
    assert answer.headers["ratelimit"] == '"1-concurrent";r=0'
    assert json.loads(answer.body)["limit"] == {
        "name": "1-concurrent",
        "kind": "concurrent",
        "amount": 1,
        "remaining": 0,
    }


@pytest.mark.parametrize(("error", "kind"), [(QueueFull, "queue"), (OrderingQueueFull, "ordering_queue")])
def test_a_full_queue_has_the_same_shape(error, kind):
    answer = problem(error("full", retry_after_us=1_500_000))
    document = json.loads(answer.body)
    assert document["limit"] == {"name": kind, "kind": kind}
    assert (document["retry_after_s"], answer.headers["retry-after"], answer.headers["retry-after-ms"]) == (
        2,
        "2",
        "1500",
    )
    assert json.loads(openai_error(error("full")).body)["error"]["type"] == "rate_limit_error"


def test_a_429_without_a_verdict_names_none():
    assert "limit" not in json.loads(problem(RateLimited("x")).body)
