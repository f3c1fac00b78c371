"""Shadows: how the answers of copies compare with those that callers had."""

from typing import Any, Final

from gateway.console import words
from gateway.console.dialogs import Form, panel, text_of, texts
from gateway.console.tables import Column, Table, act, bar
from gateway.console.view import Page, View
from gateway.ports import JsonObject

REFRESH_S: Final = 2.0
GOOD: Final = 0.95
_COLUMNS: Final = (
    Column(field="rule", label="Rule"),
    Column(field="task", label="Task"),
    Column(field="place", label="Answers", kind="code"),
    Column(field="shadow", label="Shadow", kind="code"),
    Column(field="agreement", label="Agreement", kind="bar"),
    Column(field="similarity", label="Similarity, mean / worst tenth"),
    Column(field="latency", label="Latency, shadow - answer", kind="number"),
    Column(field="cost", label="Cost delta", kind="number"),
    Column(field="counts", label="Sent / compared / failed / skipped"),
    Column(field="since", label="Since (UTC)", kind="time"),
    Column(field="acts", label="", kind="acts"),
)


async def build(view: View) -> None:
    """One row for each rule and pair of places."""
    page = Shadows(view)
    view.every(REFRESH_S, page.load)


class Shadows:
    """The list."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._found: dict[str, JsonObject] = {}
        self._table = Table(
            _COLUMNS, label="Comparisons with shadows", on_act=self._act, empty="No rule has a shadow yet."
        )

    async def load(self) -> None:
        """Ask and show."""
        found = (await self._view.api.get("/shadows"))["items"]
        self._found = {f"{one['rule']}|{one['place']}|{one['shadow']}": one for one in found}
        self._table.show([self._row(key, one) for key, one in self._found.items()])

    def _row(self, key: str, one: JsonObject) -> JsonObject:
        agreement, delta = one["agreement"], one["latency_delta_ms"]
        acts = [act("differ", "Differences")] if one["disagreements"] else []
        if self._view.api.may("DELETE", f"/shadows/{one['rule']}"):
            acts.append(act("forget", "Begin anew", is_destructive=True))
        return {
            "key": key,
            "name": f"shadow of {one['rule']}",
            "rule": one["rule"],
            "task": one["task"],
            "place": one["place"],
            "shadow": one["shadow"],
            "agreement": None
            if agreement is None
            else bar(agreement, words.percent(agreement), "good" if agreement >= GOOD else "bad"),
            "similarity": f"{words.number(one['similarity_mean'], 3)} / {words.number(one['similarity_p10'], 3)}",
            "latency": words.NONE if delta is None else f"{delta:+.1f} ms",
            "cost": words.NONE if one["cost_delta_usd"] is None else f"{one['cost_delta_usd']:+.4f} $",
            "counts": " / ".join(words.number(one[name]) for name in ("sent", "compared", "failed", "skipped")),
            "since": words.moment(one["since"]),
            "acts": acts,
        }

    async def _act(self, name: str, row: dict[str, Any]) -> None:
        one = self._found.get(row["key"])
        if one is None:
            return
        if name == "differ":
            with panel(f"Where the shadow of '{one['rule']}' differed"):
                texts(f"{words.when(d['at'])}  {d['request_id']}: {d['what']}" for d in one["disagreements"])
            return
        with Form(f"Forget what '{one['rule']}' compared", confirm="Begin anew", is_destructive=True) as form:
            reason = form.reason()

        async def change() -> JsonObject:
            return await self._view.api.change("DELETE", f"/shadows/{one['rule']}", reason=text_of(reason))

        form.then(self._view.and_soon(change), "It begins anew")


PAGE = Page(path="/shadows", title="Shadows", icon="compare", build=build)
