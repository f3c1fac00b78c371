"""Answers that are given again.

They were given to the same request under one idempotency key, are in a rule's cache, or are being made for another.
`Recalls.find` is asked before a request is admitted. It finds a recording, or claims the slot for this request; then
the events are recorded while they pass, and kept before the last one does: who has the answer and asks again, finds it.
"""

import asyncio
import contextlib
import itertools
import logging
import secrets
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from gateway.core import recording
from gateway.core.answers import (
    EVERYBODY,
    LEASE_US,
    MAX_ANSWER_BYTES,
    RENEW_US,
    Claim,
    Found,
    Slot,
    cache_control,
    is_cacheable,
)
from gateway.core.errors import (
    DeadlineExceeded,
    GatewayError,
    IdempotencyInProgress,
    IdempotencyMismatch,
    IdempotencyUnavailable,
)
from gateway.core.fingerprints import canonical, digest
from gateway.core.recording import Recording
from gateway.core.rules import Rule
from gateway.core.rules.policies import DEFAULT, Cache
from gateway.core.types import Event, Finished, InferenceRequest, Part, Recalled, Route, Started, Verdict
from gateway.ports import Answers, Clock
from gateway.tasks.chat import ChatInput

CLAIM_AGAIN_S: Final = 1.0  # while another's is waited for: a lease that runs out is not told
REFUSALS_FOR_US: Final = 1_000_000  # that a refusal is kept for those who waited for it
DOWN_US: Final = 1_000_000  # that no cache is asked after the store was out of reach
_NOT_ASKED: Final = ("user", "metadata", "safety_identifier", "prompt_cache_key")
"""Fields of OpenAI bodies that no answer depends on. The responses API repeats them in its answers."""
_ENOUGH_WAITED = "the same request is still under way elsewhere, and this one's time is used up"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Making:
    """What is under a claim: for how long the answer will be kept, and a refusal (0: it will not)."""

    claim: Claim
    request_id: str
    answer_us: int
    refusal_us: int


class Recall:
    """One request's: the answer that was `found`, or the making of one that is kept."""

    __slots__ = ("_making", "_of", "_parts", "_route", "_size", "found", "told")

    def __init__(
        self, of: "Recalls", told: Recalled, *, found: Recording | None = None, making: _Making | None = None
    ) -> None:
        self._of = of
        self.told = told
        self.found = found
        self._making = making
        self._route: Route | None = None
        self._parts: list[Part] = []
        self._size = 0

    def again(self, found: Recording, verdict: Verdict) -> Iterator[Event]:
        """The events of what was found. Raises the `GatewayError` that was."""
        if found.error is not None:
            raise found.error
        if found.route is not None and found.finished is not None:
            yield Started(route=found.route, verdict=verdict, recalled=self.told)
            yield from found.parts
            yield found.finished

    def started(self, event: Started) -> Started:
        """The first event of the answer as it goes on to the caller."""
        self._route = event.route
        return replace(event, recalled=self.told)

    def seen(self, part: Part) -> None:
        """A part goes on to the caller: what is needed to give it again is kept in mind."""
        if self._making is not None:
            self._size += recording.weight(part)
            if self._size <= MAX_ANSWER_BYTES:
                self._parts.append(part)
            else:
                self._parts.clear()

    async def keep(self, finished: Finished) -> None:
        """The answer is whole: it can be found once this returns. One that is too long is not kept."""
        making, self._making = self._making, None
        if making is not None:
            whole = None
            if self._size <= MAX_ANSWER_BYTES:
                parts = tuple(self._parts)
                whole = Recording(id=making.request_id, route=self._route, parts=parts, finished=finished)
            await asyncio.shield(self._of.end(making.claim, whole, making.answer_us))

    async def refused(self, error: GatewayError) -> None:
        """There is no answer: a refusal that is definite is kept, after any other the request may be made again."""
        if self.found is not None and error is self.found.error:
            error.recalled = self.told
        making, self._making = self._making, None
        if making is not None:
            is_kept = making.refusal_us and self._route is None and recording.is_definite(error)
            whole = Recording(id=making.request_id, error=error) if is_kept else None
            await asyncio.shield(self._of.end(making.claim, whole, making.refusal_us))

    def drop(self) -> None:
        """Whatever has become of the request, it holds nothing any longer. Never waits; said again, it does nothing."""
        making, self._making = self._making, None
        if making is not None:
            self._of.end(making.claim, None, 0)


class Recalls:
    """The answers that are kept, as the walk uses them. `once_us`: for how long idempotency keys are remembered."""

    def __init__(self, answers: Answers, clock: Clock, *, once_us: int = 86_400_000_000) -> None:
        self._answers = answers
        self._clock = clock
        self._once_us = once_us
        self._id = secrets.token_hex(8)
        self._count = itertools.count()
        self._open: dict[str, Claim] = {}  # by their names: those whose lease is renewed
        self._renewal: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._down_until_us = 0

    async def find(self, request: InferenceRequest, rule: Rule | None) -> Recall | None:
        """None where neither an idempotency key nor a cache is in play. Raises `GatewayError`.

        An idempotency key stands above the rule's cache, which is then not used.
        """
        policies = rule.policies if rule else DEFAULT
        if request.idempotency_key:
            return await self._once(request, waits=policies.idempotency == "wait")
        if rule is not None and policies.cache is not None and is_cacheable(request):
            return await self._cached(request, rule, policies.cache)
        return None

    async def close(self) -> None:
        """End what is under way."""
        if self._renewal is not None:
            self._renewal.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- one answer for one idempotency key -----------------------------------------------------

    async def _once(self, request: InferenceRequest, *, waits: bool) -> Recall:
        slot = Slot(kind="once", owner=request.caller.tenant, name=digest(request.idempotency_key))
        claim = self._new(slot, request.fingerprint)
        found, kept = await self._claimed(claim)
        if found.state == "busy" and waits:
            found, kept = await self._waited(claim, request.deadline_us)
        if found.state == "other":
            raise IdempotencyMismatch("this idempotency key was used for another request", field="idempotency-key")
        if found.state == "busy":
            error = IdempotencyInProgress("a request with this idempotency key is under way", field="idempotency-key")
            error.retry_after_us = 1_000_000
            raise error
        if kept is not None:
            return Recall(self, Recalled(id=kept.id, outcome="replayed"), found=kept)
        return self._begun(request, claim, Recalled(), answer_us=self._once_us, refusal_us=self._once_us)

    # --- one answer for all requests that are the same ------------------------------------------

    async def _cached(self, request: InferenceRequest, rule: Rule, cache: Cache) -> Recall:
        control = cache_control(request.cache_control)
        owner = EVERYBODY if cache.shared_by == "all" else request.caller.tenant
        name = cache_key(request, rule) if control.use and self._clock() >= self._down_until_us else None
        if name is None:
            return Recall(self, Recalled(cache_status="fwd=bypass"))
        claim = self._new(Slot(kind="cache", owner=owner, name=name), "")
        collapsed = False
        try:
            found, kept = await self._claimed(claim, max_age_us=control.max_age_us)
            if found.state == "busy" and cache.single_flight and control.accepts_all:
                collapsed = True
                found, kept = await self._waited(claim, request.deadline_us)
        except IdempotencyUnavailable:
            self._down_until_us = self._clock() + DOWN_US
            return Recall(self, Recalled(cache_status="fwd=bypass"))
        if kept is not None:
            return Recall(self, _hit(found, collapsed=collapsed), found=kept)
        if found.state == "busy" and collapsed:
            raise DeadlineExceeded(_ENOUGH_WAITED)
        why = "fwd=uri-miss" if control.accepts_all else "fwd=request"
        if found.state != "fresh":
            return Recall(self, Recalled(outcome="miss", cache_status=why))
        told = Recalled(outcome="miss", cache_status=f"{why}; stored")
        refusal_us = REFUSALS_FOR_US if cache.single_flight else 0
        return self._begun(request, claim, told, answer_us=cache.ttl_s * 1_000_000, refusal_us=refusal_us)

    # --- claims ---------------------------------------------------------------------------------

    def end(self, claim: Claim, whole: Recording | None, for_us: int) -> asyncio.Task[None]:
        """End a claim, with what is kept or without; the task never raises."""
        self._open.pop(claim.by, None)
        answer = None if whole is None else recording.written(whole)
        if answer is not None and len(answer) <= MAX_ANSWER_BYTES:
            return self._aside(self._answers.keep(claim, answer, for_us=for_us))
        return self._aside(self._answers.release(claim))

    def _new(self, slot: Slot, fingerprint: str) -> Claim:
        return Claim(slot=slot, by=f"{self._id}:{next(self._count)}", fingerprint=fingerprint)

    def _begun(
        self, request: InferenceRequest, claim: Claim, told: Recalled, *, answer_us: int, refusal_us: int
    ) -> Recall:
        """The claim is ours, and stays so while its answer is made."""
        self._open[claim.by] = claim
        if self._renewal is None:
            self._renewal = asyncio.get_running_loop().call_later(RENEW_US / 1e6, self._renew)
        making = _Making(claim=claim, request_id=request.id, answer_us=answer_us, refusal_us=refusal_us)
        return Recall(self, told, making=making)

    async def _claimed(self, claim: Claim, *, max_age_us: int | None = None) -> tuple[Found, Recording | None]:
        """What is found, and its recording where it is kept; one that cannot be read is as none."""
        try:
            found = await self._answers.claim(claim, lease_us=LEASE_US, max_age_us=max_age_us)
            kept = recording.read(found.answer) if found.state == "kept" else None
            if found.state == "kept" and kept is None:
                found = await self._answers.claim(claim, lease_us=LEASE_US, max_age_us=-1)
        except BaseException:  # the claim may have been made all the same
            self._aside(self._answers.release(claim))
            raise
        return found, kept

    async def _waited(self, claim: Claim, deadline_us: int) -> tuple[Found, Recording | None]:
        """The same once nobody else is at work on it; or `busy`, when the request's time is used up."""
        async with self._answers.waiting(claim.slot) as ended:
            while True:
                found, kept = await self._claimed(claim)
                left_us = deadline_us - self._clock()
                if found.state != "busy" or left_us <= 0:
                    return found, kept
                await ended(min(CLAIM_AGAIN_S, left_us / 1e6))

    def _renew(self) -> None:
        self._renewal = None
        if self._open:
            for claim in self._open.values():
                self._aside(self._answers.renew(claim, lease_us=LEASE_US))
            self._renewal = asyncio.get_running_loop().call_later(RENEW_US / 1e6, self._renew)

    def _aside(self, work: Coroutine[Any, Any, object]) -> asyncio.Task[None]:
        """Do it without being waited for; a store out of reach is no matter: the lease will end."""

        async def done() -> None:
            with contextlib.suppress(IdempotencyUnavailable):
                await work

        task = asyncio.create_task(done())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def cache_key(request: InferenceRequest, rule: Rule) -> str | None:
    """The same for requests that one answer is good for, whoever asks; None where their input has no normal form.

    That is the task, the model and version named, whether events are wanted, the input, and the places that the rule
    sends to and what it sets for them, whatever their weights: where it is changed, older answers are not found.
    """
    asked = request.input
    if isinstance(asked, ChatInput):
        body = asked.body
        if asked.api != "responses":
            body = {name: value for name, value in body.items() if name not in _NOT_ASKED}
        asked = {"api": asked.api, "is_task": asked.is_task, "body": body}
    places = sorted([str(at.place), sorted(at.parameters.items())] for at in (*rule.split, *rule.fallback))
    written = canonical([request.task, request.model, request.version, request.stream, rule.name, places, asked])
    return None if written is None else digest(written)


def _hit(found: Found, *, collapsed: bool) -> Recalled:
    age_s, left_s = found.age_us // 1_000_000, found.left_us // 1_000_000
    if collapsed:
        return Recalled(outcome="collapsed", cache_status="fwd=uri-miss; collapsed", age_s=age_s)
    return Recalled(outcome="hit", cache_status=f"hit; ttl={left_s}", age_s=age_s)
