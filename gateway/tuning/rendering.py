"""Reports for people and spreadsheets: tables of the terminal, CSV, and one HTML file that needs nothing else. Pure."""

import csv
import io
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from html import escape
from typing import Any, Final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gateway.tuning.charts import STYLE, Axis, Line, bars, lines
from gateway.tuning.report import OK, ClassReport, Percentiles, Report, ServerReport

_TIMES: Final = tuple(one.name for one in fields(Percentiles))
_SHARES: Final = {"p50": 0.301, "p90": 1.0, "p95": 1.301, "p99": 2.0, "p99_9": 3.0, "max": 3.7}
"""Where a percentile stands on its axis: each further nine at the same distance (-log10 of what is above)."""
_FINE_MS: Final = 10.0
_WIDEST_HEADING: Final = 7  # where words allow it
_MOST_SIZES: Final = 6  # of batches that a table names; pictures have all

CSV_COLUMNS: Final = (
    *("run", "kind", "class", "seconds", "slo_ms", "sent", "ok", "failed", "unfinished"),
    *("offered_per_s", "answered_per_s", "rows_per_s", "goodput_per_s"),
    *(f"latency_{name}_ms" for name in _TIMES),
    *("first_token_p50_ms", "first_token_p99_ms", "inter_token_p50_ms", "inter_token_p99_ms", "tokens_per_s"),
    *("codes", "cost_usd"),
)


def table(report: Report) -> RenderableType:
    """A report for the terminal."""
    parts: list[RenderableType] = [_plain(report.title), *_classes_tables(report)]
    if any(one.first_token for one in classes_of(report)):
        parts.append(_streams_table(report))
    if wrong := _wrong(report):
        parts.append(_ends_table(wrong))
    if report.servers:
        parts.append(_servers_table(report.servers))
    if report.cost_usd is not None:
        parts.append(_plain(f"cost: {report.cost_usd:.4f} USD"))
    if "generator" in report.setting:
        parts.append(_plain(f"generator: {report.setting['generator']}"))
    parts += [_plain(f"note: {note}") for note in report.notes]
    return Group(*parts)


def csv_text(*reports: Report) -> str:
    """One line for each class of each report, `all` first."""
    out = io.StringIO()
    writer = csv.DictWriter(out, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for report in reports:
        for one in classes_of(report):
            writer.writerow(_csv_row(report, one))
    return out.getvalue()


def html_text(reports: Sequence[Report]) -> str:
    """A page with all of them; several are compared first."""
    title = reports[0].title if len(reports) == 1 else f"{len(reports)} runs"
    body = (
        _section(reports[0])
        if len(reports) == 1
        else "".join([_comparison(reports), *(f"<h2>{escape(one.title)}</h2>{_section(one)}" for one in reports)])
    )
    return page(title, body)


def page(title: str, body: str) -> str:
    """A page of the look that all reports have, for light and dark; `body` is HTML."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
        f"<body><h1>{escape(title)}</h1>{body}</body></html>\n"
    )


def html_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, chosen: int | None = None) -> str:
    """A table of plain texts for a page, the row number `chosen` of it in bold; empty without rows."""
    if not rows:
        return ""
    above = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    below = "".join(
        f"<tr{' class=chosen' if index == chosen else ''}>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"
        for index, row in enumerate(rows)
    )
    return f'<div class="wide"><table><thead><tr>{above}</tr></thead><tbody>{below}</tbody></table></div>'


def empty_table(*headings: str, names: Collection[str] = (), title: str = "") -> Table:
    """A table for the terminal, of the look that all reports have; below `names` stand names, below others figures."""
    made = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in headings:
        is_name = heading in names
        words = textwrap.fill(heading, _WIDEST_HEADING, break_long_words=False)
        made.add_column(words, justify="left" if is_name else "right", no_wrap=not is_name, overflow="fold")
    return made


def classes_of(report: Report) -> tuple[ClassReport, ...]:
    """All together, then each; one alone is all."""
    return (*(() if len(report.classes) == 1 else (report.whole,)), *report.classes)


def ms(value: float | None) -> str:
    """Milliseconds for people; `-` for none."""
    if value is None:
        return "-"
    return f"{value:,.2f}" if value < _FINE_MS else f"{value:,.1f}"


# --- the terminal ---------------------------------------------------------------------------------


def _classes_tables(report: Report) -> Iterator[Table]:
    """Two, as one would be wider than a terminal."""
    for name, columns in (("class", slice(1, _RATES)), ("latency, ms", slice(_RATES, None))):
        made = empty_table(name, *(heading.removesuffix(" ms") for heading in _CLASS_HEADINGS[columns]), names=(name,))
        for one in classes_of(report):
            made.add_row(_plain(one.name), *(_plain(cell) for cell in _class_cells(one)[columns]))
        yield made


def _streams_table(report: Report) -> Table:
    made = empty_table(*_STREAM_HEADINGS, names=("class",))
    for one in classes_of(report):
        if one.first_token:
            made.add_row(*(_plain(cell) for cell in _stream_cells(one)))
    return made


def _ends_table(wrong: Sequence[ClassReport]) -> Table:
    made = empty_table("class", "requests", "ended with", names=("class", "ended with"))
    for one in wrong:
        for code, count in _ends(one):
            made.add_row(_plain(one.name), _plain(f"{count:,}"), _plain(code))
    return made


def _servers_table(servers: Sequence[ServerReport]) -> Table:
    made = empty_table(*_SERVER_HEADINGS, names=("model", "batches by rows"))
    for one in servers:
        made.add_row(*(_plain(cell) for cell in _server_cells(one)))
    return made


def _plain(text: str) -> Text:
    """Without what a terminal would obey: models and codes have the names that others gave them."""
    return Text("".join(one for one in text if one.isprintable()))


# --- cells, for the terminal and the page ----------------------------------------------------------

_CLASS_HEADINGS: Final = (
    *("class", "sent", "offered/s", "answered/s", "goodput/s"),
    *(f"{name.replace('_', '.')} ms" for name in _TIMES if name != "mean"),
)
_RATES: Final = 5  # the columns before latencies
_STREAM_HEADINGS: Final = (*("class", "first token p50 ms", "p99 ms", "between tokens p50 ms", "p99 ms", "tokens/s"),)
_SERVER_HEADINGS: Final = (
    *("model", "batches", "mean batch", "queue ms", "compute ms", "queue share", "busy", "batches by rows"),
)


def _class_cells(one: ClassReport) -> list[str]:
    times = [ms(getattr(one.latency, name) if one.latency else None) for name in _TIMES if name != "mean"]
    return [one.name, f"{one.sent:,}", *(f"{rate:,.1f}" for rate in (one.offered, one.qps, one.goodput)), *times]


def _stream_cells(one: ClassReport) -> list[str]:
    pairs = [(times.p50, times.p99) if times else (None, None) for times in (one.first_token, one.inter_token)]
    return [one.name, *(ms(value) for pair in pairs for value in pair), f"{one.tokens_per_s or 0:,.1f}"]


def _server_cells(one: ServerReport) -> list[str]:
    return [
        f"{one.backend}/{one.model}",
        f"{one.executions:,}",
        f"{one.mean_batch:.2f}",
        ms(one.queue_ms),
        ms(one.compute_ms),
        f"{one.queue_share:.0%}",
        "-" if one.busy is None else f"{one.busy:.0%}",
        _sizes(one.batch_sizes) or "-",
    ]


def _sizes(counts: Mapping[int, int]) -> str:
    """The most frequent, by their rows."""
    often = sorted(counts, key=lambda rows: counts[rows], reverse=True)[:_MOST_SIZES]
    told = [f"{rows}: {counts[rows]:,}" for rows in sorted(often)]
    return ", ".join([*told, "..."] if len(counts) > _MOST_SIZES else told)


def _wrong(report: Report) -> list[ClassReport]:
    """The classes with other ends than right answers."""
    return [one for one in classes_of(report) if set(one.codes) - {OK} or one.unfinished]


def _ends(one: ClassReport) -> list[tuple[str, int]]:
    unfinished = [("unfinished", one.unfinished)] if one.unfinished else []
    return [*one.codes.items(), *unfinished]


def _csv_row(report: Report, one: ClassReport) -> dict[str, Any]:
    pairs = {"first_token": one.first_token, "inter_token": one.inter_token}
    return {
        "run": report.title,
        "kind": report.kind,
        "class": one.name,
        "seconds": round(report.seconds, 3),
        "slo_ms": one.slo_ms or "",
        "sent": one.sent,
        "ok": one.codes.get(OK, 0),
        "failed": sum(one.codes.values()) - one.codes.get(OK, 0),
        "unfinished": one.unfinished,
        "offered_per_s": round(one.offered, 3),
        "answered_per_s": round(one.qps, 3),
        "rows_per_s": round(one.rows_per_s, 3),
        "goodput_per_s": round(one.goodput, 3),
        **{f"latency_{name}_ms": round(getattr(one.latency, name), 4) for name in _TIMES if one.latency},
        **{f"{name}_p50_ms": round(times.p50, 4) for name, times in pairs.items() if times},
        **{f"{name}_p99_ms": round(times.p99, 4) for name, times in pairs.items() if times},
        "tokens_per_s": "" if one.tokens_per_s is None else round(one.tokens_per_s, 3),
        "codes": " ".join(f"{code}={count}" for code, count in one.codes.items()),
        "cost_usd": "" if report.cost_usd is None else report.cost_usd,
    }


# --- the page -------------------------------------------------------------------------------------


def _section(report: Report) -> str:
    setting = "".join(
        f'<p class="setting">{escape(name)}: {escape(value)}</p>' for name, value in report.setting.items()
    )
    cost = f'<p class="setting">cost: {report.cost_usd:.4f} USD</p>' if report.cost_usd is not None else ""
    notes = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
    classes = classes_of(report)
    streams = [_stream_cells(one) for one in classes if one.first_token]
    ends = [[one.name, f"{count:,}", code] for one in _wrong(report) for code, count in _ends(one)]
    tables = [
        html_table(
            _CLASS_HEADINGS,
            [_class_cells(one) for one in classes],
        ),
        html_table(_STREAM_HEADINGS, streams),
        html_table(("class", "requests", "ended with"), ends),
        html_table(_SERVER_HEADINGS[:-1], [_server_cells(one)[:-1] for one in report.servers]),  # the last is drawn
    ]
    return (
        f"<section>{setting}{cost}{''.join(tables)}"
        f"{f'<ul class=notes>{notes}</ul>' if notes else ''}"
        f'<div class="charts">{"".join(_charts(report))}</div></section>'
    )


def _charts(report: Report) -> list[str]:
    due = Axis(name="when they were due (s since the start)")
    latency = Axis(name="latency (ms)")
    steps = report.timeline
    failed = [Line(name="failed", points=[(one.at_s, float(one.failed)) for one in steps])]
    drawn = [
        lines(
            "Latency over time",
            [Line(name=name, points=[(one.at_s, getattr(one, name)) for one in steps]) for name in ("p50", "p99")],
            x=due,
            y=latency,
        ),
        lines(
            "Answers over time",
            [
                Line(name="right answers", points=[(one.at_s, float(one.answered)) for one in steps]),
                *(failed if any(one.failed for one in steps) else ()),
            ],
            x=due,
            y=Axis(name="requests per second"),
        ),
        lines(
            "Latency by percentile",
            [_by_percentile(one) for one in classes_of(report) if one.latency],
            x=Axis(name="percentile", ticks=[(at, name.replace("_", ".")) for name, at in _SHARES.items()]),
            y=latency,
        ),
    ]
    drawn += [
        bars(
            f"Batches of {one.backend}/{one.model}",
            [(str(rows), float(count)) for rows, count in sorted(one.batch_sizes.items())],
            x=Axis(name="rows in a batch"),
            y=Axis(name="batches"),
        )
        for one in report.servers
    ]
    return drawn


def _by_percentile(one: ClassReport) -> Line:
    points = [(at, float(getattr(one.latency, name))) for name, at in _SHARES.items()]
    return Line(name=one.name, points=points, marks=[f"{one.name} {name.replace('_', '.')}" for name in _SHARES])


def _comparison(reports: Sequence[Report]) -> str:
    """All runs in one table, and their p99 against their throughput."""
    rows = [[report.title, *_class_cells(report.whole)[1:]] for report in reports]
    ordered = sorted((one for one in reports if one.whole.latency), key=lambda one: one.whole.qps)
    drawn = [
        Line(
            name=name,
            points=[(one.whole.qps, getattr(one.whole.latency, name)) for one in ordered],
            marks=[f"{one.title}, {name}" for one in ordered],
        )
        for name in ("p50", "p99")
    ]
    picture = lines(
        "Latency against throughput",
        drawn,
        x=Axis(name="right answers per second"),
        y=Axis(name="latency (ms)"),
    )
    headings = ("run", *_CLASS_HEADINGS[1:])
    return f'{html_table(headings, rows)}<div class="charts">{picture}</div>'
