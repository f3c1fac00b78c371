"""The control plane's stores on variables."""

import time
from collections.abc import Sequence
from types import SimpleNamespace

from gateway.admin_ports import Applied, AuditEntry, Change, Revision, WorkerState
from gateway.core.errors import Frozen, StaleRevision, UnknownRevision, UnknownSwitch
from gateway.core.rules import RuleSet, parse_rules
from gateway.core.switches import Switches


class Rules:
    """A `RuleStore`; `got` is what `applied` answers, `behind` happens before the next change."""

    def __init__(self, rules: Sequence[dict]) -> None:
        self.kept = [_revision(1, parse_rules(rules), Change(by="", action="seed"))]
        self.set_switches = Switches()
        self.got = Applied(workers=2, of=2, ms=40)
        self.states: list[WorkerState] = []
        self.meanwhile = None

    @property
    def now(self) -> RuleSet:
        newest = self.kept[-1]
        return RuleSet(revision=newest.revision, rules=newest.rules, switches=self.set_switches)

    async def get(self) -> RuleSet:
        return self.now

    async def put(self, rules, *, expected_revision: int, at_ms: int = 0, change: Change | None = None) -> int:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            self.change(meanwhile)
        if expected_revision != self.now.revision:
            raise StaleRevision(expected=expected_revision, current=self.now.revision)
        if self.set_switches.freezing(_now_ms()) and not (change and change.is_automatic):
            raise Frozen("changes are frozen")
        self.kept.append(_revision(expected_revision + 1, tuple(rules), change or Change()))
        return self.now.revision

    def change(self, rules: Sequence[dict]) -> None:
        """What another operator does."""
        self.kept.append(_revision(self.now.revision + 1, parse_rules(rules), Change(by="another")))

    async def revisions(self, *, before: int = 0, size: int = 50) -> list[Revision]:
        return [one for one in reversed(self.kept) if not before or one.revision < before][:size]

    async def revision(self, number: int) -> Revision:
        for one in self.kept:
            if one.revision == number:
                return one
        raise UnknownRevision(f"revision {number} is not kept")

    async def switches(self) -> Switches:
        return self.set_switches

    async def add_switch(self, switch) -> int:
        old = self.set_switches
        self.set_switches = Switches(revision=old.revision + 1, items=(*old.items, switch))
        return self.set_switches.revision

    async def end_switch(self, switch_id: str):
        old = self.set_switches
        for one in old.items:
            if one.id == switch_id:
                rest = tuple(other for other in old.items if other is not one)
                self.set_switches = Switches(revision=old.revision + 1, items=rest)
                return one, self.set_switches.revision
        raise UnknownSwitch(f"no switch has the id '{switch_id}'")

    async def workers(self) -> list[WorkerState]:
        return self.states

    async def newest(self):
        return SimpleNamespace(rules=self.now.revision, switches=self.set_switches.revision)

    async def applied(self, revision: int, timeout_s: float = 1.0, *, of_switches: bool = False) -> Applied:
        return self.got


class Audit:
    """An `AuditLog`."""

    def __init__(self) -> None:
        self.entries: list[AuditEntry] = []

    async def add(self, entry: AuditEntry) -> None:
        number = len(self.entries) + 1
        self.entries.append(
            AuditEntry(**{**{name: getattr(entry, name) for name in entry.__slots__}, "id": f"{number}-0"})
        )

    async def page(self, *, before: str = "", size: int = 100):
        older = [one for one in reversed(self.entries) if not before or _number(one.id) < _number(before)]
        return older[:size], (older[size - 1].id if len(older) > size else None)

    async def all(self):
        for entry in self.entries:
            yield entry


class Requests:
    """A `RequestLog` of documents."""

    def __init__(self, documents: Sequence[dict]) -> None:
        self.documents = list(documents)

    async def page(self, *, before: str = "", size: int = 100):
        start = int(before or 0)
        following = start + size
        return self.documents[start:following], (str(following) if following < len(self.documents) else None)

    async def find(self, request_id: str):
        return next((one for one in self.documents if one["id"].startswith(request_id)), None)


def _revision(number: int, rules, change: Change) -> Revision:
    return Revision(revision=number, at_ms=1_700_000_000_000 + number, change=change, count=len(rules), rules=rules)


def _number(entry_id: str) -> int:
    return int(entry_id.partition("-")[0])


def _now_ms() -> int:
    return round(time.time() * 1000)


class Deploys:
    """A `DeployStore`, for rollouts too."""

    def __init__(self) -> None:
        self.documents: dict[str, dict] = {}

    async def save(self, document) -> None:
        self.documents[document["id"]] = dict(document)

    async def load(self, deploy_id: str):
        return self.documents.get(deploy_id)

    async def recent(self):
        return list(reversed(self.documents.values()))

    async def claim(self, model: str, owner: str) -> bool:
        return True

    async def owner(self, model: str) -> str:
        return ""

    async def release(self, model: str, owner: str) -> None:
        pass


class Counted:
    """A `FigureSource`: `tallies` by series, as if they ended now."""

    def __init__(self) -> None:
        self.tallies: dict = {}

    async def read(self, since_s: int, until_s: int):
        second = int(time.time()) - 1
        return {second: self.tallies} if since_s <= second < until_s else {}


class Shadows:
    """A `ShadowSource` of documents."""

    def __init__(self, documents: Sequence[dict]) -> None:
        self.documents = list(documents)

    async def read(self):
        return self.documents

    async def forget(self, rule: str) -> None:
        self.documents = [one for one in self.documents if one["rule"] != rule]
