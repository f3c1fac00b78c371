import asyncio

import pytest

from gateway.tuning.report import OK, class_report
from gateway.tuning.sweep import callers
from gateway.tuning.sweep.callers import AskFailed, Times, offer
from gateway.tuning.sweep.servers import Counters
from gateway.tuning.sweep.settings import Load, SweepError


class Answering:
    """Answers after a moment; every `failing`th request fails."""

    def __init__(self, *, failing=0):
        self.asked = self.now = self.most = 0
        self.failing = failing
        self.told = []

    async def ask(self):
        self.asked += 1
        number = self.asked
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.001)
        self.now -= 1
        if self.failing and number % self.failing == 0:
            raise AskFailed("broken", "no such luck")

    def times(self):
        async def began():
            self.told.append("began")

        async def ended():
            self.told.append("ended")

        return Times(on_begin=began, on_end=ended)


async def offered(server, load, **options):
    settings = {"seconds": 0.05, "slo_ms": 0.0, "seed": 1, **options}
    return await offer(server.ask, load, times=server.times(), **settings)


async def test_callers_wait_for_their_answers_and_every_one_is_counted():
    server = Answering()
    found = await offered(server, Load(concurrency=5))
    assert server.most == 5
    assert server.now == 0
    assert server.told == ["began", "ended"]
    report = class_report([found.tally], name="all", seconds=found.seconds)
    assert report.unfinished == 0
    assert callers.LEAST_ANSWERS <= report.sent <= server.asked
    assert report.codes == {OK: report.sent}


async def test_a_run_lasts_until_a_slow_model_has_answered_often_enough():
    server = Answering()
    found = await offered(server, Load(concurrency=1), seconds=0.02)
    assert found.tally.codes.total() >= callers.LEAST_ANSWERS
    assert found.seconds > 0.02


async def test_a_rate_comes_whatever_the_answers_do():
    server = Answering()
    found = await offered(server, Load(rate=2000.0), seconds=0.1)
    assert server.told == ["began", "ended"]
    assert found.seconds == 0.1
    assert found.tally.sent == found.tally.codes.total()
    again = await offered(Answering(), Load(rate=2000.0), seconds=0.1)
    assert again.tally.sent == found.tally.sent  # the same seed
    assert server.now == 0


async def test_what_comes_while_too_many_are_in_flight_fails_by_that_name(monkeypatch):
    monkeypatch.setattr(callers, "MOST_OPEN", 1)
    found = await offered(Answering(), Load(rate=5000.0), seconds=0.1)
    assert found.tally.codes["too_many"] > 0
    assert found.tally.sent == found.tally.codes.total()


@pytest.mark.parametrize("load", [Load(concurrency=3), Load(rate=1000.0)], ids=str)
async def test_failures_are_counted_by_their_code_and_the_last_is_told(load):
    found = await offered(Answering(failing=2), load)
    assert found.failure == "no such luck"
    assert found.tally.codes["broken"] > 0
    assert set(found.tally.codes) == {OK, "broken"}


def test_what_a_server_has_counted_meanwhile():
    before = Counters(requests=10, queue_us=100, executions={1: 5}, compute_us={1: 500})
    after = Counters(requests=26, queue_us=1700, executions={1: 5, 4: 4}, compute_us={1: 500, 4: 4000})
    report = after.since(before).report(backend="local", model="m", seconds=0.008, instances=1)
    assert report.executions == 4
    assert report.batch_sizes == {4: 4}
    assert report.mean_batch == 4
    assert report.queue_ms == pytest.approx(0.1)
    assert report.compute_ms == pytest.approx(1.0)
    assert report.queue_share == pytest.approx(1600 / 17600)
    assert report.busy == pytest.approx(0.5)
    nothing = after.since(after).report(backend="local", model="m", seconds=1, instances=1)
    assert (nothing.executions, nothing.mean_batch, nothing.busy) == (0, 0, 0)


@pytest.mark.parametrize(
    ("passed_s", "answers", "lasts"),
    [
        (0.9, 1000, True),  # its time is not over
        (1.1, 64, False),
        (1.1, 63, True),  # few answers
        (4.1, 63, False),  # but not for ever
        (4.1, 15, True),  # not every caller has had one
        (60.1, 15, False),
    ],
)
def test_how_long_a_run_of_a_second_with_16_callers_lasts(passed_s, answers, lasts):
    assert callers._lasts(passed_s, answers, seconds=1.0, load=Load(concurrency=16)) is lasts


async def test_a_server_that_refuses_at_once_does_not_keep_the_run_from_ending():
    async def ask():
        raise AskFailed("invalid", "no such shape")

    found = await offer(ask, Load(concurrency=2), seconds=0.05, slo_ms=0.0, seed=1, times=Answering().times())
    assert set(found.tally.codes) <= {"invalid"}
    assert found.failure == "no such shape"


@pytest.mark.parametrize("load", [Load(concurrency=2), Load(rate=100.0)])
async def test_counters_that_cannot_be_read_end_the_run_with_that_very_error(load):
    async def gone():
        raise SweepError("the server is gone")

    with pytest.raises(SweepError, match="the server is gone"):
        await offer(Answering().ask, load, seconds=0.05, slo_ms=0.0, seed=1, times=Times(on_begin=gone, on_end=gone))
