"""The attacks by raw sockets on running planes, group by group, with what is held of each."""

import asyncio
import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tests.fuzz import attacks, names
from tests.fuzz.endpoints import scripts
from tests.fuzz.planes import TIMEOUT_MS, Planes, planes
from tests.fuzz.wire import Attack, Outcome, exchanged, faults, play

GROWTH_BYTES = 512 * 1024 * 1024
"""What the data plane's processes may grow by, together: each body is at most 1 MB here, and 32 are sent at once."""
LATE_S = 20.0
"""Beyond a request's own time, for a busy machine."""


@dataclass
class Group:
    """What came of one group of attacks."""

    name: str
    tried: int
    seconds: float
    statuses: Counter[int]
    found: list[str] = field(default_factory=list)
    grown_bytes: int = 0

    def line(self) -> str:
        told = ", ".join(f"{count} x {status or 'closed'}" for status, count in sorted(self.statuses.items()))
        verdict = "ok" if not self.found else f"{len(self.found)} FAILED"
        counted = f"{self.tried:7,} connections {self.seconds:7.1f} s, +{self.grown_bytes / 2**20:.0f} MiB"
        return f"{self.name:28} {counted}: {told}: {verdict}"


def groups(at: Planes, port: int, *, is_long: bool) -> Mapping[str, tuple[int, Sequence[Attack]]]:
    """All attacks by group, with the port of their plane; `is_long`: with those that take half a minute each."""
    key, token = at.key, at.admin_token
    posts, gets = [("POST", path) for path in attacks.data_posts()], [("GET", path) for path in attacks.data_gets()]
    # Log-ins are counted by address: ten of them, and nobody here has another one within a minute.
    admin = [(method, path) for method, path in attacks.admin_paths() if not path.endswith("/session")]
    changes = [(method, path) for method, path in admin if method != "GET"]
    made: dict[str, tuple[int, Sequence[Attack]]] = {
        "data: framing": (at.port, [*attacks.framing([*posts, *gets], key)]),
        "data: heads": (at.port, [*attacks.heads([*posts, *gets], key)]),
        "data: bodies": (at.port, [*attacks.bodies(posts, key)]),
        "data: names": (at.port, [*names.names(key)]),
        "data: addresses": (at.port, [*names.addresses(key, port)]),
        "data: slow bodies": (at.port, [*attacks.slow(posts, key)]),
        "admin: framing": (at.admin_port, [*attacks.framing(admin, token)]),
        "admin: heads": (at.admin_port, [*attacks.heads(admin, token)]),
        "admin: bodies": (at.admin_port, [*attacks.bodies(changes, token)]),
        "admin: names": (at.admin_port, [*names.admin_names(token)]),
    }
    if is_long:
        made["data: slow heads"] = (at.port, [*attacks.slow_heads(key)])
        made["admin: slow heads"] = (at.admin_port, [*attacks.slow_heads(token)])
    return made


def run(at: Planes, name: str, port: int, attempts: Sequence[Attack]) -> Group:
    """One group; afterwards the plane has to answer as before."""
    before, began = at.memory_bytes()[1], time.monotonic()
    outcomes = asyncio.run(play(port, attempts))
    statuses = Counter(status for outcome in outcomes for status in (outcome.statuses or [0]))
    group = Group(name=name, tried=len(attempts), seconds=time.monotonic() - began, statuses=statuses)
    group.found = [words for outcome in outcomes for words in faults(outcome) if not _is_servers_own(outcome)]
    return _closed(at, group, before)


def endpoints(at: Planes, *, stream: bool) -> Group:
    """Each hostile endpoint asked once, streamed or whole."""
    before, began = at.memory_bytes()[1], time.monotonic()
    asked = []
    for name in at.hostile:
        body = b'{"model":"%b","stream":%b,"messages":[{"role":"user","content":"hi"}]}' % (
            name.encode(),
            b"true" if stream else b"false",
        )
        sent = attacks.request("POST", "/v1/chat/completions", at.key, body, attacks.JSON)
        asked.append(Attack(name=f"endpoint {name}", parts=[sent], patience_s=LATE_S))
    found: list[str] = []
    outcomes = []
    for attack in asked:
        outcome, took_s = asyncio.run(_timed(at.port, attack))
        outcomes.append(outcome)
        found += faults(outcome)
        if not outcome.statuses:
            found.append(f"{attack.name}: no answer")
        if not at.hostile[attack.name.removeprefix("endpoint ")].asked:
            found.append(f"{attack.name}: was not asked, so nothing was tried: {outcome.answer[-300:]!r}")
        if took_s > TIMEOUT_MS / 1000 + LATE_S:
            found.append(f"{attack.name}: took {took_s:.1f} s")
    statuses = Counter(status for outcome in outcomes for status in (outcome.statuses or [0]))
    kind = "streamed" if stream else "whole"
    group = Group(
        name=f"endpoints: {kind}", tried=len(asked), seconds=time.monotonic() - began, statuses=statuses, found=found
    )
    return _closed(at, group, before)


async def _timed(port: int, attack: Attack) -> tuple[Outcome, float]:
    began = time.monotonic()
    outcome = await exchanged(port, attack)
    return outcome, time.monotonic() - began


def _closed(at: Planes, group: Group, before: int) -> Group:
    group.grown_bytes = at.memory_bytes()[1] - before
    if group.grown_bytes > GROWTH_BYTES:
        group.found.append(f"{group.name}: the processes grew by {group.grown_bytes:,} bytes")
    group.found += [f"{group.name}: logged: {line[:500]}" for line in at.failures()]
    evil = {("set-cookie", "x=1")} & {(name.lower(), value) for name, value in at.endpoint.headers}
    group.found += [f"{group.name}: sent on to an endpoint: {one}" for one in evil]
    alive = attacks.request("POST", "/v1/tasks/text-embedding", at.key, attacks.EMBED, attacks.JSON)
    outcome = asyncio.run(exchanged(at.port, Attack(name="as before", parts=[alive])))
    if outcome.statuses != [200]:
        group.found.append(f"{group.name}: afterwards it does not answer: {outcome.answer[:300]!r}")
    return group


def _is_servers_own(outcome: Outcome) -> bool:
    """A load that fails is Triton's own 500 on `/v2`, as Triton gives it itself: status and words go through."""
    return b'{"error":"failed to load' in outcome.answer and outcome.statuses == [500]


class Listener:
    """Hears who connects: nobody may."""

    def __init__(self) -> None:
        self.heard = 0
        self._sockets = [socket.create_server(("127.0.0.1", 0))]
        self.port: int = self._sockets[0].getsockname()[1]
        with contextlib.suppress(OSError):  # a machine without IPv6 has no such address to open
            self._sockets.append(socket.create_server(("::1", self.port), family=socket.AF_INET6))
        for one in self._sockets:
            threading.Thread(target=self._listen, args=(one,), daemon=True).start()

    def _listen(self, one: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = one.accept()
                self.heard += 1
                connection.close()

    def close(self) -> None:
        for one in self._sockets:
            one.close()


@contextlib.contextmanager
def attacked() -> Iterator[tuple[Planes, Listener]]:
    """Planes, with all hostile endpoints behind them, and a listener."""
    listener = Listener()
    try:
        with planes(scripts(listener.port)) as at:
            yield at, listener
    finally:
        listener.close()
