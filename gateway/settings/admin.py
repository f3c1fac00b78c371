"""The section `admin`: who may enter the control plane, and as what."""

import hashlib
from collections.abc import Mapping
from typing import Annotated, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from gateway.settings.secrets import from_environment
from gateway.settings.section import Section
from gateway.settings.tls import stays_here

Role = Literal["viewer", "operator", "admin"]
"""Each may do what those before it may: look; change routing and models; change keys and all else."""
Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
"""Those with a private key, which the issuer alone has: who checks a token by them cannot make one (RFC 8725, 3.1)."""

RESERVED: Final = ("admin", "guard", "rollout")
"""Names in the audit log: of the key of `server.admin_token_env`, and of what the control plane does by itself."""


def _is_url(url: str) -> str:
    if not url.startswith(("https://", "http://")) or any(c in url for c in "?# "):
        raise ValueError("must be an address such as https://issuer.example, without `?` and `#`")
    # Who answers in the issuer's place gives keys of its own, and whoever they signed for is an admin.
    if url.startswith("http://") and not stays_here(urlsplit(url).hostname or ""):
        raise ValueError("must be https://: the issuer's keys decide who enters (http:// is for this host alone)")
    return url


_Url = Annotated[str, Field(max_length=2000), AfterValidator(_is_url)]


class AdminKeySettings(Section):
    """An admin key: its secret's environment variable or its SHA-256, and what it may do."""

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="its name in the audit log")
    key_env: str | None = Field(default=None, description="environment variable that holds the key's text")
    key_sha256: str | None = Field(
        default=None, pattern=r"^[0-9a-f]{64}$", description="or the SHA-256 of its text, in hex"
    )
    role: Role = Field(description="viewers look, operators change routing and models, admins keys and all else")

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.key_env is None) == (self.key_sha256 is None):
            raise ValueError("give either key_env or key_sha256")
        if self.id in RESERVED:
            raise ValueError(f"the ids {', '.join(RESERVED)} are taken by the gateway itself")
        return self

    def secret(self) -> str:
        """What its variable holds; empty where it has none, or it is not set. Raises `ConfigError`."""
        return from_environment(self.key_env) if self.key_env else ""

    def digest(self) -> str | None:
        """SHA-256 of the secret in hex; None where its environment variable is not set. Raises `ConfigError`."""
        if self.key_sha256 is not None:
            return self.key_sha256
        secret = self.secret()
        return hashlib.sha256(secret.encode()).hexdigest() if secret else None


class OidcSettings(Section):
    """Bearer tokens of an OpenID Connect issuer: JSON Web Tokens that it has signed."""

    issuer: _Url = Field(description="what a token's `iss` has to be, letter for letter")
    audience: str = Field(min_length=1, max_length=500, description="what has to be in a token's `aud`")
    jwks_url: _Url | None = Field(
        default=None, description="where its public keys are; default: what its openid-configuration says"
    )
    roles_claim: str = Field(
        default="roles", pattern=r"^[^\s]{1,500}$", description="a claim, or the way to it: `realm_access.roles`"
    )
    roles: Mapping[str, Role] = Field(min_length=1, description="by the claim's value; the highest of them counts")
    algorithms: tuple[Algorithm, ...] = Field(
        default=("RS256", "ES256"), min_length=1, description="by which its tokens may be signed"
    )


class AdminSettings(Section):
    """Who may enter the control plane, besides the key `admin` of `server.admin_token_env`."""

    keys: tuple[AdminKeySettings, ...] = Field(default=(), max_length=100, description="admin keys")
    oidc: OidcSettings | None = Field(default=None, description="an OpenID Connect issuer")
    session_ttl_s: int = Field(default=8 * 3600, ge=60, le=7 * 86400, description="how long a log-in lasts")

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        ids = [key.id for key in self.keys]
        if twice := next((one for one in ids if ids.count(one) > 1), None):
            raise ValueError(f"keys: two have the id '{twice}'")
        return self
