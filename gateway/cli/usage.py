"""`gateway usage`: what was used up and what it cost."""

import csv
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import urlencode

import typer
from rich.console import Console
from rich.table import Table

from gateway.cli.admin_client import EXIT_USAGE, AdminToken, AdminUrl, Failure, admin_of
from gateway.cli.show import add

app = typer.Typer()

NAMES = ("day", "tenant", "task", "backend", "model")
COUNTS = {  # in the order of the table, with the headings there
    "requests": "requests",
    "failed": "failed",
    "input_tokens": "input",
    "cached_tokens": "of it cached",
    "output_tokens": "output",
    "reasoning_tokens": "of it reasoning",
    "estimated_requests": "estimated",
    "cost_usd": "USD",
}
SMALLEST_SHOWN = 0.000_001
NARROWEST = 120  # columns: all figures need as many; a terminal that has fewer breaks the lines itself


@app.command()
def usage(
    first: Annotated[str, typer.Option("--from", metavar="DAY", help="First day; default: today.")] = "",
    last: Annotated[str, typer.Option("--to", metavar="DAY", help="Last day, included; default: today.")] = "",
    by: Annotated[
        str, typer.Option(metavar="NAMES", help="Sum by some of tenant, task, backend, model, day.")
    ] = "tenant,task",
    as_json: Annotated[bool, typer.Option("--json", help="Print the control plane's answer.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values, without totals.")] = False,
    admin_url: AdminUrl = "",
    admin_token: AdminToken = "",
) -> None:
    """Show requests, tokens and cost, by tenant and task or as you like.

    Days are in UTC, written YYYY-MM-DD; they are kept for 400 days. A request is in the books a second after its end.

    Try:

        gateway usage

        gateway usage --from 2026-11-01 --to 2026-11-30 --by tenant

        gateway usage --from 2026-11-01 --by day,model --csv > november.csv
    """
    if as_json and as_csv:
        raise Failure("give either --json or --csv", EXIT_USAGE)
    asked = {name: value for name, value in (("from", first), ("to", last), ("by", by)) if value}
    answer = admin_of(admin_url, admin_token).call("GET", f"/usage?{urlencode(asked)}")
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
    elif as_csv:
        _write_csv(answer["items"], _names(by))
    else:
        _show(answer["items"], _names(by))


def _names(by: str) -> tuple[str, ...]:
    """The columns before the counts, in the order asked for; the control plane has judged them."""
    asked = (name.strip() for name in by.split(","))
    return tuple(dict.fromkeys(name for name in asked if name in NAMES))


def _write_csv(items: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    columns = (*names, *COUNTS)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(columns)
    # Nine digits after the point, never `1e-09`: spreadsheets read that as a text.
    writer.writerows(
        [f"{item[column]:.9f}" if column == "cost_usd" else item[column] for column in columns] for item in items
    )


def _show(items: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    if not items:
        typer.echo("nothing was used in this time")
        return
    table = Table(title="usage", title_justify="left", show_footer=True)
    totals = {count: sum(item[count] for item in items) for count in COUNTS}
    for i, name in enumerate(names):
        table.add_column(name, overflow="fold", footer="" if i else "total")
    for count, heading in COUNTS.items():
        words = heading.replace(" ", "\n")  # names are folded, figures never cut
        table.add_column(words, justify="right", no_wrap=True, footer=_figure(count, totals[count]))
    for item in items:
        add(table, *(item[name] for name in names), *(_figure(count, item[count]) for count in COUNTS))
    Console(width=max(Console().width, NARROWEST)).print(table)


def _figure(count: str, value: float) -> str:
    if count != "cost_usd":
        return f"{value:,}"
    return f"< {SMALLEST_SHOWN:f}" if 0 < value < SMALLEST_SHOWN else f"{value:,.6f}"
