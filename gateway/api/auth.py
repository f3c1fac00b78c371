"""Header -> Caller, before the body is read."""

import hashlib
from collections.abc import Mapping

from gateway.core.errors import Forbidden, Unauthorized
from gateway.core.types import Caller

# One text for no key, a wrong key and a disabled key: nothing can be learned from it.
_REFUSAL = "send a valid API key as 'Authorization: Bearer <key>'"


class KeyRing:
    """The keys from the configuration, by the SHA-256 of their secret (hex).

    A dictionary lookup by digest leaks nothing useful by its timing: the digest of a guess tells nothing about
    how near the guess was.
    """

    def __init__(self, callers: Mapping[str, Caller]) -> None:
        self._callers = dict(callers)

    def authenticate(self, authorization: str | None) -> Caller:
        """The caller behind an `Authorization` header's value. Raises `Unauthorized`."""
        scheme, _, secret = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not secret:
            raise Unauthorized(_REFUSAL)
        caller = self._callers.get(hashlib.sha256(secret.strip().encode("latin-1", "replace")).hexdigest())
        if caller is None:
            raise Unauthorized(_REFUSAL)
        return caller


def authorize_admin(caller: Caller) -> None:
    """Raise `Forbidden` where the key may not control models."""
    if not caller.is_admin:
        raise Forbidden("this key may not control models: that takes an admin key")


def authorize(caller: Caller, task: str) -> None:
    """Raise `Forbidden` where the key is not for this task."""
    if caller.tasks is not None and task not in caller.tasks:
        raise Forbidden(f"this key may not use the task '{task}'")
