"""What an API key is: its text, how its secret is kept and proven, and its document in the shared store. Pure.

A key's text is `gw_<id>_<secret>`. The id is public: it names the key in logs, limits and on the control plane. The
secret is 32 random bytes and is shown once; what is kept is a salted SHA-256 of it. A slow hash (bcrypt, argon2) is
for what people choose: nobody tries 2^256 secrets, at whatever speed, and a door that is passed some thousand times a
second cannot spend milliseconds on each. The salt keeps two stores from being compared.
"""

import base64
import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

from gateway.core.rate_limit import is_sound
from gateway.core.types import ANY, Caller, Limit, Priority

PREFIX: Final = "gw_"
ID_BYTES: Final = 8
SECRET_BYTES: Final = 32
SALT_BYTES: Final = 16
PRIORITIES: Final[tuple[Priority, ...]] = ("interactive", "batch")
TENANT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
LAST_S: Final = 253_402_300_799  # the end of the year 9999, after which dates have no form
ID: Final = re.compile(r"[a-z2-7]{13}")  # 8 bytes in base 32: no `_`, which ends it
ORIGIN: Final = re.compile(r"https?://(?:[a-z0-9.-]+|\[[0-9a-f:.]+\])(?::[1-9][0-9]{0,4})?")
_PRIORITY: Final = re.compile("|".join(PRIORITIES))
_TEXT: Final = re.compile(r"gw_([a-z2-7]{13})_([A-Za-z0-9_-]{43})")


class KeyFault(ValueError):
    """A document that is no key, or no client token; the text names the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Secret:
    """A secret as it is kept, in hex. `until_s` (Unix seconds): it was replaced, and is good until then."""

    salt: str
    digest: str
    until_s: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key that was made at run time.

    Attributes:
        secrets: the newest first; a second one is the one before, in its grace time.
        tasks / models: what it is for, by name; None = all of them.
        limits: None = those of the configuration's section `limits`.
        priority: the highest that its requests may ask for.
        origins: web pages that may use it, or the tokens made with it; None = any.
        created_s / expires_s: Unix seconds.
        revision: how often it was written.
    """

    id: str
    tenant: str
    name: str
    secrets: tuple[Secret, ...]
    created_s: int
    tasks: tuple[str, ...] | None = None
    models: tuple[str, ...] | None = None
    is_admin: bool = False
    limits: tuple[Limit, ...] | None = None
    priority: Priority = "interactive"
    origins: tuple[str, ...] | None = None
    expires_s: int | None = None
    is_disabled: bool = False
    revision: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownKey:
    """A key, and who comes with it."""

    key: ApiKey
    caller: Caller


def new_id(random: bytes) -> str:
    """An id out of `ID_BYTES` random bytes."""
    return base64.b32encode(random).decode().rstrip("=").lower()


def new_secret(key_id: str, random: bytes, salt: bytes) -> tuple[str, Secret]:
    """The whole key as it is shown once, out of `SECRET_BYTES` and `SALT_BYTES` random bytes, and as it is kept."""
    text = base64.urlsafe_b64encode(random).decode().rstrip("=")
    return f"{PREFIX}{key_id}_{text}", Secret(salt=salt.hex(), digest=_digest(salt, text))


def split_key(given: str) -> tuple[str, str] | None:
    """The id and the secret of a key's text; None where it is none."""
    found = _TEXT.fullmatch(given)
    return (found[1], found[2]) if found else None


def proven(key: ApiKey, secret: str, now_s: float) -> Secret | None:
    """Which of its secrets this is; None where it is none of them, or one that has had its time."""
    for kept in key.secrets:
        same = hmac.compare_digest(_digest(bytes.fromhex(kept.salt), secret), kept.digest)
        if same and (kept.until_s is None or now_s < kept.until_s):
            return kept
    return None


def is_usable(key: ApiKey, now_s: float) -> bool:
    """Whether it lets anybody in at all."""
    return not key.is_disabled and (key.expires_s is None or now_s < key.expires_s)


def rotated(key: ApiKey, secret: Secret, *, now_s: int, grace_s: int) -> ApiKey:
    """The same with a new secret; the newest one before is good for `grace_s` more, any other is gone."""
    before = replace(key.secrets[0], until_s=now_s + grace_s)
    return replace(key, secrets=(secret, before) if grace_s else (secret,))


def caller_of(key: ApiKey, limits: tuple[Limit, ...]) -> Caller:
    """Who comes with it; `limits` are for a key that has none of its own."""
    return Caller(
        key_id=key.id,
        tenant=key.tenant,
        limits=limits if key.limits is None else key.limits,
        tasks=None if key.tasks is None else frozenset(key.tasks),
        is_admin=key.is_admin,
        models=None if key.models is None else frozenset(key.models),
        priority=key.priority,
        origins=None if key.origins is None else frozenset(key.origins),
    )


def _digest(salt: bytes, secret: str) -> str:
    return hashlib.sha256(salt + secret.encode()).hexdigest()


# --- documents -----------------------------------------------------------------------------------


def key_document(key: ApiKey) -> dict[str, Any]:
    """The key as JSON has it in the shared store."""
    return asdict(key)


def parse_key(document: object) -> ApiKey:
    """Read it back. Raises `KeyFault`: a key that cannot be read whole must not let anybody in by half."""
    given = fields_of(document, [field.name for field in fields(ApiKey)], "key")
    secrets = tuple(_secret(entry, f"secrets[{i}]") for i, entry in enumerate(_list(given.get("secrets"), "secrets")))
    if not secrets:
        raise KeyFault("secrets: is empty")
    limits = given.get("limits")
    return ApiKey(
        id=_matching(ID, given.get("id"), "id"),
        tenant=_matching(TENANT, given.get("tenant"), "tenant"),
        name=_text(given.get("name"), "name"),
        secrets=secrets,
        created_s=_instant(given.get("created_s"), "created_s"),
        tasks=names_at(given.get("tasks"), "tasks"),
        models=names_at(given.get("models"), "models"),
        is_admin=_flag(given.get("is_admin"), "is_admin"),
        limits=None if limits is None else limits_at(limits, "limits"),
        priority=_priority(given.get("priority"), "priority"),
        origins=origins_at(given.get("origins"), "origins"),
        expires_s=None if given.get("expires_s") is None else _instant(given["expires_s"], "expires_s"),
        is_disabled=_flag(given.get("is_disabled"), "is_disabled"),
        revision=whole_at(given.get("revision"), "revision"),
    )


def _secret(entry: object, at: str) -> Secret:
    given = fields_of(entry, ("salt", "digest", "until_s"), at)
    until = given.get("until_s")
    return Secret(
        salt=_matching(re.compile(r"(?:[0-9a-f]{2}){8,64}"), given.get("salt"), f"{at}.salt"),
        digest=_matching(re.compile(r"[0-9a-f]{64}"), given.get("digest"), f"{at}.digest"),
        until_s=None if until is None else _instant(until, f"{at}.until_s"),
    )


def limits_at(value: object, at: str) -> tuple[Limit, ...]:
    """Limits as `dataclasses.asdict` writes them. Raises `KeyFault`."""
    return tuple(_limit(entry, f"{at}[{i}]") for i, entry in enumerate(_list(value, at)))


def _limit(entry: object, at: str) -> Limit:
    given = fields_of(entry, [field.name for field in fields(Limit)], at)
    numbers = {name: whole_at(given.get(name), f"{at}.{name}") for name in ("amount", "burst")}
    words = {name: _text(given.get(name), f"{at}.{name}") for name in ("kind", "per", "task", "model", "priority")}
    shared_by = given.get("shared_by")
    if shared_by not in ("key", "tenant"):
        raise KeyFault(f"{at}.shared_by: must be key or tenant")
    for name, form in (("task", NAME), ("model", NAME), ("priority", _PRIORITY)):
        if words[name] != ANY:
            _matching(form, words[name], f"{at}.{name}")
    limit = Limit(**{**words, **numbers, "shared_by": shared_by})
    if not is_sound(limit):
        raise KeyFault(f"{at}: is no limit")
    return limit


def fields_of(entry: object, known: Sequence[str], at: str) -> Mapping[str, Any]:
    """An object with no other fields than these. Raises `KeyFault`: one of a newer gateway may narrow the key."""
    if not isinstance(entry, Mapping):
        raise KeyFault(f"{at}: must be an object")
    for name in entry:
        if name not in known:
            raise KeyFault(f"{at}: unknown field '{name}'")
    return entry


def names_at(value: object, at: str) -> tuple[str, ...] | None:
    """A list of names, or None. Raises `KeyFault`."""
    if value is None:
        return None
    return tuple(_matching(NAME, entry, f"{at}[{i}]") for i, entry in enumerate(_list(value, at)))


def origins_at(value: object, at: str) -> tuple[str, ...] | None:
    """A list of origins, or None. Raises `KeyFault`."""
    if value is None:
        return None
    return tuple(_matching(ORIGIN, entry, f"{at}[{i}]") for i, entry in enumerate(_list(value, at)))


def whole_at(value: object, at: str) -> int:
    """A whole number from 0. Raises `KeyFault`."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**53:
        raise KeyFault(f"{at}: must be a whole number")
    return value


def _instant(value: object, at: str) -> int:
    seconds = whole_at(value, at)
    if seconds > LAST_S:
        raise KeyFault(f"{at}: must be an instant")
    return seconds


def _list(value: object, at: str) -> Sequence[object]:
    if not isinstance(value, list | tuple):
        raise KeyFault(f"{at}: must be a list")
    return value


def _text(value: object, at: str) -> str:
    if not isinstance(value, str):
        raise KeyFault(f"{at}: must be a text")
    return value


def _matching(pattern: re.Pattern[str], value: object, at: str) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise KeyFault(f"{at}: is not of its form")
    return value


def _flag(value: object, at: str) -> bool:
    if not isinstance(value, bool):
        raise KeyFault(f"{at}: must be true or false")
    return value


def _priority(value: object, at: str) -> Priority:
    for one in PRIORITIES:
        if value == one:
            return one
    raise KeyFault(f"{at}: must be interactive or batch")
