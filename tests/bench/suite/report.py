"""The document that a run of the suite keeps, and its tables in Markdown. Pure: no clock, no files."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from tests.bench.suite.goals import Goal, Run, Verdict, medians, shown, verdict

BEGIN: Final = "<!-- figures: python -m tests.bench --page -->"
END: Final = "<!-- /figures -->"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What one row found.

    Attributes:
        date: when it began; the rows of a report may be of several runs of the same machine.
        revision: of the project, marked where the files differed from it.
        load: the machine's load average before and after. It has to be near 0 before, or others were measured, too.
        runs: every run's figures as they were.
        notes: what was left out and why, what is needed to read the figures.
        errors: what failed. The other rows and subjects were measured all the same.
    """

    name: str
    title: str
    date: str
    revision: str
    load: tuple[float, float]
    goals: tuple[Goal, ...]
    runs: tuple[Run, ...] = ()
    notes: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()

    @property
    def verdicts(self) -> list[Verdict]:
        """Of all its goals."""
        return [verdict(goal, self.runs) for goal in self.goals]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All rows. `setting` is how they were measured: machine, versions, length and number of runs."""

    setting: Mapping[str, Any]
    rows: Mapping[str, Found] = field(default_factory=dict)

    def with_row(self, found: Found) -> "Report":
        """With this row instead of the one of its name."""
        return Report(setting=self.setting, rows={**self.rows, found.name: found})

    @property
    def missed(self) -> list[str]:
        """The goals that are not met, and the rows that failed."""
        goals = [
            f"{row.name}: {one.goal.figure} {one.goal.words}: {shown(one.held)}"
            for row in self.rows.values()
            for one in row.verdicts
            if one.holds is False
        ]
        return [*goals, *(f"{row.name}: {error.splitlines()[0]}" for row in self.rows.values() for error in row.errors)]

    def as_json(self) -> dict[str, Any]:
        """The whole document; medians and verdicts are told with it, and made anew when it is read."""
        return {
            "setting": dict(self.setting),
            "rows": [
                {
                    **asdict(row),
                    "medians": medians(row.runs),
                    "verdicts": [
                        {"goal": one.goal.words, "figure": one.goal.figure, **_told(one)} for one in row.verdicts
                    ],
                }
                for row in self.rows.values()
            ],
        }


def _told(one: Verdict) -> dict[str, Any]:
    return {
        "ours": one.ours,
        "peer": one.peer,
        "held": one.held,
        "spread": one.spread,
        "rounds": one.rounds,
        "holds": one.holds,
    }


def parse(document: Mapping[str, Any]) -> Report:
    """A report from its JSON. Raises `KeyError` or `TypeError` for another document."""
    return Report(setting=document["setting"], rows={row["name"]: _found(row) for row in document["rows"]})


def _found(row: Mapping[str, Any]) -> Found:
    before, after = row["load"]
    return Found(
        name=row["name"],
        title=row["title"],
        date=row["date"],
        revision=row["revision"],
        load=(before, after),
        goals=tuple(Goal(**one) for one in row["goals"]),
        runs=tuple(Run(**one) for one in row["runs"]),
        notes=tuple(row["notes"]),
        errors=tuple(row["errors"]),
    )


# --- Markdown ----------------------------------------------------------------------------------------------


def markdown(report: Report) -> str:
    """What was measured where; the goals; all medians; what failed."""
    parts = [_setting(report), goals_table(report.rows.values()), _all(report.rows.values())]
    return "\n\n".join(part for part in parts if part) + "\n"


def _setting(report: Report) -> str:
    lines = [f"- {name}: {value}" for name, value in report.setting.items()]
    dates = sorted({f"{row.date[:16]} at {row.revision}" for row in report.rows.values()})
    loads = [load for row in report.rows.values() for load in row.load[:1]]
    lines += [f"- measured: {', '.join(dates)}"] if dates else []
    lines += [f"- load average before each row: {min(loads):.1f} to {max(loads):.1f}"] if loads else []
    return "\n".join(lines)


def goals_table(rows: Iterable[Found]) -> str:
    """One line for each goal. `spread`: the lowest and the highest round."""
    head = ("row", "figure", "ours", "peer", "ratio or difference", "goal", "holds", "spread", "rounds")
    return _table(head, [_line(row, one) for row in rows for one in row.verdicts])


def _line(row: Found, one: Verdict) -> tuple[str, ...]:
    who = "" if one.goal.subject == "ours" else f" ({one.goal.subject})"
    held = shown(one.held) if one.goal.against else ""
    if held and one.held is not None and one.goal.by == "difference":
        held = f"{one.held:+.3f}"
    spread = f"{shown(one.spread[0])} to {shown(one.spread[1])}" if one.spread else ""
    holds = {True: "yes", False: "**NO**", None: "not measured"}[one.holds]
    peer = shown(one.peer) if one.goal.against else ""
    words = (one.goal.figure + who, shown(one.ours), peer, held, one.goal.words, holds, spread, str(one.rounds))
    return (row.title, *words)


def _all(rows: Iterable[Found]) -> str:
    """Every subject's medians, row by row, with notes and errors."""
    parts = []
    for row in rows:
        found = medians(row.runs)
        figures = list(dict.fromkeys(figure for one in found.values() for figure in one))
        lines = [(subject, *(shown(one.get(figure)) for figure in figures)) for subject, one in found.items()]
        said = [*(f"- {note}" for note in row.notes), *map(_fault, row.errors)]
        table = _table(("", *figures), lines) if lines else ""
        parts.append("\n\n".join(part for part in (f"**{row.title}** (`{row.name}`)", table, "\n".join(said)) if part))
    return "\n\n".join(parts)


def _fault(error: str) -> str:
    """What a server said last is a block of its own."""
    first, *more = error.splitlines()
    return "\n".join([f"- **failed**: {first}", *([""] if more else []), *(f"      {line}" for line in more)])


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def into_page(page: str, text: str) -> str:
    """The page with `text` between its two marks. Raises `ValueError` where it has none."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n{text.strip()}\n{END}{after}"
