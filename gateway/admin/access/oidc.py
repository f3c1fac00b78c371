"""Bearer tokens of an OpenID Connect issuer (RFC 7519, 7517 and 8725; OpenID Connect Discovery 1.0, 4)."""

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

import jwt
from jwt.exceptions import PyJWTError

from gateway.admin.access.actors import ROLES, Actor
from gateway.admin.access.issuer_keys import IssuerKeys
from gateway.core.errors import Forbidden, Unauthorized
from gateway.ports import JsonObject
from gateway.settings.admin import OidcSettings, Role

LEEWAY_S: Final = 30  # between the issuer's clock and ours
MAX_TOKEN_BYTES: Final = 16 * 1024
MAX_SUBJECT: Final = 200
REQUIRED: Final = ("exp", "iss", "aud", "sub")
_KINDS: Final = {"R": "RSA", "P": "RSA", "E": "EC"}  # of keys, by an algorithm's first letter; EdDSA's is below

_log = logging.getLogger(__name__)


class Oidc:
    """Says who bears a token. What is wrong with one goes to the log, never to who sent it."""

    def __init__(self, settings: OidcSettings, keys: IssuerKeys) -> None:
        self._settings = settings
        self._keys = keys
        self._jwt = jwt.PyJWT(options={"enforce_minimum_key_length": True})

    async def actor(self, token: str, *, address: str) -> Actor:
        """Who it is, as the highest of the roles that the token's values are mapped to.

        Raises `Unauthorized`, `Forbidden` where no role is mapped, `RulesUnavailable` where the issuer's keys were
        never read.
        """
        claims = await self._checked(token)
        subject = claims["sub"]
        if not isinstance(subject, str) or not 0 < len(subject) <= MAX_SUBJECT or not subject.isprintable():
            raise Unauthorized("the token names nobody")
        role = self._role(claims)
        if role is None:
            _log.info("admin_token_without_role", extra={"actor": f"oidc:{subject}"})
            raise Forbidden("the token has none of the roles that may enter")
        return Actor(id=f"oidc:{subject}", role=role, kind="oidc", address=address)

    async def _checked(self, token: str) -> JsonObject:
        """The claims of a token that is good. Raises `Unauthorized`, with one text whatever is wrong."""
        try:
            header = jwt.get_unverified_header(token) if len(token) <= MAX_TOKEN_BYTES else {}
            algorithm = header.get("alg")
            if algorithm not in self._settings.algorithms:
                raise jwt.InvalidAlgorithmError("another algorithm")
            key = await self._keys.find(header.get("kid"), _fits(str(algorithm)))
            if key is None:
                raise jwt.InvalidKeyError("signed by no key of the issuer")
            return self._jwt.decode(
                token,
                jwt.PyJWK(dict(key), algorithm=str(algorithm)),
                algorithms=list(self._settings.algorithms),
                audience=self._settings.audience,
                issuer=self._settings.issuer,
                leeway=LEEWAY_S,
                options={"require": list(REQUIRED)},
            )
        except (PyJWTError, ValueError, TypeError, ArithmeticError, RecursionError) as error:
            # All but the first: what a token may hold that the library does not expect.
            _log.info("admin_token_refused", extra={"fault": type(error).__name__})
            raise Unauthorized("missing or unknown admin token") from None

    def _role(self, claims: JsonObject) -> Role | None:
        found = _claim(claims, self._settings.roles_claim)
        values = [found] if isinstance(found, str) else found if isinstance(found, list) else []
        roles = {self._settings.roles.get(value) for value in values if isinstance(value, str)}
        return next((role for role in reversed(ROLES) if role in roles), None)


def _claim(claims: JsonObject, name: str) -> Any:
    """A claim of this whole name (which may be an address), or else the one to which its parts lead."""
    if name in claims:
        return claims[name]
    found: Any = claims
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _fits(algorithm: str) -> Callable[[JsonObject], bool]:
    """Whether a key (a JWK) is one to check this algorithm's signatures with."""
    kind = "OKP" if algorithm == "EdDSA" else _KINDS[algorithm[0]]

    def fits(key: JsonObject) -> bool:
        use, of, operations = key.get("use", "sig"), key.get("alg", algorithm), key.get("key_ops", ["verify"])
        can_verify = isinstance(operations, list) and "verify" in operations
        return key.get("kty") == kind and use == "sig" and of == algorithm and can_verify

    return fits
