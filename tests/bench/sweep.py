"""`python -m tests.bench.sweep`: a quick sweep against brute force over the same space, for three models.

An artificial model of fixed costs, the bench's own MLP and the text encoder, on the local runtime. Both sweeps make
their own runs; what the quick one chose is judged by what brute force measured of it. Figures depend on the machine,
and on what else it does: a setting may differ between two runs by more than settings differ from each other, so each
model also has the noise told: how far apart the two sweeps' runs of one setting are.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from local_runtime.bench.models import Builtin, build

ROOT = Path(__file__).resolve().parents[2]
FIXED = """import time
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        rows = sum(pb_utils.get_input_tensor_by_name(request, "X").as_numpy().shape[0] for request in requests)
        time.sleep(0.004 + 0.0005 * rows)
        inputs = [pb_utils.get_input_tensor_by_name(request, "X").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)]) for x in inputs]
"""
FIXED_CONFIG = """backend: "python" max_batch_size: 64
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
dynamic_batching { }
"""
ENCODER = ("--shape", "INPUT__0:32", "--shape", "INPUT__1:32")


def main(
    seconds: float = typer.Option(1.0, help="Length of a long run."),
    sizes: str = typer.Option("1..64", help="Of the space."),
    delays: str = typer.Option("0,2000,10000", help="In microseconds."),
    counts: str = typer.Option("1,2", help="Instances."),
    concurrency: str = typer.Option("16", help="Callers."),
    models: str = typer.Option("fixed,mlp,text_encoder", help="Which of the three."),
) -> None:
    """Measure; some ten minutes."""
    space = ("--max-batch-size", sizes, "--delay-us", delays, "--count", counts, "--concurrency", concurrency)
    headings = ("model", "quick chose", "its goodput", "best of all", "share of best", "runs", "share of runs", "noise")
    table = Table(*headings, title=f"quick against brute force, {concurrency} in flight, local runtime")
    with tempfile.TemporaryDirectory() as temporary:
        for name in models.split(","):
            where = repository(name, Path(temporary))
            found = [sweep(where, mode, space, seconds, Path(temporary) / name / mode) for mode in MODES]
            table.add_row(name, *compared(*found))
    Console(width=160).print(table)


MODES = ("--brute-force", "--quick")


def repository(name: str, folder: Path) -> tuple[str, ...]:
    """What says where the model is."""
    if name == "text_encoder":
        return ("--repository", str(ROOT / "triton_models"), "--model", name, *ENCODER)
    models = folder / name / "models"
    if name == "mlp":
        models.mkdir(parents=True)
        build(Builtin.MLP, models, max_batch_size=64)
    else:
        (models / "fixed" / "1").mkdir(parents=True)
        (models / "fixed" / "config.pbtxt").write_text(FIXED_CONFIG)
        (models / "fixed" / "1" / "model.py").write_text(FIXED)
    return ("--repository", str(models))


def sweep(where: tuple[str, ...], mode: str, space: tuple[str, ...], seconds: float, folder: Path) -> dict[str, Any]:
    """The outcome of one sweep."""
    command = [sys.executable, "-m", "gateway", "sweep", *where, *space, mode, "--duration", f"{seconds:g}s"]
    subprocess.run([*command, "--output", str(folder)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    outcome: dict[str, Any] = json.loads((folder / "sweep.json").read_text())
    return outcome


def compared(brute: dict[str, Any], quick: dict[str, Any]) -> tuple[str, ...]:
    """A row of the table."""
    chosen = quick["runs"][quick["chosen"]]
    by_cell = {cell_of(run): goodput(run) for run in brute["runs"]}
    best, own = max(by_cell.values()), by_cell[cell_of(chosen)]
    noise = [abs(goodput(run) / by_cell[cell_of(run)] - 1) for run in quick["runs"] if by_cell[cell_of(run)]]
    setting = chosen["setting"]
    return (
        f"max {setting['max_batch_size']}, delay {setting['delay_us']} us, x{setting['count']}",
        f"{own:,.0f}/s",
        f"{best:,.0f}/s",
        f"{100 * own / best:.1f} %",
        f"{len(quick['runs'])} of {len(brute['runs'])}",
        f"{100 * len(quick['runs']) / len(brute['runs']):.0f} %",
        f"{100 * statistics.median(noise):.0f} %",
    )


def cell_of(run: dict[str, Any]) -> str:
    return json.dumps([run["setting"], run["load"]], sort_keys=True)


def goodput(run: dict[str, Any]) -> float:
    return float(run["report"]["whole"]["goodput"]) if run["report"] else 0.0


if __name__ == "__main__":
    typer.run(main)
