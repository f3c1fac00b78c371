"""The control plane's side of the API keys that were made at run time; see `redis_keys` for where they lie."""

import json
import logging
import secrets
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any, Final

from redis.asyncio import Redis

from gateway.core.errors import RulesUnavailable, StaleRevision, TooManyKeys, UnknownKey
from gateway.core.keys import ApiKey, KeyFault, key_document
from gateway.stores.redis_keys import KeyNames, parsed, text_of
from gateway.stores.redis_script import answering, load_script

MAX_KEYS: Final = 100_000
ATTEMPTS: Final = 5  # of a change that names no revision, against other writers
_BATCH: Final = 500  # keys read at once

_log = logging.getLogger(__name__)


class RedisKeyStore:
    """`admin_ports.KeyStore`: the control plane's side. Raises `RulesUnavailable` when Redis does not answer."""

    def __init__(self, client: Redis, prefix: str, *, timeout_s: float = 1.0, max_keys: int = MAX_KEYS) -> None:
        self._client = client
        self._names = KeyNames(prefix)
        self._timeout_s = timeout_s
        self._max_keys = max_keys
        self._script = load_script("put_key")

    async def create(self, key: ApiKey) -> None:
        """See `admin_ports.KeyStore`."""
        if not await self._put(key.id, there=b"", wanted=_written(key), member=_member(key)):
            raise TooManyKeys("another key has this id: try again")

    async def get(self, key_id: str) -> ApiKey:
        """See `admin_ports.KeyStore`."""
        return self._readable(await self._stored(key_id))

    async def page(self, *, after: str, size: int, tenant: str = "") -> tuple[list[ApiKey], str | None]:
        """See `admin_ports.KeyStore`."""
        found: list[ApiKey] = []
        last, cursor = after, after
        while True:
            members, texts = await self._scanned(cursor)
            for member, text in zip(members, texts, strict=True):
                key = None if text is None else self._listed(member, text)
                if key is None or (tenant and key.tenant != tenant):
                    continue
                if len(found) == size:
                    return found, last
                found.append(key)
                last = member
            if len(members) < _BATCH:
                return found, None
            cursor = members[-1]

    async def _scanned(self, after: str) -> tuple[list[str], list[Any]]:
        async with self._bounded():
            start = f"({after}" if after else "-"
            members = await self._client.zrangebylex(self._names.order, start, "+", start=0, num=_BATCH)
            names = [text_of(member) for member in members]
            ids = [_id_of(name) for name in names]
            return names, await self._client.hmget(self._names.all, ids) if ids else []

    async def change(
        self, key_id: str, change: Callable[[ApiKey], ApiKey], *, expected_revision: int | None = None
    ) -> ApiKey:
        """See `admin_ports.KeyStore`."""
        for _ in range(ATTEMPTS):
            text = await self._stored(key_id)
            key = self._readable(text)
            if expected_revision is not None and expected_revision != key.revision:
                raise StaleRevision(expected=expected_revision, current=key.revision)
            changed = replace(change(key), revision=key.revision + 1)
            if await self._put(key_id, there=text, wanted=_written(changed), member=_member(key)):
                return changed
        raise RulesUnavailable("others change this key at the same time: try again")

    async def delete(self, key_id: str) -> None:
        """See `admin_ports.KeyStore`. One that cannot be read can be deleted too."""
        for _ in range(ATTEMPTS):
            text = await self._stored(key_id)
            try:
                member = _member(parsed(text))
            except KeyFault:
                member = ""
            if await self._put(key_id, there=text, wanted="", member=member):
                return
        raise RulesUnavailable("others change this key at the same time: try again")

    async def _stored(self, key_id: str) -> bytes:
        """As it is there, be it text or not: only what is equal to that is replaced."""
        async with self._bounded():
            text: Any = await self._client.hget(self._names.all, key_id)
        if text is None:
            raise UnknownKey("there is no such key (those of the configuration are changed in its file)")
        return bytes(text)

    async def _put(self, key_id: str, *, there: bytes, wanted: str, member: str) -> bool:
        names = self._names
        args: list[str | bytes | int] = [
            key_id,
            there,
            wanted,
            member,
            secrets.token_hex(8),
            names.channel,
            self._max_keys,
        ]
        async with self._bounded():
            done = await self._script.run(self._client, [names.all, names.order, names.revision], args)
        if done == -1:
            raise TooManyKeys(f"there are {self._max_keys} keys: delete some that are not used")
        return bool(done)

    def _readable(self, text: bytes) -> ApiKey:
        try:
            return parsed(text)
        except KeyFault as fault:
            raise RulesUnavailable(f"the stored key cannot be read: {fault}") from fault

    def _listed(self, member: str, text: bytes | str) -> ApiKey | None:
        try:
            return parsed(text)
        except KeyFault as fault:
            _log.error("key_unreadable", extra={"key": _id_of(member), "detail": str(fault)})
            return None

    def _bounded(self) -> AbstractAsyncContextManager[None]:
        return answering("the keys", self._timeout_s)


def _member(key: ApiKey) -> str:
    return f"{key.created_s:012d}:{key.id}"


def _id_of(member: str) -> str:
    return member.partition(":")[2]


def _written(key: ApiKey) -> str:
    return json.dumps(key_document(key), separators=(",", ":"))
