"""A real worker that gets more than its core can do: what is shed is told truthfully, to callers, metrics and log."""

import asyncio
import json
from collections import Counter
from urllib.parse import urlsplit

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.tuning.load.http_wire import HttpPool
from tests.kit.serving import KEY, serving
from tests.kit.upstream import Upstream, completion, json_reply

pytestmark = pytest.mark.alone  # who is kept from sending so much brings no worker behind

CALLERS, EACH = 100, 12
FLOODS = 5
LONG = {"model": "general_llm", "messages": [{"role": "user", "content": "word " * 40}] * 120}


def request(priority: str) -> bytes:
    body = json.dumps(LONG).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\nx-priority: {priority}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def flood(url: str) -> Counter[str]:
    """Of each caller one request after the other, three quarters of them batch; the answers."""
    pool, told = HttpPool("127.0.0.1", urlsplit(url).port or 0, limit=CALLERS), Counter()

    async def caller(number: int) -> None:
        priority = "batch" if number % 4 else "interactive"
        for _ in range(EACH):
            answer = await pool.exchange(request(priority))
            code = "ok" if answer.status == 200 else json.loads(answer.body)["error"]["code"]
            assert not answer.trouble
            assert code == "ok" or (answer.status, answer.headers[b"retry-after"]) == (429, b"1")
            told[code] += 1
            told[priority] += code != "ok"

    async with asyncio.TaskGroup() as callers:
        for number in range(CALLERS):
            callers.create_task(caller(number))
    await pool.close()
    return told


async def counted(ops_url: str) -> dict[str, Counter[str]]:
    async with httpx.AsyncClient(trust_env=False) as http:
        page = (await http.get(f"{ops_url}/metrics")).text
    found: dict[str, Counter[str]] = {"gateway_requests_total": Counter(), "gateway_shed_total": Counter()}
    for family in text_string_to_metric_families(page):
        for one in family.samples:
            if one.name in found:
                found[one.name][one.labels.get("code") or one.labels["priority"]] += int(one.value)
    return found


async def test_all_that_is_shed_is_told_and_counted_once(tmp_path):
    async with Upstream(json_reply(200, completion())) as upstream:
        sections = {"server_more": {"shed_after_ms": 1}}
        async with serving(tmp_path, upstream.base_url, **sections) as gateway:
            told, floods = Counter(), 0
            while not told["queue_full"] and floods < FLOODS:
                told += await flood(gateway.url)
                floods += 1
            for _ in range(3):  # it is over as soon as it comes round in time
                await asyncio.sleep(0.1)
                assert (await gateway.ask()).status_code == 200
            found = await counted(gateway.ops_url)
            log = gateway.log.read_text()
    assert told["ok"] + told["queue_full"] == floods * CALLERS * EACH
    assert told["queue_full"]
    assert found["gateway_requests_total"] == {"ok": told["ok"] + 3, "queue_full": told["queue_full"]}
    assert +found["gateway_shed_total"] == +Counter({name: told[name] for name in ("batch", "interactive")})
    lines = [json.loads(line) for line in log.splitlines() if "turned away" in line]
    assert sum(line.get("batch", 0) + line.get("interactive", 0) for line in lines) <= told["queue_full"]
    assert lines
