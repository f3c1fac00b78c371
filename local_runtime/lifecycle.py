"""Model control: which versions of which models are served, and how that changes without losing a request.

A model changes in one step: what it becomes is loaded first, then takes the place of what was there, which is unloaded
when its requests have ended. What cannot be loaded changes nothing but the index.
"""

import asyncio
import dataclasses
import functools
import logging
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path

from local_runtime.errors import (
    InferenceError,
    ModelLoadError,
    control_not_allowed,
    failed_to_poll,
    invalid,
    load_failed,
    no_available_versions,
    unknown_model,
    unknown_version,
    version_not_a_number,
)
from local_runtime.executors.model_files import python_auto_complete
from local_runtime.loader import LoadOptions, ServedModel, load_version, thread_share
from local_runtime.messages import ModelControl, ModelState, ModelStatus
from local_runtime.repository import reader
from local_runtime.repository.model_config import Backend, ModelConfig
from local_runtime.repository.reader import ModelSource, NoServedVersion, Unreadable
from local_runtime.scheduling import ensemble

_log = logging.getLogger(__name__)
_read = functools.partial(reader.read, complete_python=python_auto_complete)
_read_model = functools.partial(reader.read_model, complete_python=python_auto_complete)
_UNLOADED = "unloaded"  # Triton's reason for a version that was served once


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Status:
    state: ModelState
    reason: str = ""


class _Model:
    """What is known of one model: its served versions (ascending), what they were made from, the states of all."""

    def __init__(self) -> None:
        self.versions: dict[str, ServedModel] = {}
        self.statuses: dict[str, _Status] = {}
        self.source: ModelSource | None = None
        self.changing = asyncio.Lock()

    @property
    def is_failed(self) -> bool:
        """Whether it ought to be served and is not, or not as it lies in the repository."""
        return any(
            status.state is ModelState.LOADING
            or (status.state is ModelState.UNAVAILABLE and status.reason != _UNLOADED)
            for status in self.statuses.values()
        )


class ModelTable:
    """The models of one repository by name. Belongs to one event loop.

    Args:
        repository: the folder.
        control: who may change what is served.
        options: how models are loaded.
        load_threads: models loaded at the same time.
    """

    def __init__(self, repository: Path, *, control: ModelControl, options: LoadOptions, load_threads: int) -> None:
        self._repository = repository
        self._control = control
        self._options = options
        self._gate = asyncio.Semaphore(load_threads)
        self._models: defaultdict[str, _Model] = defaultdict(_Model)
        self._retiring: set[asyncio.Task[None]] = set()
        # What a failed poll found: the same fault is not tried, or told, again until a file changes.
        self._faulty: dict[str, Hashable] = {}

    async def open(self, names: Sequence[str] | None) -> None:
        """Load all models, or the named ones with what their ensembles are made of; ends when all loads have.

        Raises ModelLoadError only if there is no such repository: what is wrong with a model is told by the index.
        """
        found = await asyncio.to_thread(_read, self._repository, names)
        sources = [entry for entry in found.values() if isinstance(entry, ModelSource)]
        for entry in found.values():
            if isinstance(entry, Unreadable):
                self._refuse(entry.name, "", entry.reason)
        await self._place_all(sources)

    def find(self, model: str, version: str = "") -> ServedModel:
        """The served version, the highest if none is named; NOT_FOUND if it is not served."""
        if version and not version.lstrip("-").isdecimal():
            raise version_not_a_number(version)
        known = self._models.get(model)
        if known is None:
            raise unknown_model(model)
        if not known.versions:
            raise no_available_versions(model)
        if version in ("", "-1"):
            return next(reversed(known.versions.values()))
        served = known.versions.get(version)
        if served is None:
            raise unknown_version(model, version)
        return served

    def served(self) -> Iterable[ServedModel]:
        """Every served version, by name and version."""
        return [served for name in sorted(self._models) for served in self._models[name].versions.values()]

    def versions(self, model: str) -> Sequence[ServedModel]:
        """Every served version of one model, ascending; NOT_FOUND if there is none."""
        self.find(model)
        return list(self._models[model].versions.values())

    def is_served(self, model: str, version: str = "") -> bool:
        """Whether the model, in this version if one is given, can be asked now."""
        try:
            served = self.find(model, version)
        except InferenceError:
            return False
        return self._models[model].statuses[served.version].state is ModelState.READY

    @property
    def is_ready(self) -> bool:
        """Triton's strict readiness: nothing that ought to be served is loading or has failed."""
        return not any(model.is_failed for model in self._models.values())

    def index(self) -> tuple[ModelStatus, ...]:
        """Every model of the repository, and every version that is or was served, by name and version."""
        names = set(self._models)
        if self._control is ModelControl.EXPLICIT:
            names |= set(reader.names(self._repository))
        lines: list[ModelStatus] = []
        for name in sorted(names):
            statuses = self._models[name].statuses if name in self._models else {}
            lines += [
                ModelStatus(name=name, version=version, state=status.state, reason=status.reason)
                for version, status in sorted(statuses.items(), key=lambda item: int(item[0] or 0))
            ] or [ModelStatus(name=name, version="", state=ModelState.NONE, reason="")]
        return tuple(lines)

    async def load(self, model: str, *, config: str | None, files: Mapping[str, bytes]) -> None:
        """Load or reload a model, with a config (JSON) or files (by `<version>/<name>`) in place of its own.

        An unchanged model is left alone, a version that is served already stays as it is. Raises InferenceError,
        with what was served before still served.
        """
        self._refuse_control()
        try:
            source = await asyncio.to_thread(_read_model, self._repository, model, config_json=config, files=files)
            inner = await asyncio.to_thread(self._inner_sources, source)
        except ModelLoadError as error:
            _log.error("failed to load model", extra={"model": model, "reason": str(error)})
            if model in self._models or model in reader.names(self._repository):
                self._refuse(model, "", str(error))
            raise invalid(str(error)) if isinstance(error, NoServedVersion) else failed_to_poll(model) from error
        for entry in inner:
            await self._place(entry)
        await self._place(source, is_override=config is not None or bool(files))

    async def unload(self, model: str, *, unload_dependents: bool) -> None:
        """Stop to serve a model; its accepted requests still end. `unload_dependents`: with an ensemble's models."""
        self._refuse_control()
        if model not in self._models:
            return
        source = self._models[model].source
        await self._remove(model)
        if unload_dependents and source is not None:
            for step in source.config.ensemble_steps:
                await self.unload(step.model_name, unload_dependents=True)

    async def poll(self) -> None:
        """Look at the repository once and follow what has changed there; faults are logged, once for each change."""
        found = await asyncio.to_thread(reader.fingerprints, self._repository)
        for name in [name for name, model in self._models.items() if name not in found and model.versions]:
            _log.info("model has left the repository", extra={"model": name})
            await self._remove(name)
        for name, fingerprint in found.items():
            known = self._models.get(name)
            served = known.source if known is not None and known.versions else None
            if self._faulty.get(name) == fingerprint or (served is not None and served.fingerprint == fingerprint):
                continue
            await self._follow(name, fingerprint)

    async def close(self, *, grace_us: int) -> None:
        """Unload everything; requests that have not ended within the grace time are failed.

        Models stay findable until then: a request that was accepted may still ask other models.
        """
        waits = [asyncio.create_task(served.drained()) for served in self.served()]
        waits += self._retiring
        if waits:
            _, late = await asyncio.wait(waits, timeout=grace_us / 1_000_000)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        for model in self._models.values():
            for served in model.versions.values():
                self._retire(model, served, is_urgent=True)
            model.versions = {}
        await asyncio.gather(*self._retiring, return_exceptions=True)

    def _refuse_control(self) -> None:
        if self._control is not ModelControl.EXPLICIT:
            raise control_not_allowed()

    async def _follow(self, name: str, fingerprint: Hashable) -> None:
        """Poll: the model is new or has changed."""
        try:
            source = await asyncio.to_thread(_read_model, self._repository, name)
            await self._place(source)
        except (ModelLoadError, InferenceError) as error:
            _log.error("failed to load model", extra={"model": name, "reason": str(error)})
            if isinstance(error, ModelLoadError):
                self._refuse(name, "", str(error))
            self._faulty[name] = fingerprint
        else:
            self._faulty.pop(name, None)

    def _inner_sources(self, source: ModelSource) -> list[ModelSource]:
        """The models that an ensemble needs and that are not served, innermost first."""
        names = [step.model_name for step in source.config.ensemble_steps]
        missing = [name for name in names if not (name in self._models and self._models[name].versions)]
        if not missing:
            return []
        found = _read(self._repository, missing)
        for entry in found.values():
            if isinstance(entry, Unreadable):
                raise ModelLoadError(f"ensemble '{source.config.name}' needs '{entry.name}': {entry.reason}")
        sources = [entry for entry in found.values() if isinstance(entry, ModelSource)]
        return sorted(sources, key=lambda entry: entry.config.backend is Backend.ENSEMBLE)

    async def _place_all(self, sources: Sequence[ModelSource]) -> None:
        """Load side by side what runs by itself, then what is made of it, innermost first."""

        async def place(source: ModelSource) -> None:
            try:
                await self._place(source)
            except InferenceError as error:
                reason = error.message
                _log.error("failed to load model", extra={"model": source.config.name, "reason": reason})

        for source in sources:
            self._models[source.config.name].source = source
        ensembles = [source for source in sources if source.config.backend is Backend.ENSEMBLE]
        await asyncio.gather(*(place(source) for source in sources if source not in ensembles))
        ordered = _innermost_first(ensembles)
        for source in ordered:
            await place(source)
        for source in ensembles:
            if source not in ordered:
                name = source.config.name
                self._refuse(name, source.versions[-1], f"circular dependency of ensemble '{name}'")

    async def _place(self, source: ModelSource, *, is_override: bool = False) -> None:
        """Serve the model as the source says. Raises InferenceError, with nothing changed but the index."""
        name = source.config.name
        model = self._models[name]
        async with model.changing:
            before = model.source
            is_served = before is not None and bool(model.versions) and before.fingerprint == source.fingerprint
            # As in Triton, a config that came with a load request stays until a file changes.
            if is_served and (not is_override or before == source):
                return
            kept = self._kept(model, source)
            fresh = await self._load_fresh(model, source, [v for v in source.versions if v not in kept])
            replaced = [served for version, served in model.versions.items() if version not in kept]
            model.versions = {version: kept.get(version) or fresh[version] for version in source.versions}
            model.source = source
            model.statuses = {version: _Status(state=ModelState.READY) for version in source.versions}
            for served in replaced:
                self._retire(model, served)
        self._check_ensembles()

    def _kept(self, model: _Model, source: ModelSource) -> dict[str, ServedModel]:
        """Served versions that the source would make again just as they are."""
        before = model.source
        if before is None or before.config != source.config or before.shared_fingerprint != source.shared_fingerprint:
            return {}
        return {
            version: served
            for version, served in model.versions.items()
            if version in source.versions and before.version_fingerprint(version) == source.version_fingerprint(version)
        }

    async def _load_fresh(self, model: _Model, source: ModelSource, versions: Sequence[str]) -> dict[str, ServedModel]:
        """Load all these versions or none."""
        name = source.config.name
        before = dict(model.statuses)
        for version in versions:
            if version not in model.versions:
                model.statuses[version] = _Status(state=ModelState.LOADING)
        configs = [other.source.config for other in self._models.values() if other.source is not None]
        threads = thread_share([*configs, source.config], threads=self._options.threads)
        fresh: dict[str, ServedModel] = {}
        version = ""
        try:
            for version in versions:
                self._check_steps(source.config)
                async with self._gate:
                    fresh[version] = await load_version(source, version, threads=threads, options=self._options)
        except BaseException as error:
            model.statuses = before
            for served in fresh.values():
                self._retire(model, served)
            if not isinstance(error, ModelLoadError):
                raise
            if version not in model.versions:
                self._refuse(name, version, str(error))
            raise load_failed(name, version, str(error)) from error
        return fresh

    def _refuse(self, name: str, version: str, reason: str) -> None:
        """Remember in the index why a version is not served."""
        statuses = self._models[name].statuses
        statuses.pop("", None)
        if version or not self._models[name].versions:
            statuses[version] = _Status(state=ModelState.UNAVAILABLE, reason=reason)

    async def _remove(self, name: str) -> None:
        model = self._models[name]
        async with model.changing:
            removed, model.versions = model.versions, {}
            model.source = None
            model.statuses = {}
            for served in removed.values():
                self._retire(model, served)
        self._check_ensembles()

    def _retire(self, model: _Model, served: ServedModel, *, is_urgent: bool = False) -> None:
        """Unload in the background what is no longer served, and show it in the index meanwhile."""
        if served.version not in model.versions:
            model.statuses[served.version] = _Status(state=ModelState.UNLOADING)
        task = asyncio.create_task(self._retired(model, served, is_urgent=is_urgent))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def _retired(self, model: _Model, served: ServedModel, *, is_urgent: bool) -> None:
        try:
            if not is_urgent:
                await served.drained()
        finally:
            await served.unload()
        status = model.statuses.get(served.version)
        if status is not None and status.state is ModelState.UNLOADING:
            model.statuses[served.version] = _Status(state=ModelState.UNAVAILABLE, reason=_UNLOADED)

    def _check_steps(self, config: ModelConfig) -> None:
        if config.backend is Backend.ENSEMBLE:
            ensemble.check_steps(config, self._step_configs(config))

    def _step_configs(self, config: ModelConfig) -> dict[str, ModelConfig]:
        """The configurations of an ensemble's models, as far as they are served in the version asked for."""
        found: dict[str, ModelConfig] = {}
        for step in config.ensemble_steps:
            try:
                found[step.model_name] = self.find(step.model_name, step.model_version).config
            except InferenceError:
                continue
        return found

    def _check_ensembles(self) -> None:
        """Take ensembles out of service that what is served now no longer carries, and back into it."""
        for name, model in self._models.items():
            source = model.source
            if source is None or source.config.backend is not Backend.ENSEMBLE:
                continue
            try:
                ensemble.check_steps(source.config, self._step_configs(source.config))
            except ModelLoadError as error:
                for served in model.versions.values():
                    model.statuses[served.version] = _Status(state=ModelState.UNAVAILABLE, reason=str(error))
                    _log.warning("ensemble cannot be served", extra={"model": name, "reason": str(error)})
                continue
            for served in model.versions.values():
                model.statuses[served.version] = _Status(state=ModelState.READY)


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
