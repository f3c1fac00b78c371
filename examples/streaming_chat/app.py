"""A page that streams a chat. It holds no key: this server gets it a token, good for ten minutes and for one task.

    GATEWAY_KEY=... GATEWAY_URL=http://127.0.0.1:8080 uvicorn --app-dir examples/streaming_chat app:app --port 8002

Then http://127.0.0.1:8002. The page calls the gateway itself, from another origin, so the gateway has to allow that:
`server.cors_origins: ["http://127.0.0.1:8002"]` in its configuration. Where it does not (as after `make up`), this
server passes the page's calls on: leave GATEWAY_PAGE_URL unset.
"""

import os
import sys
from pathlib import Path

import httpx
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse

URL, KEY = os.environ.get("GATEWAY_URL", "http://127.0.0.1:8080"), os.environ.get("GATEWAY_KEY")
if not KEY:
    print("set GATEWAY_KEY: after `make up` it is in .run/dev-key (see examples/README.md)", file=sys.stderr)
    sys.exit(2)
PAGE_URL = os.environ.get("GATEWAY_PAGE_URL", "")  # where the page finds the gateway; empty: through this server
PAGE = (Path(__file__).parent / "page.html").read_text()
GONE = "the gateway cannot be reached"

app = FastAPI()


@app.get("/", response_class=HTMLResponse)
def page() -> str:
    """The page."""
    return PAGE.replace("{{gateway}}", PAGE_URL)


@app.post("/token")
async def token() -> dict:
    """A token for one visitor: chats alone, and twenty of them a minute. Your own log-in belongs before this line."""
    wish = {"tasks": ["general_llm"], "minutes": 10, "limits": [{"requests": 20, "per": "minute"}]}
    async with httpx.AsyncClient(base_url=URL, headers={"authorization": f"Bearer {KEY}"}) as gateway:
        try:
            answer = await gateway.post("/v1/client-tokens", json=wish)
        except httpx.TransportError as error:
            raise HTTPException(502, GONE) from error
    if answer.is_error:
        raise HTTPException(answer.status_code, answer.json()["detail"])
    return {"token": answer.json()["token"]}


@app.post("/v1/chat/completions")
async def passed_on(request: Request) -> Response:
    """The page's call, with the page's token; when the page leaves, so do we, and nothing more is generated."""
    client = httpx.AsyncClient(base_url=URL, timeout=60)  # for each piece; the gateway bounds the whole
    headers = {name: request.headers[name] for name in ("authorization", "content-type") if name in request.headers}
    sent = client.build_request("POST", request.url.path, content=await request.body(), headers=headers)
    try:
        answer = await client.send(sent, stream=True)
    except httpx.TransportError:
        await client.aclose()
        return JSONResponse({"error": {"message": GONE}}, 502)

    async def pieces():
        try:
            async for piece in answer.aiter_raw():
                yield piece
        finally:
            await answer.aclose()
            await client.aclose()

    kept = {name: answer.headers[name] for name in ("content-type", "retry-after") if name in answer.headers}
    return StreamingResponse(pieces(), status_code=answer.status_code, headers=kept)
