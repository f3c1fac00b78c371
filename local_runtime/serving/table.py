"""Which versions of which models are served now, and what the index says of the others."""

import asyncio
import dataclasses
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from local_runtime.errors import (
    InferenceError,
    ModelLoadError,
    no_available_versions,
    unknown_model,
    unknown_version,
    version_not_a_number,
)
from local_runtime.messages import ModelState, ModelStatus
from local_runtime.repository.model_config import Backend, ModelConfig
from local_runtime.repository.reader import ModelSource
from local_runtime.scheduling import ensemble
from local_runtime.serving.loader import ServedModel

_log = logging.getLogger(__name__)
_UNLOADED = "unloaded"  # Triton's reason for a version that was served once


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """One version's line of the index. `is_fault`: it ought to be served and is not."""

    state: ModelState
    reason: str = ""
    is_fault: bool = False


class KnownModel:
    """One model.

    `versions` are those that can be asked, ascending; `parked` those of an ensemble whose models are not there;
    `source` is what both were made from. Whoever changes it holds `changing`.
    """

    def __init__(self) -> None:
        self.versions: dict[str, ServedModel] = {}
        self.parked: dict[str, ServedModel] = {}
        self.statuses: dict[str, Status] = {}
        self.source: ModelSource | None = None
        self.changing = asyncio.Lock()


class ModelTable:
    """The models of one repository by name. Belongs to one event loop."""

    def __init__(self) -> None:
        self._models: defaultdict[str, KnownModel] = defaultdict(KnownModel)
        self._retiring: set[asyncio.Task[None]] = set()

    # --- asking ------------------------------------------------------------------------------------

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
            self.find(model, version)
        except InferenceError:
            return False
        return True

    @property
    def is_ready(self) -> bool:
        """Whether every model that ought to be served can be asked.

        Stricter in Triton, which is not ready while a served model is reloaded or after that has failed, and so
        would be taken out of rotation with all its models.
        """
        return not any(
            status.is_fault or status.state is ModelState.LOADING
            for model in self._models.values()
            if not model.versions
            for status in model.statuses.values()
        )

    def index(self, names: Iterable[str]) -> tuple[ModelStatus, ...]:
        """Every version that is or was served, and every model of `names`, by name and version."""
        lines: list[ModelStatus] = []
        for name in sorted({*self._models, *names}):
            statuses = self._models[name].statuses if name in self._models else {}
            lines += [
                ModelStatus(name=name, version=version, state=status.state, reason=status.reason)
                for version, status in sorted(statuses.items(), key=lambda item: int(item[0] or 0))
            ] or [ModelStatus(name=name, version="", state=ModelState.NONE, reason="")]
        return tuple(lines)

    def __contains__(self, model: str) -> bool:
        """Whether anything is known of the model."""
        return model in self._models

    def __iter__(self) -> Iterator[str]:
        """The names of all that is known, whatever its state."""
        return iter(tuple(self._models))

    def forget_fault(self, model: str) -> None:
        """What lay in the repository and could not be served is gone: what is served is what lies there."""
        self._models[model].statuses.pop("", None)

    def forget(self, model: str) -> None:
        """Nothing of the model is served, and nothing of it is in the repository."""
        if not self._models[model].statuses.keys() - {""}:
            del self._models[model]

    def sources(self) -> Mapping[str, ModelSource]:
        """What the served (or parked) models were made from, by name."""
        return {name: model.source for name, model in self._models.items() if model.source is not None}

    # --- changing ----------------------------------------------------------------------------------

    def known(self, model: str) -> KnownModel:
        """That model, known from now on."""
        return self._models[model]

    def place(self, name: str, source: ModelSource, versions: Mapping[str, ServedModel]) -> None:
        """Serve these versions in place of all that was there, which ends when its requests have."""
        model = self._models[name]
        before = {**model.versions, **model.parked}
        model.versions, model.parked = dict(versions), {}
        model.source = source
        model.statuses = {version: Status(state=ModelState.READY) for version in versions}
        for served in before.values():
            if served not in versions.values():
                self.retire(served)
        self.check_ensembles()

    def remove(self, name: str) -> Sequence[ServedModel]:
        """Serve nothing of the model any more; what was served, and ends when its requests have."""
        model = self._models[name]
        removed = [*model.versions.values(), *model.parked.values()]
        model.versions, model.parked, model.source, model.statuses = {}, {}, None, {}
        for served in removed:
            self.retire(served)
        self.check_ensembles()
        return removed

    def refuse(self, name: str, version: str, reason: str) -> None:
        """Remember in the index why a version (or, with "", what lies in the repository now) is not served."""
        model = self._models[name]
        model.statuses.pop("", None)
        model.statuses[version] = Status(state=ModelState.UNAVAILABLE, reason=reason, is_fault=True)

    def retire(self, served: ServedModel) -> None:
        """Unload in the background what is no longer served, and show it in the index meanwhile."""
        model = self._models[served.config.name]
        if served.version not in model.versions:
            model.statuses[served.version] = Status(state=ModelState.UNLOADING)
        task = asyncio.create_task(self._retired(model, served))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

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
        left: list[ServedModel] = []
        for model in self._models.values():
            left += [*model.versions.values(), *model.parked.values()]
            model.versions, model.parked = {}, {}
        await asyncio.gather(*(served.unload() for served in left))

    async def _retired(self, model: KnownModel, served: ServedModel) -> None:
        try:
            await served.drained()
        finally:
            await served.unload()
        status = model.statuses.get(served.version)
        if status is not None and status.state is ModelState.UNLOADING:
            model.statuses[served.version] = Status(state=ModelState.UNAVAILABLE, reason=_UNLOADED)
        _log.info("model version unloaded", extra={"model": served.config.name, "version": served.version})

    def check_ensembles(self) -> None:
        """Take ensembles out of service that what is served now no longer carries, and back into it."""
        for name, model in self._models.items():
            if model.source is None or model.source.config.backend is not Backend.ENSEMBLE:
                continue
            everything = {**model.versions, **model.parked}
            try:
                ensemble.check_steps(model.source.config, self.step_configs(model.source.config))
            except ModelLoadError as error:
                if model.versions:
                    _log.warning("ensemble cannot be served", extra={"model": name, "reason": str(error)})
                status = Status(state=ModelState.UNAVAILABLE, reason=str(error))
                model.versions, model.parked = {}, everything
            else:
                status = Status(state=ModelState.READY)
                model.versions, model.parked = everything, {}
            model.statuses.update(dict.fromkeys(everything, status))

    def step_configs(self, config: ModelConfig) -> dict[str, ModelConfig]:
        """The configurations of an ensemble's models, as far as they are served in the version asked for."""
        found: dict[str, ModelConfig] = {}
        for step in config.ensemble_steps:
            try:
                found[step.model_name] = self.find(step.model_name, step.model_version).config
            except InferenceError:
                continue
        return found
