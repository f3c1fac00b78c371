"""`gateway explain`: which rule takes a request, every candidate and why, limits and headers."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.table import Table

from gateway.cli.admin_client import EXIT_USAGE, AdminToken, AdminUrl, Failure, Json, admin_of
from gateway.cli.requests import recorded
from gateway.cli.rules.words import POLICIES, policy_words
from gateway.cli.show import add, examples, fields, show, show_json, span_words, table
from gateway.cli.switches import scope_words, words
from gateway.cli.terminal import say

app = typer.Typer()


@app.command(
    epilog=examples(
        "gateway explain --task text-embedding --tenant acme --header x-canary=yes",
        "gateway explain --task general_llm --priority batch --input-tokens 9000",
        "gateway explain --request-id 0f3bc022",
    )
)
def explain(
    *,
    request_id: Annotated[str, typer.Option(metavar="ID", help="A past request, by its x-request-id.")] = "",
    task: Annotated[str, typer.Option(metavar="NAME", help="Of a request that could come.")] = "",
    tenant: Annotated[str, typer.Option(metavar="NAME", help="Whose it would be.")] = "",
    key: Annotated[str, typer.Option(metavar="ID", help="The key's id; its tenant and limits are known.")] = "",
    model: Annotated[str, typer.Option(metavar="NAME", help="As the caller names it.")] = "",
    version: Annotated[str, typer.Option(metavar="NUMBER", help="As the caller names it.")] = "",
    priority: Annotated[str, typer.Option(metavar="interactive|batch", help="Its X-Priority.")] = "",
    header: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Again for more.")] = None,
    input_tokens: Annotated[int | None, typer.Option(min=0, help="Of the prompt.")] = None,
    input_bytes: Annotated[int | None, typer.Option(min=0, help="Of the body.")] = None,
    session: Annotated[str, typer.Option(metavar="ID", help="What keeps sessions on their side.")] = "",
    ordering_key: Annotated[str, typer.Option(metavar="KEY", help="Its X-Ordering-Key.")] = "",
    stream: Annotated[bool, typer.Option("--stream", help="Its answer is streamed.")] = False,
    at: Annotated[str, typer.Option(metavar="TIME", help="When it comes: 2027-01-31T22:00:00Z; default: now.")] = "",
    worker: Annotated[str, typer.Option(metavar="ID", help="As this worker sees it: its loads, its breakers.")] = "",
    as_json: Json = False,
    admin_url: AdminUrl = "",
    admin_token: AdminToken = "",
) -> None:
    """Explain what would become of a request, or what became of a past one. Nothing is sent anywhere."""
    described = {
        "task": task,
        "tenant": tenant,
        "key": key,
        "model": model,
        "version": version,
        "priority": priority,
        "headers": _headers(header or ()),
        "input_tokens": input_tokens,
        "input_bytes": input_bytes,
        "session": session,
        "ordering_key": ordering_key,
        "stream": stream or None,
        "at": at,
    }
    request = {name: value for name, value in described.items() if value not in (None, "", {})}
    if bool(request_id) == bool(request):
        raise Failure("give --request-id, or describe a request: --task and what else is known of it", EXIT_USAGE)
    if request and not task:
        raise Failure("give the --task of the request", EXIT_USAGE)
    body: dict[str, Any] = {"request_id": request_id} if request_id else {"request": request}
    if worker:
        body["worker"] = worker
    found = admin_of(admin_url, admin_token).call("POST", "/explain", body=body)
    if as_json:
        show_json(found)
    else:
        show_explained(found)


def show_explained(found: Mapping[str, Any]) -> None:
    """Rules, candidates, switches, limits, headers, and what became of it."""
    rule = f"rule '{found['rule']}'" if found["rule"] else "no rule"
    show(f"{rule}, by rules revision {found['revision']} and switches revision {found['switches_revision']}")
    if found["refused"]:
        why = found["refused"]
        show(why if why.startswith("refused") else f"refused: {why}")
    rules = table("rule", "takes it", "why")
    for one in found["rules"]:
        add(
            rules, one["rule"], "yes" if one["matched"] else "no", one["why"], style="green" if one["matched"] else None
        )
    show(rules)
    if found["candidates"]:
        show(_candidates(found["candidates"]))
    for switch in found["switches"]:
        left = span_words(switch["remaining_s"])
        told = f"{words(switch)} {scope_words(switch['scope'])}, {left} left"
        say(f"switch {switch['id']}: {told}: {switch['reason']} ({switch['owner']})")
    for limit in found["limits"]:
        say(f"limit of the {limit['of']}: {limit['limit']}")
    policies = {name: value for name, value in (found["policies"] or {}).items() if name not in POLICIES}
    show(fields({**policies, "policies": ", ".join(policy_words(found["policies"] or {})), **found["headers"]}))
    if found["outcome"]:
        show("what became of it:")
        show(recorded(found["outcome"]))
    elif found["worker"]:
        say(f"as worker {found['worker']} sees it now")


def _candidates(candidates: Sequence[Mapping[str, Any]]) -> Table:
    shown = table("rank", "place", "stands in", "score", "reason", title="candidates", right=("rank",))
    ranked = [one for one in candidates if one["rank"] is not None]
    for one in sorted(ranked, key=lambda one: one["rank"]) + [one for one in candidates if one["rank"] is None]:
        colour = "green" if one["taken"] else "dim" if one["rank"] is None else None
        add(shown, one["rank"], one["place"], one["side"], one["score"], one["reason"], style=colour)
    return shown


def _headers(given: Sequence[str]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not equals or not name:
            raise Failure(f"--header {one}: write it as name=value", EXIT_USAGE)
        headers[name.lower()] = value
    return headers
