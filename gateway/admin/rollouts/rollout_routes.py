"""The control plane's paths about rollouts: begun, listed, taken on or back."""

import itertools
from typing import Annotated, Final

from fastapi import APIRouter, Query

from gateway.admin.access.door import CurrentVisit
from gateway.admin.document import refuses
from gateway.admin.fields import PAGE_SIZE, RolloutPath
from gateway.admin.rollouts.rollout_bodies import NoteIn, RolloutIn, RolloutOut, RolloutsOut, rollout_out
from gateway.admin.rollouts.rollout_run import told
from gateway.admin.rollouts.rollouts import Rollouts
from gateway.core.errors import Frozen, InvalidRules, RolloutConflict, StaleRevision, UnknownRollout, UnknownRule

MAX_PAGE = 100  # as many as are kept
PAGE = 50
_STEP: Final = (InvalidRules, StaleRevision, Frozen, RolloutConflict)
"""What may be in the way of a change of the rule."""


def rollout_routes(rollouts: Rollouts) -> APIRouter:
    """`/rollouts`."""
    router = APIRouter(tags=["rollouts"])

    @router.post(
        "/rollouts",
        status_code=201,
        openapi_extra=refuses(UnknownRule, *_STEP),
    )
    async def post_rollout(body: RolloutIn, visit: CurrentVisit) -> RolloutOut:
        """Begin one: the first step is in force on all workers when this is answered."""
        note = body.note or visit.reason
        visit.tell("rollout.start", body.rule, reason=note)
        seen = await rollouts.begin(body.rule, body.course(), actor=visit.actor.id, note=note)
        visit.tell("rollout.start", body.rule, after=told(seen.rollout), reason=note)
        return rollout_out(seen, rollouts.clock())

    @router.get("/rollouts")
    async def get_rollouts(
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE, description=PAGE_SIZE)] = PAGE,
        cursor: Annotated[str, Query(max_length=64, description="`next` of the page before")] = "",
    ) -> RolloutsOut:
        """Those that are under way and the last hundred, the newest first."""
        found = await rollouts.recent()
        if cursor:
            found = list(itertools.dropwhile(lambda seen: seen.rollout.id != cursor, found))[1:]
        now_ms = rollouts.clock()
        return RolloutsOut(
            items=[rollout_out(seen, now_ms) for seen in found[:limit]],
            next=found[limit - 1].rollout.id if len(found) > limit else None,
        )

    @router.get("/rollouts/{rollout_id}", openapi_extra=refuses(UnknownRollout))
    async def get_rollout(rollout_id: RolloutPath) -> RolloutOut:
        """One as it was when it was last looked at, a second ago at most."""
        return rollout_out(await rollouts.get(rollout_id), rollouts.clock())

    @router.post(
        "/rollouts/{rollout_id}/promote",
        openapi_extra=refuses(UnknownRollout, *_STEP),
    )
    async def promote_rollout(rollout_id: RolloutPath, visit: CurrentVisit, body: NoteIn | None = None) -> RolloutOut:
        """Go on to the next step now, whatever the hold and the count of requests; from the last one: be done."""
        note = (body.note if body else "") or visit.reason
        visit.tell("rollout.promote", rollout_id, reason=note)
        before = (await rollouts.get(rollout_id)).rollout
        visit.tell("rollout.promote", before.rule, before=told(before), reason=note)
        seen = await rollouts.promote(rollout_id, actor=visit.actor.id, note=note)
        visit.tell("rollout.promote", before.rule, before=told(before), after=told(seen.rollout), reason=note)
        return rollout_out(seen, rollouts.clock())

    @router.post(
        "/rollouts/{rollout_id}/abort",
        openapi_extra=refuses(UnknownRollout, *_STEP),
    )
    async def abort_rollout(rollout_id: RolloutPath, visit: CurrentVisit, body: NoteIn | None = None) -> RolloutOut:
        """Give the rule the split that it had."""
        note = (body.note if body else "") or visit.reason
        visit.tell("rollout.abort", rollout_id, reason=note)
        before = (await rollouts.get(rollout_id)).rollout
        visit.tell("rollout.abort", before.rule, before=told(before), reason=note)
        seen = await rollouts.abort(rollout_id, actor=visit.actor.id, note=note)
        visit.tell("rollout.abort", before.rule, before=told(before), after=told(seen.rollout), reason=note)
        return rollout_out(seen, rollouts.clock())

    return router
