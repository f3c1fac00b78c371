"""A model server in memory, with replicas, that loads and unloads as Triton does; it cannot infer."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gateway.core.errors import BackendError, Fault, FaultKind, Reply
from gateway.core.models import ModelFacts, ModelFigures
from gateway.core.types import Place


def refusal(text: str) -> BackendError:
    """What a server says that does not do as it was told."""
    return BackendError(Fault(kind=FaultKind.FAILED, message=text, reply=Reply(code="INTERNAL", text=text)))


@dataclass
class Replica:
    """One server: the versions on its disk (or in a real `folder`), those that are ready, and what shall go wrong."""

    disk: set[str]
    folder: Path | None = None
    ready: set[str] = field(default_factory=set)
    broken: dict[str, str] = field(default_factory=dict)  # version: why it does not load
    down: str = ""
    loads: list[Any] = field(default_factory=list)  # each the versions that a configuration asked for, or None
    failed: dict[str, str] = field(default_factory=dict)
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)  # version: answered, failed
    hold: asyncio.Event | None = None  # loads wait for it

    def versions(self) -> set[str]:
        return self.disk if self.folder is None else {p.name for p in self.folder.iterdir() if p.name.isdecimal()}


class ModelServerFake:
    """A backend with one model, `m`, in its repository; `ModelServer` and `Backend`."""

    def __init__(self, name: str = "triton", replicas: Sequence[str] = ("a", "b"), *, disk: Sequence[str] = ("1", "2")):
        self.name = name
        self.servers = {one: Replica(disk=set(disk), ready={"1"}) for one in replicas or ("",)}
        self.configs: dict[str, dict[str, Any]] = {}  # what configurations say besides
        self._names = tuple(replicas)

    def replicas(self) -> Sequence[str]:
        return self._names

    def infer(self, call, *, timeout_us):
        raise AssertionError("nobody infers here")

    async def probe(self, place: Place) -> None:
        self._up(place.replica)

    async def figures(self) -> Sequence[ModelFigures]:
        return [
            ModelFigures(
                replica=name,
                model="m",
                version=version,
                requests=requests,
                failures=failures,
                inferences=requests * 3,
                executions=requests,
                queue_us=requests * 100,
                compute_input_us=requests * 10,
                compute_infer_us=requests * 50,
                compute_output_us=requests * 5,
                batch_sizes={3: requests},
            )
            for name, server in self.servers.items()
            if not server.down
            for version, (requests, failures) in sorted(server.counts.items())
        ]

    async def close(self) -> None:
        pass

    async def facts(self, place: Place) -> ModelFacts:
        return ModelFacts(name=place.model)

    async def server_metadata(self, replica: str) -> Mapping[str, Any]:
        return {"name": "fake"}

    async def metadata(self, place: Place) -> Mapping[str, Any]:
        return {"name": place.model}

    async def config(self, place: Place) -> Mapping[str, Any]:
        if not self._up(place.replica).ready:
            raise refusal(f"Request for unknown model: '{place.model}' has no available versions")
        policy = {"latest": {"num_versions": 1}}
        return {"name": place.model, "version_policy": policy, **self.configs.get(place.model, {})}

    async def statistics(self, place: Place) -> Mapping[str, Any]:
        return {}

    async def index(self, replica: str, *, ready_only: bool = False) -> list[Mapping[str, Any]]:
        server = self._up(replica)
        states = {version: ("UNAVAILABLE", why) for version, why in server.failed.items()}
        states |= dict.fromkeys(server.ready, ("READY", ""))
        found = [
            {"name": "m", "version": version, "state": state, "reason": reason}
            for version, (state, reason) in sorted(states.items())
        ]
        return [*(found or [{"name": "m"}]), {"name": "other"}]

    async def load(self, model: str, *, replica: str, config=None, files=None) -> None:
        server = self._up(replica)
        if server.hold is not None:
            await server.hold.wait()
        policy = json.loads(config).get("version_policy", {}) if config else {}
        asked = policy.get("specific", {}).get("versions")
        server.loads.append(asked)
        wanted = {str(version) for version in asked} if asked else {max(server.versions(), key=int)}
        wanted &= server.versions()
        for version in wanted & set(server.broken):
            server.failed[version] = server.broken[version]
            why = server.broken[version]
            raise refusal(f"load failed for model 'm': version {version} is at UNAVAILABLE state: {why}\nAt: x.py")
        server.failed.update(dict.fromkeys(server.ready - wanted, "unloaded"))
        server.ready = wanted

    async def unload(self, model: str, *, replica: str, unload_dependents: bool = False) -> None:
        server = self._up(replica)
        server.failed.update(dict.fromkeys(server.ready, "unloaded"))
        server.ready = set()

    def _up(self, replica: str) -> Replica:
        server = self.servers[replica]
        if server.down:
            raise BackendError(Fault(kind=FaultKind.UNAVAILABLE, message=server.down, is_server=True))
        return server
