"""`python -m local_runtime bench`: one model, naive against batched against adaptive, side by side in one process."""

import argparse
import asyncio
import collections
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from rich.console import Console
from rich.progress import Progress

from local_runtime.bench import load, models, plot, report, variants
from local_runtime.bench.inputs import tensor
from local_runtime.bench.results import Results
from local_runtime.bench.subject import NotBenchable, Subject, read
from local_runtime.errors import InferenceError, ModelLoadError
from local_runtime.messages import InferRequest, ModelControl, TensorMetadata
from local_runtime.runtime import LocalRuntime, RuntimeOptions

_WIDTH = 120
_SIZES = (1, 2, 4, 8, 16, 32, 64)
# In the text of a model that calls one which is not there.
_ANOTHER_MODEL = re.compile(r"Request for unknown model|Model '[^']*' is not ready")
_EXAMPLES = """examples:
  python -m local_runtime bench                                  the built-in CNN, about 9 minutes
  python -m local_runtime bench --quick --builtin mlp            a first look, under a minute
  python -m local_runtime bench --repository triton_models --model text_encoder --shape INPUT__0:32 --shape INPUT__1:32
  python -m local_runtime bench --max-batch-size 8 --delay-us 0 --delay-us 2000 --concurrency 16 --output build/bench

Each setting becomes a model of its own beside the others; the settings take turns, and medians are told, since
machines are noisy. Before its first round at each concurrency a setting runs uncounted (--lead-in): torch gets warm
and adaptive batching learns. Callers run in the same process and ask again as soon as they are answered.
Ensembles, sequence and decoupled models, and models that call others cannot be measured."""


def add_parser(commands: Any) -> None:
    """Add `bench` to the commands of the command line."""
    parser = commands.add_parser(
        "bench",
        help="measure one model naive, batched and adaptive: table, plot, matching config.pbtxt",
        description="Measure throughput and latency of one model without batching, with Triton's dynamic batching "
        "over a sweep of max_batch_size, and with adaptive batching.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--repository", type=Path, help="folder of models; default: a built-in model, made for this run"
    )
    parser.add_argument("--model", help="which model of the repository (default: the only one)")
    parser.add_argument(
        "--builtin", type=models.Builtin, choices=list(models.Builtin), default=models.Builtin.CNN, help="(cnn)"
    )
    parser.add_argument(
        "--shape",
        action="append",
        type=_shape,
        default=[],
        metavar="INPUT:D,D,...",
        help="shape of an input with free dimensions, without the batch (repeatable; free dimensions are 1)",
    )
    parser.add_argument(
        "--max-batch-size", action="append", type=positive, metavar="N", help=f"repeatable; default: {_SIZES}"
    )
    parser.add_argument(
        "--delay-us",
        action="append",
        type=not_negative,
        metavar="US",
        help="max_queue_delay_microseconds of the static settings, repeatable; default: 0 and 2000",
    )
    parser.add_argument(
        "--concurrency", action="append", type=positive, metavar="N", help="repeatable; default: 1, 4, 16, 64"
    )
    parser.add_argument("--seconds", type=_seconds, default=1.0, help="length of one run (1)")
    parser.add_argument(
        "--rounds", type=positive, default=3, help="runs of each setting, of which the median counts (3)"
    )
    parser.add_argument(
        "--lead-in",
        type=_lead_in,
        metavar="SECONDS",
        help="each setting at each concurrency runs uncounted for so long before its first round (1.5; quick: 0.5)",
    )
    parser.add_argument("--threads", type=positive, default=1, help="CPU threads of the model (1)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="sizes 1, 8, 64; one round of 0.3 s, lead-in 0.5 s; only 1 and 16 in flight",
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="write bench.png and bench.html there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")


def run(options: argparse.Namespace) -> int:
    """Measure and report; returns the exit status."""
    # A pipe has no width of its own: wide enough that no cell is wrapped.
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else _WIDTH, soft_wrap=True, highlight=False)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            results, message = runner.run(_measure(options))
        console.print(report.table(results))
        console.print(report.comparison(results))
        for line in report.advice(results, message):
            console.print(line, markup=False)
        _write(results, options)
    except (ModelLoadError, InferenceError, OSError, NotBenchable, plot.PlotUnavailable) as error:
        sys.stderr.write(f"local_runtime bench: {error}\n")
        return 1
    return 0


def _write(results: Results, options: argparse.Namespace) -> None:
    if options.json is not None:
        options.json.write_text(json.dumps(results.as_json(), indent=2) + "\n")
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        pictures, heading = plot.pictures(results), f"{results.model}: batching measured"
        plot.write_png(pictures, options.output / "bench.png", heading=heading)
        plot.write_html(pictures, options.output / "bench.html", heading=heading)
        sys.stderr.write(f"local_runtime bench: wrote {options.output}/bench.png and bench.html\n")


async def _measure(options: argparse.Namespace) -> tuple[Results, Any]:
    """All runs; with the model's config message as it was written."""
    sizes = options.max_batch_size or ((1, 8, 64) if options.quick else _SIZES)
    delays_us = options.delay_us or (0, 2000)
    if options.repository is None and options.model is not None:
        raise NotBenchable("--model names a model of a --repository, which is not given")
    with tempfile.TemporaryDirectory(prefix="local_runtime_bench_") as temporary:
        repository = options.repository
        if repository is None:
            repository = Path(temporary) / "builtin"
            models.build(options.builtin, repository, max_batch_size=max(sizes))
        # In a thread: a Python model may complete its config by its own code, which must not be interrupted.
        subject = await asyncio.to_thread(read, repository, options.model)
        config = subject.config
        swept = variants.sweep([size for size in sizes if size <= config.max_batch_size] or [1], delays_us)
        copies = Path(temporary) / "variants"
        variants.write(subject.folder, config.message, swept, copies, threads=options.threads)
        if left_out := variants.left_out(config.message):
            sys.stderr.write(f"local_runtime bench: measured without the model's {', '.join(left_out)}\n")
        tensors = _tensors(subject, dict(options.shape))
        requests = {one: InferRequest(model=one.name, inputs=tensors) for one in swept}
        runtime = await LocalRuntime.open(copies, options=RuntimeOptions(control_mode=ModelControl.EXPLICIT))
        try:
            await _load(runtime, swept, name=config.name)
            label = f"{options.builtin} (built in)" if options.repository is None else config.name
            return await _take_turns(runtime, requests, options, label=label), subject.written
        except InferenceError as error:
            reason = _told(error.message, name=config.name)
            raise NotBenchable(
                f"model '{config.name}' failed on inputs made up for it (noise, 1, hello): {reason}"
            ) from error
        finally:
            await runtime.close()


async def _load(runtime: LocalRuntime, swept: Sequence[variants.Variant], *, name: str) -> None:
    """Load every variant. Raises NotBenchable with the reason of the first that fails, or is not what it shall be."""
    for variant in swept:
        try:
            await runtime.load(variant.name)
        except InferenceError as error:
            reasons = [status.reason for status in runtime.index() if status.name == variant.name and status.reason]
            reason = _told("; ".join(reasons) or error.message, name=name)
            raise NotBenchable(f"model '{name}' cannot be loaded as '{report.title(variant)}': {reason}") from error
        message = runtime.model_config(variant.name)
        is_batching = message.HasField("dynamic_batching")
        if message.max_batch_size != variant.max_batch_size or is_batching == (variant.kind is variants.Kind.NAIVE):
            raise NotBenchable(f"model '{name}' cannot be measured: its auto_complete_config changes how it batches")


def _told(reason: str, *, name: str) -> str:
    """The reason, explained where the model calls another one."""
    if _ANOTHER_MODEL.search(reason) is None:
        return reason
    return f"{reason.rstrip()}\nmodels that call others cannot be measured by this command: only '{name}' is loaded"


async def _take_turns(
    runtime: LocalRuntime, requests: dict[variants.Variant, InferRequest], options: argparse.Namespace, *, label: str
) -> Results:
    seconds, rounds, lead_in_s = (0.3, 1, 0.5) if options.quick else (options.seconds, options.rounds, 1.5)
    if options.lead_in is not None:
        lead_in_s = options.lead_in
    concurrencies = sorted(set(options.concurrency or ((1, 16) if options.quick else (1, 4, 16, 64))))
    runs: dict[tuple[variants.Variant, int], list[load.Measured]] = collections.defaultdict(list)
    with Progress(console=Console(file=sys.stderr)) as progress:
        task = progress.add_task("", total=len(requests) * len(concurrencies) * (1 + rounds))
        for concurrency in concurrencies:
            for variant, request in requests.items():
                progress.update(task, description=f"{concurrency} in flight, lead-in: {report.title(variant)}")
                await load.warm(runtime, request, concurrency=concurrency, seconds=lead_in_s)
                progress.advance(task)
            for _ in range(rounds):
                for variant, request in requests.items():
                    progress.update(task, description=f"{concurrency} in flight: {report.title(variant)}")
                    measured = await load.run(runtime, request, concurrency=concurrency, seconds=seconds)
                    runs[variant, concurrency].append(measured)
                    progress.advance(task)
    return Results(
        model=label,
        variants=list(requests),
        concurrencies=concurrencies,
        measured={key: load.medians(some) for key, some in runs.items()},
    )


def _tensors(subject: Subject, shapes: dict[str, tuple[int, ...]]) -> dict[str, "np.ndarray[Any, Any]"]:
    config = subject.config
    if unknown := shapes.keys() - {spec.name for spec in config.inputs}:
        names = ", ".join(spec.name for spec in config.inputs)
        raise NotBenchable(f"--shape names {', '.join(sorted(unknown))}; inputs of '{config.name}' are: {names}")
    return {
        spec.name: tensor(TensorMetadata(name=spec.name, datatype=spec.datatype, shape=config.full_shape(spec)), shapes)
        for spec in config.inputs
    }


def positive(text: str) -> int:
    """An option's whole number above 0."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def not_negative(text: str) -> int:
    """An option's whole number from 0 on."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, not {number}")
    return number


def _seconds(text: str) -> float:
    seconds = float(text)
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"must be more than 0, not {text}")
    return seconds


def _lead_in(text: str) -> float:
    seconds = float(text)
    if not seconds >= 0:
        raise argparse.ArgumentTypeError(f"must not be negative, not {text}")
    return seconds


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, _, dims = text.rpartition(":")
    if not name:
        raise argparse.ArgumentTypeError(f"must be INPUT:D,D,... not {text}")
    return name, tuple(int(size) for size in dims.split(",") if size)
