"""The ways in that the configuration names, ready for use."""

import logging
import ssl
from contextlib import AsyncExitStack

import httpx

from gateway.admin.access.entry import ONE_KEY, AdminKey, Entry
from gateway.admin.access.failures import LONG_TOKEN
from gateway.admin.access.issuer_keys import IssuerKeys
from gateway.admin.access.oidc import Oidc
from gateway.settings import ConfigError, Settings
from gateway.settings.admin import OidcSettings

_log = logging.getLogger(__name__)


def open_entry(settings: Settings, stack: AsyncExitStack) -> Entry:
    """All of them, closed with `stack`. Raises `ConfigError` where nobody could enter, or two keys are one."""
    admin = settings.admin
    keys = _keys(settings)
    if not keys and admin.oidc is None:
        raise ConfigError(
            f"set the admin token in the environment variable {settings.server.admin_token_env}, "
            "or give admin.keys or admin.oidc"
        )
    oidc = None if admin.oidc is None else _oidc(admin.oidc, stack)
    return Entry(keys=keys, oidc=oidc, session_ttl_s=admin.session_ttl_s)


def _keys(settings: Settings) -> tuple[AdminKey, ...]:
    token = settings.server.admin_token()
    keys = list(Entry.of_token(token).keys)
    _warn_of_short(ONE_KEY, token)
    for key in settings.admin.keys:
        _warn_of_short(key.id, key.secret())
        digest = key.digest()
        if digest is None:
            _log.warning(
                "admin key lets nobody in: its variable is not set", extra={"key": key.id, "variable": key.key_env}
            )
        else:
            keys.append(AdminKey(id=key.id, role=key.role, digest=digest))
    if len({key.digest for key in keys}) < len(keys):
        raise ConfigError(f"admin.keys: two keys have the same secret (`{ONE_KEY}` is of server.admin_token_env)")
    return tuple(keys)


def _warn_of_short(key_id: str, secret: str) -> None:
    """Say so of a secret that many addresses together may find by trying, each as often as one may fail."""
    if 0 < len(secret.encode()) < LONG_TOKEN:
        _log.warning("admin key is short: make one of 32 random bytes", extra={"key": key_id})


def _oidc(settings: OidcSettings, stack: AsyncExitStack) -> Oidc:
    # The system's certificates: an issuer of one's own has often an authority of one's own.
    http = httpx.AsyncClient(verify=ssl.create_default_context(), trust_env=False, timeout=None)  # noqa: S113 - bounded as a whole
    stack.push_async_callback(http.aclose)
    return Oidc(settings, IssuerKeys(http, issuer=settings.issuer, url=settings.jwks_url))
