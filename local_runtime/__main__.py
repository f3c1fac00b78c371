"""`python -m local_runtime`: serve a model repository over Triton's protocols, or measure what batching gains."""

import argparse
import asyncio
import gc
import logging
import os
import signal
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import uvloop

from local_runtime.bench import command as bench
from local_runtime.errors import ModelLoadError
from local_runtime.messages import ModelControl, ModelState
from local_runtime.protocol.http_server import HttpServer, start_http
from local_runtime.protocol.oip_grpc import GrpcServer, start_server
from local_runtime.protocol.oip_http import HttpApp
from local_runtime.repository import examination
from local_runtime.runtime import LocalRuntime, RuntimeOptions

_EXAMPLES = """examples:
  python -m local_runtime serve --repository triton_models
  python -m local_runtime serve --repository triton_models --http 0.0.0.0:8000 --grpc 0.0.0.0:8001
  python -m local_runtime serve --repository triton_models --http none --grpc unix:/run/local_runtime.sock
  python -m local_runtime serve --repository triton_models --model-control-mode explicit --load-model text_embedding
"""


EXIT_CONFIG = 78  # EX_CONFIG of sysexits.h: starting again would not help
_NONE = "none"
_MAX_INPUT_BYTES = 64 * 1024 * 1024  # Triton's default


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    words = command_line()
    options = words.parse_args(arguments)
    if options.command == "bench":
        return bench.run(options)
    if options.command == "check":
        return _check(options.repository)
    if options.http is None and options.grpc == _NONE:
        words.error("--http none and --grpc none leave nothing to serve")
    _log_to_stderr(options.log_level.upper())
    # Read when a model brings torch: threads that wait shall not spin and take the cores from everything else.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            _leave(runner.run(_serve(options)))
    except (ModelLoadError, OSError) as error:
        _say(f"local_runtime: {error}")
        return EXIT_CONFIG


class _Once(argparse.Action):
    """An option that may be given once: of two repositories, one would be ignored."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        """Refuse the second."""
        if getattr(namespace, self.dest, None) is not None:
            parser.error(f"{option_string} can be given once: this server has one repository")
        setattr(namespace, self.dest, values)


class _Fields(logging.Formatter):
    """A line of text with the record's own fields behind the message, as `name=value`."""

    _STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line = super().format(record)  # gives the record more fields
        fields = (f" {name}={value!r}" for name, value in vars(record).items() if name not in self._STANDARD)
        return line + "".join(fields)


def _log_to_stderr(level: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(_Fields("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


def command_line() -> argparse.ArgumentParser:
    """The words that it takes."""
    parser = argparse.ArgumentParser(
        prog="python -m local_runtime",
        description="Serve a Triton model repository inside one Python process.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser(
        "serve",
        help="load the models, then answer until SIGTERM or Ctrl-C",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    serve.add_argument(
        "--repository",
        "--model-repository",
        type=Path,
        action=_Once,
        required=True,
        metavar="FOLDER",
        help="folder of Triton models (the second name is Triton's own)",
    )
    _add_addresses(serve)
    _add_models(serve)
    _add_limits(serve)
    serve.add_argument(
        "--until-stdin-closes",
        action="store_true",
        help="also stop when standard input ends: the program that started this one is gone",
    )
    levels = ("debug", "info", "warning", "error")
    serve.add_argument(
        "--log-level", choices=levels, default="info", help="the least that is logged (default: %(default)s)"
    )
    bench.add_parser(commands)
    check = commands.add_parser(
        "check",
        help="print as JSON what Triton and this runtime would make of a repository",
        epilog="example: python -m local_runtime check triton_models",
    )
    check.add_argument("repository", type=Path, metavar="FOLDER", help="folder of Triton models; none is loaded")
    return parser


def _check(repository: Path) -> int:
    try:
        sys.stdout.write(examination.report(repository) + "\n")
    except (ModelLoadError, OSError) as error:
        _say(f"local_runtime: {error}")
        return EXIT_CONFIG
    return 0


def _add_addresses(serve: argparse.ArgumentParser) -> None:
    serve.add_argument(
        "--http",
        type=_http_address,
        default="127.0.0.1:8100",
        metavar="HOST:PORT",
        help="where to serve HTTP and /metrics, or none (127.0.0.1:8100)",
    )
    serve.add_argument(
        "--grpc",
        default="127.0.0.1:8101",
        metavar="ADDRESS",
        help="where to serve gRPC: HOST:PORT or unix:/path, or none (127.0.0.1:8101)",
    )


def _add_models(serve: argparse.ArgumentParser) -> None:
    serve.add_argument(
        "--model-control-mode",
        type=ModelControl,
        choices=tuple(ModelControl),
        default=ModelControl.NONE,
        metavar="{none,poll,explicit}",
        help="none: all models, once; poll: watch the repository; explicit: load and unload by request (none)",
    )
    serve.add_argument(
        "--load-model",
        "--model",
        dest="models",
        action="append",
        metavar="NAME",
        help="load only this model (repeatable); default: all, and none with explicit control, where * means all",
    )
    serve.add_argument(
        "--repository-poll-secs", type=bench.positive, default=15, help="seconds between two looks in mode poll (15)"
    )
    serve.add_argument(
        "--cache-size-bytes",
        type=bench.not_negative,
        default=0,
        help="room for answers of models with response_cache enabled (0: none is kept)",
    )


def _add_limits(serve: argparse.ArgumentParser) -> None:
    serve.add_argument("--threads", type=bench.positive, help="CPU threads for all models together; default: all CPUs")
    serve.add_argument(
        "--max-queue-size", type=bench.positive, default=1024, help="requests that may wait per model (1024)"
    )
    serve.add_argument(
        "--http-max-input-size",
        type=bench.positive,
        default=_MAX_INPUT_BYTES,
        help="bytes that the body of an HTTP request may have, also after decompression (64 MiB)",
    )
    serve.add_argument(
        "--exit-timeout-s",
        "--exit-timeout-secs",
        type=bench.positive,
        default=30,
        metavar="SECONDS",
        help="how long accepted work may take on exit (30; the second name is Triton's own)",
    )


def _http_address(text: str) -> tuple[str, int] | None:
    if text == _NONE:
        return None
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:  # noqa: PLR2004 - the highest port that there is
        raise argparse.ArgumentTypeError(f"must be HOST:PORT or none, not {text!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _leave(status: int) -> NoReturn:
    """End now: threads that a model left behind, or a load that is stuck, would hold up the ordinary end for ever."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _watch_stdin(stop: asyncio.Event) -> None:
    """Stop when standard input ends. Raises OSError where it is nothing that ends by itself."""
    mode = os.fstat(0).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(0)):
        raise OSError("--until-stdin-closes needs a pipe as standard input")
    loop = asyncio.get_running_loop()

    def readable() -> None:
        if not os.read(0, 4096):  # whatever is said there is nothing to us
            loop.remove_reader(0)
            stop.set()

    loop.add_reader(0, readable)


async def _serve(options: argparse.Namespace) -> int:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    if options.until_stdin_closes:
        _watch_stdin(stop)
    # Until the ports are open nothing is accepted that would have to be finished: a signal ends the process at once.
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _leave, 128 + number)
    gc.freeze()  # what is imported stays; searching through it for garbage would only hold requests up
    runtime = await LocalRuntime.open(
        options.repository,
        models=options.models,
        options=RuntimeOptions(
            threads=options.threads,
            max_queue_size=options.max_queue_size,
            close_grace_us=options.exit_timeout_s * 1_000_000,
            control_mode=options.model_control_mode,
            poll_interval_us=options.repository_poll_secs * 1_000_000,
            cache_size_bytes=options.cache_size_bytes,
        ),
    )
    _stop_on_signals(stop)
    servers: list[HttpServer | GrpcServer] = []
    try:
        await _start(runtime, options, servers)
        await stop.wait()
        _say("local_runtime: stopping, finishing accepted requests")
    finally:
        end = loop.time() + options.exit_timeout_s
        await asyncio.gather(*(server.stop(grace_s=options.exit_timeout_s) for server in servers))
        await runtime.close(grace_us=max(0, int((end - loop.time()) * 1_000_000)))
    _say("local_runtime: stopped")
    return 0


async def _start(runtime: LocalRuntime, options: argparse.Namespace, servers: list[HttpServer | GrpcServer]) -> None:
    """Open the ports, adding each server to `servers` as it starts, and say so."""
    where: list[str] = []
    if options.grpc != _NONE:
        servers.append(await start_server(runtime, options.grpc))
        where.append(f"grpc {options.grpc}")
    if options.http is not None:
        host, port = options.http
        app = HttpApp(runtime, max_input_bytes=options.http_max_input_size)
        servers.append(start_http(app, host=host, port=port))
        where.append(f"http {host}:{servers[-1].port}")
    _say(_start_line(runtime, " and ".join(where)))


def _stop_on_signals(stop: asyncio.Event) -> None:
    """The first SIGTERM or SIGINT sets `stop`, a second ends the process at once."""

    def signalled(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signalled, number)


def _start_line(runtime: LocalRuntime, where: str) -> str:
    """What is served; why the rest is not stands in the log and in the index."""
    statuses = runtime.index()
    ready = [f"{status.name}/{status.version}" for status in statuses if status.state is ModelState.READY]
    failed = {status.name for status in statuses if status.state is ModelState.UNAVAILABLE}
    served = f"{len(ready)} model{'' if len(ready) == 1 else 's'} on {where}"
    names = f": {', '.join(ready)}" if ready else ""
    others = f"; not served: {', '.join(sorted(failed))}" if failed else ""
    return f"local_runtime: serving {served}{names}{others}"


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
