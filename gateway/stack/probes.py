"""Is a part ready? One small question per kind of part; "no" and "not yet" are the same answer."""

import asyncio
import contextlib
import ssl
from dataclasses import dataclass

import httpx

from gateway.stack.ports import HOST

PROBE_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpReady:
    """Ready when a GET of `url` answers 200."""

    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisReady:
    """Ready when Redis answers a PING with +PONG (while it loads its data it answers -LOADING)."""

    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonReady:
    """Ready when Triton answers; models that it could not load are named, not waited for.

    Triton opens its HTTP port only after it tried to load every model, so an answer means: loading is over.
    """

    url: str


Ready = HttpReady | RedisReady | TritonReady


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a probe saw: `note` is one line worth telling although the part is ready."""

    ready: bool
    note: str = ""


NOT_YET = Answer(ready=False)


async def ask(check: Ready) -> Answer:
    """Ask once; never raises for a part that is absent, slow or broken."""
    try:
        match check:
            case RedisReady(port=port):
                return await _ask_redis(port)
            case HttpReady(url=url):
                return Answer(ready=await _get(url) is not None)
            case TritonReady(url=url):
                return await _ask_triton(url)
    except (OSError, httpx.HTTPError, TimeoutError, ValueError):
        return NOT_YET


async def _ask_redis(port: int) -> Answer:
    async with asyncio.timeout(PROBE_TIMEOUT_S):
        reader, writer = await asyncio.open_connection(HOST, port)
        try:
            writer.write(b"PING\r\n")
            return Answer(ready=(await reader.readline()).startswith(b"+PONG"))
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


def _client() -> httpx.AsyncClient:
    """One for a single call: a connection that is kept would delay Triton's exit.

    Parts speak plain HTTP. So it knows no certificates: to read them takes 15 ms, a hundred times in a start.
    """
    no_certificates = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    return httpx.AsyncClient(timeout=PROBE_TIMEOUT_S, trust_env=False, verify=no_certificates)


async def _get(url: str) -> httpx.Response | None:
    """The answer if it is a 200."""
    async with _client() as client:
        answer = await client.get(url)
        return answer if answer.status_code == httpx.codes.OK else None


async def _ask_triton(url: str) -> Answer:
    if await _get(f"{url}/v2/health/ready") is None:
        return NOT_YET
    async with _client() as client:
        answer = await client.post(f"{url}/v2/repository/index")
    models = answer.json()
    broken = sorted({model["name"] for model in models if model.get("state") == "UNAVAILABLE"})
    return Answer(ready=True, note=f"could not load: {', '.join(broken)}" if broken else "")
