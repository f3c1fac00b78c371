"""A web application that finds photos like yours: upload -> embedding by the gateway -> the nearest of those it has.

    GATEWAY_KEY=... uvicorn --app-dir examples/image_search app:app --port 8001

Then http://127.0.0.1:8001: add some photos, then search with another. The index is an array in memory; with millions of
photos a vector database takes its place, and nothing else changes.
"""

import base64
import os
import sys
from contextlib import asynccontextmanager
from html import escape
from typing import Annotated

import httpx
import numpy as np
from fastapi import FastAPI, File, HTTPException, UploadFile
from fastapi.responses import HTMLResponse

URL, KEY = os.environ.get("GATEWAY_URL", "http://127.0.0.1:8080"), os.environ.get("GATEWAY_KEY")
if not KEY:
    print("set GATEWAY_KEY: after `make up` it is in .run/dev-key (see examples/README.md)", file=sys.stderr)
    sys.exit(2)
PAGE = """<!doctype html><meta charset="utf-8"><title>Image search</title>
<style>body { font: 16px sans-serif; max-width: 46em; margin: 2em auto } figure { display: inline-block; margin: 1em }
img { height: 160px }</style><h1>Image search</h1>
<form method="post" action="/photos" enctype="multipart/form-data">
<label>Add photos <input type="file" name="photos" multiple required></label> <button>Add</button></form>
<form method="post" action="/search" enctype="multipart/form-data">
<label>Find photos like <input type="file" name="photo" required></label> <button>Search</button></form>
<p>%d photos.</p>%s"""


@asynccontextmanager
async def gateway(app: FastAPI):
    """One client for all requests: connections to the gateway are kept."""
    async with httpx.AsyncClient(
        base_url=URL, headers={"authorization": f"Bearer {KEY}"}, timeout=30
    ) as app.state.http:
        yield


app = FastAPI(lifespan=gateway)
photos: list[tuple[str, str]] = []  # name, and the photo as a data URL, both as HTML
vectors = np.empty((0, 1280), np.float32)  # one row each, of unit length


async def embedded(photo: UploadFile) -> np.ndarray:
    """FP32 [1280], of unit length. What the gateway refuses, we refuse in its words."""
    files = {"image": (photo.filename, await photo.read())}
    answer = await app.state.http.post("/v1/tasks/image-embedding", files=files)
    if answer.is_error:
        raise HTTPException(answer.status_code, answer.json()["detail"])
    return np.array(answer.json()["output"]["embedding"], np.float32)


@app.get("/", response_class=HTMLResponse)
def page(found: str = "") -> str:
    """The two forms, and what was found."""
    return PAGE % (len(photos), found)


@app.post("/photos", response_class=HTMLResponse)
async def add(photos_added: Annotated[list[UploadFile], File(alias="photos")]) -> str:
    """Put photos into the index."""
    global vectors  # noqa: PLW0603 - the whole database of this example
    for photo in photos_added:
        vector = await embedded(photo)
        await photo.seek(0)
        data = base64.b64encode(await photo.read()).decode()
        # Both at once, nothing is waited for between them: other requests add and search meanwhile.
        vectors = np.vstack([vectors, vector])
        photos.append((escape(photo.filename or "photo"), escape(f"data:{photo.content_type};base64,{data}")))
    return page()


@app.post("/search", response_class=HTMLResponse)
async def search(photo: UploadFile) -> str:
    """The three nearest, by the cosine of their vectors: a dot product, as all have unit length."""
    vector = await embedded(photo)
    alike = vectors @ vector
    figure = "<figure><img src='%s' alt=''><figcaption>%s: %.2f</figcaption></figure>"
    nearest = [figure % (photos[i][1], photos[i][0], alike[i]) for i in np.argsort(-alike)[:3]]
    return page("<h2>Nearest</h2>" + "".join(nearest))
