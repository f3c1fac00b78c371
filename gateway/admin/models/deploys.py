"""The deploys of this control plane: begun, watched, interrupted, gone on with, rolled back.

One deploy of a model at a time, whichever control plane runs it: each run holds a claim in the store and renews it, and
stops where another has it. A deploy that is `running` there without a claim was interrupted.
"""

import asyncio
import contextlib
import functools
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from gateway.admin.models.deploy import Deploy, Pace, deploy_document, parse_deploy
from gateway.admin.models.deploy_run import DeployRun
from gateway.admin.models.fleet import READY, Fleet, Servers, cautions, everywhere, told, versions_of
from gateway.admin.routing.rule_writer import RuleWriter, patiently
from gateway.admin_ports import DeployStore, OutcomeSource, RuleStore
from gateway.core.errors import DeployConflict, Fault, RulesUnavailable, UnknownDeploy, UnknownModel
from gateway.core.rollouts.model_move import WHOLE
from gateway.core.rules import Rule

RENEW_S = 2.5  # a quarter of what a claim lasts

_log = logging.getLogger(__name__)


class Deploys:
    """Owns the runs of this process. `close` stops them where they are; they can be gone on with later."""

    def __init__(
        self,
        *,
        servers: Servers,
        rules: RuleStore,
        store: DeployStore,
        outcomes: OutcomeSource,
        check: Callable[[Sequence[Rule]], None],
    ) -> None:
        self._servers = servers
        self._writer = RuleWriter(rules, check)
        self._store = store
        self._outcomes = outcomes
        self._runs: dict[str, tuple[DeployRun, asyncio.Task[None]]] = {}

    async def start(self, model: str, version: str, *, backend: str | None, pace: Pace) -> Deploy:
        """Move `model` to `version`, whose folder is in the repository already; returns while it goes on.

        Raises `UnknownModel`, `DeployConflict`.
        """
        await self._refuse_second(model)
        served = await self._served(model, backend)
        old = max(served.versions, key=int)
        if version in served.versions:
            raise DeployConflict(f"version {version} of '{model}' is served already")
        after = {*served.versions, version} - {old}
        if version != max(after, key=int):
            # Who names no version is served by the highest one.
            raise DeployConflict(f"versions {', '.join(sorted(after, key=int))} would be served, {version} not first")
        now_ms = round(time.time() * 1000)
        deploy = Deploy(
            id=uuid.uuid4().hex[:12],
            model=model,
            old=old,
            new=version,
            backends=served.backends,
            served=served.versions,
            pace=pace,
            started_ms=now_ms,
            updated_ms=now_ms,
            notes=await self._notes(model, served.backends),
        )
        return await self._begin(deploy)

    async def go_on(self, deploy_id: str) -> Deploy:
        """Take up one that was interrupted, where it was. Raises `UnknownDeploy`, `DeployConflict`."""
        deploy = await self.get(deploy_id)
        if deploy.status != "interrupted":
            raise DeployConflict(f"deploy {deploy_id} is {deploy.status}")
        return await self._begin(replace(deploy, status="running"))

    async def rollback(self, deploy_id: str) -> Deploy:
        """Undo one: at once where it is under way or was interrupted, by a deploy back where it is done.

        Raises `UnknownDeploy`, `DeployConflict`.
        """
        deploy = await self.get(deploy_id)
        if run := self._runs.get(deploy_id):
            if run[0].deploy.status == "running":
                run[0].go_back()
                return run[0].deploy
            await asyncio.wait({run[1]})  # it has ended, and is about to give up its claim
        if deploy.status == "running":
            raise DeployConflict(f"deploy {deploy_id} is run by another control plane")
        if deploy.status == "done":
            newest = next(one for one in await self.recent() if one.model == deploy.model)
            if newest.id != deploy_id:
                raise DeployConflict(f"deploy {deploy_id} is not the last of '{deploy.model}'; that is {newest.id}")
            pace = replace(deploy.pace, percents=(WHOLE,))
            only = deploy.backends[0] if len(deploy.backends) == 1 else None  # others may serve other versions
            return await self.start(deploy.model, deploy.old, backend=only, pace=pace)
        if not deploy.is_open:
            raise DeployConflict(f"deploy {deploy_id} has left nothing to roll back: it is {deploy.status}")
        reason = deploy.reason or "rolled back by an operator"
        return await self._begin(replace(deploy, status="running", undo="asked", reason=reason))

    async def rollback_model(self, model: str) -> Deploy:
        """Undo the last deploy of a model."""
        for deploy in await self.recent():
            if deploy.model == model:
                return await self.rollback(deploy.id)
        raise UnknownDeploy(f"no deploy of '{model}' is known")

    async def get(self, deploy_id: str) -> Deploy:
        """One deploy as it is now. Raises `UnknownDeploy`."""
        if run := self._runs.get(deploy_id):
            return run[0].deploy
        document = await self._store.load(deploy_id)
        if document is None:
            raise UnknownDeploy(f"no deploy has the id '{deploy_id}'"[:200])
        return await self._as_it_is(parse_deploy(document))

    async def recent(self) -> list[Deploy]:
        """The deploys that are known, the newest first."""
        return [await self._as_it_is(parse_deploy(document)) for document in await self._store.recent()]

    async def close(self) -> None:
        """Stop all runs where they are."""
        tasks = [task for _, task in self._runs.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _as_it_is(self, deploy: Deploy) -> Deploy:
        if deploy.status == "running" and deploy.id not in self._runs and not await self._store.owner(deploy.model):
            return replace(deploy, status="interrupted")
        return deploy

    async def _refuse_second(self, model: str) -> None:
        for deploy in await self.recent():
            if deploy.model == model and deploy.is_open:
                state = "under way" if deploy.status == "running" else f"{deploy.status}, and not undone"
                raise DeployConflict(
                    f"deploy {deploy.id} of '{model}' to version {deploy.new} is {state}: roll it back"
                    + (" or go on with it" if deploy.status == "interrupted" else "")
                )

    async def _served(self, model: str, backend: str | None) -> "_Served":
        """Which versions are ready, the same on every replica of the backends that serve the model."""
        servers = self._servers.only(backend).reachable
        found = await everywhere(servers, lambda server, replica: server.index(replica))
        ready: dict[str, set[tuple[str, ...]]] = {}
        for spot, index in found.items():
            if isinstance(index, Fault):
                raise DeployConflict(f"{spot} does not answer: {told(index)}")
            states = versions_of(index, model)
            if any(entry.get("name") == model for entry in index):
                versions = tuple(sorted((v for v, one in states.items() if one.state == READY), key=int))
                ready.setdefault(spot.backend, set()).add(versions)
        everything = {versions for sets in ready.values() for versions in sets}
        if not everything:
            raise UnknownModel(f"no server that can be reached has the model '{model}'")
        if len(everything) > 1:
            raise DeployConflict(f"not all servers serve the same versions of '{model}': load it on all of them first")
        (versions,) = everything
        if not versions:
            raise DeployConflict(f"'{model}' is not loaded: load it, then deploy")
        return _Served(backends=tuple(ready), versions=versions)

    async def _notes(self, model: str, backends: Sequence[str]) -> tuple[str, ...]:
        kept = (
            f"backend '{name}' keeps the version that it has: {reason}"
            for name, reason in self._servers.unreachable.items()
        )
        servers = {name: self._servers.reachable[name] for name in backends}
        return (*await cautions(model, servers), *kept)

    async def _begin(self, deploy: Deploy) -> Deploy:
        claimant = uuid.uuid4().hex  # of this run alone: two that take up the same deploy are two
        if not await self._store.claim(deploy.model, claimant):
            raise DeployConflict(f"another deploy of '{deploy.model}' is under way")
        servers = {name: self._servers.reachable[name] for name in deploy.backends if name in self._servers.reachable}
        run = DeployRun(
            deploy,
            fleet=Fleet(deploy.model, servers),
            writer=self._writer,
            outcomes=self._outcomes,
            save=self._save,
        )
        await self._save(deploy)
        task = asyncio.create_task(self._drive(run, claimant), name=f"deploy {deploy.id}")
        self._runs[deploy.id] = (run, task)
        return deploy

    async def _drive(self, run: DeployRun, claimant: str) -> None:
        deploy = run.deploy
        running = asyncio.create_task(run.run())
        renewing = asyncio.create_task(self._renew(deploy.model, claimant))
        try:
            await asyncio.wait({running, renewing}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                await running
            else:
                _log.error("deploy_lost", extra={"deploy": deploy.id, "reason": "another has its claim"})
        except Exception:  # noqa: BLE001 - the supervisor of this task: it is then interrupted, and can be rolled back
            _log.exception("deploy_failed", extra={"deploy": deploy.id})
        finally:
            for task in (running, renewing):
                task.cancel()
            await asyncio.gather(running, renewing, return_exceptions=True)
            with contextlib.suppress(RulesUnavailable):
                await self._store.release(deploy.model, claimant)
            del self._runs[deploy.id]

    async def _renew(self, model: str, claimant: str) -> None:
        """Keep the claim; returns when it is another's, after a time in which it could not be renewed."""
        is_ours = True
        while is_ours:
            await asyncio.sleep(RENEW_S)
            with contextlib.suppress(RulesUnavailable):
                is_ours = await self._store.claim(model, claimant)

    async def _save(self, deploy: Deploy) -> None:
        await patiently(functools.partial(self._store.save, deploy_document(deploy)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Served:
    """Where a model is, and the versions that are ready there."""

    backends: tuple[str, ...]
    versions: tuple[str, ...]


def shown(deploy: Deploy) -> Mapping[str, object]:
    """What an operator sees of it."""
    document = deploy_document(deploy)
    del document["marks"]
    return {**document, "rules": sorted({*deploy.marks.held, *deploy.marks.added})}
