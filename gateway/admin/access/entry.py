"""Who may enter the control plane: admin keys and an issuer's tokens, as the configuration has them."""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Self

from gateway.admin.access.actors import ROLES, Actor
from gateway.admin.access.oidc import Oidc
from gateway.admin_ports import Session
from gateway.core.errors import Unauthorized
from gateway.settings.admin import Role

ONE_KEY: Final = "admin"  # the id of the key of `server.admin_token_env`
SESSION_TTL_S: Final = 8 * 3600
_DOTS: Final = 2  # in a signed token: header, claims, signature (RFC 7515, 3.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminKey:
    """An admin key; `digest` is the SHA-256 of its secret, in hex."""

    id: str
    role: Role
    digest: str = field(repr=False)

    @classmethod
    def of_secret(cls, key_id: str, secret: str, role: Role) -> Self:
        """The key with this secret."""
        return cls(id=key_id, role=role, digest=hashlib.sha256(secret.encode()).hexdigest())

    @property
    def mark(self) -> str:
        """Tells it from one of the same id with another secret, and says nothing of the secret."""
        return hashlib.sha256(f"session of {self.id} {self.digest}".encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """All ways in. Without any, nobody enters."""

    keys: Sequence[AdminKey] = ()
    oidc: Oidc | None = None
    session_ttl_s: int = SESSION_TTL_S

    @classmethod
    def of_token(cls, token: str) -> Self:
        """One key, `admin`, with the role `admin`; an empty token lets nobody in."""
        return cls(keys=(AdminKey.of_secret(ONE_KEY, token, "admin"),) if token else ())

    async def actor(self, token: bytes, *, address: str) -> Actor:
        """Who bears this token. Raises `Unauthorized`, `Forbidden`, `RulesUnavailable`."""
        key = self.key_of(token)
        if key is not None:
            return Actor(id=key.id, role=key.role, kind="key", address=address)
        if self.oidc is not None and token.count(b".") == _DOTS and token.isascii():
            return await self.oidc.actor(token.decode(), address=address)
        raise Unauthorized("missing or unknown admin token")

    def key_of(self, token: bytes) -> AdminKey | None:
        """The key with this secret. All are compared, each in the same time."""
        digest = hashlib.sha256(token).hexdigest()
        found = None
        for key in self.keys:
            if hmac.compare_digest(digest, key.digest) and token:
                found = key
        return found

    def actor_of(self, session: Session, *, address: str) -> Actor | None:
        """Whose log-in it is; None where it was by a key that is no longer among the keys, or has another secret now.

        A key's role is the one that it has now.
        """
        if not session.key:
            role = next((role for role in ROLES if role == session.role), None)
            if self.oidc is None or role is None:
                return None
            return Actor(id=session.actor, role=role, kind="session", address=address)
        for key in self.keys:
            if hmac.compare_digest(key.mark, session.key):
                return Actor(id=key.id, role=key.role, kind="session", address=address)
        return None
