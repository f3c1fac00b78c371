"""A process that `gateway serve` keeps alive."""

import asyncio

from gateway.serve import Child
from tests.kit.wait import until


async def test_a_stop_while_it_waits_to_begin_again_begins_nothing(monkeypatch, caplog):
    begun, begin = [], asyncio.create_subprocess_exec

    async def counted(*command, **options):
        begun.append(command)
        return await begin(*command, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", counted)
    stop = asyncio.Event()
    running = asyncio.create_task(Child(name="c", command=("false",), environment={}).run(stop, drain_s=1))
    await until(lambda: "process died; starting another" in caplog.text)
    stop.set()
    assert await running == 0
    assert begun == [("false",)]
