"""A job that embeds a file of texts, one to a line. It goes last, backs off, and can be stopped and started again.

    GATEWAY_KEY=... python examples/bulk_embedding/run.py texts.txt vectors.npy

`X-Priority: batch` lets everybody who waits for one answer go first. A 429 or 503 says when to come back. Each batch
has an `Idempotency-Key` made of its texts: sent again after a stop or a lost connection, it is answered out of what the
gateway has kept, not done (or paid) twice. What is done already is read from the file of vectors.

Prints (after a bar, while it runs):

    ... texts, ... vectors of 384 numbers in ...
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import httpx
import numpy as np
from rich.progress import track

URL, KEY = os.environ.get("GATEWAY_URL", "http://127.0.0.1:8080"), os.environ["GATEWAY_KEY"]
TEXTS_A_REQUEST, REQUESTS_A_BATCH, TRIES = 16, 8, 8
HEADERS = {"authorization": f"Bearer {KEY}", "x-priority": "batch"}


def batch_of(texts: list[str]) -> dict:
    """A body for /v1/infer/batch: its requests meet in the server's batches."""
    parts = [texts[at : at + TEXTS_A_REQUEST] for at in range(0, len(texts), TEXTS_A_REQUEST)]
    truncate = {"truncate": True}  # a text longer than the model reads is cut, not refused
    return {"requests": [{"task": "text-embedding", "input": {"text": part}, "parameters": truncate} for part in parts]}


def send(http: httpx.Client, body: dict) -> list[dict]:
    """The answers of a batch, all of them good. Waits as long as the gateway says; gives up after some tries."""
    key = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    why, wait_s = "", 1.0
    for attempt in range(TRIES):
        try:
            reply = http.post("/v1/infer/batch", json=body, headers={"idempotency-key": key})
            answers = reply.json().get("responses", [{"status": reply.status_code, "body": reply.json()}])
            bad = [one for one in answers if one["status"] != 200]
            if not bad:
                return answers
            why, wait_s = bad[0]["body"].get("detail", "?"), float(reply.headers.get("retry-after", 2**attempt))
            if bad[0]["status"] not in (409, 429, 500, 502, 503, 504):
                break  # another try would end the same way
        except httpx.TransportError as error:
            why, wait_s = str(error), 2.0**attempt
        time.sleep(min(wait_s, 30))
    sys.exit(f"stopped: {why}\nrun it again to go on")


def main() -> None:
    """Read, skip what is done, embed, and save after each batch."""
    texts = [line for line in Path(sys.argv[1]).read_text().splitlines() if line.strip()]
    target, size = Path(sys.argv[2]), TEXTS_A_REQUEST * REQUESTS_A_BATCH
    done = np.load(target) if target.exists() else np.empty((0, 384), np.float32)
    with httpx.Client(base_url=URL, headers=HEADERS, timeout=120) as http:
        for at in track(range(len(done), len(texts), size), "embedding", disable=not sys.stderr.isatty()):
            answers = send(http, batch_of(texts[at : at + size]))
            rows = [row for one in answers for row in one["body"]["output"]["embeddings"]]
            done = np.vstack([done, np.array(rows, np.float32)])
            saved = target.with_suffix(".part.npy")
            np.save(saved, done)
            saved.replace(target)  # whole, or as it was
    print(f"{len(texts)} texts, {len(done)} vectors of {done.shape[1]} numbers in {target.name}")


main()
