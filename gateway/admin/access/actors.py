"""Who acts on the control plane, and what a change says of itself for the audit log."""

from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from starlette.types import Scope

from gateway.admin_ports import Session
from gateway.settings.admin import Role

ROLES: Final[tuple[Role, ...]] = get_args(Role)
"""The least first."""
Kind = Literal["key", "oidc", "session", "system"]
STATE: Final = "gateway"  # the key of ASGI's scope under which the door leaves a `Visit`


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """Who asks.

    Attributes:
        id: a key's id; `oidc:` and a token's subject; `guard`, `rollout` where the control plane acts by itself.
        kind: how it came in.
        address: from where; empty where the control plane acts by itself.
    """

    id: str
    role: Role
    kind: Kind
    address: str = ""


@dataclass(slots=True, kw_only=True)
class Visit:
    """One request to the control plane; handlers write into it what the audit log shall say of a change.

    Attributes:
        action: such as `rules.put`; empty: the path says it.
        target: what was changed: a rule's name, a switch's id.
        before / after: what it was and what it is, as far as it changed; never a secret.
        reason: why, in the operator's words.
        session: the log-in that the request came by, where it is one.
    """

    actor: Actor
    action: str = ""
    target: str = ""
    before: Any = None
    after: Any = None
    reason: str = ""
    is_read_only: bool = False
    session: Session | None = None

    def tell(self, action: str, target: str = "", *, before: Any = None, after: Any = None, reason: str = "") -> None:
        """What this request has changed; the audit entry is written when it is answered."""
        self.action, self.target, self.before, self.after = action, target, before, after
        self.reason = reason or self.reason


def visit_of(scope: Scope) -> Visit:
    """What the door left of the request; handlers have it by `access.door.CurrentVisit`."""
    visit = scope[STATE]
    assert isinstance(visit, Visit)  # noqa: S101 - the door lets nothing by without one
    return visit
