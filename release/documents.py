"""The OpenAPI documents of both planes, as a whole gateway serves them, without one that runs."""

from dataclasses import fields
from typing import Any

from gateway.admin.access.entry import Entry
from gateway.admin.app import create_admin_app
from gateway.admin.models.fleet import Servers
from gateway.admin.models.model_routes import ModelPlane
from gateway.admin.plane import Plane
from gateway.api import openapi
from gateway.settings import load_settings
from gateway.wiring import make_tasks
from release.packages import ROOT

_PART: Any = object()  # stands where the control plane has a store: nobody asks it anything


def data_plane() -> dict[str, Any]:
    """That of the data plane, with the tasks of `deploy/gateway.yaml`."""
    settings = load_settings(ROOT / "deploy" / "gateway.yaml")
    tasks = make_tasks(settings)
    return openapi.document(tasks, {name: name for name in tasks})


def control_plane() -> dict[str, Any]:
    """That of the control plane, with all of its parts."""
    servers = Servers(reachable={}, unreachable={}, kinds={}, repositories={})
    models = ModelPlane(servers=servers, deploys=_PART, events=_PART)
    given: dict[str, Any] = {"tasks": (), "models": models}
    parts: dict[str, Any] = {one.name: _PART for one in fields(Plane) if one.default is None}
    return create_admin_app(Plane(**{**parts, **given}), Entry(keys=())).openapi()
