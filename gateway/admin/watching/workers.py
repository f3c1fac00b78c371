"""The control plane's path about the data plane's workers, and what their reports say."""

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, Field

from gateway.admin.fields import Body, Next
from gateway.admin_ports import RuleStore, WorkerState
from gateway.core.watching.worker_view import WorkerView, view_of


class WorkerOut(Body):
    """What one worker says of itself; `refused` means that it keeps an older set, `detail` says why."""

    id: str = Field(description="its name")
    pid: int = Field(description="of its process, on its host")
    revision: int = Field(description="of the rules in force there")
    switches: int = Field(description="the revision of the switches in force there")
    started: int = Field(description="Unix seconds")
    state: str = Field(description="`serving`; `refused`: it keeps an older set of rules than the stored one")
    detail: str = Field(description="why it refused the stored set")
    is_behind: bool = Field(description="newer rules or switches are stored than it runs")
    report: dict[str, Any] = Field(description="how it sees the backends, written once a second")


class Workers(BaseModel):
    """The live workers."""

    items: list[WorkerOut] = Field(description="all that tell of themselves")
    next: Next


def worker_routes(store: RuleStore) -> APIRouter:
    """`/workers`."""
    router = APIRouter(tags=["workers"])

    @router.get("/workers")
    async def get_workers() -> Workers:
        """The live data-plane workers, and the revisions that each of them runs."""
        # First what they should run: one that takes a change in between is not behind.
        revision, switches = await newest_of(store)
        items = [_out(worker, revision, switches) for worker in await store.workers()]
        return Workers(items=items, next=None)

    return router


async def newest_of(store: RuleStore) -> tuple[int, int]:
    """The newest revisions of the rules and of the switches."""
    return (await store.get()).revision, (await store.switches()).revision


def is_behind(worker: WorkerState, revision: int, switches: int) -> bool:
    """Whether it runs something older than these."""
    return worker.revision < revision or worker.switches < switches


def report_of(worker: WorkerState) -> WorkerView:
    """Its report, read; an empty one where it has another form, as that of another version may have."""
    try:
        return view_of(worker.report)
    except (ValueError, TypeError, AttributeError):
        return WorkerView()


def _out(worker: WorkerState, revision: int, switches: int) -> WorkerOut:
    return WorkerOut(
        id=worker.id,
        pid=worker.pid,
        revision=worker.revision,
        switches=worker.switches,
        started=worker.started,
        state=worker.state,
        detail=worker.detail,
        is_behind=is_behind(worker, revision, switches),
        report=dict(worker.report),
    )
