"""One OpenAI client for both ways to an engine: straight, and through the gateway."""

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
RESPONSES = "/v1/responses"
DONE = "[DONE]"


@dataclass(frozen=True)
class Door:
    """Where requests go in, and the model's name there."""

    http: httpx.AsyncClient
    model: str

    async def whole(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json={"model": self.model, **body})

    async def answer(self, path: str, **body: Any) -> dict[str, Any]:
        response = await self.whole(path, **body)
        assert response.status_code == 200, response.text
        return response.json()

    async def events(self, path: str, **body: Any) -> list[Any]:
        """A streamed answer's events, the last of them `[DONE]` where the stream says so."""
        async with self.stream(path, **body) as (response, events):
            assert response.status_code == 200, (await response.aread()).decode()
            assert response.headers["content-type"].startswith("text/event-stream")
            return [event async for event in events]

    @contextlib.asynccontextmanager
    async def stream(self, path: str, **body: Any) -> AsyncIterator[tuple[httpx.Response, AsyncIterator[Any]]]:
        """A streamed answer as it comes; the connection is closed with the block."""
        async with self.http.stream("POST", path, json={"model": self.model, "stream": True, **body}) as response:
            yield response, _events(response)


@contextlib.asynccontextmanager
async def door(url: str, model: str, *, key: str = "") -> AsyncIterator[Door]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=180, trust_env=False) as http:
        yield Door(http, model)


async def _events(response: httpx.Response) -> AsyncIterator[Any]:
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            text = line.removeprefix("data: ")
            yield text if text == DONE else json.loads(text)


def text_of(events: list[Any]) -> str:
    """The words of a streamed chat."""
    deltas = [choice["delta"] for event in events if event != DONE for choice in event["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)
