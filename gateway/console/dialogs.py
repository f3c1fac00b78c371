"""Dialogs: what an operator is asked before something is changed, and what the API said where it was refused."""

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Literal, Self

from nicegui import ui
from nicegui.events import GenericEventArguments

from gateway.console.client import ApiError
from gateway.ports import JsonObject

MAX_REASON: Final = 500
CONFLICT: Final = 412
Do = Callable[[], Awaitable[JsonObject | None]]


def button(
    text: str,
    on_click: Callable[[], Any] | None = None,
    *,
    kind: Literal["main", "danger", "plain"] = "plain",
    icon: str | None = None,
) -> ui.button:
    """A button in the console's colours."""
    made = ui.button(text, on_click=on_click, icon=icon, color=None).props("flat no-caps")
    return made.classes(f"button button-{kind}")


def search(label: str, on_change: Callable[[], None]) -> ui.input:
    """A field that narrows what a page shows."""
    field = ui.input(label, on_change=on_change).props("outlined dense clearable debounce=300")
    return field.classes("search").props("role=searchbox")


class Range(ui.element):
    """A slider of whole numbers, as browsers have it: it takes keys, fingers and screen readers."""

    def __init__(self, label: str, value: int, most: int, on_change: Callable[[], None]) -> None:
        super().__init__("input")
        self.value = value
        self._on_change = on_change
        self._props |= {"type": "range", "min": 0, "max": most, "step": 1, "aria-label": label}
        self._props["^value"] = value  # the attribute: where it begins, and not where it is held
        self.classes("range")
        self.on("input", self._moved, js_handler="(event) => emit(event.target.value)")

    def _moved(self, event: GenericEventArguments) -> None:
        self.value = int(event.args)
        self._on_change()


class Form:
    """A dialog with fields: Enter confirms it, Escape leaves it, the first field has the focus.

    Use it as a context for its fields, then give `then` what to do. It stays open, with the API's words, where the API
    refuses, so that nothing that was typed is lost.
    """

    def __init__(
        self,
        title: str,
        text: str = "",
        *,
        confirm: str = "Confirm",
        is_destructive: bool = False,
        is_wide: bool = False,
    ) -> None:
        self.dialog = _dialog(title)
        self._required: list[ui.input] = []
        self._do: Do | None = None
        self._done: Callable[[JsonObject], str] | str = ""
        card = ui.card().classes("form form-wide" if is_wide else "form")
        card.move(self.dialog)
        with card, ui.element("form").on("submit.prevent", self._submit):
            _title(title)
            if text:
                ui.label(text).classes("muted")
            self._fields = ui.element("div").classes("form-fields")
            self._error = ui.label("").classes("form-error").props("role=alert")
            self._conflict = ui.element("div")
            with ui.element("div").classes("form-buttons"):
                button("Cancel", self.dialog.close).props("type=button")
                kind: Literal["main", "danger"] = "danger" if is_destructive else "main"
                self._confirm = button(confirm, kind=kind).props("type=submit")

    def __enter__(self) -> Self:
        self._fields.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._fields.__exit__()

    def reason(self, *, is_required: bool = True) -> ui.input:
        """The field that says why; it goes to the audit log."""
        field = ui.input(f"Reason ({'required' if is_required else 'optional'})").props(
            f"outlined maxlength={MAX_REASON}"
        )
        return self.require(field) if is_required else field

    def require(self, field: ui.input) -> ui.input:
        """Do not confirm while it is empty."""
        self._required.append(field)
        return field.props("aria-required=true")

    def then(self, do: Do, done: Callable[[JsonObject], str] | str) -> None:
        """Show it; when it is confirmed `do`, and say that it is `done`."""
        self._do, self._done = do, done
        first = next((one for one in self._fields.descendants() if isinstance(one, ui.input | ui.select | Range)), None)
        if first is not None:
            first.props("autofocus")
        self.dialog.open()

    async def _submit(self) -> None:
        missing = next((field for field in self._required if not str(field.value or "").strip()), None)
        if missing is not None:
            self._error.text = f"{missing.props['label'].partition(' (')[0]} is needed."
            missing.run_method("focus")
            return
        if self._do is None or not self._confirm.enabled:
            return
        self._confirm.disable()
        try:
            told = await self._do() or {}
        except ApiError as error:
            self._fail(error)
            return
        finally:
            self._confirm.enable()
        done = self._done if isinstance(self._done, str) else self._done(told)
        self.dialog.close()
        say(f"{done}{applied(told)}")

    def _fail(self, error: ApiError) -> None:
        self._error.text = error.detail
        self._conflict.clear()
        if error.status == CONFLICT:
            with self._conflict:
                ui.label("Nothing of yours was saved. Changed meanwhile:").classes("muted")
                texts(str(change.get("text", "")) for change in error.body.get("changes", []))


def text_of(field: ui.input) -> str:
    """What was typed."""
    return str(field.value or "").strip()


def applied(told: JsonObject) -> str:
    """How far a change has got, as the API tells."""
    found = told.get("applied") or {}
    if "workers" not in found:
        return f", on {found['replicas']} of {found['of']} servers" if found else ""
    return f": applied on {found['workers']} of {found['of']} workers in {found['ms']} ms"


def say(text: str) -> None:
    """A word in passing, which is read out too."""
    ui.notify(text, position="top", timeout=5000, color=None, classes="said")


def panel(title: str) -> ui.element:
    """A dialog that only shows something; what is made in it stands above its one button."""
    with _dialog(title) as dialog, ui.card().classes("form form-wide"):
        _title(title)
        body = ui.element("div").classes("form-fields")
        with ui.element("div").classes("form-buttons"):
            button("Close", dialog.close, kind="main").props("autofocus")
    dialog.open()
    return body


def texts(lines: Sequence[str] | Any, empty: str = "What that was is not kept.") -> None:
    """Lines of words as a list."""
    found = list(lines)
    if not found:
        ui.label(empty)
        return
    with ui.element("ul").classes("lines"):
        for line in found:
            with ui.element("li"):
                ui.label(line)


def shown_once(title: str, secret: str) -> None:
    """A secret that is in no other place, with a button that copies it."""
    with _dialog(title).props("persistent") as dialog, ui.card().classes("form"):
        _title(title)
        ui.label("It is shown this once: keep it now. The gateway has only its hash.").classes("muted")
        ui.label(secret).classes("secret")
        with ui.element("div").classes("form-buttons"):
            button("Copy", lambda: ui.clipboard.write(secret))
            button("I have kept it", dialog.close, kind="main").props("autofocus")
    dialog.open()


def _title(title: str) -> None:
    ui.label(title).props("role=heading aria-level=2").classes("form-title")


def _dialog(title: str) -> ui.dialog:
    """A dialog that is gone when it is closed, and gives the focus back to where it was."""
    dialog = ui.dialog().props(f"aria-label={json.dumps(title)}")
    dialog.on("before-show", js_handler="() => { window.cameFrom = document.activeElement; }")
    dialog.on("hide", js_handler="(...args) => { window.cameFrom?.focus(); emit(); }", handler=dialog.delete)
    return dialog
