"""The report of `python -m tests.bench.simulation`: what holds, what is kept, and that nothing is hidden."""

from dataclasses import replace
from pathlib import Path

import pytest

from gateway.tuning.curves import LatencyCurve
from tests.bench.simulation.book import Book
from tests.bench.simulation.calibration import Lone, Measured, curve_of, pace, paced
from tests.bench.simulation.cells import Cell, Figures, capacity, instants
from tests.bench.simulation.engines import Counted
from tests.bench.simulation.subjects import SUBJECTS
from tests.bench.simulation.summary import verdicts


def cell(*, p50: float = 10.0, number: int = 0, wrong: int = 0, load: float = 0.7) -> Cell:
    """Measured were 100/s and 10 and 20 ms."""
    return Cell(
        engine="local",
        model="fixed",
        setting="no delay",
        load=load,
        round=number,
        rate=100.0,
        seconds=15.0,
        requests=1500,
        drift=0.01,
        pace=1.0,
        wrong={"unavailable": wrong} if wrong else {},
        measured=Figures(qps=100.0, p50=10.0, p99=20.0, mean_batch=2.0),
        predicted=Figures(qps=100.0, p50=p50, p99=20.0, mean_batch=2.0),
        calibrated=Figures(qps=100.0, p50=2 * p50, p99=20.0, mean_batch=2.0),
    )


@pytest.mark.parametrize(
    ("found", "holds"),
    [
        ([cell(p50=11.49)], True),
        ([cell(p50=11.51)], False),
        ([cell(p50=8.49)], False),
        ([cell(wrong=1)], False),
        ([cell(p50=20.0), cell(p50=10.0, number=1), cell(p50=9.0, number=2)], True),
        ([cell(p50=20.0), cell(p50=13.0, number=1), cell(p50=9.0, number=2)], False),
        ([cell(), cell(number=1, wrong=1)], False),
    ],
)
def test_a_cell_holds_by_the_median_of_its_rounds_and_if_all_was_answered(found: list[Cell], holds: bool):
    (verdict,) = verdicts(found)
    assert verdict.holds is holds
    assert not verdict.calibrated_holds
    assert verdict.rounds == len(found)


def test_rounds_are_added_to_what_a_folder_has_and_all_are_told(tmp_path: Path):
    first = Book(tmp_path, adds=False)
    first.cells += [cell(p50=25.0), cell(load=0.95)]
    first.curves.append(curve_of(SUBJECTS["fixed"], "unbatched", {1: [5000.0]}, Lone(took_us=[5200.0], pace=1.0)))
    first.notes.append("triton, fixed: not all was measured")
    first.write()
    again = Book(tmp_path, adds=True)
    assert again.cells == first.cells
    assert again.curves == first.curves
    assert again.rounds("local", "fixed", "no delay") == 1
    assert again.rounds("triton", "fixed", "no delay") == 0
    again.cells.append(cell(number=1))
    again.write()
    page = (tmp_path / "report.html").read_text()
    assert "+150.0% !" in page
    assert "1 of 2 cells hold" in page
    assert "not all was measured" in page
    assert Book(tmp_path, adds=False).cells == []


def test_the_way_is_what_a_lone_request_takes_beyond_its_batch_and_the_delay():
    times = {1: [5000.0], 2: [6000.0], 4: [8000.0], 8: [12_000.0]}
    curve = curve_of(SUBJECTS["fixed"], "delay 5 ms", times, Lone(took_us=[10_800.0], pace=1.1))
    assert set(curve.overhead_us) == {300.0}
    assert capacity(curve, "delay 5 ms") == pytest.approx(8 / 0.012)
    assert capacity(curve, "unbatched") == pytest.approx(200)


def test_the_pace_is_what_batches_took_beside_those_of_their_sizes():
    around = Measured(times={1: [1.0], 8: [1.0]}, computed_us={1: [4900.0, 5100.0], 8: [12_000.0]})
    counted = Counted(requests=20, compute_us=0, batch_sizes={1: 4, 8: 2})
    expected_us = 4 * 5000 + 2 * 8 * 12_000  # each request of a batch has all of its computing
    assert pace(replace(counted, compute_us=expected_us), around) == pytest.approx(1)
    assert pace(replace(counted, compute_us=2 * expected_us), around) == pytest.approx(2)
    slow = paced(LatencyCurve(model="m", compute_us={1: (10.0, 20.0)}, overhead_us=(7.0,)), 1.5)
    assert (slow.compute_us, slow.overhead_us) == ({1: (15.0, 30.0)}, (7.0,))


def test_arrivals_are_those_of_their_seed():
    assert instants(100.0, seed=1, seconds=2.0) == instants(100.0, seed=1, seconds=2.0)
    assert instants(100.0, seed=1, seconds=2.0) != instants(100.0, seed=2, seconds=2.0)
