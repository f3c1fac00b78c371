"""The calls of docs/api.md, typed one after the other as they stand there, answer what stands there."""

import asyncio
import json
import os
from typing import Any

import httpx

from release.references import MARK
from tests.kit.manuals import ROOT, blocks
from tests.kit.serving import ADMIN_TOKEN, control_plane, serving
from tests.kit.upstream import Upstream, json_reply
from tests.kit.wait import until_async

DOCUMENTED = "localhost:8090/admin/v1"
OTHERWISE = ("id", "key", "worker", "at", "created_at", "expires_at", "started_at", "step_since", "next_at", "ms")
"""What is otherwise each time; of these the kind has to be the same."""
LEFT = "remaining_s"  # counts down


def documented() -> tuple[str, list[tuple[str, Any]]]:
    """What is typed first, and each call with its answer."""
    text = (ROOT / "docs" / "api.md").read_text().partition(MARK)[0]
    first, *found = [block.text for block in blocks(text, "bash", "json")]
    calls = [(call, json.loads(answer)) for call, answer in zip(found[::2], found[1::2], strict=True)]
    return first, calls


def kind(answer: Any) -> Any:
    """An answer without what is otherwise each time."""
    if isinstance(answer, list):
        return [kind(one) for one in answer]
    if not isinstance(answer, dict):
        return answer
    return {
        name: type(one).__name__ if name in OTHERWISE else one // 60 if name == LEFT else kind(one)
        for name, one in answer.items()
    }


async def typed(script: str) -> Any:
    """What a shell prints of it, as JSON."""
    shell = await asyncio.create_subprocess_exec(
        *("bash", "-euo", "pipefail", "-c", script),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "GATEWAY_ADMIN_TOKEN": ADMIN_TOKEN},
    )
    out, _ = await shell.communicate()
    assert shell.returncode == 0, script
    return json.loads(out)


async def has_told(admin: httpx.AsyncClient) -> bool:
    """Whether the worker has reported how it sees its backends."""
    return any(one["report"] for one in (await admin.get("/workers")).json()["items"])


async def test_each_call_answers_what_stands_there(tmp_path, redis_server, redis_prefix):
    first, calls = documented()
    assert len(calls) >= 10
    redis = {"url": redis_server.url, "prefix": redis_prefix}
    async with (
        Upstream(json_reply(200, {"data": []})) as up,
        serving(tmp_path, up.base_url, redis=redis) as gateway,
        control_plane(gateway.config) as admin,
    ):
        await until_async(lambda: has_told(admin), timeout_s=10)
        address = str(admin.base_url).removeprefix("http://").rstrip("/")
        ids: dict[str, str] = {}

        async def answers(call: str, expected: Any) -> bool:
            for told, real in ids.items():
                call = call.replace(told, real)
            got = await typed(f"{first}\n{call.replace(DOCUMENTED, address)}")
            changes = " -sX " in call or " --json " in call
            assert kind(got) == kind(expected) or not changes  # what changes nothing is asked until workers have told
            if "id" in expected:
                ids[expected["id"]] = got["id"]
            return kind(got) == kind(expected)

        for call, expected in calls:
            await until_async(lambda: answers(call, expected), timeout_s=10)  # noqa: B023 - it is awaited here
