"""What a person reads once the stack is up: addresses, the key, and three calls to paste."""

import shlex
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gateway.stack import packages
from gateway.stack.state import RunDir

_FOUND_BY_COMMANDS = Path(".run")
_EDGE = 224  # what image classifiers look at


def lines(stack: Mapping[str, Any], run: RunDir) -> list[str]:
    """The text, line by line. `stack` is the content of `stack.json`."""
    data = stack["data_url"]
    tries = calls(data, stack["key"], example_image(run))
    if stack["llm_url"] is None:
        tries.pop()  # the chat would find nobody
    triton = stack["triton_grpc"] or "not running: the local runtime serves tensor tasks"
    token = run.path / "admin-token"
    is_found = run.path == _FOUND_BY_COMMANDS
    return [
        "",
        f"API      {data}",
        f"metrics  {stack['ops_url']}/metrics",
        f"console  {stack['admin_url']}/console   (token: {token})",
        f"admin    {stack['admin_url']}/admin/v1   (the same token)",
        f"Triton   {triton}",
        f"LLM      {stack['llm_url'] or 'not running'}",
        f"Redis    {stack['redis_url']}",
        f"key      {stack['key']}",
        "",
        *(() if is_found else (*_found_by_environment(stack, token), "")),
        "Try:",
        *(f"  {call}" for call in tries),
        "",
    ]


def _found_by_environment(stack: Mapping[str, Any], token: Path) -> list[str]:
    """How commands such as `gateway rules` reach a stack whose folder they do not look into."""
    urls = f"GATEWAY_ADMIN_URL={stack['admin_url']} GATEWAY_OPS_URL={stack['ops_url']}"
    exported = f"{urls} GATEWAY_ADMIN_TOKEN=$(cat {shlex.quote(str(token.absolute()))})"
    return ["For `gateway rules`, `switches`, `doctor` and the other commands:", f"  export {exported}"]


def how_to_stop(run: RunDir) -> str:
    """The command that stops the stack of this run directory."""
    return "`make down`" if run.path == _FOUND_BY_COMMANDS else f"`gateway down --run-dir {run.path}`"


def calls(data_url: str, key: str, image: Path) -> list[str]:
    """Three `curl` lines: an image to a classifier, a text to an encoder, a question to an LLM."""
    curl = f"curl -s {data_url}"
    secret = f"-H 'Authorization: Bearer {key}'"
    json = "-H 'Content-Type: application/json'"
    photo = shlex.quote(f"@{image}")
    text = """{"input": {"text": "a cat on a sofa"}}"""
    chat = """{"model": "general_llm", "messages": [{"role": "user", "content": "Say hello."}]}"""
    return [
        f"{curl}/v1/tasks/image-classification {secret} -H 'Content-Type: image/png' --data-binary {photo}",
        f"{curl}/v1/tasks/text-embedding {secret} {json} -d '{text}'",
        f"{curl}/v1/chat/completions {secret} {json} -d '{chat}'",
    ]


def example_image(run: RunDir) -> Path:
    """A real photo where one is installed (a cat, out of scikit-image), else a picture that we draw."""
    photo = packages.example_photo()
    if photo is not None:
        return photo
    drawn = run.path / "example.png"
    if not drawn.exists():
        drawn.write_bytes(_png(_EDGE))
    return drawn.resolve()


def _png(edge: int) -> bytes:
    """A square PNG with a colour gradient (PNG specification: 8-bit RGB, filter 0)."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    rows = b"".join(
        b"\0" + b"".join(bytes((x * 255 // edge, y * 255 // edge, 128)) for x in range(edge)) for y in range(edge)
    )
    head = struct.pack(">IIBBBBB", edge, edge, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
