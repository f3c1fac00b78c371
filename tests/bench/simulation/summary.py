"""What all rounds say of a cell."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from tests.bench.simulation.cells import BOUNDS, Cell, holds


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A cell's errors, each the median over its rounds; nothing may have ended wrongly in any.

    `calibrated_holds`: of the prediction by the calibrated times as they are.
    """

    name: tuple[str, str, str, str]
    rounds: int
    errors: dict[str, float]
    holds: bool
    calibrated_holds: bool


def verdicts(cells: Sequence[Cell]) -> list[Verdict]:
    found = []
    for name in dict.fromkeys(cell.name for cell in cells):
        those = [cell for cell in cells if cell.name == name]
        errors = {figure: median(cell.errors[figure] for cell in those) for figure in BOUNDS}
        calibrated = {figure: median(cell.calibrated_errors[figure] for cell in those) for figure in BOUNDS}
        is_clean = not any(cell.wrong for cell in those)
        found.append(
            Verdict(
                name=name,
                rounds=len(those),
                errors=errors,
                holds=is_clean and holds(errors),
                calibrated_holds=is_clean and holds(calibrated),
            )
        )
    return found
