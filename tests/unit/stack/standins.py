"""Tiny processes that stand in for the parts of the stack: they start in a few hundredths of a second."""

import asyncio
import io
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from gateway.stack.display import Display
from gateway.stack.leftovers import MARK
from gateway.stack.parts import Part
from gateway.stack.ports import free_ports
from gateway.stack.probes import RedisReady
from gateway.stack.process import Backoff
from gateway.stack.state import RunDir
from gateway.stack.supervisor import Supervisor

RUN_ID = "c0ffee"

# Answers +PONG like Redis. At SIGTERM it writes its name into the journal and goes, unless told to be stubborn.
SERVER = """
import os, signal, socket, sys
port, name, journal, manner = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
def leave(*_):
    with open(journal, "a") as file:
        file.write(name + "\\n")
    os._exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN if manner == "stubborn" else leave)
if manner == "parent":
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            signal.pause()
    with open(journal + ".child", "w") as file:
        file.write(str(child))
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind(("127.0.0.1", port))
server.listen()
print("listening", flush=True)
while True:
    peer, _ = server.accept()
    peer.recv(64)
    peer.sendall(b"+PONG\\r\\n")
    peer.close()
"""


def python(code: str, *arguments: object) -> tuple[str, ...]:
    return (sys.executable, "-I", "-S", "-c", code, *map(str, arguments))


def part(name: str, folder: Path, *, after: tuple[str, ...] = (), manner: str = "mild", grace_s: float = 20.0) -> Part:
    port = free_ports().redis
    return Part(
        name=name,
        title=name.title(),
        command=python(SERVER, port, name, folder / "journal", manner),
        env={MARK: RUN_ID},
        ports=(port,),
        ready=RedisReady(port=port),
        after=after,
        ready_within_s=20.0,
        grace_s=grace_s,
    )


def failing(name: str, code: str = "import sys; print('no luck'); sys.exit(3)") -> Part:
    return Part(
        name=name, title=name.title(), command=python(code), env={}, ports=(), ready=RedisReady(port=free_ports().redis)
    )


def supervisor(
    folder: Path, *parts: Part, on_ready: Callable[[], None] = lambda: None
) -> tuple[Supervisor, RunDir, io.StringIO]:
    run = RunDir(folder / "run")
    run.create()
    text = io.StringIO()
    made = Supervisor(
        parts=parts,
        run=run,
        run_id=RUN_ID,
        addresses={"data_url": "http://127.0.0.1:1", "key": "gw-dev-x", "triton_grpc": None},
        display=Display(parts, Console(file=text, width=200)),
        on_ready=on_ready,
        backoff=lambda: Backoff(first_s=0.01),
    )
    return made, run, text


async def until(condition: Callable[[], bool], within_s: float = 20.0) -> None:
    give_up = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up, "it did not come to pass"
        await asyncio.sleep(0.01)


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state != "Z"
