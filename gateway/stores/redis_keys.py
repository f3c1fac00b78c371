"""API keys that were made at run time, as all workers share them; `redis_key_store` changes them.

Layout, all under one prefix and in one slot of a cluster (`{keys}` is written as it is here):
- `{prefix}{keys}:all`: a hash of id -> the JSON of `core.keys.key_document`; their number is bounded;
- `{prefix}{keys}:order`: a sorted set of `<when it was made, in Unix seconds>:<id>`, all with the score 0;
- `{prefix}{keys}:revision`: a random text, another one after each change;
- `{prefix}{keys}:signing`: the secret that signs client tokens, in hex, made by the first who needs it;
- `{prefix}keys:changed`: the channel on which each change says `[id, revision before, revision after]`.
None of it expires: keys have to outlive pauses, so the Redis that holds them should keep its data on disk.

A worker keeps what it has read. It learns of a change by the channel, within a few milliseconds, and by reading the
revision twice a second, which also covers lost messages: where it is not the one that the worker knows, every key is
read anew before it is next used. So what was revoked is out everywhere within a second.
"""

import asyncio
import contextlib
import json
import logging
import random
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from gateway.core.errors import KeysUnavailable
from gateway.core.keys import ApiKey, KeyFault, KnownKey, caller_of, parse_key
from gateway.core.types import Limit
from gateway.ports import StoreObserver
from gateway.settings import MIN_SIGNING_BYTES
from gateway.stores.redis_script import UNREACHABLE, in_time, listen, nobody, timed

POLL_S: Final = 0.5
UNKNOWN_S: Final = 1.0  # for so long an id that was not there is not asked for again
MAX_KNOWN: Final = 10_000  # keys in a worker's memory, some 2 KiB each; and as many ids that are none
MAX_AWAY_S: Final = 600.0  # for so long keys are good without Redis
_BATCH: Final = 500  # keys read at once
_RETRY_US: Final = 1_000_000

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Entry:
    """What was read of an id, and in which epoch; None: no such key."""

    known: KnownKey | None
    epoch: int
    read_s: float


class RedisKeys:
    """`ports.Keys` of one worker. `limits` are for keys that have none of their own."""

    def __init__(
        self,
        client: Redis,
        prefix: str,
        limits: tuple[Limit, ...],
        *,
        timeout_s: float = 0.5,
        max_known: int = MAX_KNOWN,
        observer: StoreObserver = nobody,
    ) -> None:
        self._client = client
        self._names = KeyNames(prefix)
        self._limits = limits
        self._timeout_s = timeout_s
        self._observer = observer
        self._max_known = max_known
        self._known: OrderedDict[str, _Entry] = OrderedDict()  # the least recently used first
        self._unknown: OrderedDict[str, _Entry] = OrderedDict()
        self._epoch = 0  # of the entries that can be trusted
        self._revision: str | None = None
        self._signing: bytes | None = None
        self._is_away = False
        self._contact_s = time.monotonic()
        self._asking: dict[str, asyncio.Future[_Entry | None]] = {}
        self._queue: list[str] = []
        self._heard: set[str] = set()  # changed while they were being read
        self._reader: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False

    async def start(self) -> None:
        """Follow in the background. A Redis out of reach is no error here."""
        await self._poll()
        self._tasks = [
            asyncio.create_task(self._forever(self._follow), name="keys-follow"),
            asyncio.create_task(self._forever(self._listen), name="keys-listen"),
        ]

    async def close(self) -> None:
        """Stop following. The client stays its owner's."""
        self._closing = True
        tasks = [*self._tasks, *([self._reader] if self._reader else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def find(self, key_id: str) -> KnownKey | None:
        """See `ports.Keys`. Waits only where the key is not known, or another one has changed unheard."""
        if not self._is_away:
            entry = self._fresh(key_id) or await self._asked(key_id)
            if entry is not None:
                return entry.known
        entry = self._known.get(key_id)
        if entry is not None and time.monotonic() - self._contact_s <= MAX_AWAY_S:
            return entry.known
        raise KeysUnavailable("the key cannot be looked up now", retry_after_us=_RETRY_US)

    async def signing(self) -> bytes:
        """The secret that signs client tokens. Raises `KeysUnavailable`."""
        if self._signing is None:
            raise KeysUnavailable("client tokens cannot be signed or read now", retry_after_us=_RETRY_US)
        return self._signing

    def _fresh(self, key_id: str) -> _Entry | None:
        entry = self._known.get(key_id)
        if entry is not None:
            self._known.move_to_end(key_id)
        else:
            entry = self._unknown.get(key_id)
            if entry is not None and time.monotonic() - entry.read_s > UNKNOWN_S:
                return None
        return entry if entry is not None and entry.epoch == self._epoch else None

    async def _asked(self, key_id: str) -> _Entry | None:
        """What Redis says of it now, or None where it says nothing; all who ask meanwhile share a round trip."""
        future = self._asking.get(key_id)
        if future is None:
            future = self._asking[key_id] = asyncio.get_running_loop().create_future()
            self._queue.append(key_id)
            if self._reader is None or self._reader.done():
                self._reader = asyncio.create_task(self._read_all())
        return await asyncio.shield(future)

    async def _read_all(self) -> None:
        """Answer everybody who asks; whatever happens, nobody is left waiting, nor waits for more than one failure."""
        while self._queue:
            ids, self._queue = self._queue[:_BATCH], self._queue[_BATCH:]
            entries: dict[str, _Entry | None] = dict.fromkeys(ids)
            self._heard.clear()
            try:
                entries.update(await self._read(ids))
            except UNREACHABLE as error:
                self._lost(error)
                ids, self._queue = [*ids, *self._queue], []
                entries = dict.fromkeys(ids)
            finally:
                for key_id in ids:
                    if key_id in self._heard and entries[key_id] is not None:
                        self._queue.append(key_id)  # it may have been read before it changed
                    elif not (future := self._asking.pop(key_id)).done():
                        future.set_result(self._keep(key_id, entries[key_id]))

    async def _read(self, ids: list[str]) -> dict[str, _Entry | None]:
        epoch = self._epoch
        with timed(self._observer, "keys"):
            async with in_time(self._timeout_s):
                texts = await self._client.hmget(self._names.all, ids)
        now_s = self._contact_s = time.monotonic()
        entries: dict[str, _Entry | None] = {}
        for key_id, text in zip(ids, texts, strict=True):
            try:
                known = None if text is None else self._parsed(text)
                entries[key_id] = _Entry(known, epoch, now_s)
            except KeyFault as fault:
                _log.error("key_unreadable", extra={"key": key_id, "detail": str(fault)})
                self._known.pop(key_id, None)
                entries[key_id] = None
        return entries

    def _parsed(self, text: bytes | str) -> KnownKey:
        key = parsed(text)
        return KnownKey(key=key, caller=caller_of(key, self._limits))

    def _keep(self, key_id: str, entry: _Entry | None) -> _Entry | None:
        """Remember it, and forget what was not used for longest."""
        if entry is not None:
            self._known.pop(key_id, None)
            self._unknown.pop(key_id, None)
            kept = self._unknown if entry.known is None else self._known
            kept[key_id] = entry
            if len(kept) > self._max_known:
                kept.popitem(last=False)
        return entry

    # --- following ---

    async def _forever(self, step: Callable[[], Awaitable[None]]) -> None:
        """Repeat `step`; after a failure pause for 1 to 1.5 s, so that workers do not all come at once."""
        while not self._closing:
            try:
                await step()
            except UNREACHABLE:
                await asyncio.sleep(1 + random.random() / 2)  # noqa: S311 - nothing to guess here
            except Exception:  # noqa: BLE001 - the supervisor of these tasks: keys must stay followed
                _log.exception("keys_task_failed")
                await asyncio.sleep(1)

    async def _follow(self) -> None:
        self._changed.clear()
        await self._poll()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POLL_S):
                await self._changed.wait()

    async def _listen(self) -> None:
        """Forget every key that is announced, until the connection breaks."""
        await listen(self._client, self._names.channel, self._hear)

    def _hear(self, told: str) -> None:
        try:
            key_id, before, after = (str(word) for word in json.loads(told))
        except (TypeError, ValueError, RecursionError):  # the subscription has begun, so that something may be missed
            self._changed.set()
            return
        self._known.pop(key_id, None)
        self._unknown.pop(key_id, None)
        self._heard.add(key_id)
        if before == self._revision:  # nothing was missed in between
            self._revision = after
        else:
            self._changed.set()

    async def _poll(self) -> None:
        """Read the revision; where it is not the one known, no key is trusted any more until it was read anew."""
        try:
            with timed(self._observer, "keys"):
                async with in_time(self._timeout_s):
                    revision, signing = await self._client.mget(self._names.revision, self._names.signing)
                    if signing is None:
                        signing = await self._made_signing()
        except UNREACHABLE as error:
            self._lost(error)
            return
        self._contact_s = time.monotonic()
        self._sign_with(text_of(signing).encode())
        if text_of(revision) != self._revision:
            self._revision = text_of(revision)
            self._epoch += 1
        if self._is_away:
            self._is_away = False
            _log.warning("key_store_restored")

    async def _made_signing(self) -> Any:
        ours = self._signing.decode() if self._signing else secrets.token_hex(32)
        try:
            await self._client.set(self._names.signing, ours, nx=True)
            return await self._client.get(self._names.signing)
        except ResponseError:  # something else is in its place, or there is no room: keys are good all the same
            return None

    def _sign_with(self, secret: bytes) -> None:
        """Take a secret; one that could be guessed is none."""
        if len(secret) >= MIN_SIGNING_BYTES:
            self._signing = secret
            return
        if self._signing is not None or self._revision is None:
            _log.error("signing_secret_unusable", extra={"at": self._names.signing})
        self._signing = None

    def _lost(self, error: BaseException) -> None:
        if not self._is_away:
            self._is_away = True
            _log.warning("key_store_unreachable", extra={"error": type(error).__name__})


class KeyNames:
    """The names in Redis."""

    def __init__(self, prefix: str) -> None:
        self.all, self.order, self.revision, self.signing = (
            f"{prefix}{{keys}}:{name}" for name in ("all", "order", "revision", "signing")
        )
        self.channel = f"{prefix}keys:changed"


def parsed(text: bytes | str) -> ApiKey:
    """A key's JSON. Raises `KeyFault`."""
    try:
        return parse_key(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise KeyFault(str(error) if isinstance(error, KeyFault) else "not JSON") from error


def text_of(value: Any) -> str:
    """A reply as text, whether or not the client decodes; missing is empty."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")
