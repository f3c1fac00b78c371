"""Rollouts as documents, for a store."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from gateway.core.rollouts.progressive import Course, Event, Rollout, Split
from gateway.core.rules.documents import guard_at, target_at


def rollout_document(rollout: Rollout) -> dict[str, Any]:
    """As plain lists and dicts."""
    return asdict(rollout)


def parse_rollout(document: Mapping[str, Any]) -> Rollout:
    """The inverse of `rollout_document`, also after a way through JSON. Raises `RuleError`."""
    course = document["course"]
    guard = course["guard"]
    return Rollout(
        **{
            **document,
            "course": Course(
                **{
                    **course,
                    "target": target_at(course["target"], "target"),
                    "steps": tuple(course["steps"]),
                    "guard": None if guard is None else guard_at(guard, "guard"),
                }
            ),
            "split": _split(document["split"]),
            "forms": tuple(_split(form) for form in document["forms"]),
            "events": tuple(Event(**event) for event in document["events"]),
        }
    )


def _split(entries: Sequence[Mapping[str, Any]]) -> Split:
    return tuple(target_at(entry, f"split[{i}]") for i, entry in enumerate(entries))
