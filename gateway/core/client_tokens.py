"""Short-lived tokens for web pages: what a page may do of what a key may, signed, so that nothing needs to be kept.

A token's text is `gwt_<payload>.<signature>`: JSON and its HMAC-SHA256, both in URL-safe base 64. It is never wider
than its key, whatever it says: it is read together with the key, and has what both allow.
"""

import base64
import binascii
import hashlib
import hmac
import json
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from gateway.core.keys import KeyFault, fields_of, limits_at, names_at, origins_at, whole_at
from gateway.core.types import Caller, Limit

PREFIX: Final = "gwt_"
MAX_TOKEN: Final = 4096  # characters; a server takes 64 KiB of headers, proxies before it often 8
_FIELDS: Final = ("id", "key", "proof", "until", "tasks", "models", "limits", "origins")
_MAX_NAME: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientToken:
    """What a token says.

    Attributes:
        proof: of the key's secret with which it was made (`proof_of`): it lives no longer than that secret.
        until_s: Unix seconds.
        tasks / models / origins: None = those of the key.
        limits: counted for this token, beside the key's own.
    """

    id: str
    key_id: str
    proof: str
    until_s: int
    tasks: tuple[str, ...] | None = None
    models: tuple[str, ...] | None = None
    limits: tuple[Limit, ...] = ()
    origins: tuple[str, ...] | None = None


def proof_of(signing: bytes, kept: str) -> str:
    """Names a secret, by what is kept of it, without telling anything of that to those who read the token."""
    return hmac.new(signing, b"proof:" + kept.encode(), hashlib.sha256).hexdigest()[:16]


def sign(token: ClientToken, signing: bytes) -> str:
    """The token's text."""
    document: dict[str, Any] = {
        "id": token.id,
        "key": token.key_id,
        "proof": token.proof,
        "until": token.until_s,
        "tasks": token.tasks,
        "models": token.models,
        "limits": [asdict(limit) for limit in token.limits] or None,
        "origins": token.origins,
    }
    given = {name: value for name, value in document.items() if value is not None}
    payload = _written(json.dumps(given, separators=(",", ":")).encode())
    return f"{PREFIX}{payload}.{_mac(payload, signing)}"


def read(text: str, signing: bytes) -> ClientToken | None:
    """What a token says; None where it was not signed with `signing`, or cannot be read."""
    payload, _, signature = text.removeprefix(PREFIX).partition(".")
    if not text.startswith(PREFIX) or len(text) > MAX_TOKEN or not text.isascii():
        return None
    if not hmac.compare_digest(signature, _mac(payload, signing)):
        return None
    try:
        return _token(json.loads(_bytes(payload)))
    except (binascii.Error, KeyFault, ValueError):
        return None


def narrowed(caller: Caller, token: ClientToken) -> Caller:
    """The key's `caller` as the token lets it in: what both allow, and neither models' control nor more tokens."""
    return replace(
        caller,
        token_id=token.id,
        is_admin=False,
        tasks=_both(caller.tasks, token.tasks),
        models=_both(caller.models, token.models),
        origins=_both(caller.origins, token.origins),
        limits=(*caller.limits, *(replace(limit, shared_by="token") for limit in token.limits)),
    )


def _both(of_key: frozenset[str] | None, of_token: tuple[str, ...] | None) -> frozenset[str] | None:
    if of_token is None:
        return of_key
    return frozenset(of_token) if of_key is None else of_key & frozenset(of_token)


def _token(document: object) -> ClientToken:
    given = fields_of(document, _FIELDS, "token")
    names = {name: given.get(name) for name in ("id", "key", "proof")}
    for name, value in names.items():
        if not isinstance(value, str) or not 1 <= len(value) <= _MAX_NAME:
            raise KeyFault(f"{name}: must be a text")
    return ClientToken(
        id=given["id"],
        key_id=given["key"],
        proof=given["proof"],
        until_s=whole_at(given.get("until"), "until"),
        tasks=names_at(given.get("tasks"), "tasks"),
        models=names_at(given.get("models"), "models"),
        limits=limits_at(given.get("limits", ()), "limits"),
        origins=origins_at(given.get("origins"), "origins"),
    )


def _mac(payload: str, signing: bytes) -> str:
    """As text, and compared so: of one and the same signature there are many spellings, and one is ours."""
    return _written(hmac.new(signing, payload.encode(), hashlib.sha256).digest())


def _written(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _bytes(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
