"""Model control: how what is served changes, without losing a request.

A model changes in one step: what it becomes is loaded first, then takes the place of what was there, which is unloaded
when its requests have ended. What cannot be loaded changes nothing but the index.
"""

import asyncio
import functools
import logging
from collections.abc import Coroutine, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from local_runtime.errors import (
    InferenceError,
    ModelLoadError,
    control_not_allowed,
    failed_to_poll,
    invalid,
    load_failed,
    stopping,
)
from local_runtime.executors.model_files import python_auto_complete
from local_runtime.messages import ModelControl, ModelState, ModelStatus
from local_runtime.repository import reader
from local_runtime.repository.model_config import Backend
from local_runtime.repository.reader import ModelSource, NoServedVersion, Unreadable
from local_runtime.scheduling import ensemble
from local_runtime.serving.loader import LoadOptions, ServedModel, load_version, thread_share
from local_runtime.serving.table import KnownModel, ModelTable, Status

_log = logging.getLogger(__name__)
_read = functools.partial(reader.read, complete_python=python_auto_complete)
_read_model = functools.partial(reader.read_model, complete_python=python_auto_complete)


class Lifecycle:
    """Loads and unloads the models of one repository. Belongs to one event loop.

    Args:
        repository: the folder.
        control: who may change what is served.
        options: how models are loaded.
        load_threads: models loaded at the same time.
    """

    def __init__(self, repository: Path, *, control: ModelControl, options: LoadOptions, load_threads: int) -> None:
        self.table = ModelTable()
        self._repository = repository.absolute()  # a model may change the process's working folder
        self._control = control
        self._options = options
        self._gate = asyncio.Semaphore(load_threads)
        self._is_closing = False
        self._changes: set[asyncio.Task[None]] = set()
        # What a failed poll found: the same fault is not tried, or told, again until something changes.
        self._faulty: dict[str, Hashable] = {}

    async def open(self, names: Sequence[str] | None) -> None:
        """Load all models, or the named ones with what their ensembles are made of; ends when all loads have.

        Raises ModelLoadError only if there is no such repository: what is wrong with a model is told by the index.
        """
        found = await asyncio.to_thread(_read, self._repository, names)
        sources = [entry for entry in found.values() if isinstance(entry, ModelSource)]
        for entry in found.values():
            if isinstance(entry, Unreadable):
                _log_failure(entry.name, entry.reason)
                self.table.refuse(entry.name, "", entry.reason)
        await self._place_all(sources)

    def index(self) -> tuple[ModelStatus, ...]:
        """Every model that is known: with explicit control, all of the repository's."""
        names = reader.names(self._repository) if self._control is ModelControl.EXPLICIT else ()
        return self.table.index(names)

    async def load(self, model: str, *, config: str | None, files: Mapping[str, bytes]) -> None:
        """Load or reload a model, with a config (JSON) or files (by `<version>/<name>`) in place of its own.

        An unchanged model is left alone, a version that is served already stays as it is. Raises InferenceError,
        with what was served before still served. A caller that leaves does not end it.
        """
        self._refuse_control(model)
        await self._to_its_end(self._load(model, config=config, files=files))

    async def unload(self, model: str, *, unload_dependents: bool) -> None:
        """Stop to serve a model; its accepted requests still end.

        `unload_dependents`: with an ensemble's models, once the ensemble's requests have ended.
        """
        self._refuse_control(model)
        await self._to_its_end(self._unload(model, unload_dependents=unload_dependents))

    async def poll(self) -> None:
        """Look at the repository once and follow what has changed there; faults are logged, once for each change."""
        found = await asyncio.to_thread(reader.fingerprints, self._repository)
        for name in [name for name in self.table if name not in found]:
            async with self.table.known(name).changing:
                if self.table.known(name).source is not None:
                    _log.info("model has left the repository", extra={"model": name})
                    self.table.remove(name)
                self.table.forget_fault(name)
            self.table.forget(name)
        sources = self.table.sources()
        changed: list[ModelSource] = []
        for name, fingerprint in found.items():
            is_served = name in sources and sources[name].fingerprint == fingerprint
            if is_served:
                self.table.forget_fault(name)
            if is_served or self._faulty.get(name) == fingerprint:
                continue
            self._faulty[name] = fingerprint
            try:
                changed.append(await asyncio.to_thread(_read_model, self._repository, name))
            except ModelLoadError as error:
                _log_failure(name, str(error))
                self.table.refuse(name, "", str(error))
        if changed:
            await self._place_all(changed)

    async def close(self, *, grace_us: int) -> None:
        """Give up changes that are going on, then unload everything; see `ModelTable.close`."""
        self._is_closing = True
        changes = tuple(self._changes)
        for task in changes:
            task.cancel()
        await asyncio.gather(*changes, return_exceptions=True)
        await self.table.close(grace_us=grace_us)

    def _refuse_control(self, model: str) -> None:
        if self._control is not ModelControl.EXPLICIT:
            raise control_not_allowed()
        if self._is_closing:
            raise stopping(model)

    async def _to_its_end(self, change: Coroutine[Any, Any, None]) -> None:
        """Go on with a change although the caller that asked for it leaves: half of one helps nobody."""
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        task.add_done_callback(_seen)
        await asyncio.shield(task)

    async def _unload(self, model: str, *, unload_dependents: bool) -> None:
        if model not in self.table:
            return
        known = self.table.known(model)
        async with known.changing:
            source = known.source
            removed = self.table.remove(model)
        if unload_dependents and source is not None and source.config.ensemble_steps:
            for served in removed:
                await served.drained()
            for step in source.config.ensemble_steps:
                await self._unload(step.model_name, unload_dependents=True)

    async def _load(self, model: str, *, config: str | None, files: Mapping[str, bytes]) -> None:
        try:
            source = await asyncio.to_thread(_read_model, self._repository, model, config_json=config, files=files)
            inner = await asyncio.to_thread(self._inner_sources, source)
        except ModelLoadError as error:
            _log_failure(model, str(error))
            if model in self.table or model in await asyncio.to_thread(reader.names, self._repository):
                self.table.refuse(model, "", str(error))
            # What came with the request is in no file here: its sender is told what is wrong with it.
            is_told = isinstance(error, NoServedVersion) or config is not None or bool(files)
            raise invalid(str(error)) if is_told else failed_to_poll(model) from error
        for entry in inner:
            await self._place(entry)
        await self._place(source, is_override=config is not None or bool(files))

    def _inner_sources(self, source: ModelSource) -> list[ModelSource]:
        """The models that an ensemble needs and that are not served, innermost first."""
        names = [step.model_name for step in source.config.ensemble_steps]
        missing = [name for name in names if not self.table.is_served(name)]
        if not missing:
            return []
        found = _read(self._repository, missing)
        for entry in found.values():
            if isinstance(entry, Unreadable):
                raise ModelLoadError(f"ensemble '{source.config.name}' needs '{entry.name}': {entry.reason}")
        plain, ensembles = _sorted([entry for entry in found.values() if isinstance(entry, ModelSource)])
        return [*plain, *_innermost_first(ensembles)]

    async def _place_all(self, sources: Sequence[ModelSource]) -> None:
        """Load side by side what runs by itself, then what is made of it, innermost first. Faults are logged."""
        plain, ensembles = _sorted(sources)
        await asyncio.gather(*map(self._place_or_log, plain))
        ordered = _innermost_first(ensembles)
        for source in ordered:
            await self._place_or_log(source)
        for source in ensembles:
            if source not in ordered:
                name = source.config.name
                self.table.refuse(name, source.versions[-1], f"circular dependency of ensemble '{name}'")

    async def _place_or_log(self, source: ModelSource) -> None:
        try:
            await self._place(source)
        except InferenceError as error:
            _log_failure(source.config.name, error.message)

    async def _place(self, source: ModelSource, *, is_override: bool = False) -> None:
        """Serve the model as the source says. Raises InferenceError, with nothing changed but the index."""
        name = source.config.name
        model = self.table.known(name)
        async with model.changing:
            before = model.source
            is_served = before is not None and bool(model.versions) and before.fingerprint == source.fingerprint
            # As in Triton, a config that came with a load request stays until a file changes.
            if is_served and (not is_override or before == source):
                return
            kept = _kept(model, source)
            fresh = await self._load_fresh(model, source, [v for v in source.versions if v not in kept])
            self.table.place(name, source, {v: kept.get(v) or fresh[v] for v in source.versions})
        # What failed for want of this model may work now.
        self._faulty.clear()

    async def _load_fresh(
        self, model: KnownModel, source: ModelSource, versions: Sequence[str]
    ) -> dict[str, ServedModel]:
        """Load all these versions or none."""
        name = source.config.name
        before = dict(model.statuses)
        for version in versions:
            if version not in model.versions:
                model.statuses[version] = Status(state=ModelState.LOADING)
        others = [other.config for other_name, other in self.table.sources().items() if other_name != name]
        threads = thread_share([*others, source.config], threads=self._options.threads)
        fresh: dict[str, ServedModel] = {}
        version = ""
        try:
            for version in versions:
                if source.config.backend is Backend.ENSEMBLE:
                    ensemble.check_steps(source.config, self.table.step_configs(source.config))
                async with self._gate:
                    fresh[version] = await load_version(source, version, threads=threads, options=self._options)
                    _log.info("model version loaded", extra={"model": name, "version": version})
        except BaseException as error:
            model.statuses = before
            for served in fresh.values():
                self.table.retire(served)
            if not isinstance(error, ModelLoadError):
                raise
            if version not in model.versions:
                self.table.refuse(name, version, str(error))
            raise load_failed(name, version, str(error)) from error
        return fresh


def _kept(model: KnownModel, source: ModelSource) -> dict[str, ServedModel]:
    """Served versions that the source would make again just as they are."""
    before = model.source
    if before is None or before.config != source.config or before.shared_fingerprint != source.shared_fingerprint:
        return {}
    return {
        version: served
        for version, served in model.versions.items()
        if version in source.versions and before.version_fingerprint(version) == source.version_fingerprint(version)
    }


def _sorted(sources: Sequence[ModelSource]) -> tuple[list[ModelSource], list[ModelSource]]:
    """Models that run by themselves, and ensembles."""
    ensembles = [source for source in sources if source.config.backend is Backend.ENSEMBLE]
    return [source for source in sources if source not in ensembles], ensembles


def _innermost_first(ensembles: Sequence[ModelSource]) -> list[ModelSource]:
    """Ensembles behind the ensembles that they are made of, without those that go round in a circle."""
    waiting = {source.config.name: source for source in ensembles}
    ordered: list[ModelSource] = []
    while True:
        ready = [
            source
            for source in waiting.values()
            if not {step.model_name for step in source.config.ensemble_steps} & waiting.keys()
        ]
        if not ready:
            return ordered
        ordered.extend(waiting.pop(source.config.name) for source in ready)


def _log_failure(model: str, reason: str) -> None:
    _log.error("failed to load model", extra={"model": model, "reason": reason})


def _seen(task: "asyncio.Task[None]") -> None:
    """A load whose caller has left: its error is in the log and the index, and nobody else will look at it."""
    if not task.cancelled():
        task.exception()
