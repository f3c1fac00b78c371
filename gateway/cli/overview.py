"""`gateway overview` and `gateway whoami`: how all of it is doing now, and who asks."""

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from gateway.cli.admin_client import EXIT_UNREACHABLE, Admin, AdminToken, AdminUrl, Failure, Json, Refusal, admin_of
from gateway.cli.show import (
    add,
    clock,
    examples,
    fields,
    figure,
    percent,
    seconds_of,
    show,
    show_json,
    span_words,
    table,
)
from gateway.cli.terminal import visible

REFRESH_S: Final = 1.0
FRESH_S: Final = 3.0  # workers tell once a second
CHART_WIDTH: Final = 60
BARS: Final = "▁▂▃▄▅▆▇█"

app = typer.Typer()


@app.command(epilog=examples("gateway overview", "gateway overview --watch", "gateway overview --window 1h --json"))
def overview(
    watch: Annotated[bool, typer.Option("--watch", help="Anew every second, until Ctrl-C.")] = False,
    window: Annotated[str, typer.Option(metavar="TIME", help="What is looked at: 60s, 5m, 1h.")] = "5m",
    as_json: Json = False,
    admin_url: AdminUrl = "",
    admin_token: AdminToken = "",
) -> None:
    """Show requests, errors, times, tokens and cost of the live system; it says so when its numbers are old."""
    admin = admin_of(admin_url, admin_token)
    path = f"/overview?window_s={seconds_of(window, '--window')}"
    found = admin.call("GET", path)
    if as_json:
        show_json(found)
    elif watch:
        _watch(admin, path, found)
    else:
        show(_page(found))


@app.command(epilog=examples("gateway whoami", "gateway whoami --json | jq -r .role"))
def whoami(as_json: Json = False, admin_url: AdminUrl = "", admin_token: AdminToken = "") -> None:
    """Show who the admin token is for, and what it may: viewer looks, operator changes routing, admin all."""
    admin = admin_of(admin_url, admin_token)
    found = admin.call("GET", "/session")
    if as_json:
        show_json(found)
        return
    expires = clock(found["expires_at"]) if found["expires_at"] else ""
    show(
        fields({"name": found["actor"], "role": found["role"], "by": found["kind"], "until": expires, "at": admin.url})
    )


def _watch(admin: Admin, path: str, found: Mapping[str, Any]) -> None:
    """The page anew every second. Where the control plane is away the last one stays, marked as old; Ctrl-C ends it."""
    console = Console()
    asked, fault = time.monotonic(), ""
    try:
        with Live(_page(found), console=console, auto_refresh=False, screen=console.is_terminal) as live:
            while True:
                time.sleep(REFRESH_S)
                try:
                    found, asked, fault = admin.ask("GET", path), time.monotonic(), ""
                except Refusal as refusal:
                    if refusal.exit_code != EXIT_UNREACHABLE and refusal.document.get("status", 0) < 500:  # noqa: PLR2004 - what HTTP calls a server's error may pass
                        raise Failure(refusal.line, refusal.exit_code) from refusal
                    fault = f"{refusal.line}: these numbers are {span_words(time.monotonic() - asked)} old"
                live.update(_page(found, fault), refresh=True)
    except KeyboardInterrupt:
        return


def _page(found: Mapping[str, Any], fault: str = "") -> RenderableType:
    """Everything of one answer; `fault` is said above all else."""
    parts: list[RenderableType] = []
    stale = fault or (_stale_words(found) if found["is_stale"] else "")
    if stale:
        parts.append(Text(visible(f"STALE: {stale}"), style="bold red"))
    workers = found["workers"]
    of_workers = f"{workers['live']} live, {workers['refused']} without the rules, {workers['behind']} behind"
    is_whole = workers["live"] and not workers["refused"] and not workers["behind"]
    parts.append(Text(f"workers: {of_workers}", style="" if is_whole else "bold red"))
    parts.append(_totals(found))
    if points := found["points"]:
        parts.append(Text(f"requests {_bars([point['requests'] for point in points])}"))
        errors = [point["errors"] for point in points]
        parts.append(Text(f"errors   {_bars(errors)}", style="red" if any(errors) else "dim"))
    shown = table("task\nrule", "place", *_COLUMNS, right=_COLUMNS)
    for one in found["by"]:
        ratio = one["errors"] / one["requests"] if one["requests"] else None
        at = (
            f"{one['backend']}/{one['model']}{':' + one['version'] if one['version'] else ''}" if one["backend"] else ""
        )
        cells = (percent(ratio), figure(one["failed_attempts"]), _ms(one["p50_ms"]), _ms(one["p99_ms"]))
        style = "red" if one["errors"] else None
        add(shown, f"{one['task']}\n{one['rule'] or '-'}", at, figure(one["requests"]), *cells, style=style)
    return Group(*parts, shown if found["by"] else Text("no request has ended in this time"))


_COLUMNS: Final = ("requests", "errors", "failed\nattempts", "p50 ms", "p99 ms")


def _totals(found: Mapping[str, Any]) -> RenderableType:
    return fields(
        {
            "at": f"{clock(found['at'])} UTC, of the last {span_words(found['window_s'])}",
            "requests/s": figure(found["requests_per_s"], digits=1),
            "errors": percent(found["error_ratio"]),
            "p50 / p99": f"{_ms(found['p50_ms'])} / {_ms(found['p99_ms'])} ms" if found["p50_ms"] is not None else "",
            "first token": figure(found["first_token_p50_ms"], "ms") if found["first_token_p50_ms"] is not None else "",
            "tokens/s": figure(found["tokens_per_s"]),
            "USD/hour": figure(found["usd_per_hour"], digits=4),
            "in flight": figure(found["in_flight"]),
            "waiting": figure(found["waiting"]),
        }
    )


def _stale_words(found: Mapping[str, Any]) -> str:
    newest = found["newest_s"]
    if newest is None:
        return "no worker tells anything"
    if newest <= FRESH_S:
        return "the control plane cannot read them now; these are the last that it has read"
    return f"no worker has told anything for {span_words(newest)}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _bars(values: Sequence[float]) -> str:
    """A chart of one line: the last values, the highest the full height; nothing at all is the lowest bar."""
    last = values[-CHART_WIDTH:]
    most = max(last, default=0) or 1
    return "".join(BARS[min(len(BARS) - 1, round(value / most * (len(BARS) - 1)))] for value in last)
