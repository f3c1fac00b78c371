"""Prometheus and its `promtool`, and what the files in `deploy/` give them."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus"
DASHBOARDS = sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))
MISSING = "the tests of alerts and dashboards need Prometheus: `apt-get install prometheus`"
NAMES = re.compile(r"\b(?:gateway|nv)_[a-z0-9_]+")
RECORDED = re.compile(r"\bgateway:[a-z0-9_:]+")


def tool(name: str) -> str:
    """The path of `prometheus` or `promtool`."""
    found = shutil.which(name)
    assert found, MISSING
    return found


def panels() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every panel of every dashboard, with `dashboard/title`."""
    for path in DASHBOARDS:
        board = json.loads(path.read_text())
        for panel in board["panels"]:
            yield f"{path.stem}/{panel['title']}", panel


def queries() -> Iterator[tuple[str, str]]:
    """Every query of a panel, as Grafana would send it, with where it stands."""
    for where, panel in panels():
        for target in panel["targets"]:
            yield where, target["expr"].replace("$__rate_interval", "20s")
