"""Who asks: from what a request shows to its `Caller`, before the body is read."""

import hashlib
import hmac
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from starlette.types import Scope

from gateway.core import client_tokens
from gateway.core.client_tokens import ClientToken
from gateway.core.errors import Forbidden, Unauthorized, UnsupportedByBackend
from gateway.core.keys import is_usable, proven, split_key
from gateway.core.types import Caller, Priority
from gateway.core.values import quick_value
from gateway.ports import Keys

# One text for no key, a wrong, disabled, expired or twofold one: nothing can be learned from it.
_REFUSAL: Final = "send a valid API key as 'Authorization: Bearer <key>'"
_PLACES: Final = (b"authorization", b"x-api-key")

Signing = Callable[[], Awaitable[bytes]]
"""The secret that signs client tokens, the same in all workers. Raises `KeysUnavailable`."""


@quick_value
class Identity:
    """Who has come, and with which secret.

    Attributes:
        kept: the digest that is kept of the secret.
        until_s: how long it is good as far as is known now, in Unix seconds; None: no end.
    """

    caller: Caller
    kept: str
    until_s: int | None = None


@dataclass(frozen=True, slots=True)
class KeptSecret:
    """A signing secret that is there from the start."""

    secret: bytes = field(repr=False)

    async def signing(self) -> bytes:
        """See `Signing`."""
        return self.secret


class KeyRing:
    """All keys: the configuration's, by the SHA-256 of their secret (hex), those made at run time, and client tokens.

    A dictionary lookup by digest leaks nothing useful by its timing: the digest of a guess tells nothing about
    how near the guess was. Without `keys` there are no others; without `signing` there are no client tokens.
    """

    def __init__(
        self,
        callers: Mapping[str, Caller],
        *,
        keys: Keys | None = None,
        signing: Signing | None = None,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._callers = dict(callers)
        self._digests = {caller.key_id: digest for digest, caller in callers.items()}
        self._keys = keys
        self._signing = signing
        self._now_s = now_s

    async def authenticate(self, shown: str, origin: str | None) -> Caller:
        """The caller behind a key or a client token; waits only for a key that this worker does not know yet.

        `origin` is that of the web page, where the request names one. Raises `Unauthorized`, `KeysUnavailable`, and
        `Forbidden` where the page may not use it.
        """
        if shown.startswith(client_tokens.PREFIX):
            caller = await self._of_token(shown)
        else:
            caller = (await self.identify(shown)).caller
        # Servers send no origin; a page always does, so a token that is bound to pages is nothing without one.
        if caller.origins is not None and origin not in caller.origins and (origin is not None or caller.token_id):
            raise Forbidden("this key may not be used from this page's origin", field="origin")
        return caller

    async def identify(self, shown: str) -> Identity:
        """Who has this very key, and not a token. Raises `Unauthorized` and `KeysUnavailable`."""
        digest = hashlib.sha256(shown.encode("latin-1", "replace")).hexdigest()
        caller = self._callers.get(digest)
        if caller is not None:
            return Identity(caller=caller, kept=digest)
        parts = split_key(shown)
        found = None if parts is None or self._keys is None else await self._keys.find(parts[0])
        if found is not None and parts is not None and is_usable(found.key, self._now_s()):
            secret = proven(found.key, parts[1], self._now_s())
            if secret is not None:
                ends = [end for end in (found.key.expires_s, secret.until_s) if end is not None]
                return Identity(caller=found.caller, kept=secret.digest, until_s=min(ends, default=None))
        raise Unauthorized(_REFUSAL)

    async def proof(self, identity: Identity) -> str:
        """What a client token bears of the secret it was made with. Raises `UnsupportedByBackend`."""
        return client_tokens.proof_of(await self._signing_secret(), identity.kept)

    async def sign(self, token: ClientToken) -> str:
        """The token's text. Raises `UnsupportedByBackend` where workers share no secret."""
        return client_tokens.sign(token, await self._signing_secret())

    async def _signing_secret(self) -> bytes:
        if self._signing is None:
            raise UnsupportedByBackend(
                "client tokens need Redis, or a secret in the environment variable that the configuration names"
            )
        return await self._signing()

    async def _of_token(self, shown: str) -> Caller:
        if self._signing is not None:
            signing = await self._signing()
            token = client_tokens.read(shown, signing)
            if token is not None and self._now_s() < token.until_s:
                caller, kept = await self._key_of(token)
                proofs = [client_tokens.proof_of(signing, one) for one in kept]
                if caller is not None and any([hmac.compare_digest(token.proof, one) for one in proofs]):  # noqa: C419 - all
                    return client_tokens.narrowed(caller, token)
        raise Unauthorized(_REFUSAL)

    async def _key_of(self, token: ClientToken) -> tuple[Caller | None, Sequence[str]]:
        """The key that a token was made with, as far as it is in force, and what is kept of its secrets."""
        digest = self._digests.get(token.key_id)
        if digest is not None:
            return self._callers[digest], [digest]
        found = None if self._keys is None else await self._keys.find(token.key_id)
        now_s = self._now_s()
        if found is None or not is_usable(found.key, now_s):
            return None, []
        return found.caller, [s.digest for s in found.key.secrets if s.until_s is None or now_s < s.until_s]


def shown_key(scope: Scope, headers: Mapping[str, str], *, offered: str | None = None) -> str:
    """The key or token that a request shows: as a bearer, as `x-api-key`, or as `offered` by a WebSocket's handshake.

    Never one from the address, which others keep in their logs. Raises `Unauthorized` where there is none, and where
    there are two: of them a proxy before us may have looked at the other.
    """
    if len(headers) < len(scope["headers"]):  # some header is there twice
        names = [name for name, _ in scope["headers"]]
        if any(names.count(name) > 1 for name in _PLACES):
            raise Unauthorized(_REFUSAL)
    given = {shown for shown in (headers.get("x-api-key"), offered) if shown is not None}
    authorization = headers.get("authorization")
    if authorization is not None:
        scheme, _, secret = authorization.partition(" ")
        given.add(secret.strip() if scheme.lower() == "bearer" else "")
    if len(given) != 1 or "" in given:
        raise Unauthorized(_REFUSAL)
    return given.pop()


def authorize_admin(caller: Caller) -> None:
    """Raise `Forbidden` where the key may not control models."""
    if not caller.is_admin:
        raise Forbidden("this key may not control models: that takes an admin key")


def authorize(caller: Caller, task: str) -> None:
    """Raise `Forbidden` where the key is not for this task."""
    if caller.tasks is not None and task not in caller.tasks:
        raise Forbidden(f"this key may not use the task '{task}'")


def authorize_model(caller: Caller, model: str) -> None:
    """Raise `Forbidden` where the key may not name this model."""
    if caller.models is not None and model not in caller.models:
        raise Forbidden("this key may not use this model", field="model")


def authorized_priority(caller: Caller, asked: Priority | None) -> Priority:
    """What a request asks for, else the highest that its key may. Raises `Forbidden` for a higher one.

    Refused and not lowered: whoever asks for `interactive` waits for the answer, and should know that nobody hurries.
    """
    if asked == "interactive" and caller.priority == "batch":
        raise Forbidden("this key may not ask for the priority interactive", field="x-priority")
    return asked or caller.priority
