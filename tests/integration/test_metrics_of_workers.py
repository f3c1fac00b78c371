"""Metrics of several workers as one page: what clients count themselves, also after a worker was killed."""

import asyncio
import itertools
import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.parser import text_string_to_metric_families

from gateway.settings import METRICS_DIR_ENV
from tests.kit.serving import Serving, children, serving
from tests.kit.stack import is_running
from tests.kit.upstream import HOLD, Script, Seen, Upstream, completion, json_reply
from tests.kit.wait import until, until_async

WORKERS, HELD = 4, 20
Labels = frozenset[tuple[str, str]]


class Held(Upstream):
    """It answers probes whatever its scripts are: a breaker would refuse what comes after a long hold."""

    def script_for(self, seen: Seen) -> Script:
        if seen.method == "GET":
            return json_reply(200, {"object": "list", "data": [{"id": "m", "object": "model"}]})
        return super().script_for(seen)


class Page:
    """The operations listener's page as Prometheus reads it."""

    def __init__(self, text: str) -> None:
        self.samples = [one for family in text_string_to_metric_families(text) for one in family.samples]

    def total(self, name: str, **labels: str) -> float:
        return sum(one.value for one in self.samples if one.name == name and labels.items() <= one.labels.items())

    @property
    def answered(self) -> float:
        return self.total("gateway_requests_total", code="ok")

    @property
    def in_flight(self) -> float:
        return self.total("gateway_requests_in_flight")

    @property
    def workers(self) -> int:
        """Those that have told of their rules."""
        return len({one.labels["pid"] for one in self.samples if "pid" in one.labels})

    @property
    def counts(self) -> Mapping[tuple[str, Labels], float]:
        """All that only ever counts up."""
        found = [one for one in self.samples if one.name.endswith(("_total", "_count", "_bucket"))]
        counts = {(one.name, frozenset(one.labels.items())): one.value for one in found}
        assert len(counts) == len(found), "a series that comes twice"
        return counts

    def follows(self, before: "Page") -> bool:
        """Whether nothing has counted down since."""
        now = self.counts
        return all(now[name] >= count for name, count in before.counts.items())


class Client:
    """One client of a gateway's two listeners."""

    def __init__(self, gateway: Serving, http: httpx.AsyncClient) -> None:
        self._ops_url, self._http = gateway.ops_url, http

    async def page(self) -> Page:
        return Page((await self._http.get(f"{self._ops_url}/metrics")).text)

    async def until(self, true: Callable[[Page], bool]) -> Page:
        """The first page of which it is true: a request is counted right after its answer."""
        pages: list[Page] = []

        async def is_so() -> bool:
            pages.append(await self.page())
            return true(pages[-1])

        await until_async(is_so, timeout_s=30)
        return pages[-1]

    async def ask(self) -> int:
        body = {"model": "general_llm", "messages": [{"role": "user", "content": "hi"}]}
        return (await self._http.post("/v1/chat/completions", json=body)).status_code

    async def ask_all(self, count: int) -> None:
        assert await asyncio.gather(*(self.ask() for _ in range(count))) == [200] * count


def in_flight(pid: int) -> float:
    """A worker's own requests under way, out of the file that it writes for the page."""
    environment = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    folder = next(one.partition("=")[2] for one in environment if one.startswith(f"{METRICS_DIR_ENV}="))
    values = MmapedDict.read_all_values_from_file(f"{folder}/gauge_livesum_{pid}.db")
    return sum(value for key, value, *_ in values if json.loads(key)[1] == "gateway_requests_in_flight")


async def kill_the_busiest(gateway: Serving) -> int:
    """End a worker without warning. How many requests it had."""
    workers = children(gateway.process.pid)
    assert len(workers) == WORKERS
    victim = max(workers, key=in_flight)
    count = int(in_flight(victim))
    os.kill(victim, signal.SIGKILL)
    await until(lambda: not is_running(victim))
    return count


async def test_sums_are_those_of_the_clients_after_a_worker_was_killed(tmp_path):  # MT-06
    good = json_reply(200, completion())
    async with (
        Held(good) as up,
        serving(tmp_path, up.base_url, "--workers", str(WORKERS)) as gateway,
        gateway.http() as http,
    ):
        client = Client(gateway, http)
        await client.until(lambda page: page.workers == WORKERS)
        await client.ask_all(100)
        await client.until(lambda page: page.answered == 100 and page.in_flight == 0)
        pages = [await client.page() for _ in range(20)]
        assert [page.answered for page in pages] == [100] * 20
        assert all(after.follows(before) for before, after in itertools.pairwise(pages))

        up.scripts, served = [[HOLD]], len(up.requests)
        held = [asyncio.create_task(client.ask()) for _ in range(HELD)]
        await until(lambda: sum(seen.method == "POST" for seen in up.requests[served:]) == HELD, timeout_s=15)
        before = await client.until(lambda page: page.in_flight == HELD)
        count = await kill_the_busiest(gateway)
        assert count >= HELD // WORKERS
        await until(lambda: sum(task.done() for task in held) == count)
        await client.until(lambda page: page.in_flight == HELD - count and page.workers == WORKERS)
        lost = [task for task in held if task.done()]
        assert all(isinstance(task.exception(), httpx.HTTPError) for task in lost)

        left = [task for task in held if not task.done()]
        for task in left:
            task.cancel()  # these clients leave, and are counted as gone
        await asyncio.gather(*held, return_exceptions=True)
        await client.until(lambda page: page.in_flight == 0)
        up.scripts = [good]
        await client.ask_all(20)
        after = await client.until(lambda page: page.answered == 120 and page.in_flight == 0)
    assert after.follows(before)
    assert after.total("gateway_requests_total", code="client_closed") == len(left)
    assert after.total("gateway_requests_total") == 120 + len(left)
    assert after.total("gateway_request_duration_seconds_count") == 120 + len(left)
    assert after.total("gateway_attempts_total", outcome="ok") == 120
    assert after.total("gateway_tokens_total", direction="output") == 120 * 2
    assert {one.name for one in after.samples if "pid" in one.labels} == {"gateway_worker_rules_revision"}
