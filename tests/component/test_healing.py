"""The healer: which models it loads anew, who does it, and what is told of it."""

import asyncio
import logging

import pytest

from gateway import healing
from gateway.backends.scripted import ScriptedBackend, ScriptedServer
from gateway.core.breaker import BreakerBoard
from gateway.core.errors import Fault, FaultKind, Reply
from gateway.core.types import Place
from gateway.healing import Healer
from gateway.stores.leases import MemoryLeases
from tests.kit.wait import until

DEAD = Place(backend="triton", model="m", replica="a:1")
ENSEMBLE = Place(backend="triton", model="e", replica="a:1")
ELSEWHERE = Place(backend="triton", model="m", replica="b:1")
NOT_ALLOWED = Fault(
    kind=FaultKind.UNAVAILABLE,
    message="UNAVAILABLE: explicit",
    reply=Reply(code="UNAVAILABLE", text="explicit model load / unload is not allowed if polling is enabled"),
)
BROKEN = Fault(kind=FaultKind.REFUSED_INPUT, message="its files are gone")


class Heard:
    """The observer and the log of events in one."""

    def __init__(self) -> None:
        self.outcomes, self.events = [], []

    def healed(self, place, outcome):
        self.outcomes.append((place, outcome))

    async def add(self, event):
        self.events.append(event)


class Worker:
    """One worker's healer over a server that all share."""

    def __init__(self, server, leases, backends=None) -> None:
        self.board, self.heard = BreakerBoard(), Heard()
        self.healer = Healer(
            backends=backends or {"triton": server},
            board=self.board,
            leases=leases,
            observer=self.heard,
            events=self.heard,
        )

    def dies(self, *places, model="m"):
        for place in places:
            self.board.failed(place, now_us=0, fault=Fault(kind=FaultKind.DEAD, message="x", dead_model=model))

    async def round(self):
        self.healer.heal()
        await asyncio.gather(*self.healer._tasks.values())

    def is_out(self, place):
        return self.board.why_not(place, 1) is not None


@pytest.fixture
def clock():
    class Clock:
        now_us = 0

        def __call__(self):
            return self.now_us

    return Clock()


@pytest.fixture
def server():
    return ScriptedServer("triton")


@pytest.fixture
def worker(server, clock):
    return Worker(server, MemoryLeases(clock))


async def test_a_dead_model_is_unloaded_and_loaded_where_it_died(worker, server, caplog):
    caplog.set_level(logging.INFO)
    worker.dies(DEAD, ENSEMBLE)
    worker.dies(ELSEWHERE, model="other")
    server.told.control_faults = {"b:1": BROKEN}
    await worker.round()
    assert [change[:3] for change in server.changes if change[2] == "a:1"] == [
        ("unload", "m", "a:1"),
        ("load", "m", "a:1"),
    ]
    assert not worker.is_out(DEAD)
    assert not worker.is_out(ENSEMBLE)
    assert worker.is_out(ELSEWHERE)
    assert sorted(outcome for _, outcome in worker.heard.outcomes) == ["failed", "healed"]
    (healed,) = [event for event in worker.heard.events if event["model"] == "m"]
    assert healed["event"] == "model_heal_healed"
    assert (healed["backend"], healed["replica"], healed["detail"]) == ("triton", "a:1", "")
    assert len([record for record in caplog.records if record.name == "gateway.healing"]) == 2


async def test_nothing_is_done_where_nothing_has_died(worker, server):
    for _ in range(3):
        worker.board.failed(DEAD, now_us=0, fault=Fault(kind=FaultKind.BROKEN, message="x"))
    await worker.round()
    assert not server.changes


async def test_where_control_is_not_explicit_it_is_told_once(worker, server, clock):
    server.told.control_faults = {"a:1": NOT_ALLOWED}
    worker.dies(DEAD)
    for _ in range(3):
        await worker.round()
        clock.now_us += 60_000_000
    assert worker.heard.outcomes == [(DEAD, "not_allowed")]
    assert len(server.changes) == 1
    worker.board.answered(DEAD)
    await worker.round()
    worker.dies(DEAD)
    await worker.round()
    assert len(worker.heard.outcomes) == 2


async def test_what_failed_is_tried_again_after_a_while(worker, server, clock):
    server.told.control_faults = {"a:1": BROKEN}
    worker.dies(DEAD)
    await worker.round()
    await worker.round()
    assert worker.heard.outcomes == [(DEAD, "failed")]
    assert worker.is_out(DEAD)
    server.told.control_faults = {}
    clock.now_us += 31_000_000
    await worker.round()
    assert worker.heard.outcomes[1:] == [(DEAD, "healed")]
    assert not worker.is_out(DEAD)


async def test_one_worker_heals_for_all(server, clock):
    leases = MemoryLeases(clock)
    one, two = Worker(server, leases), Worker(server, leases)
    for worker in (one, two):
        worker.dies(DEAD, ENSEMBLE)
    await one.round()
    await two.round()
    assert len(server.changes) == 2
    assert len(one.heard.outcomes) + len(two.heard.outcomes) == 1
    assert not two.is_out(DEAD)
    assert not two.is_out(ENSEMBLE)
    two.dies(DEAD)  # again, and nobody has healed it since
    await two.round()
    assert two.is_out(DEAD)
    clock.now_us += 31_000_000
    await two.round()
    assert len(server.changes) == 4
    assert not two.is_out(DEAD)


class SlowServer(ScriptedServer):
    def __init__(self) -> None:
        super().__init__("triton")
        self.may_load = asyncio.Event()

    async def load(self, model, *, replica, config=None, files=None):
        await self.may_load.wait()
        await super().load(model, replica=replica, config=config, files=files)


async def test_a_long_load_keeps_its_lease_and_is_not_begun_twice(clock, monkeypatch):
    monkeypatch.setattr(healing, "RENEW_S", 0.005)
    server, leases = SlowServer(), MemoryLeases(clock)
    one, two = Worker(server, leases), Worker(server, leases)
    one.dies(DEAD)
    two.dies(DEAD)
    one.healer.heal()
    one.healer.heal()
    await until(lambda: server.changes)
    for _ in range(3):
        held = leases._held["heal:triton/m@a:1"]
        clock.now_us += 20_000_000
        await until(lambda held=held: leases._held["heal:triton/m@a:1"] > held)
    await two.round()
    server.may_load.set()
    await one.healer.close()
    assert [change[0] for change in server.changes] == ["unload", "load"]
    assert one.heard.outcomes == [(DEAD, "healed")]
    assert not two.heard.outcomes


async def test_a_stop_does_not_wait_for_ever(clock, monkeypatch):
    monkeypatch.setattr(healing, "CLOSE_S", 0.01)
    server = SlowServer()
    worker = Worker(server, MemoryLeases(clock))
    worker.dies(DEAD)
    worker.healer.heal()
    await until(lambda: server.changes)
    await worker.healer.close()
    assert not worker.heard.outcomes


async def test_a_backend_without_models_of_its_own_is_left_alone(clock):
    plain = ScriptedBackend("triton", [])
    worker = Worker(plain, MemoryLeases(clock))
    worker.dies(DEAD, Place(backend="gone", model="m"))
    await worker.round()
    assert not worker.heard.outcomes
