"""The control plane's path `/explain`: what would become of a request, or what became of one, and why."""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from fastapi import APIRouter
from pydantic import Field, model_validator

from gateway.admin.document import refuses
from gateway.admin.fields import Body
from gateway.admin.plane import Plane
from gateway.admin.routing.rule_bodies import SampleIn
from gateway.admin.routing.switch_bodies import SwitchOut, switch_out
from gateway.admin.watching.requests import RequestOut, found_in, out
from gateway.admin.watching.workers import report_of
from gateway.admin_ports import RequestLog, RuleStore, WorkerState
from gateway.core import rate_limit
from gateway.core.errors import InvalidInput, UnknownKey, UnknownRequest, UnknownRevision
from gateway.core.keys import caller_of
from gateway.core.rate_limit import Take, name_of
from gateway.core.rules import Rule, RuleSet
from gateway.core.rules.dry_run import Sample, sample_of
from gateway.core.rules.fields import suggest
from gateway.core.rules.matching import Circumstances
from gateway.core.rules.policies import policies_document
from gateway.core.tokens import GUESSED_OUTPUT
from gateway.core.types import Caller, Work
from gateway.core.watching import explaining
from gateway.core.watching.explaining import Candidate, Explanation, World
from gateway.core.watching.worker_view import WorkerView

USUAL_DRAW: Final = 0.5
"""What chance is taken to be: it falls on a side that has more than half of the weight."""


class ExplainIn(Body):
    """A request that might come, or the id of one that came."""

    request: SampleIn | None = Field(None, description="one that might come")
    worker: str = Field("", description="as this worker sees the backends; by default the one that reported last")
    request_id: str = Field(
        "", max_length=256, description="of one that came: its `x-request-id`, or the first 8 characters or more"
    )

    @model_validator(mode="after")
    def _one_of_both(self) -> "ExplainIn":
        if (self.request is None) == (not self.request_id):
            raise ValueError("give one of `request` and `request_id`")
        return self


class RuleLooked(Body):
    """A rule that it was held against."""

    rule: str = Field(description="its name")
    matched: bool = Field(description="whether it takes the request")
    why: str = Field(description="why it does not, or that it does")


class CandidateOut(Body):
    """A place of the rule. `rank`: its standing in the plan, from 1; null where it may not, or need not, be tried."""

    place: str = Field(description="backend, model, version and server")
    side: str = Field(description="the field of the rule; empty where it is not known any more")
    rank: int | None = Field(
        description="its standing in the plan, from 1; null where it may not, or need not, be tried"
    )
    taken: bool = Field(description="whether the request goes, or went, there first")
    score: str = Field(description="what it is chosen by, in words")
    reason: str = Field(description="why it stands there")


class LimitOut(Body):
    """A limit that it takes of; `key` names its counter."""

    of: str = Field(description="`key` or `rule`")
    limit: str = Field(description="in words, such as `60 requests per minute`")
    key: str = Field(description="names its counter")


class ExplainOut(Body):
    """All of it."""

    request: dict[str, Any] = Field(description="what was asked of, as far as it was given")
    past: bool = Field(description="whether it is one that came")
    revision: int = Field(description="of the rules that it was held against")
    switches_revision: int = Field(description="of the switches")
    rule: str | None = Field(description="the one that takes it; null: none")
    refused: str = Field(description="why it is not served at all; empty where it is, or the places are to blame")
    rules: list[RuleLooked] = Field(description="those that it was held against, up to the one that takes it")
    candidates: list[CandidateOut] = Field(description="the places of the rule")
    switches: list[SwitchOut] = Field(description="that concern it, or one of its places, now")
    limits: list[LimitOut] = Field(description="that it takes of")
    policies: dict[str, Any] = Field(
        description="how the rule goes on with it, times in milliseconds; what is as usual is left out"
    )
    headers: dict[str, str] = Field(description="that would tell its caller where it went")
    worker: str = Field(description="the id of the one whose view this is; empty: none is live")
    outcome: RequestOut | None = Field(description="what became of it; null of one that might come")


def explain_routes(plane: Plane, rules: RuleStore) -> APIRouter:
    """`/explain`."""
    router = APIRouter(tags=["explain"])

    @router.post("/explain", openapi_extra=refuses(UnknownRequest))
    async def explain(body: ExplainIn) -> ExplainOut:
        """Say which rule takes a request, where it goes and why, and what it takes of limits. Nothing is sent."""
        if body.request is None:
            if plane.requests is None:
                raise InvalidInput("#/request_id: no requests are kept here", field="request_id")
            return await _past(plane, rules, plane.requests, body.request_id)
        return await _fresh(plane, rules, body.request, body.worker)

    return router


async def _fresh(plane: Plane, store: RuleStore, given: SampleIn, worker_id: str) -> ExplainOut:
    if plane.tasks and given.task not in plane.tasks:
        told = f"#/request/task: unknown task '{given.task}'{suggest(given.task, plane.tasks)}"
        raise InvalidInput(told, field="request.task")
    sample = given.sample()
    sample = replace(sample, request=replace(sample.request, caller=await _caller(plane, given.key, given.tenant)))
    worker = _worker(await store.workers(), worker_id)
    rules = await _rules_of(store, worker)
    found = explaining.explain(rules, sample.request, _circumstances(plane, sample), _world(plane, sample, worker))
    now_ms = round(time.time() * 1000)
    return ExplainOut(
        request=given.model_dump(mode="json", exclude_unset=True) | {"tenant": sample.request.caller.tenant},
        past=False,
        revision=rules.revision,
        switches_revision=rules.switches.revision,
        rule=found.rule.name if found.rule else None,
        refused=found.refused,
        rules=[RuleLooked(rule=one.rule, matched=one.matched, why=one.why) for one in found.looked],
        candidates=[_candidate(one, found) for one in found.candidates],
        switches=[switch_out(one, now_ms) for one in found.switches],
        limits=list(_limits(found.limits)),
        policies=_policies(found.rule),
        headers=dict(explaining.headers_of(found)),
        worker=worker.id if worker else "",
        outcome=None,
    )


async def _past(plane: Plane, store: RuleStore, log: RequestLog, request_id: str) -> ExplainOut:
    """One of the request log: held against the rules that were in force, and otherwise as it was written down."""
    document = await found_in(log, request_id)
    sample = sample_of(document)
    rules = await _kept(store, document["revision"]) or RuleSet(revision=document["revision"], rules=())
    rule = rules.named(document["rule"])
    looked: list[RuleLooked] = []
    limits: tuple[Take, ...] = ()
    if sample is not None:
        request = sample.request
        looked = [
            RuleLooked(rule=one.rule, matched=one.matched, why=one.why)
            for one in explaining.looked_at(rules.rules, request, _circumstances(plane, sample))
        ]
        try:
            caller = await _caller(plane, request.caller.key_id, request.caller.tenant)
        except InvalidInput:  # a key that is gone by now
            caller = request.caller
        of_rule = rule.limits if rule else ()
        limits = rate_limit.counters(caller, request.task, request.model, request.priority, of_rule)
    shown = out(document)
    return ExplainOut(
        request={name: document[name] for name in _ASKED if document.get(name) not in (None, "", {})},
        past=True,
        revision=document["revision"],
        switches_revision=document["switches_revision"],
        rule=document["rule"] or None,
        refused="; ".join(shown.notes) if not shown.place and shown.code != "ok" else "",
        rules=looked,
        candidates=list(_past_candidates(shown)),
        switches=[],
        limits=list(_limits(limits)),
        policies=_policies(rule),
        headers=_past_headers(shown),
        worker=shown.worker,
        outcome=shown,
    )


_ASKED: Final = (
    *("task", "tenant", "key", "model", "version", "priority", "headers", "input_tokens", "input_bytes"),
    *("session", "ordering_key", "stream"),
)


async def _caller(plane: Plane, key_id: str, tenant: str) -> Caller:
    """Who comes with a key, of the configuration or made later. Raises `InvalidInput`."""
    if not key_id:
        return Caller(key_id="", tenant=tenant)
    caller = plane.callers.get(key_id)
    if caller is None and plane.keys is not None:
        try:
            caller = caller_of(await plane.keys.get(key_id), plane.key_limits)
        except UnknownKey:
            caller = None
    if caller is None:
        raise InvalidInput(f"#/request/key: there is no key '{key_id}'"[:300], field="request.key")
    if tenant and tenant != caller.tenant:
        told = f"#/request/tenant: the key is of the tenant '{caller.tenant}'"
        raise InvalidInput(told, field="request.tenant")
    return caller


def _worker(workers: list[WorkerState], worker_id: str) -> WorkerState | None:
    """The one that is named, else the one that reported last; None where none is live. Raises `InvalidInput`."""
    if not worker_id:
        return max(workers, key=lambda worker: report_of(worker).at_ms, default=None)
    for worker in workers:
        if worker.id == worker_id:
            return worker
    raise InvalidInput(f"#/worker: no live worker has the id '{worker_id}'"[:300], field="worker")


async def _rules_of(store: RuleStore, worker: WorkerState | None) -> RuleSet:
    """Those that the worker runs, which may be older than the newest; the newest where they are not kept any more."""
    newest = await store.get()
    if worker is None or worker.revision == newest.revision:
        return newest
    kept = await _kept(store, worker.revision)
    return newest if kept is None else replace(kept, switches=newest.switches)


async def _kept(store: RuleStore, revision: int) -> RuleSet | None:
    try:
        found = await store.revision(revision)
    except UnknownRevision:
        return None
    return RuleSet(revision=revision, rules=found.rules or ())


def _circumstances(plane: Plane, sample: Sample) -> Circumstances:
    """When it comes, and how long its prompt is: where that is not told, nothing for a task that an LLM can answer."""
    tokens = sample.input_tokens
    if tokens is None and sample.request.task in plane.llm_tasks:
        tokens = 0
    return Circumstances(now_s=lambda: sample.at_s, input_tokens=lambda: tokens)


def _world(plane: Plane, sample: Sample, worker: WorkerState | None) -> World:
    is_llm = sample.request.task in plane.llm_tasks
    work = Work(input_tokens=sample.input_tokens or 0, output_tokens=GUESSED_OUTPUT) if is_llm else None
    return World(
        view=report_of(worker) if worker else WorkerView(), draw=lambda: USUAL_DRAW, work=work, prices=plane.prices
    )


def _candidate(one: Candidate, found: Explanation) -> CandidateOut:
    return CandidateOut(
        place=str(one.place),
        side=one.side,
        rank=one.rank,
        taken=one.rank == 1 and not found.refused,
        score=one.score,
        reason=one.reason,
    )


def _past_candidates(shown: RequestOut) -> Iterator[CandidateOut]:
    for i, (place, why) in enumerate(zip(shown.candidates, shown.why, strict=False)):
        is_planned = i < shown.planned
        yield CandidateOut(
            place=place,
            side="",
            rank=i + 1 if is_planned else None,
            taken=is_planned and place == shown.place,
            score="",
            reason=why,
        )


def _limits(takes: tuple[Take, ...]) -> Iterator[LimitOut]:
    for take in takes:
        yield LimitOut(of="rule" if take.limit.rule else "key", limit=name_of(take.limit), key=take.key)


def _policies(rule: Rule | None) -> dict[str, Any]:
    """What the rule holds to on the way; what is as usual is left out."""
    if rule is None:
        return {}
    told: dict[str, Any] = {"strategy": rule.strategy, "sticky_by": rule.sticky_by}
    for name in ("retries", "hedge", "timeout_ms", "attempt_timeout_ms"):
        if value := getattr(rule, name):
            told[name] = value
    return told | policies_document(rule.policies)


def _past_headers(shown: RequestOut) -> dict[str, str]:
    if not shown.place:
        return {}
    backend = shown.place.partition("/")[0]
    return {
        "x-gateway-backend": backend,
        "x-gateway-attempts": str(shown.attempts),
        "x-gateway-rule": shown.rule,
    }
