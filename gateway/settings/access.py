"""The sections `limits` and `keys`: who may do how much."""

import hashlib
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from gateway.core.cost import NANO_USD_PER_USD
from gateway.core.keys import NAME, ORIGIN, TENANT
from gateway.core.rate_limit import MOST_OF, is_sound
from gateway.core.types import Caller, Limit, Priority
from gateway.settings.secrets import from_environment
from gateway.settings.section import Section

_KINDS: Final = ("requests", "tokens", "usd", "concurrent")
_NAME: Final = f"^{NAME.pattern}$"


class LimitSettings(Section):
    """So many requests or tokens per period, so much money per calendar day or month (UTC), or so many at once."""

    per: Literal["second", "minute", "hour", "day", "month"] | None = Field(
        default=None,
        description="days and months are those of UTC; money alone is per month, and `concurrent` has none",
    )
    requests: int | None = Field(default=None, ge=1, le=MOST_OF["requests"], description="so many requests")
    tokens: int | None = Field(default=None, ge=1, le=MOST_OF["tokens"], description="so many tokens, read and made")
    usd: float | None = Field(
        default=None, gt=0, le=MOST_OF["usd"] / NANO_USD_PER_USD, description="so many US dollars, per day or month"
    )
    concurrent: int | None = Field(
        default=None, ge=1, le=MOST_OF["concurrent"], description="requests that are under way"
    )
    burst: int | None = Field(
        default=None, ge=1, le=MOST_OF["tokens"], description="requests or tokens that may come at once; default: all"
    )
    task: str | None = Field(default=None, pattern=_NAME, description="only requests for this task")
    model: str | None = Field(default=None, pattern=_NAME, description="only requests that name this model")
    priority: Literal["interactive", "batch"] | None = Field(default=None, description="only requests of this priority")
    shared_by: Literal["key", "tenant", "all"] = Field(
        default="key", description="each key has a counter, or the keys of a tenant have one, or all keys have one"
    )

    @model_validator(mode="after")
    def _is_exact(self) -> Self:
        given = [kind for kind in _KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of {', '.join(_KINDS)}")
        kind = given[0]
        if (self.per is None) != (kind == "concurrent"):
            raise ValueError("`concurrent` has no period" if self.per else f"`{kind}` needs `per`")
        if kind == "usd" and self.per not in ("day", "month"):
            raise ValueError("`usd` is per day or per month")
        if kind != "usd" and self.per == "month":
            raise ValueError("only `usd` is per month")
        if self.burst is not None and kind not in ("requests", "tokens"):
            raise ValueError(f"`{kind}` has no burst")
        if not is_sound(self.limit()):
            raise ValueError("burst is too large for so few per period")
        return self

    def limit(self) -> Limit:
        """The same as the limiter takes it."""
        kind: Any = next(kind for kind in _KINDS if getattr(self, kind) is not None)
        given = getattr(self, kind)
        amount = round(given * NANO_USD_PER_USD) if kind == "usd" else int(given)
        return Limit(
            kind=kind,
            amount=max(1, amount),
            per=self.per or "",
            burst=(self.burst or amount) if kind in ("requests", "tokens") else 0,
            task=self.task or "*",
            model=self.model or "*",
            priority=self.priority or "*",
            shared_by=self.shared_by,
        )


Tenant = Annotated[str, Field(pattern=f"^{TENANT.pattern}$")]
ModelName = Annotated[str, Field(pattern=_NAME)]


def _as_browsers_send_it(origin: str) -> str:
    if not ORIGIN.fullmatch(origin):
        raise ValueError(
            "must be as browsers send it: https://app.example, in small letters, with no `/` or path after"
        )
    return origin


def _any_or_one(origin: str) -> str:
    return origin if origin == "*" else _as_browsers_send_it(origin)


Origin = Annotated[
    str,
    AfterValidator(_as_browsers_send_it),
    Field(
        max_length=261,
        description="scheme, host and port, as browsers send it",
        json_schema_extra={"pattern": f"^{ORIGIN.pattern}$"},
    ),
]
AnyOrigin = Annotated[
    str,
    AfterValidator(_any_or_one),
    Field(
        max_length=261,
        description="the same, or `*`: any",
        json_schema_extra={"pattern": rf"^(?:\*|{ORIGIN.pattern})$"},
    ),
]


class KeySettings(Section):
    """An API key: its secret's environment variable or its SHA-256, whose it is, and what it may."""

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="its name in logs and books")
    tenant: Tenant = Field(description="whose it is")
    key_env: str | None = Field(default=None, description="environment variable that holds the key's text")
    key_sha256: str | None = Field(
        default=None, pattern=r"^[0-9a-f]{64}$", description="or the SHA-256 of its text, in hex"
    )
    limits: tuple[LimitSettings, ...] | None = Field(default=None, description="default: the section `limits`")
    tasks: tuple[str, ...] | None = Field(default=None, description="default: every task")
    models: tuple[ModelName, ...] | None = Field(default=None, description="those that it may name; default: any")
    admin: bool = Field(default=False, description="may list, load and unload models on /v2/repository")
    priority: Priority = Field(default="interactive", description="the highest that its requests may ask for")
    origins: tuple[Origin, ...] | None = Field(
        default=None, description="web pages that may use it or its client tokens; default: any"
    )

    @model_validator(mode="after")
    def _has_one_secret(self) -> "KeySettings":
        if (self.key_env is None) == (self.key_sha256 is None):
            raise ValueError("give either key_env or key_sha256")
        return self

    def digest(self) -> str | None:
        """SHA-256 of the secret in hex; None where its environment variable is not set. Raises `ConfigError`."""
        if self.key_sha256 is not None:
            return self.key_sha256
        secret = from_environment(self.key_env) if self.key_env else ""
        return hashlib.sha256(secret.encode()).hexdigest() if secret else None

    def caller(self, limits: Sequence[LimitSettings]) -> Caller:
        """Who comes with it; `limits` are for a key that has none of its own."""
        return Caller(
            key_id=self.id,
            tenant=self.tenant,
            limits=tuple(limit.limit() for limit in (limits if self.limits is None else self.limits)),
            tasks=None if self.tasks is None else frozenset(self.tasks),
            is_admin=self.admin,
            models=None if self.models is None else frozenset(self.models),
            priority=self.priority,
            origins=None if self.origins is None else frozenset(self.origins),
        )
