"""All that was found, kept in a folder."""

import os
import platform
from pathlib import Path

import orjson

from gateway.tuning.curves import LatencyCurve, parse_curve
from tests.bench.simulation import page
from tests.bench.simulation.cells import Cell, parse_cell
from tests.bench.simulation.summary import verdicts


class Book:
    """Written anew after each setting: who stops the bench keeps what it had.

    Args:
        folder: of `report.html` and `report.json`.
        adds: to what the folder has; else it is begun anew.
    """

    def __init__(self, folder: Path, *, adds: bool) -> None:
        self._folder = folder
        self.cells: list[Cell] = []
        self.curves: list[LatencyCurve] = []
        self.notes: list[str] = []
        self._machines: list[str] = []
        folder.mkdir(parents=True, exist_ok=True)
        if adds and (folder / "report.json").exists():
            found = orjson.loads((folder / "report.json").read_bytes())
            self.cells = [parse_cell(one) for one in found["cells"]]
            self.curves = [parse_curve(one) for one in found["curves"]]
            self.notes, self._machines = found["notes"], found["machines"]
        self._machine = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before"

    def rounds(self, engine: str, model: str, setting: str) -> int:
        """How often a setting was measured so far."""
        name = (engine, model, setting)
        return len({cell.round for cell in self.cells if (cell.engine, cell.model, cell.setting) == name})

    def write(self) -> None:
        """The page and the JSON."""
        machines = [*self._machines, f"{self._machine}, {os.getloadavg()[0]:.1f} after"]
        found = verdicts(self.cells)
        text = page.html(self.cells, found, machine="; ".join(machines), notes=self.notes)
        (self._folder / "report.html").write_text(text)
        document = {
            "machines": machines,
            "notes": self.notes,
            "verdicts": found,
            "cells": [cell.as_json() for cell in self.cells],
            "curves": [curve.as_json() for curve in self.curves],
        }
        (self._folder / "report.json").write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2))
