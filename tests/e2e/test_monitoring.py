"""A real Prometheus over the running stack: it scrapes every part, and every panel of every dashboard shows something.

A panel asks of what has happened, so it is made to happen first. What cannot happen here is named with its reason.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.kit.prometheus import queries, scraping
from tests.kit.stack import LIMITED_KEY, Stack
from tests.kit.wait import until_async

pytestmark = pytest.mark.asyncio(loop_scope="module")

NOTHING_HERE = {
    "gateway-triton/GPU memory": "no GPU",
    "gateway-llm/KV cache taken": "this llama.cpp does not tell",
    "gateway-limits/US dollars an hour": "the embedded model has no price",
    "gateway-limits/Dollars in the last day": "the embedded model has no price",
}
EMBED = ("/v1/tasks/text-embedding", {"input": {"text": "a cat on a sofa"}})
CHAT = {"model": "general_llm", "max_tokens": 8, "messages": [{"role": "user", "content": "Say hello."}]}


def targets(stack: Stack) -> dict[str, str]:
    """Where each job of deploy/prometheus/prometheus.yml is here."""
    told = stack.told
    command = Path(f"/proc/{stack.pid('triton')}/cmdline").read_bytes().decode().split("\0")
    port = next(word.partition("=")[2] for word in command if word.startswith("--metrics-port="))
    return {
        "gateway": told["ops_url"].removeprefix("http://"),
        "triton": f"127.0.0.1:{port}",
        "llm": told["llm_url"].removeprefix("http://").removesuffix("/v1"),
    }


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def prometheus(stack: Stack, tmp_path_factory) -> AsyncIterator[httpx.AsyncClient]:
    async with scraping(tmp_path_factory.mktemp("prometheus"), targets(stack)) as http:
        yield http


async def asked(http: httpx.AsyncClient, query: str) -> list[Any]:
    answer = (await http.get("/api/v1/query", params={"query": query})).json()
    assert answer["status"] == "success", (query, answer)
    return answer["data"]["result"]


async def happen(stack: Stack, round_: int) -> None:
    """Something of everything: answers, refusals, replays, a stream that is left, a switch."""
    async with stack.http() as http, stack.http(key=LIMITED_KEY) as limited, stack.admin() as admin:
        for _ in range(3):
            assert (await http.post(EMBED[0], json=EMBED[1])).status_code == 200
            await limited.post(EMBED[0], json=EMBED[1])
            key = {"idempotency-key": f"monitoring-{round_}"}
            assert (await http.post(EMBED[0], json=EMBED[1], headers=key)).status_code == 200
        body = {"inputs": [{"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": ["a"]}]}
        await http.post("/v2/models/text_embedding/versions/99/infer", json=body)
        async with http.stream(
            "POST", "/v1/chat/completions", json={**CHAT, "stream": True, "max_tokens": 200}
        ) as answer:
            async for _ in answer.aiter_lines():
                break
        async with http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
            assert [line async for line in answer.aiter_lines()]
        switch = {"action": "block", "scope": {"task": "custom_nlu"}, "reason": "a test", "ttl_s": 60}
        set_ = (await admin.post("/switches", json=switch)).json()
        blocked = await http.post("/v1/tasks/custom_nlu", json={"input": {"text": "a", "labels": ["b", "c"]}})
        assert (await admin.delete(f"/switches/{set_['id']}")).status_code == 200
        assert blocked.status_code == 503


async def test_every_part_is_scraped_and_every_panel_has_data(stack: Stack, prometheus: httpx.AsyncClient):
    async def all_up() -> bool:
        up = {one["metric"]["job"]: one["value"][1] for one in await asked(prometheus, "up")}
        return up == dict.fromkeys(("gateway", "triton", "llm"), "1")

    await until_async(all_up, timeout_s=20)
    for round_ in range(6):
        await happen(stack, round_)
    empty: set[str] = set()

    async def shown() -> bool:
        empty.clear()
        for where, query in queries():
            if not await asked(prometheus, query):
                empty.add(where)
        return empty <= set(NOTHING_HERE)

    try:
        await until_async(shown, timeout_s=20)
    except TimeoutError:
        pytest.fail(f"panels without data: {sorted(empty - set(NOTHING_HERE))}")
    firing = {one["metric"]["alertname"] for one in await asked(prometheus, 'ALERTS{alertstate="firing"}')}
    assert not firing & {"GatewayDown", "GatewayLimiterStoreDown", "GatewayRevisionSkew"}
