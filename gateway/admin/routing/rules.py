"""The control plane's paths about rules: read, tried, replaced, switched, and taken back.

A change names the revision that it was made from (`If-Match`); it is taken whole or refused whole, and its
answer says how many live workers run it.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Final

from fastapi import APIRouter, Path, Query, Response

from gateway.admin.access.door import CurrentVisit
from gateway.admin.document import refuses
from gateway.admin.etags import IfMatch, revision_of, set_etag
from gateway.admin.fields import PAGE_SIZE
from gateway.admin.instants import instant
from gateway.admin.routing.rule_bodies import (
    DryRunIn,
    DryRunOut,
    RevisionRules,
    Revisions,
    RollbackIn,
    RuleApplied,
    RulePatch,
    RulesApplied,
    RulesCandidate,
    RulesDiff,
    RulesIn,
    RulesOut,
    RulesValid,
)
from gateway.admin.routing.switch_bodies import switch_out
from gateway.admin_ports import Change, RequestLog, Revision, RuleStore
from gateway.core.errors import (
    Frozen,
    InvalidInput,
    InvalidRules,
    RateLimited,
    RevisionRequired,
    RulesUnavailable,
    StaleRevision,
    UnknownRevision,
    UnknownRule,
)
from gateway.core.rules import Rule, RuleSet, parse_rules, rules_document, warnings_of
from gateway.core.rules.diff import RuleChange, changes
from gateway.core.rules.dry_run import DryRun, Sample, dry_run, sample_of

ATTEMPTS: Final = 20  # of a PATCH that names no revision, against other writers
PAGE: Final = 500  # of the request log
AUDITED: Final = 50  # changes that an audit entry names
DRY_RUN_S: Final = 5.0  # beyond which one ends without an answer
TURN_S: Final = 3.0  # for which one waits while another is under way; together less than a command's patience

Check = Callable[[Sequence[Rule]], None]
Absent = Callable[[Sequence[Rule]], Awaitable[list[str]]]


@dataclass(frozen=True, slots=True)
class _Rules:
    """The store, and what its rules are held against."""

    store: RuleStore
    check: Check
    tasks: Collection[str]

    def parsed(self, document: Sequence[Any]) -> tuple[Rule, ...]:
        """Rules that fit. Raises `RuleError`."""
        rules = parse_rules(document)
        self.check(rules)
        return rules

    def warnings(self, rules: Sequence[Rule]) -> list[str]:
        """What may not be meant."""
        return warnings_of(rules, self.tasks)

    async def put(self, rules: tuple[Rule, ...], expected: int, change: Change) -> RuleSet:
        """Put them in the place of revision `expected`. Raises `StaleRevision`, which tells what others changed."""
        try:
            revision = await self.store.put(rules, expected_revision=expected, change=change)
        except StaleRevision as error:
            error.changes = [asdict(one) for one in await self._changed_since(error.expected)]
            raise
        return RuleSet(revision=revision, rules=rules)

    async def _changed_since(self, revision: int) -> tuple[RuleChange, ...]:
        """What others changed since; nothing where that revision is not kept."""
        try:
            was = await self.store.revision(revision)
            return changes(was.rules or (), (await self.store.get()).rules)
        except (UnknownRevision, RulesUnavailable):
            return ()

    async def in_force(self) -> RuleSet | None:
        """The newest set; None where it cannot be read, which is no reason not to replace it."""
        try:
            return await self.store.get()
        except RulesUnavailable:
            return None

    async def applied(self, rules: RuleSet, response: Response) -> dict[str, Any]:
        """The answer to a change of the whole set."""
        set_etag(response, rules.revision)
        applied = await self.store.applied(rules.revision)
        shown = {"revision": rules.revision, "rules": rules_document(rules.rules)}
        return {**shown, "applied": asdict(applied), "warnings": self.warnings(rules.rules)}


def rule_routes(
    store: RuleStore,
    check: Check,
    tasks: Collection[str],
    requests: RequestLog | None = None,
    *,
    absent: Absent | None = None,
) -> APIRouter:
    """`/rules`. `check` raises `RuleError` for rules that do not fit; `requests` are those that a dry run looks at.

    `absent` warns of models that no server has.
    """
    router = APIRouter(tags=["rules"])
    rules = _Rules(store, check, tasks)
    _reading(router, rules)
    _trying(router, rules, requests, absent)
    _changing(router, rules)
    return router


def _reading(router: APIRouter, rules: _Rules) -> None:
    @router.get("/rules")
    async def get_rules(response: Response) -> RulesOut:
        """The rules in force, with their revision as the ETag."""
        current = await rules.store.get()
        set_etag(response, current.revision)
        now_ms = round(time.time() * 1000)
        freezing = current.switches.freezing(now_ms)
        shown = {"revision": current.revision, "rules": rules_document(current.rules)}
        return RulesOut.model_validate({**shown, "frozen": switch_out(freezing, now_ms) if freezing else None})

    @router.get("/rules/revisions")
    async def get_revisions(
        size: Annotated[int, Query(alias="limit", ge=1, le=200, description=PAGE_SIZE)] = 50,
        cursor: Annotated[str, Query(description="`next` of the page before", pattern=r"^[0-9]{1,15}$")] = "0",
    ) -> Revisions:
        """The sets that were in force, the newest first, by whom and why."""
        found = await rules.store.revisions(before=int(cursor), size=size + 1)
        newest = (await rules.store.get()).revision
        items = [_revision_document(one, newest) | {"rules": one.count} for one in found[:size]]
        following = str(found[size - 1].revision) if len(found) > size else None
        return Revisions.model_validate({"items": items, "next": following})

    @router.get("/rules/revisions/{revision}", openapi_extra=refuses(UnknownRevision))
    async def get_revision(revision: Annotated[int, Path(description="of the rules")]) -> RevisionRules:
        """One of them, with its rules."""
        found = await rules.store.revision(revision)
        newest = (await rules.store.get()).revision
        shown = _revision_document(found, newest) | {"rules": rules_document(found.rules or ())}
        return RevisionRules.model_validate(shown)

    @router.get("/rules/diff", openapi_extra=refuses(UnknownRevision))
    async def get_diff(
        before: Annotated[int, Query(alias="from", description="a revision")],
        after: Annotated[int | None, Query(alias="to", description="by default the newest")] = None,
    ) -> RulesDiff:
        """What turns one revision into another."""
        was = await rules.store.revision(before)
        if after is None:
            current = await rules.store.get()
            number, then = current.revision, current.rules
        else:
            number, then = after, (await rules.store.revision(after)).rules or ()
        told = [asdict(one) for one in changes(was.rules or (), then)]
        return RulesDiff.model_validate({"from": before, "to": number, "changes": told})


def _trying(router: APIRouter, rules: _Rules, requests: RequestLog | None, absent: Absent | None) -> None:
    turn = asyncio.Lock()

    @router.post("/rules/validate", openapi_extra=refuses(InvalidRules))
    async def validate_rules(body: RulesCandidate) -> RulesValid:
        """Say whether a set would be taken and what it would change, without taking it."""
        parsed = rules.parsed(body.rules)
        current = await rules.in_force()
        told = None if current is None else [asdict(one) for one in changes(current.rules, parsed)]
        warnings = [*rules.warnings(parsed), *(await absent(parsed) if absent else ())]
        shown = {"rules": rules_document(parsed), "warnings": warnings, "changes": told}
        return RulesValid.model_validate({"valid": True, **shown})

    @router.post("/rules/dry-run", openapi_extra=refuses(InvalidRules))
    async def dry_run_rules(body: DryRunIn) -> DryRunOut:
        """Say how many of the last requests, or of those that are given, a set would send elsewhere."""
        parsed = rules.parsed(body.rules)
        current = await rules.store.get()
        wanted = RuleSet(revision=current.revision, rules=parsed)
        async with _in_turn(turn):
            samples = [one.sample() for one in body.requests or ()]
            if body.requests is None:
                samples = await _recorded(requests, body.last)
            found = await _tried(current, wanted, samples, is_recorded=body.requests is None)
        return DryRunOut.model_validate(
            {"revision": current.revision, **_dry_run_document(found), "warnings": rules.warnings(parsed)}
        )


def _changing(router: APIRouter, rules: _Rules) -> None:
    @router.put("/rules", openapi_extra=refuses(InvalidRules, RevisionRequired, StaleRevision, Frozen))
    async def put_rules(
        body: RulesIn, response: Response, visit: CurrentVisit, if_match: IfMatch = None
    ) -> RulesApplied:
        """Replace the whole set; `If-Match` says which revision it replaces."""
        expected = body.revision if if_match is None else revision_of(if_match)
        if expected is None:
            raise RevisionRequired("send If-Match with the revision that the rules were made from")
        parsed = rules.parsed(body.rules)
        current = await rules.in_force()
        note = body.note or visit.reason
        saved = await rules.put(parsed, expected, Change(by=visit.actor.id, action="put", note=note))
        visit.tell("rules.put", **_audited(current, saved), reason=note)
        return RulesApplied.model_validate(await rules.applied(saved, response))

    @router.post("/rules/rollback", openapi_extra=refuses(InvalidRules, UnknownRevision, StaleRevision, Frozen))
    async def rollback_rules(
        response: Response, visit: CurrentVisit, body: RollbackIn | None = None, if_match: IfMatch = None
    ) -> RulesApplied:
        """Put a set of before in force again, under a new revision; by default the one before the one in force."""
        asked = body or RollbackIn()
        current = await rules.store.get()
        back = await _back_to(rules.store, asked.revision, current.revision)
        again = back.rules or ()
        rules.check(again)
        expected = revision_of(if_match)
        note = asked.note or visit.reason or f"back to revision {back.revision}"
        change = Change(by=visit.actor.id, action="rollback", note=note)
        saved = await rules.put(again, current.revision if expected is None else expected, change)
        visit.tell("rules.rollback", f"revision {back.revision}", **_audited(current, saved), reason=note)
        return RulesApplied.model_validate(await rules.applied(saved, response))

    @router.patch("/rules/{name:path}", openapi_extra=refuses(UnknownRule, InvalidRules, StaleRevision, Frozen))
    async def patch_rule(
        name: Annotated[str, Path(description="the rule's name")],
        body: RulePatch,
        response: Response,
        visit: CurrentVisit,
        if_match: IfMatch = None,
    ) -> RuleApplied:
        """Switch one rule on or off, or share its requests otherwise.

        Without `If-Match` it is done on whatever set is the newest.
        """
        if body.enabled is None and body.weights is None:
            raise InvalidInput("#/: give `enabled` or `weights`", field="body")
        note = body.note or visit.reason
        action = "switch" if body.weights is None else "weights"
        change = Change(by=visit.actor.id, action=action, note=note)
        before, saved = await _patch(rules, name, body, change=change, expected=revision_of(if_match))
        visit.tell(f"rules.{action}", name, **_audited(before, saved), reason=note)
        applied = await rules.applied(saved, response)
        one = next(rule for rule in applied.pop("rules") if rule["name"] == name)
        return RuleApplied.model_validate({**applied, "rule": one})


async def _patch(
    rules: _Rules, name: str, body: RulePatch, *, change: Change, expected: int | None
) -> tuple[RuleSet, RuleSet]:
    """Change one rule; returns the set before, and the new one. Without `expected` it tries again after a conflict."""
    for _ in range(ATTEMPTS - 1):
        try:
            return await _patch_once(rules, name, body, change=change, expected=expected)
        except StaleRevision:
            if expected is not None:
                raise
    return await _patch_once(rules, name, body, change=change, expected=expected)


async def _patch_once(
    rules: _Rules, name: str, body: RulePatch, *, change: Change, expected: int | None
) -> tuple[RuleSet, RuleSet]:
    current = await rules.store.get()
    old = current.named(name)
    if old is None:
        known = ", ".join(rule.name for rule in current.rules) or "none"
        raise UnknownRule(f"no rule is named '{name}'; there are: {known}"[:500])
    new = _patched(old, body)
    changed = tuple(new if rule.name == name else rule for rule in current.rules)
    rules.check(changed)
    return current, await rules.put(changed, current.revision if expected is None else expected, change)


def _patched(rule: Rule, body: RulePatch) -> Rule:
    """The rule with what the body says. Raises `RuleError`, `InvalidInput`."""
    if body.enabled is not None:
        rule = replace(rule, enabled=body.enabled)
    if body.weights is None:
        return rule
    if len(body.weights) != len(rule.split):
        told = f"#/weights: the split of rule '{rule.name}' has {len(rule.split)} targets"
        raise InvalidInput(told, field="weights")
    split = [replace(target, weight=weight) for target, weight in zip(rule.split, body.weights, strict=True)]
    return parse_rules(rules_document([replace(rule, split=tuple(split))]))[0]


async def _back_to(store: RuleStore, revision: int | None, current: int) -> Revision:
    """The set to go back to. Raises `UnknownRevision`."""
    if revision is None:
        before = await store.revisions(before=current, size=1)
        if not before:
            raise UnknownRevision(f"no revision before {current} is kept")
        revision = before[0].revision
    return await store.revision(revision)


async def _recorded(requests: RequestLog | None, last: int) -> list[Sample]:
    """The newest requests that came as far as the rules."""
    if requests is None:
        raise InvalidInput("#/requests: no requests are recorded here: give some", field="requests")
    samples: list[Sample] = []
    cursor: str | None = ""
    looked = 0
    while cursor is not None and looked < last:
        documents, cursor = await requests.page(before=cursor, size=min(PAGE, last - looked))
        looked += len(documents)
        samples += [sample for sample in map(sample_of, documents) if sample is not None]
        if not documents:
            break
    return samples


@contextlib.asynccontextmanager
async def _in_turn(turn: asyncio.Lock) -> AsyncIterator[None]:
    """One dry run at a time: guards and rollouts share this process. Raises `RateLimited`."""
    try:
        async with asyncio.timeout(TURN_S):
            await turn.acquire()
    except TimeoutError:
        raise RateLimited("others' dry runs are under way", retry_after_us=round(DRY_RUN_S * 1e6)) from None
    try:
        yield
    finally:
        turn.release()


async def _tried(before: RuleSet, after: RuleSet, samples: Sequence[Sample], *, is_recorded: bool) -> DryRun:
    """A dry run in a thread, as it may take seconds. Raises `InvalidInput` where it takes too long."""
    is_over = threading.Event()
    in_time = _while_time_is_left(samples, time.monotonic() + DRY_RUN_S, is_over)
    try:
        return await asyncio.to_thread(dry_run, before, after, in_time, is_recorded=is_recorded)
    finally:
        is_over.set()  # where nobody waits for it any more


def _while_time_is_left(samples: Sequence[Sample], until_s: float, is_over: threading.Event) -> Iterator[Sample]:
    for tried, sample in enumerate(samples):
        if is_over.is_set() or time.monotonic() > until_s:
            told = f"#/: {tried} of {len(samples)} requests were tried in {DRY_RUN_S:g} s: give fewer, or fewer rules"
            raise InvalidInput(told, field="requests")
        yield sample


def _dry_run_document(found: DryRun) -> dict[str, Any]:
    moves = [{"from": one.from_place, "to": one.to_place, "requests": one.requests} for one in found.moves]
    return {**asdict(found), "moves": moves}


def _revision_document(one: Revision, newest: int) -> dict[str, Any]:
    return {
        "revision": one.revision,
        "at": instant(one.at_ms),
        "by": one.change.by,
        "action": one.change.action,
        "note": one.change.note,
        "in_force": one.revision == newest,
    }


def _audited(before: RuleSet | None, after: RuleSet) -> Mapping[str, Any]:
    """What the audit log keeps of a change: which revisions, and what differs."""
    if before is None:
        return {"before": None, "after": {"revision": after.revision}}
    told = [one.text for one in changes(before.rules, after.rules)]
    more = [f"and {len(told) - AUDITED} more"] if len(told) > AUDITED else []
    return {
        "before": {"revision": before.revision},
        "after": {"revision": after.revision, "changes": [*told[:AUDITED], *more]},
    }
