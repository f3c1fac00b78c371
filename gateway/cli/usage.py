"""`gateway usage`: what was used up and what it cost."""

import csv
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from gateway.cli.admin_client import EXIT_USAGE, AdminToken, AdminUrl, Failure, admin_of
from gateway.cli.show import add, show, table
from gateway.cli.terminal import say

app = typer.Typer()

NAMES = ("day", "tenant", "task", "backend", "model")
COUNTS = (
    *("requests", "failed", "input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens"),
    *("estimated_requests", "cost_usd"),
)
SHOWN = {  # the columns of the table; what is a part of something stands below it
    "requests\n(failed)": ("requests", "failed"),
    "input\n(cached)": ("input_tokens", "cached_tokens"),
    "output\n(reasoning)": ("output_tokens", "reasoning_tokens"),
    "estimated": ("estimated_requests",),
    "USD": ("cost_usd",),
}
SMALLEST_SHOWN = 0.000_001


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
        say("nothing was used in this time")
        return
    shown = table(*names, *SHOWN, right=SHOWN)
    for item in items:
        add(shown, *(item[name] for name in names), *_cells(item))
    shown.add_section()
    totals = {count: sum(item[count] for item in items) for count in COUNTS}
    add(shown, *("" if i else "total" for i in range(len(names))), *_cells(totals), style="bold")
    show(shown)


def _cells(item: Mapping[str, Any]) -> Iterator[str]:
    for whole, *parts in SHOWN.values():
        yield "\n".join(
            [_figure(whole, item[whole]), *(f"({_figure(part, item[part])})" for part in parts if item[part])]
        )


def _figure(count: str, value: float) -> str:
    if count != "cost_usd":
        return f"{value:,}"
    return f"< {SMALLEST_SHOWN:f}" if 0 < value < SMALLEST_SHOWN else f"{value:,.6f}"
