"""`python -m tests.kit.cost`: what one request of each hot path costs, in bytecode instructions, and its ceiling.

    python -m tests.kit.cost               # the table
    python -m tests.kit.cost chat          # the functions in which a path's instructions are
    python -m tests.kit.cost --write       # lower the ceilings that are too high, make those that are missing

The number is the same in every run on every machine, as long as Python's minor version and the libraries are those of
requirements/constraints.txt. How it is counted: `cost_meter.py`; what is asked: `cost_paths.py`, and
`cost_refusals.py` for what is refused.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from typing import Annotated, Final

import typer

from tests.kit.cost_meter import ROOT, Cost

CEILINGS: Final = ROOT / "tests" / "component" / "cost_ceilings.toml"
PYTHON: Final = f"{sys.version_info.major}.{sys.version_info.minor}"  # each has a bytecode of its own
MARGIN: Final = 1.005  # a ceiling is so much above what was counted: some 100 instructions of a chat
SLACK: Final = 0.97  # of its ceiling: below this there is room to forget a gain
MOST_GARBAGE: Final = 5  # objects of a request: timers leave some too; one that is in a cycle drags dozens along
TOP: Final = 40
HEAD: Final = """\
# The most bytecode instructions that a request of each hot path may cost, by Python's minor version. They only go down:
# `python -m tests.kit.cost --write` lowers them. One that has to be higher is written here by hand, in a commit that
# says what is gained by it. docs/performance.md tells how they are counted.
"""


def main(
    path: Annotated[str, typer.Argument(help="Show the functions of this one.")] = "",
    write: Annotated[bool, typer.Option(help="Lower the ceilings.")] = False,
    top: Annotated[int, typer.Option(min=1, help="So many functions.")] = TOP,
) -> None:
    """Count; ten seconds."""
    costs, limits = measured(), ceilings()
    if path:
        if path not in costs:
            raise typer.BadParameter(f"must be one of {', '.join(costs)}")
        print(dearest(costs[path], top))
        return
    for name, cost in costs.items():
        print(f"{name:<14} {cost.instructions:>7,} of {limits.get(name, 0):>7,}")
    if write:
        CEILINGS.write_text(written(lowered(costs, limits)))
    complaints = [told for name, cost in costs.items() if (told := complaint(name, cost, ceilings().get(name)))]
    if complaints:
        print("\n\n".join(complaints), file=sys.stderr)
        raise typer.Exit(1)


def measured() -> dict[str, Cost]:
    """Every path's cost, and every refusal's, each counted in a process of its own."""
    return {**_counted_by("tests.kit.cost_paths"), **_counted_by("tests.kit.cost_refusals")}


def _counted_by(module: str) -> dict[str, Cost]:
    with tempfile.TemporaryDirectory() as metrics:
        # As `gateway serve` starts a worker; and sets shall have one order.
        environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": metrics, "PYTHONHASHSEED": "0"}
        command = (sys.executable, "-m", module)
        said = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if said.returncode:
        raise RuntimeError(f"nothing could be counted:\n{said.stderr}")
    return {name: Cost(**fields) for name, fields in json.loads(said.stdout).items()}


def ceilings() -> dict[str, int]:
    """Those of this Python."""
    return dict(tomllib.loads(CEILINGS.read_text()).get(PYTHON, {}))


def ceiling_for(instructions: int) -> int:
    """The ceiling of a path that costs so much."""
    return math.ceil(instructions * MARGIN)


def complaint(name: str, cost: Cost, ceiling: int | None) -> str:
    """What is wrong with a path's cost, and what to do; empty where all is well."""
    count, show = (
        cost.instructions,
        f"`python -m tests.kit.cost {name}` shows where they are, before and after a change",
    )
    if cost.garbage > MOST_GARBAGE:
        return f"{name}: leaves {cost.garbage} objects in cycles; `python -m tests.bench.stalls` shows which"
    if ceiling is None:
        return f"{name}: costs {count:,} instructions, and has no ceiling for Python {PYTHON}: add --write"
    if count > ceiling:
        return (
            f"{name}: costs {count:,} instructions, more than its ceiling of {ceiling:,} ({count / ceiling - 1:+.1%}); "
            f"{show}.\n{dearest(cost, 10)}"
        )
    if count < ceiling * SLACK:
        lower = ceiling_for(count)
        return f"{name}: costs {count:,} instructions; lower the ceiling from {ceiling:,} to {lower:,} (add --write)"
    return ""


def lowered(costs: Mapping[str, Cost], before: Mapping[str, int]) -> dict[str, int]:
    """The new ceilings: none is higher than before."""
    wanted = {name: ceiling_for(cost.instructions) for name, cost in costs.items()}
    return {name: min(before.get(name, ceiling), ceiling) for name, ceiling in wanted.items()}


def written(limits: Mapping[str, int]) -> str:
    """The file with these for this Python, and those of others as they were."""
    tables = {**tomllib.loads(CEILINGS.read_text() if CEILINGS.exists() else ""), PYTHON: limits}
    parts = [
        f'["{version}"]\n' + "".join(f"{name} = {limit}\n" for name, limit in table.items())
        for version, table in sorted(tables.items())
    ]
    return "\n".join([HEAD, *parts])


def dearest(cost: Cost, top: int) -> str:
    """Its functions, each with its own instructions, without those of what it calls."""
    lines = [f"{count:>7,}  {where}" for where, count in list(cost.functions.items())[:top]]
    rest = cost.instructions - sum(list(cost.functions.values())[:top])
    return "\n".join([*lines, f"{rest:>7,}  in {max(0, len(cost.functions) - top)} more"])


if __name__ == "__main__":
    typer.run(main)
