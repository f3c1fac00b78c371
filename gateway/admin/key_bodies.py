"""The bodies of the control plane's paths about keys."""

from datetime import UTC, datetime
from typing import Annotated, Any, Final

from pydantic import AfterValidator, AwareDatetime, BaseModel, Field, PlainSerializer

from gateway.admin.fields import Body, Next
from gateway.core.cost import NANO_USD_PER_USD
from gateway.core.keys import ApiKey
from gateway.core.types import Limit, Priority
from gateway.settings import LimitSettings
from gateway.settings.access import ModelName, Origin, Tenant

MAX_GRACE_S: Final = 30 * 24 * 3600


def _own(limit: LimitSettings) -> LimitSettings:
    if limit.shared_by == "all":
        raise ValueError("a key's limit is shared by `key` or `tenant`; those of all are in the configuration")
    return limit


def _given(limit: LimitSettings) -> dict[str, Any]:
    return limit.model_dump(exclude_none=True)


_OwnLimit = Annotated[LimitSettings, AfterValidator(_own)]
_Name = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]{1,128}$")]
_Tasks = Annotated[tuple[str, ...], Field(min_length=1, max_length=256)]
_Models = Annotated[tuple[ModelName, ...], Field(min_length=1, max_length=256)]
_Limits = Annotated[tuple[_OwnLimit, ...], Field(max_length=32)]
_Origins = Annotated[tuple[Origin, ...], Field(min_length=1, max_length=64)]


class KeyChange(Body):
    """What may be changed of a key; a field that is left out stays, `null` takes a restriction away."""

    name: _Name | None = Field(None, description="for people")
    tasks: _Tasks | None = Field(default=None, description="null: every task")
    models: _Models | None = Field(default=None, description="those that it may name; null: any")
    scopes: tuple[str, ...] | None = Field(
        default=None,
        min_length=1,
        max_length=512,
        description="tasks, models and admin in one list: `task:NAME` or `NAME`, `model:NAME`, `admin`",
    )
    admin: bool = Field(default=False, description="may list, load and unload models on /v2/repository")
    limits: _Limits | None = Field(default=None, description="null: the configuration's section `limits`")
    priority: Priority = Field(default="interactive", description="the highest that its requests may ask for")
    origins: _Origins | None = Field(default=None, description="web pages that may use it; null: any")
    expires_at: AwareDatetime | None = Field(None, description="from when on it is refused: RFC 3339; null: never")
    disabled: bool = Field(default=False, description="whether it is refused")


class KeyIn(KeyChange):
    """A new key."""

    tenant: Tenant = Field(description="whose it is")
    name: _Name = Field(description="for people")


class KeyRotation(Body):
    """How long the secret before stays good."""

    grace_s: int = Field(default=0, ge=0, le=MAX_GRACE_S, description="seconds for which the secret before stays good")


class KeyOut(BaseModel):
    """A key without its secret."""

    id: str = Field(description="its name in logs, books and paths")
    tenant: str = Field(description="whose it is")
    name: str = Field(description="for people")
    tasks: tuple[str, ...] | None = Field(description="those that it may ask; null: every one")
    models: tuple[str, ...] | None = Field(description="those that it may name; null: any")
    scopes: tuple[str, ...] = Field(description="`tasks`, `models` and `admin` in one list")
    admin: bool = Field(description="may list, load and unload models on /v2/repository")
    limits: tuple[Annotated[LimitSettings, PlainSerializer(_given)], ...] | None = Field(
        description="its own; null: the configuration's section `limits`"
    )
    priority: Priority = Field(description="the highest that its requests may ask for")
    origins: tuple[str, ...] | None = Field(description="web pages that may use it; null: any")
    created_at: datetime = Field(description="RFC 3339, UTC")
    expires_at: datetime | None = Field(description="from when on it is refused: RFC 3339, UTC; null: never")
    disabled: bool = Field(description="whether it is refused")
    old_secret_until: datetime | None = Field(description="until when the secret before is good")
    revision: int = Field(description="of the key: what `If-Match` of a change names")


class KeyMade(KeyOut):
    """A key with its secret, which is shown this once."""

    key: str = Field(description="the secret that callers send")


class KeysOut(BaseModel):
    """Keys in the order in which they were made."""

    items: list[KeyOut] = Field(description="the oldest first")
    next: Next


def key_out(key: ApiKey) -> KeyOut:
    """What is shown of a key."""
    old = [secret.until_s for secret in key.secrets if secret.until_s is not None]
    return KeyOut(
        id=key.id,
        tenant=key.tenant,
        name=key.name,
        tasks=key.tasks,
        models=key.models,
        scopes=_scopes(key),
        admin=key.is_admin,
        limits=None if key.limits is None else tuple(_limit_out(limit) for limit in key.limits),
        priority=key.priority,
        origins=key.origins,
        created_at=datetime.fromtimestamp(key.created_s, UTC),
        expires_at=None if key.expires_s is None else datetime.fromtimestamp(key.expires_s, UTC),
        disabled=key.is_disabled,
        old_secret_until=datetime.fromtimestamp(max(old), UTC) if old else None,
        revision=key.revision,
    )


def _scopes(key: ApiKey) -> tuple[str, ...]:
    tasks, models = key.tasks or (), key.models or ()
    return (*(f"task:{name}" for name in tasks), *(f"model:{name}" for name in models), *(("admin",) * key.is_admin))


def _limit_out(limit: Limit) -> LimitSettings:
    """As it was given."""
    amount = limit.amount / NANO_USD_PER_USD if limit.kind == "usd" else limit.amount
    given = {
        limit.kind: amount,
        "per": limit.per or None,
        "burst": limit.burst if limit.burst not in (0, limit.amount) else None,
        "shared_by": limit.shared_by,
    }
    scope = {"task": limit.task, "model": limit.model, "priority": limit.priority}
    return LimitSettings.model_validate({**given, **{k: None if v == "*" else v for k, v in scope.items()}})
