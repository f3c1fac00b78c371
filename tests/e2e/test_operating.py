"""Operating a running stack: rules for all workers within a second, limits, metrics, and the files it leaves."""

import asyncio
import json
import os
import signal
import stat

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.kit.stack import is_running
from tests.kit.wait import until

pytestmark = pytest.mark.stack("up", "compose")

TEXT = {"input": {"text": "hello"}}
EMBED = "/v1/tasks/text-embedding"


async def backends_seen(stack, count: int = 40) -> set[str]:
    """Which backends answer, over fresh connections, so that both workers are met."""
    seen = set()
    for _ in range(count):
        async with stack.http() as http:
            seen.add((await http.post(EMBED, json=TEXT)).json()["route"]["backend"])
    return seen


async def test_the_rules_commands_move_traffic_on_every_worker(stack, tmp_path):
    shown = json.loads(stack.cli("rules", "get", "--json").stdout)
    rules = tmp_path / "rules.yaml"
    moved = [
        {**rule, "split": rule["fallback"], "fallback": []} if rule["name"] == "embeddings" else rule
        for rule in shown["rules"]
    ]
    rules.write_text(yaml.safe_dump({"rules": moved}))
    applied = stack.cli("rules", "apply", "--yes", str(rules))
    try:
        assert applied.returncode == 0, applied.stdout + applied.stderr
        assert f"applied on {stack.workers}/{stack.workers} workers" in applied.stdout
        # No pause: the command returns when all workers have it.
        assert await backends_seen(stack) == {"local"}
        off = stack.cli("rules", "disable", "embeddings")
        assert off.returncode == 0, off.stdout + off.stderr
        async with stack.http() as http:
            refused = await http.post(EMBED, json=TEXT)
        assert (refused.status_code, refused.json()["code"]) == (503, "no_healthy_backend")
        assert stack.cli("rules", "enable", "embeddings").returncode == 0
        assert await backends_seen(stack, 10) == {"local"}
    finally:
        rules.write_text(yaml.safe_dump({"rules": shown["rules"]}))
        assert stack.cli("rules", "apply", "--yes", str(rules)).returncode == 0
    assert await backends_seen(stack) == {"triton"}


async def test_a_bad_rule_set_changes_nothing(stack, tmp_path):
    before = json.loads(stack.cli("rules", "get", "--json").stdout)
    rules = tmp_path / "rules.yaml"
    rules.write_text(yaml.safe_dump([*before["rules"], {"name": "x", "split": [{"backend": "tritn", "model": "m"}]}]))
    refused = stack.cli("rules", "apply", "--yes", str(rules))
    assert refused.returncode == 1
    assert "rule 'x': split[0].backend: unknown backend 'tritn' (did you mean 'triton'?)" in (
        refused.stdout + refused.stderr
    )
    assert json.loads(stack.cli("rules", "get", "--json").stdout) == before


async def test_one_limit_over_all_workers(stack):
    key = await stack.limited_key(3)

    async def one() -> httpx.Response:
        async with stack.http(key=key) as http:
            return await http.post(EMBED, json=TEXT)

    answers = await asyncio.gather(*(one() for _ in range(12)))
    assert sorted(a.status_code for a in answers) == [200] * 3 + [429] * 9
    refused = next(a for a in answers if a.status_code == 429)
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert 1 <= int(refused.headers["retry-after"]) <= 60


async def total(stack, name: str, **labels: str) -> float:
    """A metric over all gateways."""
    pages = await stack.metrics()
    families = (family for page in pages for family in text_string_to_metric_families(page))
    found = [
        one.value
        for family in families
        for one in family.samples
        if one.name == name and labels.items() <= one.labels.items()
    ]
    assert found, f"no gateway has {name}{labels}"
    return sum(found)


async def test_metrics_sum_the_workers(stack):
    ok = {"backend": "triton", "code": "ok", "task": "text-embedding"}
    assert await backends_seen(stack, 20) == {"triton"}  # every worker has a series now
    before = await total(stack, "gateway_requests_total", **ok)
    assert await backends_seen(stack, 20) == {"triton"}
    assert await total(stack, "gateway_requests_total", **ok) - before == 20
    assert await total(stack, "gateway_requests_in_flight", task="text-embedding") == 0
    for page in await stack.metrics():
        for name in ("request_duration_seconds_bucket", "redis_seconds_bucket", "event_loop_lag_seconds_bucket"):
            assert f"gateway_{name}" in page
        assert "gateway_redis_up 1.0" in page
        assert 'gateway_model_batch_executions{backend="triton",batch_size=' in page
    async with httpx.AsyncClient(trust_env=False) as http:
        assert {(await http.get(f"{url}/healthz/ready")).status_code for url in stack.ops_urls} == {200}


@pytest.mark.stack("up")
async def test_stack_json_tells_scripts_where_everything_is(stack):
    told = stack.parts.told
    names = {"data_url", "admin_url", "ops_url", "key", "admin_token", "pids"}
    names |= {"triton_grpc", "triton_http", "redis_url", "llm_url"}
    assert names <= set(told)
    assert {"supervisor", "redis", "triton", "llm"} <= set(told["pids"])
    assert stat.S_IMODE((stack.parts.run_dir / "stack.json").stat().st_mode) == 0o600


async def test_a_killed_worker_is_replaced_and_nothing_stays_in_flight(stack):
    async with stack.admin() as admin:
        workers = (await admin.get("/workers")).json()["items"]
        assert len(workers) == stack.workers
        os.kill(workers[0]["pid"], signal.SIGKILL)
        await until(lambda: not is_running(workers[0]["pid"]), timeout_s=10)

        async def live() -> set[int]:
            return {w["pid"] for w in (await admin.get("/workers")).json()["items"]}

        async with asyncio.timeout(30):
            while len(pids := await live()) != stack.workers or workers[0]["pid"] in pids:  # noqa: ASYNC110 - another process's doing
                await asyncio.sleep(0.1)
    assert await backends_seen(stack, 10) == {"triton"}
    assert await total(stack, "gateway_requests_in_flight", task="text-embedding") == 0
