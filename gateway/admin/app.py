"""The control plane's HTTP, put together: all under `/admin/v1`, but `/healthz/*`, which needs no token."""

from functools import partial

from fastapi import APIRouter, FastAPI

from gateway.admin.access.door import Door, Guard
from gateway.admin.access.entry import Entry
from gateway.admin.access.roles import PREFIX
from gateway.admin.document import install_document, refuses
from gateway.admin.keys import key_routes
from gateway.admin.models.absent import absent_models
from gateway.admin.models.backends import backend_routes
from gateway.admin.models.model_routes import model_routes
from gateway.admin.plane import Plane
from gateway.admin.problems import install_problems
from gateway.admin.rollouts.rollout_routes import rollout_routes
from gateway.admin.routing.rules import rule_routes
from gateway.admin.routing.switches import switch_routes
from gateway.admin.session import session_routes
from gateway.admin.watching.audit import audit_routes
from gateway.admin.watching.explain import explain_routes
from gateway.admin.watching.overview import overview_routes
from gateway.admin.watching.requests import request_routes
from gateway.admin.watching.shadows import shadow_routes
from gateway.admin.watching.usage import usage_routes
from gateway.admin.watching.workers import worker_routes
from gateway.admin_ports import RuleStore
from gateway.core.errors import RulesUnavailable


def create_admin_app(plane: Plane, entry: Entry | str) -> FastAPI:
    """The control plane over the parts of `plane` that there are, for those who have a way in by `entry`.

    A token alone is that of one key with the role `admin`; an empty one lets nobody in.
    """
    guard = Guard(Entry.of_token(entry) if isinstance(entry, str) else entry, plane.sessions)
    app = FastAPI(
        title="Hybrid inference gateway: control plane",
        docs_url=None,
        redoc_url=None,
        openapi_url=f"{PREFIX}/openapi.json",
        redirect_slashes=False,  # to an address that the caller's Host header would name
    )
    app.add_middleware(Door, guard=guard, audit=plane.audit)
    install_problems(app)
    install_document(app)
    app.include_router(session_routes(guard), prefix=PREFIX)
    if plane.audit is not None:
        app.include_router(audit_routes(plane.audit), prefix=PREFIX)
    if plane.rules is not None:
        absent = partial(absent_models, plane.models.servers) if plane.models is not None else None
        rules = rule_routes(plane.rules, plane.check, plane.tasks, plane.requests, absent=absent)
        app.include_router(rules, prefix=PREFIX)
        app.include_router(switch_routes(plane.rules, plane.check, plane.tasks), prefix=PREFIX)
        app.include_router(worker_routes(plane.rules), prefix=PREFIX)
        app.include_router(explain_routes(plane, plane.rules), prefix=PREFIX)
        app.include_router(_health(plane.rules))
    if plane.figures is not None:
        app.include_router(overview_routes(plane.figures, plane.rules), prefix=PREFIX)
    if plane.requests is not None:
        app.include_router(request_routes(plane.requests), prefix=PREFIX)
    if plane.models is not None:
        app.include_router(model_routes(plane.models), prefix=PREFIX)
        app.include_router(backend_routes(plane.models.servers, plane.rules), prefix=PREFIX)
    if plane.usage is not None:
        app.include_router(usage_routes(plane.usage), prefix=PREFIX)
    if plane.keys is not None:
        app.include_router(key_routes(plane.keys, plane.tasks), prefix=PREFIX)
    if plane.shadows is not None:
        app.include_router(shadow_routes(plane.shadows), prefix=PREFIX)
    if plane.rollouts is not None:
        app.include_router(rollout_routes(plane.rollouts), prefix=PREFIX)
    return app


def _health(store: RuleStore) -> APIRouter:
    router = APIRouter(prefix="/healthz", tags=["health"])

    @router.get("/live")
    async def live() -> dict[str, str]:
        """Whether the process runs."""
        return {"status": "live"}

    @router.get("/ready", openapi_extra=refuses(RulesUnavailable))
    async def ready() -> dict[str, str]:
        """Whether the rules can be read."""
        await store.get()
        return {"status": "ready"}

    return router
