"""The public keys of an OpenID Connect issuer, read when they are needed and kept (RFC 7517, 5)."""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import httpx

from gateway.core.errors import RulesUnavailable
from gateway.ports import JsonObject

FRESH_S: Final = 300.0
FETCH_S: Final = 3.0  # discovery and the keys together
AGAIN_S: Final = 30.0  # at the soonest after the last try, whatever asks: unknown key ids are anybody's to send
FIRST_AGAIN_S: Final = 3.0  # the same while there are no keys at all
MAX_STALE_S: Final = 86_400.0  # an issuer that is away for a day is gone, and what it has taken back is not known
MAX_BYTES: Final = 256 * 1024
MAX_KEYS: Final = 100
WELL_KNOWN: Final = "/.well-known/openid-configuration"

_NOT_SO: Final = (ValueError, LookupError, TypeError, RecursionError)
"""What reading an answer raises that is not of its form."""

_log = logging.getLogger(__name__)


class IssuerKeys:
    """The keys are read again when they are five minutes old, and when a token names one that is not among them.

    While the issuer is away those that were read last are good for a day.
    """

    def __init__(
        self, http: httpx.AsyncClient, *, issuer: str, url: str | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._http = http
        self._issuer = issuer
        self._url = url
        self._clock = clock
        self._keys: Sequence[JsonObject] = ()
        self._read_s: float | None = None
        self._tried_s: float | None = None
        self._fetching = asyncio.Lock()

    async def find(self, kid: object, fits: Callable[[JsonObject], bool]) -> JsonObject | None:
        """The key (a JWK) of this id that fits; without an id, the only one that fits. None: there is none.

        Raises `RulesUnavailable` where no keys could be read.
        """
        if self._age_s() >= FRESH_S:
            await self._renew()
        found = self._among(kid, fits)
        if found is None and await self._renew():
            found = self._among(kid, fits)
        if self._age_s() > MAX_STALE_S:
            raise RulesUnavailable("the token issuer's keys cannot be read now")
        return found

    def _among(self, kid: object, fits: Callable[[JsonObject], bool]) -> JsonObject | None:
        fitting = [key for key in self._keys if fits(key) and (kid is None or key.get("kid") == kid)]
        return fitting[0] if len(fitting) == 1 or (fitting and kid is not None) else None

    def _age_s(self) -> float:
        return float("inf") if self._read_s is None else self._clock() - self._read_s

    async def _renew(self) -> bool:
        """Read them anew, unless that was tried just now; whether they may be others than before."""
        if self._fetching.locked() and self._age_s() < MAX_STALE_S and self._age_s() >= FRESH_S:
            return False  # another reads them; those that are there will do
        before = self._read_s
        async with self._fetching:
            if self._read_s != before:
                return True  # another has read them while we waited
            pause_s = AGAIN_S if self._keys else FIRST_AGAIN_S
            if self._tried_s is not None and self._clock() - self._tried_s < pause_s:
                return False
            self._tried_s = self._clock()
            try:
                async with asyncio.timeout(FETCH_S):
                    self._keys = await self._fetched()
            except (httpx.HTTPError, httpx.InvalidURL, OSError, *_NOT_SO) as error:
                _log.warning("issuer_keys_unread", extra={"issuer": self._issuer, "fault": type(error).__name__})
                return False
            self._read_s = self._clock()
            return True

    async def _fetched(self) -> Sequence[JsonObject]:
        url = self._url or await self._discovered()
        keys = [key for key in (await self._document(url))["keys"] if isinstance(key, dict)]
        return tuple(key for key in keys[:MAX_KEYS] if key.get("kty") != "oct")  # one that is no secret

    async def _discovered(self) -> str:
        document = await self._document(self._issuer.rstrip("/") + WELL_KNOWN)
        if document["issuer"] != self._issuer:
            raise ValueError("the configuration is another issuer's")
        url = str(document["jwks_uri"])
        if self._issuer.startswith("https://") and not url.startswith("https://"):
            raise ValueError("the keys are offered without encryption")
        return url

    async def _document(self, url: str) -> dict[str, Any]:
        body = bytearray()
        async with self._http.stream("GET", url, headers={"accept": "application/json"}) as answer:
            if answer.status_code != httpx.codes.OK:
                raise ValueError("another status than 200")
            async for chunk in answer.aiter_bytes():
                body += chunk
                if len(body) > MAX_BYTES:
                    raise ValueError("too long")
        document = json.loads(body)
        if not isinstance(document, dict):
            raise TypeError("not an object")
        return document
