"""docs/performance.md and `tests.bench.flame` name what there is; samples are counted for the step that asked."""

import re
from pathlib import Path

import pytest

from tests.bench.flame import LOOP, SERVER, STEPS, step_of, table
from tests.kit import cost

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "performance.md").read_text()
SITE = "/x/.venv/lib/python3.11/site-packages"


def test_what_is_there_for_speed_is_there():
    table_of_it = PAGE.partition("## What is there for speed")[2]
    named = [name for line in table_of_it.splitlines() if line.startswith("| ") for name in places(line.split("|")[2])]
    assert len(named) > 20
    missing = [name for name in named if not ((ROOT / "gateway" / name).exists() or (ROOT / name).exists())]
    assert not missing


def test_the_counted_paths_are_told():
    counted = PAGE.partition("| path | what is counted |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", counted, re.MULTILINE)) == cost.ceilings().keys()


def places(cell: str) -> list[str]:
    """Files and folders of a cell; a bare name stands beside the one before it."""
    found: list[str] = []
    for name in re.findall(r"`([\w/]+(?:\.py|/))", cell):
        before = found[-1].rpartition("/")[0] if found else ""
        is_beside = "/" not in name and before and not (ROOT / "gateway" / name).exists()
        found.append(f"{before}/{name}" if is_beside else name)
    return found


def test_the_steps_are_of_files_that_exist():
    assert all((ROOT / prefix).exists() for prefix, _ in STEPS)
    assert STEPS[-1][0] == "gateway/"


@pytest.mark.parametrize(
    ("frames", "step"),
    [
        (["worker (/p/gateway/cli/serve.py:69)", "handle (/p/gateway/pipeline.py:90)"], "the walk itself"),
        (["worker (/p/gateway/cli/serve.py:69)", f"run ({SITE}/uvloop/__init__.py:1)"], LOOP),
        (["handle (/p/gateway/pipeline.py:90)", "_run (/p/gateway/stores/redis_steps.py:1)"], "2 admit"),
        (
            ["_run (/p/gateway/stores/redis_steps.py:1)", f"pack_command ({SITE}/redis/asyncio/connection.py:5)"],
            "2 admit",
        ),
        (["__call__ (/p/gateway/api/endpoint.py:1)", f"send ({SITE}/uvicorn/protocols/http/h.py:1)"], SERVER),
        ([f"run ({SITE}/uvloop/__init__.py:1)"], LOOP),
        ([f"odd ({SITE}/gateway/pipeline.py:1)"], LOOP),
    ],
)
def test_a_sample_counts_for_the_deepest_function_of_ours(frames, step):
    assert step_of(frames) == step


def test_samples_become_microseconds():
    samples = "a (/p/gateway/pipeline.py:1) 3\na (/p/gateway/pipeline.py:1);b (/p/gateway/gate.py:2) 1\n"
    shown = table(samples, 200.0, 0)
    assert [list(column.cells) for column in shown.columns] == [
        ["the walk itself", "4 dispatch: the attempt, gate and breaker"],
        ["150.0", "50.0"],
        ["75.0%", "25.0%"],
    ]
    assert list(table(samples, 200.0, 100).columns[1].cells) == ["1.5", "0.5"]
