"""One worker of the data plane: `python -m gateway.worker CONFIG FD WORKERS`, which `gateway serve` alone calls.

So it takes its words as they come, without the command line, whose library takes a twelfth of a worker's start.
"""

import asyncio
import gc
import socket
import sys
from pathlib import Path

import uvloop
from prometheus_client import CollectorRegistry

from gateway.http.server import serve_app
from gateway.settings import EXIT_CONFIG, ConfigError, Settings, load_settings
from gateway.stopping import stop_on_signals
from gateway.wiring import configure_logging, data_plane

SWITCH_S = 0.0005  # a model's thread waits so long for a busy event loop each time that it comes back from torch


async def work(settings: Settings, listener_fd: int) -> None:
    """Serve the data plane on the parent's socket until a signal, or until the parent is gone."""
    configure_logging()
    stop = stop_on_signals()
    # The parent holds the other end of our standard input: its end means that the parent died.
    loop = asyncio.get_running_loop()

    def parent_gone() -> None:
        loop.remove_reader(0)
        stop.set()

    loop.add_reader(0, parent_gone)
    listener = socket.socket(fileno=listener_fd)
    async with data_plane(settings, CollectorRegistry(), is_draining=stop.is_set) as app:
        server = settings.server
        gc.collect(1)  # of the newest alone: to look through all that was imported takes as long as importing numpy
        gc.freeze()  # what is there now stays; searching through it for garbage would only hold requests up
        gc.set_threshold(20_000, 20, 50)  # a request makes hundreds of objects that die by themselves
        sys.setswitchinterval(SWITCH_S)
        # The loop keeps a list of open generators, to close them at its end: ours are closed by those who read them.
        sys.set_asyncgen_hooks(firstiter=None, finalizer=sys.get_asyncgen_hooks().finalizer)
        await serve_app(app, [listener], stop, drain_s=server.drain_timeout_s, max_message_bytes=server.max_body_bytes)


def main(config: str, listener_fd: str, workers: str) -> int:
    """Serve as one of so many `workers`; the exit status."""
    try:
        settings = load_settings(Path(config)).with_server(workers=int(workers))
        uvloop.run(work(settings, int(listener_fd)))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_CONFIG
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
