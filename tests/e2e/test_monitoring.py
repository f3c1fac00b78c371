"""A real Prometheus over the running stack: it scrapes every part, and every panel of every dashboard shows something.

Of docker-compose.yml it is that file's own, with the shipped configuration as it is; before the stack of `gateway up`
another one is started, which scrapes faster. A panel asks of what has happened, so it is made to happen. What cannot
happen here is named with its reason.
"""

import asyncio
import contextlib
import itertools
import math
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.kit.prometheus import RULES, client, queries, scraping
from tests.kit.stack import Stack
from tests.kit.wait import until_async

NOTHING_HERE = {
    "gateway-triton/GPU memory": "no GPU",
    "gateway-llm/KV cache taken": "this llama.cpp does not tell",
}
EMBED = ("/v1/tasks/text-embedding", {"input": {"text": "a cat on a sofa"}})
STEP_S = 5  # between the points of a panel
CHAT = {"model": "general_llm", "max_tokens": 8, "messages": [{"role": "user", "content": "Say hello."}]}


@pytest.fixture
async def prometheus(stack: Stack, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with client(stack.prometheus_url) if stack.prometheus_url else scraping(tmp_path, stack.scraped) as http:
        yield http


async def asked(http: httpx.AsyncClient, path: str, **params: Any) -> Any:
    answer = (await http.get(f"/api/v1/{path}", params=params)).json()
    assert answer["status"] == "success", (path, params, answer)
    return answer["data"]


async def draws(http: httpx.AsyncClient, query: str, since: float) -> bool:
    """Whether a panel with this query has a point to draw, asked as Grafana does; it draws none for NaN."""
    found = await asked(http, "query_range", query=query, start=since, end=time.time(), step=STEP_S)
    return any(not math.isnan(float(value)) for one in found["result"] for _, value in one["values"])


async def happen(stack: Stack, round_: int, limited_key: str) -> None:
    """Something of everything: answers, refusals, replays, a stream that is left, a switch."""
    async with stack.http() as http, stack.http(key=limited_key) as limited, stack.admin() as admin:
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
    async def is_scraped() -> bool:
        targets = (await asked(prometheus, "targets", state="active"))["activeTargets"]
        well = {(one["scrapePool"], one["discoveredLabels"]["__address__"]) for one in targets if one["health"] == "up"}
        return well == {(job, address) for job, where in stack.scraped.items() for address in where}

    await until_async(is_scraped, timeout_s=30)
    since, limited_key = time.time() - STEP_S, await stack.limited_key(3)
    empty = [(where, query) for where, query in queries() if where not in NOTHING_HERE]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(90):
            for round_ in itertools.count():
                await happen(stack, round_, limited_key)
                empty = [(where, query) for where, query in empty if not await draws(prometheus, query, since)]
                if not empty:
                    break
    assert not empty, f"panels without data after {round_} rounds: {empty}"
    drawn = [where for where, query in queries() if where in NOTHING_HERE and await draws(prometheus, query, since)]
    assert not drawn, f"these can happen here after all: {drawn}"


async def test_every_rule_is_loaded_and_evaluated_and_none_fires_of_a_stack_that_is_well(
    stack: Stack, prometheus: httpx.AsyncClient
):
    files = [yaml.safe_load((RULES / name).read_text()) for name in ("recording.yml", "alerts.yml")]
    written = [rule for file in files for group in file["groups"] for rule in group["rules"]]
    loaded: list[dict[str, Any]] = []

    async def are_evaluated() -> bool:
        loaded[:] = [rule for group in (await asked(prometheus, "rules"))["groups"] for rule in group["rules"]]
        return all(rule["health"] != "unknown" for rule in loaded)

    await until_async(are_evaluated, timeout_s=60)
    assert sorted(rule["name"] for rule in loaded) == sorted(rule.get("alert") or rule["record"] for rule in written)
    assert [rule for rule in loaded if rule["health"] != "ok"] == []
    firing = {rule["name"] for rule in loaded if rule.get("state") == "firing"}
    assert not firing & {"GatewayDown", "GatewayLimiterStoreDown", "GatewayRevisionSkew"}
