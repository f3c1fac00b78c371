"""Bodies of the paths about switches."""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from gateway.admin.access.auditing import cleaned
from gateway.admin.instants import instant
from gateway.core.switches import Action, Switch

MAX_TTL_S = 7 * 86_400
MAX_REASON = 500
MAX_NAME = 200


def _said(reason: str) -> str:
    if not (line := cleaned(reason)):
        raise ValueError("must say why")
    return line


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class SwitchIn(_Body):
    """A switch that is to be set."""

    action: Action
    scope: dict[str, Any] = Field(
        description='`{"everything": true}`, or one of tenant, key, task, model, backend, replica with its name'
    )
    value: str = Field("", max_length=MAX_NAME, description="the backend of `force_backend`")
    reason: Annotated[str, Field(min_length=1, max_length=MAX_REASON), AfterValidator(_said)]
    ttl_s: int = Field(ge=1, le=MAX_TTL_S, description="after so many seconds it ends by itself")


class SwitchOut(_Body):
    """One switch. `in_flight` and `is_drained` are there for a drain, as far as workers tell."""

    id: str
    action: Action
    scope: dict[str, str | bool]
    value: str
    reason: str
    owner: str
    created_at: str
    expires_at: str
    remaining_s: int
    in_flight: int | None = None
    is_drained: bool | None = None


class SwitchesOut(_Body):
    """All that have not ended, the newest first."""

    revision: int
    items: list[SwitchOut]
    next: str | None


class AppliedOut(_Body):
    """How many of the live workers run a change, and how long after it that was seen."""

    workers: int
    of: int
    ms: int


class SwitchChanged(SwitchOut):
    """A switch that was set, or ended. `warnings`: what to mind, such as a server that no worker knows."""

    applied: AppliedOut
    warnings: list[str] = Field(default_factory=list)


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
