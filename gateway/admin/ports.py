"""What the control plane needs from the world, stated by its user."""

from collections.abc import Sequence
from typing import Protocol

from gateway.core.routing import Applied, Rule, RuleSet, WorkerState


class RuleStore(Protocol):
    """The shared routing rules. Every call raises `RulesUnavailable` when the store cannot answer."""

    async def get(self) -> RuleSet:
        """The newest set; revision 0 and no rules where none was ever stored."""
        ...

    async def put(self, rules: Sequence[Rule], *, expected_revision: int) -> int:
        """Replace the set of `expected_revision`; returns the new revision.

        Raises `StaleRevision` when that is not the newest.
        """
        ...

    async def workers(self) -> list[WorkerState]:
        """The live data-plane workers."""
        ...

    async def applied(self, revision: int, timeout_s: float = 1.0) -> Applied:
        """Wait until all live workers run `revision` or a later one; never raises."""
        ...
