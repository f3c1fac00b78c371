"""`python -m local_runtime serve`: the local runtime alone, speaking Triton's gRPC protocol."""

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from local_runtime.errors import ModelLoadError
from local_runtime.messages import ModelState
from local_runtime.protocol.oip_grpc import start_server
from local_runtime.runtime import LocalRuntime, RuntimeOptions

_EXAMPLES = """examples:
  python -m local_runtime serve --repository triton_models --grpc 127.0.0.1:8101
  python -m local_runtime serve --repository triton_models --grpc unix:/run/local_runtime.sock
  python -m local_runtime serve --repository triton_models --grpc 127.0.0.1:8101 --model text_embedding --threads 2
"""


EXIT_CONFIG = 78  # EX_CONFIG of sysexits.h: starting again would not help


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        return asyncio.run(_serve(options))
    except (ModelLoadError, OSError) as error:
        _say(f"local_runtime: {error}")
        return EXIT_CONFIG


def _parser() -> argparse.ArgumentParser:
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
    serve.add_argument("--repository", type=Path, required=True, help="folder of Triton models")
    serve.add_argument("--grpc", required=True, metavar="ADDRESS", help="HOST:PORT or unix:/path")
    serve.add_argument(
        "--model", action="append", metavar="NAME", help="load only this model (repeatable); default: all"
    )
    serve.add_argument("--threads", type=_positive, help="CPU threads per model; default: all CPUs")
    serve.add_argument("--max-queue-size", type=_positive, default=1024, help="requests that may wait per model (1024)")
    serve.add_argument(
        "--exit-timeout-s", type=_positive, default=30, help="seconds to finish accepted work on exit (30)"
    )
    serve.add_argument(
        "--until-stdin-closes",
        action="store_true",
        help="also stop when standard input ends: the program that started this one is gone",
    )
    serve.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


async def _serve(options: argparse.Namespace) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if options.until_stdin_closes:

        def parent_gone() -> None:
            loop.remove_reader(sys.stdin)
            stop.set()

        loop.add_reader(sys.stdin, parent_gone)
    runtime = await LocalRuntime.open(
        options.repository,
        models=options.model,
        options=RuntimeOptions(
            threads=options.threads,
            max_queue_size=options.max_queue_size,
            close_grace_us=options.exit_timeout_s * 1_000_000,
        ),
    )
    try:
        server = await start_server(runtime, options.grpc)
        _say(_start_line(runtime, options.grpc))
        await stop.wait()
        _say("local_runtime: stopping, finishing accepted requests")
        await server.stop(grace=options.exit_timeout_s)
    finally:
        await runtime.close()
    _say("local_runtime: stopped")
    return 0


def _start_line(runtime: LocalRuntime, address: str) -> str:
    statuses = runtime.index()
    ready = [f"{status.name}/{status.version}" for status in statuses if status.state is ModelState.READY]
    lines = [f"local_runtime: serving {len(ready)} models on grpc {address}: {', '.join(ready)}"]
    lines += [
        f"local_runtime: model {status.name} is not served: {status.reason}"
        for status in statuses
        if status.state is not ModelState.READY
    ]
    return "\n".join(lines)


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
