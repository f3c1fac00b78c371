"""Who is asked about models: the places of the tensor task's rule that are model servers."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final, TypeVar

from gateway.api.auth import authorize_model
from gateway.api.endpoint import Api, Visit
from gateway.core import attempts
from gateway.core.errors import BackendError, Fault, FaultKind, NoHealthyBackend, NotFound
from gateway.core.types import ANY, InferenceRequest, Place
from gateway.pipeline import Task
from gateway.ports import ModelServer
from gateway.tasks.tensor import TensorTask

_Answer = TypeVar("_Answer")
_NO_SERVER: Final = Fault(kind=FaultKind.UNSUPPORTED, message="no model server")


def entered(visit: Visit) -> Task:
    """The task of tensors, which the key may use. Raises `NotFound` where none is configured, `Forbidden`."""
    return visit.enter(_task(visit.api))


async def ask(
    visit: Visit, call: Callable[[ModelServer, Place], Awaitable[_Answer]], *, model: str = ANY, version: str = ""
) -> _Answer:
    """The first answer of the servers that a request for `model` could go to. Raises `GatewayError`.

    They are asked in the order of the rule, as a request would be; the model `*` is the server itself.
    """
    task, pipeline = entered(visit), visit.api.pipeline
    if model != ANY:
        authorize_model(visit.caller, model)
    request = InferenceRequest(
        id=visit.id,
        task=task.name,
        caller=visit.caller,
        input=None,
        received_us=visit.received_us,
        deadline_us=visit.received_us + task.timeout_us,
        model=model,
        version=version,
        headers=visit.headers,
    )
    plan = pipeline.plan(request)
    if not plan.candidates:
        cooling_us = pipeline.board.shortest_cooling_us(plan.refusals, pipeline.clock())
        raise attempts.nobody(plan, cooling_us=cooling_us)
    faults: list[Fault] = []
    while True:
        step = attempts.next_attempt(
            plan,
            faults,
            now_us=pipeline.clock(),
            deadline_us=request.deadline_us,
            attempt_timeout_us=task.attempt_timeout_us,
        )
        if isinstance(step, attempts.GiveUp):
            raise step.error
        server = pipeline.backends[step.place.backend]
        if not isinstance(server, ModelServer):
            faults.append(replace(_NO_SERVER, place=step.place))
            continue
        try:
            async with asyncio.timeout(step.timeout_us / 1e6):
                return await call(server, step.place)
        except TimeoutError:
            faults.append(Fault(kind=FaultKind.TIMEOUT, message="did not answer in time", place=step.place))
        except BackendError as failed:
            faults.append(replace(attempts.named_by_caller(failed.fault), place=step.place))


def servers(visit: Visit, model: str) -> dict[str, ModelServer]:
    """Every model server that the rule for `model` names, whatever its health. Raises `NoHealthyBackend` for none."""
    authorize_model(visit.caller, model)
    pipeline = visit.api.pipeline
    rule = pipeline.rules.current().rule_for(visit.caller, task=entered(visit).name, model=model)
    named = () if rule is None else dict.fromkeys(target.backend for target in (*rule.split, *rule.fallback))
    found: dict[str, ModelServer] = {}
    for name in named:
        server = pipeline.backends.get(name)
        if isinstance(server, ModelServer):
            found[name] = server
    if not found:
        raise NoHealthyBackend("no rule leads to a model server")
    return found


def _task(api: Api) -> Task:
    for task in api.pipeline.tasks.values():
        if task.contract.name == TensorTask.name:
            return task
    raise NotFound("no task with the contract 'tensor' is configured here")
