"""A deploy as a value: what was asked for, how far it has got, and what it has left in the rules."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from gateway.core.rollouts.model_move import WHOLE, Marks, Move, marks_document, parse_marks

Status = Literal["running", "done", "failed", "rolled_back", "interrupted"]
Step = Literal["pin", "load", "shift", "retire", "unpin"]
STEPS: tuple[Step, ...] = ("pin", "load", "shift", "retire", "unpin")
ENDED: tuple[Status, ...] = ("done", "failed", "rolled_back")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How traffic is shifted.

    Attributes:
        percents: of the callers, one after the other; the last is 100.
        hold_s: how long each is held and watched, in seconds.
        max_error_ratio: of the new version's requests may fail, beyond what fails of the old version's.
        load_timeout_s: for a load, warm-up included.
    """

    percents: tuple[int, ...] = (10, 50, WHOLE)
    hold_s: float = 10.0
    max_error_ratio: float = 0.02
    load_timeout_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Deploy:
    """One move of a model from version `old` to `new`.

    Attributes:
        served: the versions that were ready before, on every replica: what an undo goes back to.
        step / weight: where it is, and the share of callers on the new version, in percent.
        marks: what it has changed in the rules; empty once they are as they were.
        undo: it goes back, since an operator asked for it or since it could not go on.
        reason: why it failed or was rolled back.
        notes: what the operator should know.
        started_ms / updated_ms: Unix milliseconds.
    """

    id: str
    model: str
    old: str
    new: str
    backends: tuple[str, ...]
    served: tuple[str, ...]
    pace: Pace
    started_ms: int
    updated_ms: int
    status: Status = "running"
    step: Step = "pin"
    weight: int = 0
    marks: Marks = field(default_factory=Marks)
    undo: Literal["", "asked", "forced"] = ""
    reason: str = ""
    notes: tuple[str, ...] = ()

    @property
    def move(self) -> Move:
        """For the rules."""
        return Move(model=self.model, backends=frozenset(self.backends), old=self.old, new=self.new)

    @property
    def both(self) -> tuple[str, ...]:
        """The versions to serve while it lasts."""
        return tuple(sorted({*self.served, self.new}, key=int))

    @property
    def after(self) -> tuple[str, ...]:
        """The versions to serve after it."""
        return tuple(version for version in self.both if version != self.old)

    @property
    def is_open(self) -> bool:
        """It has not come to an end, or has left something in the rules."""
        return self.status not in ENDED or bool(self.marks.held or self.marks.added)


def deploy_document(deploy: Deploy) -> dict[str, Any]:
    """As plain lists and dicts."""
    return {**asdict(deploy), "marks": marks_document(deploy.marks)}


def parse_deploy(document: Mapping[str, Any]) -> Deploy:
    """The inverse of `deploy_document`, also after a way through JSON."""
    pace = document["pace"]
    return Deploy(
        **{
            **document,
            **{name: tuple(document[name]) for name in ("backends", "served", "notes")},
            "pace": Pace(**{**pace, "percents": tuple(pace["percents"])}),
            "marks": parse_marks(document["marks"]),
        }
    )
