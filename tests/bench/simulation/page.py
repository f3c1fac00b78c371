"""The report: every cell, and pictures of what was measured beside what was predicted."""

from collections.abc import Sequence
from html import escape

from gateway.tuning.charts import STYLE, Axis, Line, lines
from tests.bench.simulation.cells import BOUNDS, LOADS, Cell
from tests.bench.simulation.summary import Verdict

HEADINGS = (
    *("server", "model", "setting", "load", "round", "holds", "rate/s", "requests"),
    *("answered/s", "off by", "p50 ms", "off by", "p99 ms", "off by", "mean batch", "drift", "pace"),
    *("calibrated: p50 off by", "p99 off by"),
)


def verdict(holds: bool) -> str:
    """A word."""
    return "yes" if holds else "NO"


def told_error(name: str, error: float) -> str:
    """Marked where it is out of bounds."""
    return f"{error:+.1%}{'' if abs(error) <= BOUNDS[name] else ' !'}"


def row(cell: Cell) -> list[str]:
    """A cell's words."""
    told = []
    for name, error in cell.errors.items():
        both = (f"{getattr(one, name):,.{1 if name == 'qps' else 2}f}" for one in (cell.measured, cell.predicted))
        told += [" | ".join(both), told_error(name, error)]
    return [
        *(cell.engine, cell.model, cell.setting, f"{cell.load:.0%}", str(cell.round + 1)),
        *(verdict(cell.holds), f"{cell.rate:.1f}", f"{cell.requests:,}"),
        *told,
        " | ".join(f"{one.mean_batch:.2f}" for one in (cell.measured, cell.predicted)),
        f"{cell.drift:+.1%}",
        f"{cell.pace:.3f}",
        *(told_error(name, cell.calibrated_errors[name]) for name in ("p50", "p99")),
    ]


def html(cells: Sequence[Cell], verdicts: Sequence[Verdict], *, machine: str, notes: Sequence[str]) -> str:
    """The page."""
    bounds = ", ".join(f"{name} within {bound:.0%}" for name, bound in BOUNDS.items())
    good, calibrated = sum(one.holds for one in verdicts), sum(one.calibrated_holds for one in verdicts)
    head = (
        f"<p class=setting>{escape(machine)}</p><p class=setting>Each cell is held to: {bounds}. Open Poisson traffic; "
        "the simulation has the same instants. The load is a share of what the calibrated times allow. "
        "Drift: by how much the times of batches after the run differed from those before it, of the size that did "
        "most. Pace: how many times as long batches took in the run as in the calibration, by the server's own count. "
        f"</p><p><b>{good} of {len(verdicts)} cells hold</b> at the pace of their runs (each by the median of its "
        f"rounds), {calibrated} by the calibrated times as they are.</p>"
    )
    told = "".join(f"<li>{escape(note)}</li>" for note in notes)
    medians = [
        [
            *(*one.name, str(one.rounds), *(f"{one.errors[name]:+.1%}" for name in BOUNDS)),
            *(verdict(one.holds), verdict(one.calibrated_holds)),
        ]
        for one in verdicts
    ]
    names = (
        "server",
        "model",
        "setting",
        "load",
        "rounds",
        *(f"{name} off by" for name in BOUNDS),
        "holds",
        "as calibrated",
    )
    rounds = {cell.round for cell in cells}
    parts = [
        head,
        f"<ul class=notes>{told}</ul>" if told else "",
        f"<h2>Medians of all rounds</h2>{_table(names, medians)}" if len(rounds) > 1 else "",
        f"<h2>Every cell: measured | simulated</h2>{_table(HEADINGS, [row(cell) for cell in cells])}",
        f'<h2>Latency by load</h2><div class="charts">{"".join(_charts(cells))}</div>',
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width, initial-scale=1"><title>Simulated and measured</title><style>{STYLE}</style>'
        f"</head><body><h1>Simulated and measured</h1>{''.join(parts)}</body></html>\n"
    )


def _charts(cells: Sequence[Cell]) -> list[str]:
    drawn = []
    for name in dict.fromkeys((cell.engine, cell.model, cell.setting) for cell in cells):
        those = sorted(
            (cell for cell in cells if (cell.engine, cell.model, cell.setting) == name and cell.round == 0),
            key=lambda cell: cell.load,
        )
        drawn.append(
            lines(
                ", ".join(name),
                [
                    Line(name=f"{of} {share}", points=[(c.load * 100, getattr(getattr(c, of), share)) for c in those])
                    for share in ("p50", "p99")
                    for of in ("measured", "predicted")
                ],
                x=Axis(name="load (% of capacity)", ticks=[(load * 100, f"{load:.0%}") for load in sorted(LOADS)]),
                y=Axis(name="latency (ms)"),
            )
        )
    return drawn


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    above = "".join(f"<th>{escape(one)}</th>" for one in headings)
    below = "".join(f"<tr>{''.join(f'<td>{escape(one)}</td>' for one in words)}</tr>" for words in rows)
    return f'<div class="wide"><table><thead><tr>{above}</tr></thead><tbody>{below}</tbody></table></div>'
