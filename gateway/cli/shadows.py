"""`gateway shadows`: how the answers of shadows compare with those that callers got."""

from typing import Annotated

import typer

from gateway.cli.admin_client import AdminToken, AdminUrl, Json, Reason, admin_of, part
from gateway.cli.show import add, confirm, examples, figure, percent, show, show_json, table, when
from gateway.cli.terminal import say

app = typer.Typer(
    no_args_is_help=True,
    help="Shadows: how their answers compare with those that callers got, and what they would take and cost.",
    epilog="Exit codes: 0 done, 1 refused, 2 usage, 3 no control plane.",
)
MAX_RULES = 1000


@app.command("list", epilog=examples("gateway shadows list", "gateway shadows list --json"))
def list_shadows(as_json: Json = False, admin_url: AdminUrl = "", admin_token: AdminToken = "") -> None:
    """Show what all comparisons since the last reset came to; `ms` and `USD` are what the shadow takes and costs more.

    With --json the last disagreements too.
    """
    items = admin_of(admin_url, admin_token).items("/shadows", MAX_RULES)
    if as_json:
        show_json({"items": items})
        return
    if not items:
        say("nothing was sent to a shadow yet")
        return
    headings = ("compared", "agree", "alike\np10", "failed\nskipped", "more ms\nmore USD")
    shown = table("rule", "answered by\nshadow", *headings, "since (UTC)", right=headings)
    for one in items:
        why = f" ({one['last_failure']})" if one["last_failure"] else ""
        add(
            shown,
            one["rule"],
            f"{one['place']}\n{one['shadow']}{why}",
            f"{figure(one['compared'])}\nof {figure(one['sent'])}",
            percent(one["agreement"]),
            f"{figure(one['similarity_mean'], digits=3)}\n{figure(one['similarity_p10'], digits=3)}",
            f"{figure(one['failed'])}\n{figure(one['skipped'])}",
            f"{_delta(one['latency_delta_ms'], 1)}\n{_delta(one['cost_delta_usd'], 6)}",
            when(one["since"]),
        )
    show(shown)


@app.command(epilog=examples("gateway shadows reset nlu --reason 'the shadow has a new version'"))
def reset(
    rule: Annotated[str, typer.Argument(metavar="RULE", help="Whose comparisons are forgotten.")],
    reason: Reason = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
    admin_url: AdminUrl = "",
    admin_token: AdminToken = "",
) -> None:
    """Forget a rule's comparisons and begin anew."""
    confirm(f"forget what the shadow of '{rule}' was compared to?", yes=yes)
    done = admin_of(admin_url, admin_token).call("DELETE", f"/shadows/{part(rule)}", reason=reason)
    if as_json:
        show_json(done)
    else:
        say(f"{rule}: comparisons begin anew")


def _delta(value: float | None, digits: int) -> str:
    """With its sign: more is worse."""
    return "-" if value is None else f"{value:+,.{digits}f}"
