"""`make chaos`: every part is killed, paused, cut off, slowed down and restarted under load.

Examples:

    python -m tests.chaos                      # every fault of every part, then pairs: about 8 minutes
    python -m tests.chaos --quick              # a small set: about 90 seconds
    python -m tests.chaos --seed 7             # the same schedule again
    python -m tests.chaos --soak 30            # faults at random for 30 minutes; memory and descriptors are watched
"""

import json
import random
import shutil
import sys
import tempfile
from pathlib import Path

import typer
import uvloop

from tests.bench.suite.machine import revision
from tests.chaos import report, schedule
from tests.chaos.run import run
from tests.kit.ending import sigterm_as_ctrl_c

PAIRS = 10
PAUSE_S, SOAK_PAUSE_S = 0.5, 12.0
LONG_S = 3600.0


def main(
    *,
    seed: int = typer.Option(0, help="Of the schedule and of the clients; 0 draws one, which is printed."),
    quick: bool = typer.Option(default=False, help="A small fixed set of faults, and one pair."),
    soak: float = typer.Option(0.0, help="So many minutes of random faults, at a gentle rate."),
    pairs: int = typer.Option(PAIRS, help="Pairs of faults after the single ones."),
    output: Path = typer.Option(Path("build/chaos"), help="Folder of report.json, report.md and the logs."),  # noqa: B008 - Typer's way
) -> None:
    """Make faults, and judge what clients saw. Exit status 1 where anything is found."""
    seed = seed or random.randrange(1, 10**6)
    words = [f"--seed {seed}", *(["--quick"] if quick else []), *([f"--soak {soak:g}"] if soak else [])]
    words += [f"--pairs {pairs}"] if pairs != PAIRS else []
    command = " ".join(["python -m tests.chaos", *words])
    say(command)
    if soak:
        strikes, lasts_s, pause_s = schedule.soak(seed), soak * 60, SOAK_PAUSE_S
    else:
        strikes = schedule.quick(seed) if quick else schedule.suite(seed, pairs=pairs)
        lasts_s, pause_s = LONG_S, PAUSE_S
        say(f"{len(strikes)} strikes")
    output.mkdir(parents=True, exist_ok=True)
    sigterm_as_ctrl_c()
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        result = uvloop.run(run(folder, strikes, seed=seed, lasts_s=lasts_s, pause_s=pause_s, say=say))
        for log in [*folder.glob("*.log"), folder / "clients.jsonl"]:
            shutil.copy(log, output)
    told = {"command": command, "revision": revision()}
    (output / "report.json").write_text(json.dumps(report.as_json(result, **told), indent=1) + "\n")
    text = report.markdown(result, **told)
    (output / "report.md").write_text(text)
    print(text)
    sys.exit(1 if result.findings else 0)


def say(text: str) -> None:
    """One line for who waits."""
    print(text, flush=True)


if __name__ == "__main__":
    typer.run(main)
