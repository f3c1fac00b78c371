"""The model servers as the control plane reaches them, and one model on all replicas of its backends."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from gateway.core.errors import BackendBroke, BackendError, Fault, FaultKind, UnknownModel
from gateway.core.models import ModelFigures, Outcomes
from gateway.core.types import Place
from gateway.model_control import ask_every_replica
from gateway.ports import Backend, JsonObject, ModelServer

ASK_S = 5.0  # for what a server has at hand: its index, its counters, a configuration
LOOK_S = 2.0  # for the same where somebody looks at it, once and again: who needs longer than that is not well
POLL_S = 0.1
READY = "READY"
# Triton lists a version that it had and has no more as UNAVAILABLE, and one that only lies on disk not at all.
GONE = ("UNAVAILABLE", "")
_T = TypeVar("_T")


class ModelBackend(Backend, ModelServer, Protocol):
    """A backend that serves a model repository."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """The backends with models: those that this process reaches, and why it does not reach the others.

    `kinds` and `repositories` are what the configuration says of them; `why_off` has, for those that workers may have
    to leave out, what the reason is when they do.
    """

    reachable: Mapping[str, ModelBackend] = field(default_factory=dict)
    unreachable: Mapping[str, str] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)
    repositories: Mapping[str, str] = field(default_factory=dict)
    why_off: Mapping[str, str] = field(default_factory=dict)

    def only(self, backend: str | None) -> "Servers":
        """Narrowed to one backend. Raises `UnknownModel` where there is none of that name to ask."""
        if backend is None:
            return self
        if backend in self.unreachable:
            raise UnknownModel(f"backend '{backend}': {self.unreachable[backend]}")
        if backend not in self.reachable:
            raise UnknownModel(f"no backend with models is named '{backend}'; there are: {', '.join(self.reachable)}")
        return Servers(reachable={backend: self.reachable[backend]})


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """One server of one backend; `replica` is empty where it has but one."""

    backend: str
    replica: str

    def __str__(self) -> str:
        return f"{self.backend}@{self.replica}" if self.replica else self.backend


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionState:
    """A version as a server's index has it."""

    state: str
    reason: str = ""


async def everywhere(
    servers: Mapping[str, ModelBackend], call: Callable[[ModelBackend, str], Awaitable[_T]], *, timeout_s: float = ASK_S
) -> dict[Spot, _T | Fault]:
    """Ask every replica of every backend at once; for each its answer, or why there is none."""

    async def ask(server: ModelBackend) -> Mapping[str, _T | Fault]:
        async def within(replica: str) -> _T:
            try:
                async with asyncio.timeout(timeout_s):
                    return await call(server, replica)
            except TimeoutError as error:
                text = f"no answer within {timeout_s:g} s"
                raise BackendError(Fault(kind=FaultKind.TIMEOUT, message=text)) from error

        return await ask_every_replica(server, within)

    answers = await asyncio.gather(*map(ask, servers.values()))
    return {
        Spot(backend=name, replica=replica): answer
        for name, of_server in zip(servers, answers, strict=True)
        for replica, answer in of_server.items()
    }


def told(fault: Fault) -> str:
    """A failure in one line for an operator: the server's own words where there are any, without a stack."""
    return first_line(fault.reply.text if fault.reply else fault.message)


def first_line(reason: str) -> str:
    """A server's reason without the stack that may follow."""
    return next((line.strip() for line in reason.splitlines() if line.strip()), "")[:300]


def versions_of(index: Sequence[JsonObject], model: str) -> dict[str, VersionState]:
    """The versions of a model in a server's index."""
    return {
        str(entry["version"]): VersionState(state=str(entry.get("state", "")), reason=str(entry.get("reason", "")))
        for entry in index
        if entry.get("name") == model and entry.get("version")
    }


class Fleet:
    """One model on all replicas of the backends that serve it. Raises `BackendBroke` with the replica's name."""

    def __init__(self, model: str, servers: Mapping[str, ModelBackend]) -> None:
        self.model = model
        self._servers = servers

    async def states(self) -> dict[Spot, dict[str, VersionState]]:
        """The versions on each replica."""
        found = await everywhere(self._servers, lambda server, replica: server.index(replica))
        return {spot: versions_of(index, self.model) for spot, index in self._all(found).items()}

    async def serve(self, versions: Sequence[str], *, timeout_s: float) -> None:
        """Load so that each replica serves exactly `versions`, and wait until those are ready.

        The version policy of the loaded configuration is overridden; what a server has loaded already is not loaded
        again, and a version that leaves finishes its requests first.
        """

        async def load(server: ModelBackend, replica: str) -> None:
            place = Place(backend="", model=self.model, replica=replica)
            await server.load(self.model, replica=replica, config=pinned(await server.config(place), versions))

        self._all(await everywhere(self._servers, load, timeout_s=timeout_s))
        # A load that does not find a version's folder says nothing of it.
        if lacking := self.lacking(await self.states(), versions):
            raise BackendBroke(lacking)

    def lacking(self, states: Mapping[Spot, Mapping[str, VersionState]], versions: Sequence[str]) -> str:
        """Which version is not ready where, and why; empty where all are."""
        for spot, found in states.items():
            for version in versions:
                state = found.get(version)
                if state is None:
                    return f"{spot}: there is no version {version} of '{self.model}' in the repository"
                if state.state != READY:
                    why = f" ({first_line(state.reason)})" if state.reason else ""
                    return f"{spot}: version {version} of '{self.model}' is {state.state}{why}"
        return ""

    async def gone(self, version: str, *, timeout_s: float) -> bool:
        """Wait until no replica serves a version; false where one still does, or does not tell, at the end."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    with contextlib.suppress(BackendBroke):  # one that does not answer now is asked again
                        states = await self.states()
                        if all(found.get(version, VersionState(state="")).state in GONE for found in states.values()):
                            return True
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            return False

    async def counts(self) -> dict[str, Outcomes]:
        """By version, of all replicas together; a backend that does not tell counts nothing."""
        counts: dict[str, Outcomes] = {}
        for figures in (await figures_of(self._servers)).values():
            for one in figures:
                if one.model == self.model:
                    before = counts.get(one.version, Outcomes())
                    counts[one.version] = Outcomes(
                        requests=before.requests + one.requests, failures=before.failures + one.failures
                    )
        return counts

    def _all(self, found: Mapping[Spot, _T | Fault]) -> dict[Spot, _T]:
        """The answers, where every replica has given one."""
        answers: dict[Spot, _T] = {}
        for spot, answer in found.items():
            if isinstance(answer, Fault):
                raise BackendBroke(f"{spot}: {told(answer)}")
            answers[spot] = answer
        return answers


async def cautions(model: str, servers: Mapping[str, ModelBackend]) -> list[str]:
    """What an operator should know before a new version of the model is loaded; one server of each backend is asked."""
    found = []
    for name, server in servers.items():
        replica = next(iter(server.replicas()), "")
        try:
            async with asyncio.timeout(ASK_S):
                names = {str(entry["name"]) for entry in await server.index(replica, ready_only=True)}
                places = [Place(backend=name, model=one, replica=replica) for one in sorted(names | {model})]
                configs = await asyncio.gather(*map(server.config, places))
        except (BackendError, TimeoutError):
            continue
        found += [
            text for place, config in zip(places, configs, strict=True) if (text := _caution(model, place, config))
        ]
    return found


def _caution(model: str, place: Place, config: JsonObject) -> str:
    if place.model == model and config.get("sequence_batching"):
        return f"'{model}' keeps state: sequences that are not over when their version is retired are lost"
    steps = (config.get("ensemble_scheduling") or {}).get("step", ())
    if any(step.get("model_name") == model and int(step.get("model_version") or -1) < 0 for step in steps):
        # Triton resolves a step without a version at each request: no rule of ours has a say.
        return (
            f"the ensemble '{place.model}' takes the new version as soon as it is loaded: its callers all move at once"
        )
    return ""


async def figures_of(
    servers: Mapping[str, ModelBackend], *, timeout_s: float = ASK_S
) -> dict[str, Sequence[ModelFigures]]:
    """What each backend counts; nothing for one that does not answer."""

    async def ask(server: ModelBackend) -> Sequence[ModelFigures]:
        try:
            async with asyncio.timeout(timeout_s):
                return await server.figures()
        except (BackendError, TimeoutError):
            return ()

    return dict(zip(servers, await asyncio.gather(*map(ask, servers.values())), strict=True))


def pinned(config: JsonObject, versions: Sequence[str]) -> str:
    """A model's configuration (JSON) with a version policy that takes exactly `versions`."""
    policy = {"specific": {"versions": [int(version) for version in versions]}}
    return json.dumps({**config, "version_policy": policy})
