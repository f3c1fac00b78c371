"""What `gateway doctor` reads: the control plane, metrics pages, model servers, repositories on this machine."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from gateway.cli.admin_client import EXIT_REFUSED, EXIT_UNREACHABLE, PAGE, Admin, Refusal
from gateway.cli.check_models import BOTH_SCHEDULERS, ExaminationError, advice, examined, findings
from gateway.cli.models_plan import UsageError, models_of
from gateway.cli.trust import system_trust
from gateway.core import memory_plan
from gateway.core.doctor.counting import counted
from gateway.core.doctor.facts import Facts, Setup
from gateway.core.doctor.looks import Look, Sample
from gateway.core.doctor.reading import (
    gates_of,
    gpus_of,
    latencies_of,
    limit_words,
    requests_of,
    setup_of,
    tasks_of,
)
from gateway.settings import LocalSettings, Settings, TritonSettings
from gateway.tasks import CONTRACTS

TIMEOUT_S: Final = 5.0
LENGTH: Final = 512  # for dimensions of any size, as `gateway models plan` has it
TICK_S: Final = 1.5  # workers put servers' counters on their page once a second
POLL_S: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where to look beside the control plane; `ops_url` may be empty.

    `servers` are `URL`, or `BACKEND=URL` for one of several backends.
    """

    ops_url: str = ""
    servers: Sequence[str] = ()
    metrics: Sequence[str] = ()


@dataclass(slots=True)
class Looker:
    """Looks at one stack. `unseen` gathers, once each, what could not be looked at."""

    admin: Admin
    settings: Settings
    places: Places
    unseen: dict[str, None] = field(default_factory=dict)

    def look(self, window_s: int) -> Look:
        """Everything that changes, now. Raises `Refusal` where the control plane does not answer."""
        samples = self._fresh() if self.places.ops_url else []
        at_s = time.monotonic()
        models = self.admin.ask("GET", "/models")
        if "unreachable" not in models:
            raise Refusal(f"what answers at {self.admin.url} is not this gateway's control plane", EXIT_REFUSED)
        for one in models["unreachable"]:
            self.unseen[f"servers of '{one['backend']}' one by one: {one['reason']}"] = None
        pages = {url: self._page(url, "nv_gpu_") for url in self.places.metrics}
        return Look(
            at_s=at_s,
            models=models["items"],
            backends=self.admin.ask("GET", "/backends")["items"],
            requests=self._asked(f"/requests?limit={PAGE}", "the last requests").get("items", ()),
            overview=self._asked(f"/overview?window_s={window_s}", "times of requests"),
            samples=samples,
            servers=pages,
        )

    def facts(self, before: Look, after: Look, *, target_p99_ms: float | None) -> Facts:
        """What the two looks say together."""
        plain = self.settings.model_dump(mode="json", exclude_none=True)
        tasks = {name: (one.timeout_ms, one.attempt_timeout_ms) for name, one in self.settings.tasks.items()}
        sequences = frozenset(name for name, one in self.settings.tasks.items() if _is_sequence(one.contract))
        rules = self._asked("/rules", "the rules in force").get("rules", self.settings.rules)
        keys = self._asked(f"/keys?limit={PAGE}", "limits of keys").get("items", ())
        own = [limit for key in (*plain.get("keys", ()), *keys) for limit in key.get("limits") or ()]
        window_s = after.at_s - before.at_s
        seen = counted(before, after, limits=limit_words((*plain.get("limits", ()), *own)))
        self.unseen |= dict.fromkeys(seen.unseen)
        at_ms = max((one["at_ms"] for one in after.requests), default=0)
        gpus = gpus_of(after, self._plans(after))
        self._say_blind(after, has_gpus=bool(gpus))
        return Facts(
            window_s=window_s,
            setups=self.setups(),
            traffic=seen.traffic,
            tasks=tasks_of(tasks, rules, sequences),
            latencies=latencies_of(after.overview),
            requests=requests_of(after.requests, since_ms=at_ms - 1000 * window_s),
            gates=gates_of(
                (before, after),
                {name: one.max_in_flight for name, one in self.settings.backends.items() if one.enabled},
            ),
            servers=seen.servers,
            limiting=seen.limiting,
            gpus=gpus,
            target_p99_ms=target_p99_ms,
            unseen=tuple(self.unseen),
        )

    def setups(self) -> list[Setup]:
        """Every model's: as a server says it, else as the repository on this machine has it."""
        found: dict[tuple[str, str], Setup] = {}
        for backend, repository in self._repositories():
            for setup in self._of_repository(backend, repository):
                found[setup.name] = setup
        for server in self.places.servers:
            backends, url = self._backends_at(server)
            for config in self._configs(url) if backends else ():
                for backend in backends:
                    file = found.get((backend, str(config["name"])))
                    setup = setup_of(
                        config,
                        backend=backend,
                        file=file.file if file else url,
                        faults={**(file.faults if file else {}), **_advised(config)},
                    )
                    found[setup.name] = setup
        return list(found.values())

    def _backends_at(self, server: str) -> tuple[list[str], str]:
        """The backends that a `--server` is of, and its address: all that speak its protocol where none is named."""
        backends = [
            name for name, one in self.settings.backends.items() if isinstance(one, TritonSettings) and one.enabled
        ]
        name, _, url = server.partition("=")
        if not url or "/" in name:
            return backends, server
        if name not in backends:
            self.unseen[f"configurations at {url}: no backend '{name}' of kind triton is on"] = None
        return [name] if name in backends else [], url

    def _repositories(self) -> Iterator[tuple[str, Path]]:
        for name, one in self.settings.backends.items():
            if isinstance(one, TritonSettings | LocalSettings) and one.enabled:
                if one.repository is not None and one.repository.is_dir():
                    yield name, one.repository
                elif not self.places.servers:
                    self.unseen[f"configurations of '{name}': its repository is not on this machine (--server)"] = None

    def _of_repository(self, backend: str, repository: Path) -> Iterator[Setup]:
        try:
            document = examined(repository)
        except ExaminationError as error:
            self.unseen[f"configurations of '{backend}': {error}"] = None
            return
        # A file that cannot be a configuration has the finding alone.
        wrong = {finding.model: finding for finding in findings(document) if finding.reason == BOTH_SCHEDULERS}
        for name, model in document["models"].items():
            for file, read in model["configs"].items():
                config: Mapping[str, Any] = {"name": name} | (read["config"] or {})
                faults = _advised(config)
                if finding := wrong.get(name):
                    faults["sequence_batching"] = finding.reason
                yield setup_of(
                    {**config, "name": name}, backend=backend, file=str(repository / name / file), faults=faults
                )

    def _configs(self, url: str) -> Iterator[Mapping[str, Any]]:
        """What a server says of each model that is ready."""
        try:
            with httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False, verify=system_trust()) as http:
                index = http.post("/v2/repository/index", json={"ready": True}).raise_for_status().json()
                for name in sorted({str(one["name"]) for one in index}):
                    answer = http.get(f"/v2/models/{name}/config")
                    if answer.is_success:
                        yield answer.json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, TypeError, KeyError):
            self.unseen[f"configurations at {url}: no model server answers there"] = None

    def _plans(self, look: Look) -> dict[int, memory_plan.MemoryPlan]:
        """What the first repository's models need of each size of GPU that is there."""
        totals = {gpu.total for gpu in gpus_of(look)}
        repository = next((path for _, path in self._repositories()), None) if totals else None
        if repository is None:
            return {}
        try:
            models = models_of(examined(repository), repository, length=LENGTH)
        except (ExaminationError, UsageError):
            return {}
        return {total: memory_plan.plan(models, gpu_bytes=total) for total in totals}

    def _asked(self, path: str, what: str) -> Mapping[str, Any]:
        """An answer; empty where it is refused, which is said. Raises `Refusal` where nobody answers."""
        try:
            return self.admin.ask("GET", path)
        except Refusal as refusal:
            if refusal.exit_code == EXIT_UNREACHABLE:
                raise
            self.unseen[f"{what}: {refusal.line}"] = None
            return {}

    def _fresh(self) -> list[Sample]:
        """The gateway's page just as its counters of models have changed; as it is, where they stand still.

        Two looks are then apart by the time that lies between the counters, not by up to a second more or less.
        """
        first = self._page(self.places.ops_url, "gateway_")
        models = [one for one in first if one.name.startswith("gateway_model_")]
        until = time.monotonic() + TICK_S
        while models and time.monotonic() < until:
            time.sleep(POLL_S)
            page = self._page(self.places.ops_url, "gateway_")
            if [one for one in page if one.name.startswith("gateway_model_")] != models:
                return page
        return first

    def _page(self, url: str, prefix: str) -> list[Sample]:
        """The samples of a metrics page that begin so; none where it is not there or another's, which is said."""
        from prometheus_client.parser import text_string_to_metric_families

        address = url.rstrip("/") + ("" if url.rstrip("/").endswith("/metrics") else "/metrics")
        try:
            answer = httpx.get(address, timeout=TIMEOUT_S, trust_env=False, verify=system_trust()).raise_for_status()
            found = [
                Sample(name=one.name, labels=one.labels, value=one.value)
                for family in text_string_to_metric_families(answer.text)
                for one in family.samples
                if one.name.startswith(prefix) and math.isfinite(one.value)
            ]
        except (httpx.HTTPError, httpx.InvalidURL, ValueError):
            self.unseen[f"metrics: none at {address}"] = None
            return []
        if not found:
            self.unseen[f"metrics: none that begins with {prefix} at {address}"] = None
        return found

    def _say_blind(self, look: Look, *, has_gpus: bool) -> None:
        if not self.places.ops_url:
            self.unseen["queues, batches and refusals of the window: no --ops-url"] = None
        if not has_gpus:
            self.unseen["GPU memory: no server tells (--metrics-url: Triton's metrics page)"] = None
        if look.overview.get("is_stale") or not any(one["is_on"] for one in look.backends):
            self.unseen["what workers see now: none has told anything for some seconds"] = None


def _advised(config: Mapping[str, Any]) -> dict[str, str]:
    """What `gateway check` says against a configuration's dynamic batching, by the field."""
    return {field: reason for _, field, reason in advice(config) if field == "dynamic_batching"}


def _is_sequence(contract: str) -> bool:
    return bool(getattr(CONTRACTS.get(contract), "is_sequence", False))
