"""Rules toggled under load: eight workers, a steady stream of requests, and an operator who cannot make up their mind.

Every set names its number twice, in its rule and in the model that the rule leads to: an answer in which the two differ
was decided by two sets at once.
"""

import asyncio
import itertools
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.kit.replicas import Replica, Rounds, Workshop, all_workers, replicas
from tests.kit.serving import children, control_plane
from tests.kit.wait import until_async

pytestmark = pytest.mark.alone

WORKERS = 8
TOGGLES = 200
RATE = 300  # requests a second


def rules(number: int) -> list[dict[str, Any]]:
    """Two rules, of which toggles switch the first off and on."""

    def one(name: str) -> dict[str, Any]:
        target = {"backend": "llm", "model": f"{name}-{number}"}
        return {"name": f"{name}-{number}", "match": {"task": "general_llm"}, "split": [target]}

    return [one("first"), one("second")]


@dataclass
class Seen:
    """What callers were answered."""

    statuses: Counter[int] = field(default_factory=Counter)
    rules: Counter[str] = field(default_factory=Counter)
    mixed: list[str] = field(default_factory=list)

    def answer(self, status: int, headers: dict[str, str]) -> None:
        rule, model = headers.get("x-gateway-rule", ""), headers.get("x-gateway-model", "")
        self.statuses[status] += 1
        self.rules[rule] += 1
        if rule != model:
            self.mixed.append(f"{rule} led to {model}")


async def traffic(replica: Replica, seen: Seen, stop: asyncio.Event) -> None:
    """`RATE` requests a second, whether or not those before are answered."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()

    async def one(number: int) -> None:
        answer = await replica.ask(f"r{number}")
        seen.answer(answer.status, answer.headers)

    async with asyncio.TaskGroup() as asked:
        for number in itertools.count():
            if stop.is_set():
                return
            asked.create_task(one(number))
            await asyncio.sleep(max(0.0, began_s + (number + 1) / RATE - loop.time()))


@pytest.fixture
async def plane(
    request, tmp_path, redis_server, redis_client, redis_prefix
) -> AsyncIterator[tuple[Replica, httpx.AsyncClient]]:
    """The data plane, with as many workers as the test says, and the control plane."""
    rounds = Rounds()
    async with (
        Workshop(rounds) as upstream,
        replicas(
            tmp_path,
            upstream.base_url,
            [redis_server.url],
            redis_prefix,
            workers=request.param,
            rounds=rounds,
            rules=rules(0),
            telemetry={"access_log": False},
        ) as (replica,),
    ):
        await all_workers(redis_client, redis_prefix, request.param)
        async with control_plane(replica.serving.config) as admin:
            yield replica, admin


async def put(admin: httpx.AsyncClient, number: int) -> httpx.Response:
    revision = (await admin.get("/rules")).json()["revision"]
    return await admin.put("/rules", json={"rules": rules(number)}, headers={"if-match": str(revision)})


@pytest.mark.parametrize("plane", [WORKERS], indirect=True)
async def test_two_hundred_toggles_fail_no_request_and_mix_no_revisions(plane):
    replica, admin = plane
    seen, stop = Seen(), asyncio.Event()
    running = asyncio.create_task(traffic(replica, seen, stop))
    applied = []
    try:
        await until_async(lambda: _is_true(seen.statuses[200] > RATE / 10))
        for toggle in range(TOGGLES):
            if toggle % 10 == 0:
                changed = await put(admin, toggle // 10)
            else:
                name = f"first-{toggle // 10}"
                changed = await admin.patch(f"/rules/{name}", json={"enabled": toggle % 2 == 0})
            assert changed.status_code == 200, changed.text
            applied.append(changed.json()["applied"])
            assert applied[-1]["workers"] == applied[-1]["of"] == WORKERS
    finally:
        stop.set()
        await running
    assert set(seen.statuses) == {200}
    assert not seen.mixed
    assert len(seen.rules) > TOGGLES / 10  # both rules of most sets have had requests
    workers = (await admin.get("/workers")).json()["items"]
    assert {(worker["revision"], worker["is_behind"]) for worker in workers} == {(TOGGLES + 1, False)}


@pytest.mark.parametrize("plane", [3], indirect=True)
async def test_a_worker_that_does_not_follow_is_told(plane):
    replica, admin = plane
    pid = next(iter(children(replica.serving.process.pid)))
    os.kill(pid, signal.SIGSTOP)
    try:
        changed = (await put(admin, 1)).json()
        assert (changed["applied"]["workers"], changed["applied"]["of"]) == (2, 3)
        behind = [one["pid"] for one in (await admin.get("/workers")).json()["items"] if one["is_behind"]]
        assert behind == [pid]
        switched = await admin.post(
            "/switches", json={"action": "block", "scope": {"task": "general_llm"}, "reason": "test", "ttl_s": 60}
        )
        assert switched.json()["applied"]["workers"] == 2
    finally:
        os.kill(pid, signal.SIGCONT)

    async def follows() -> bool:
        return not any(one["is_behind"] for one in (await admin.get("/workers")).json()["items"])

    await until_async(follows, timeout_s=10)
    for _ in range(15):
        assert (await replica.ask("x")).status == 503  # the switch, on the one that was stopped too


async def _is_true(value: bool) -> bool:
    return value
