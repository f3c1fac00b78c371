"""What servers count of their models, before a run and after it: batches, and how much of the time was waiting."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Final, Protocol

import httpx

from gateway.core.doctor.counting import counted
from gateway.core.doctor.facts import Traffic
from gateway.core.doctor.looks import Look, Sample
from gateway.core.models import ModelFigures
from gateway.tuning.load.asks import AskError
from gateway.tuning.load.targets import Clients
from gateway.tuning.report import ServerReport

COLLECTED_S: Final = 1.2  # a gateway reads its servers' counters once a second (`gateway.health.INTERVAL_S`)
TIMEOUT_S: Final = 5.0
PAGE_BYTES: Final = 16 * 2**20  # of a gateway with thousands of replicas


class Statistics(Protocol):
    """A look before a run, and what has come since."""

    async def begin(self) -> None:
        """The look before. Raises `AskError` where nothing can be seen."""
        ...

    async def end(self) -> Sequence[ServerReport]:
        """What was counted since. Raises `AskError`."""
        ...


class TritonStatistics:
    """The counters of one server by gRPC."""

    def __init__(self, clients: Clients, triton: str) -> None:
        self._clients, self._triton = clients, triton
        self._before: Sequence[ModelFigures] = ()

    async def begin(self) -> None:
        """The look before."""
        self._before = await self._clients.figures(self._triton)

    async def end(self) -> Sequence[ServerReport]:
        """Models that answered something, all versions together."""
        return grown(self._before, await self._clients.figures(self._triton), backend=self._triton)


class GatewayStatistics:
    """The metrics page of a gateway: of all its backends that have model statistics."""

    def __init__(self, ops_url: str) -> None:
        url = ops_url.rstrip("/")
        self._url = url if url.endswith("/metrics") else f"{url}/metrics"
        self._before = Look(at_s=0.0)

    async def begin(self) -> None:
        """The look before; once more where a gateway that has just started did not yet ask its servers."""
        self._before = await self._look(0.0)
        if not self._before.samples:
            await asyncio.sleep(COLLECTED_S)
            self._before = await self._look(0.0)

    async def end(self) -> Sequence[ServerReport]:
        """Models that answered something; a second later, when the gateway has read the last of it."""
        await asyncio.sleep(COLLECTED_S)
        found = counted(self._before, await self._look(1.0)).traffic
        return [server_report(backend, model, one) for (backend, model), one in sorted(found.items())]

    async def _look(self, at_s: float) -> Look:
        from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415 - slow to import

        try:
            page = await self._page()
            samples = [
                Sample(name=one.name, labels=one.labels, value=one.value)
                for family in text_string_to_metric_families(page)
                if family.name.startswith("gateway_model_")
                for one in family.samples
            ]
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, ValueError) as error:
            raise AskError(f"ops-url: no metrics at {self._url}") from error
        return Look(at_s=at_s, samples=samples)

    async def _page(self) -> str:
        """The whole page. Raises ValueError for more than `PAGE_BYTES`, and TimeoutError for one that does not end."""
        page = bytearray()
        plain = {"accept-encoding": "identity"}
        async with (
            asyncio.timeout(TIMEOUT_S),
            httpx.AsyncClient(trust_env=False) as http,
            http.stream("GET", self._url, headers=plain) as answer,
        ):
            async for part in answer.raise_for_status().aiter_raw():
                page += part
                if len(page) > PAGE_BYTES:
                    raise ValueError("too long")
        return page.decode()


def grown(before: Sequence[ModelFigures], after: Sequence[ModelFigures], *, backend: str) -> list[ServerReport]:
    """By how much counters have grown, by model; one that was loaded anew counts from 0."""
    old = {(one.model, one.version): one for one in before}
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    sizes: dict[str, Counter[int]] = defaultdict(Counter)
    for one in after:
        then = old.get((one.model, one.version))
        sign = 1 if then is not None and then.executions <= one.executions else 0
        for name in _COUNTS:
            sums[one.model][name] += getattr(one, name) - sign * (getattr(then, name) if then else 0)
        for size, count in one.batch_sizes.items():
            sizes[one.model][size] += count - sign * (then.batch_sizes.get(size, 0) if then else 0)
    return [
        server_report(
            backend,
            model,
            Traffic(
                window_s=1.0,
                requests=counts["requests"],
                rows=counts["inferences"],
                executions=counts["executions"],
                queue_s=counts["queue_us"] / 1e6,
                compute_s=sum(counts[name] for name in _COUNTS if name.startswith("compute")) / 1e6,
                batch_sizes={size: count for size, count in sorted(sizes[model].items()) if count > 0},
            ),
        )
        for model, counts in sorted(sums.items())
        if counts["requests"]
    ]


_COUNTS: Final = (
    *("requests", "inferences", "executions", "queue_us"),
    *("compute_input_us", "compute_infer_us", "compute_output_us"),
)


def server_report(backend: str, model: str, traffic: Traffic) -> ServerReport:
    """One model's counters as a report has them; times are means over requests."""
    spent_s = traffic.queue_s + traffic.compute_s
    return ServerReport(
        backend=backend,
        model=model,
        executions=traffic.executions,
        mean_batch=traffic.mean_batch,
        queue_ms=traffic.queue_s / traffic.requests * 1e3,
        compute_ms=traffic.compute_s / traffic.requests * 1e3,
        queue_share=traffic.queue_s / spent_s if spent_s else 0.0,
        batch_sizes=dict(traffic.batch_sizes),
    )
