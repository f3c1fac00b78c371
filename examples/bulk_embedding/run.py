"""A job that embeds a file of texts, one to a line. It goes last, backs off, and can be stopped and started again.

    GATEWAY_KEY=... python examples/bulk_embedding/run.py texts.txt vectors.npy

`X-Priority: batch` lets everybody who waits for one answer go first. A 429 or 503 says when to come back; then what
was refused is sent again, and that alone. Each batch has an `Idempotency-Key` made of its texts: sent again after a
stop or a lost connection, it is answered out of what the gateway has kept, not done (or paid) twice. What is done
already is read from the file of vectors: texts may be added to the end of their file.

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

URL, KEY = os.environ.get("GATEWAY_URL", "http://127.0.0.1:8080"), os.environ.get("GATEWAY_KEY")
if not KEY:
    print("set GATEWAY_KEY: after `make up` it is in .run/dev-key (see examples/README.md)", file=sys.stderr)
    sys.exit(2)
TEXTS_A_REQUEST, REQUESTS_A_BATCH, TRIES = 16, 8, 8
AGAIN = {409, 429, 500, 502, 503, 504}  # with any other status another try would end the same way
HEADERS = {"authorization": f"Bearer {KEY}", "x-priority": "batch"}


def requests_for(texts: list[str]) -> list[dict]:
    """For /v1/infer/batch, which runs them at the same time: they meet in the server's batches."""
    parts = [texts[at : at + TEXTS_A_REQUEST] for at in range(0, len(texts), TEXTS_A_REQUEST)]
    truncate = {"truncate": True}  # a text longer than the model reads is cut, not refused
    return [{"task": "text-embedding", "input": {"text": part}, "parameters": truncate} for part in parts]


def tried(http: httpx.Client, requests: list[dict]) -> list[dict]:
    """Each request's `status` and `body`; where all failed together, that for each of them."""
    key = hashlib.sha256(json.dumps(requests).encode()).hexdigest()
    try:
        reply = http.post("/v1/infer/batch", json={"requests": requests}, headers={"idempotency-key": key})
    except httpx.TransportError as error:
        return [{"status": 503, "body": {"detail": str(error)}}] * len(requests)
    if reply.status_code != 200:
        return [{"status": reply.status_code, "body": reply.json()}] * len(requests)
    return reply.json()["responses"]


def send(http: httpx.Client, requests: list[dict]) -> list[dict]:
    """The outputs. Sends again what failed, and that alone, when the gateway says; gives up where nothing gets on."""
    outputs: dict[int, dict] = {}
    tries = 0
    while left := [number for number in range(len(requests)) if number not in outputs]:
        answers = dict(zip(left, tried(http, [requests[number] for number in left]), strict=True))
        good = {number: one["body"]["output"] for number, one in answers.items() if one["status"] == 200}
        outputs.update(good)
        bad = [one for one in answers.values() if one["status"] != 200]
        tries = 0 if good else tries + 1
        if any(one["status"] not in AGAIN for one in bad) or tries == TRIES:
            sys.exit(f"stopped: {bad[0]['body'].get('detail', '?')}\nrun it again to go on")
        if bad:
            time.sleep(min(30, max(one["body"].get("retry_after_s", 2**tries) for one in bad)))
    return [outputs[number] for number in range(len(requests))]


def main() -> None:
    """Read, skip what is done, embed, and save after each batch."""
    if len(sys.argv) != 3:
        sys.exit("give a file of texts, one in each line, and one for the vectors: run.py texts.txt vectors.npy")
    texts = [line for line in Path(sys.argv[1]).read_text().splitlines() if line.strip()]
    target, size = Path(sys.argv[2]), TEXTS_A_REQUEST * REQUESTS_A_BATCH
    done = np.load(target) if target.exists() else np.empty((0, 384), np.float32)
    if len(done) > len(texts):
        sys.exit(f"{target} has {len(done)} vectors, of other texts: name another file")
    with httpx.Client(base_url=URL, headers=HEADERS, timeout=120) as http:
        for at in track(range(len(done), len(texts), size), "embedding", disable=not sys.stderr.isatty()):
            rows = [row for output in send(http, requests_for(texts[at : at + size])) for row in output["embeddings"]]
            done = np.vstack([done, np.array(rows, np.float32)])
            saved = target.with_suffix(".part.npy")
            np.save(saved, done)
            saved.replace(target)  # whole, or as it was
    print(f"{len(texts)} texts, {len(done)} vectors of {done.shape[1]} numbers in {target.name}")


main()
