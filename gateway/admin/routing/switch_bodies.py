"""Bodies of the paths about switches."""

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from gateway.admin.access.auditing import cleaned
from gateway.admin.fields import Body, Next
from gateway.admin.instants import instant
from gateway.core.switches import Action, Switch

MAX_TTL_S = 7 * 86_400
MAX_REASON = 500
MAX_NAME = 200


def _said(reason: str) -> str:
    if not (line := cleaned(reason)):
        raise ValueError("must say why")
    return line


class SwitchIn(Body):
    """A switch that is to be set."""

    action: Action = Field(description="what it does; `drain` sends nothing new and lets end what is under way")
    scope: dict[str, Any] = Field(
        description='`{"everything": true}`, or one of tenant, key, task, model, backend, replica with its name'
    )
    value: str = Field("", max_length=MAX_NAME, description="the backend of `force_backend`")
    reason: Annotated[str, Field(min_length=1, max_length=MAX_REASON), AfterValidator(_said)] = Field(
        description="why, on one line"
    )
    ttl_s: int = Field(ge=1, le=MAX_TTL_S, description="after so many seconds it ends by itself")


class SwitchOut(Body):
    """One switch. `in_flight` and `is_drained` are there for a drain, as far as workers tell."""

    id: str = Field(description="what it is ended by")
    action: Action = Field(description="what it does")
    scope: dict[str, str | bool] = Field(description="what it is for: one kind with its name, or `everything`")
    value: str = Field(description="the backend of `force_backend`; else empty")
    reason: str = Field(description="why it was set")
    owner: str = Field(description="who set it")
    created_at: str = Field(description="when it was set: RFC 3339, UTC")
    expires_at: str = Field(description="when it ends by itself: RFC 3339, UTC")
    remaining_s: int = Field(description="seconds until then")
    in_flight: int | None = Field(
        None,
        description="of a drain: requests that it still waits for, in all workers; null: no drain, or no worker tells",
    )
    is_drained: bool | None = Field(
        None, description="of a drain: all workers know it, and none has such a request any more; null as before"
    )


class SwitchesOut(Body):
    """All that have not ended, the newest first."""

    revision: int = Field(description="of the switches")
    items: list[SwitchOut] = Field(description="the newest first")
    next: Next


class AppliedOut(Body):
    """How many of the live workers run a change, and how long after it that was seen."""

    workers: int = Field(description="live workers that run the change")
    of: int = Field(description="live workers")
    ms: int = Field(description="milliseconds after the change in which that was seen")


class SwitchChanged(SwitchOut):
    """A switch that was set, or ended. `warnings`: what to mind, such as a server that no worker knows."""

    applied: AppliedOut = Field(description="how many workers have it")
    warnings: list[str] = Field(default_factory=list, description="what to mind, such as a server that no worker knows")


def switch_out(
    switch: Switch, now_ms: int, *, in_flight: int | None = None, is_drained: bool | None = None
) -> SwitchOut:
    """What is shown of a switch."""
    kind, name = switch.scope.kind, switch.scope.name
    return SwitchOut(
        id=switch.id,
        action=switch.action,
        scope={kind: True} if kind == "everything" else {kind: name},
        value=switch.value,
        reason=switch.reason,
        owner=switch.owner,
        created_at=instant(switch.created_ms),
        expires_at=instant(switch.expires_ms),
        remaining_s=max(0, -(-(switch.expires_ms - now_ms) // 1000)),
        in_flight=in_flight,
        is_drained=is_drained,
    )
