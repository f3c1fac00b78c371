"""Prometheus and its `promtool`, and what the files in `deploy/` give them."""

import asyncio
import contextlib
import json
import re
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.kit.serving import free_port
from tests.kit.wait import until_async

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus"
DASHBOARDS = sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))
MISSING = "the tests of alerts and dashboards need Prometheus: `apt-get install prometheus`"
NAMES = re.compile(r"\b(?:gateway|nv)_[a-z0-9_]+")
RECORDED = re.compile(r"\bgateway:[a-z0-9_:]+")


def tool(name: str) -> str:
    """The path of `prometheus` or `promtool`."""
    found = shutil.which(name)
    assert found, MISSING
    return found


def panels() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every panel of every dashboard, with `dashboard/title`."""
    for path in DASHBOARDS:
        board = json.loads(path.read_text())
        for panel in board["panels"]:
            yield f"{path.stem}/{panel['title']}", panel


def queries() -> Iterator[tuple[str, str]]:
    """Every query of a panel, as Grafana would send it, with where it stands."""
    for where, panel in panels():
        for target in panel["targets"]:
            yield where, target["expr"].replace("$__rate_interval", "20s")


JOBS = {
    job
    for text in [*((RULES / name).read_text() for name in ("alerts.yml", "recording.yml")), *(q for _, q in queries())]
    for job in re.findall(r'\bjob="([^"]+)"', text)
}
"""The jobs that alerts and panels choose by."""


def config(folder: Path, where: Mapping[str, Sequence[str]]) -> Path:
    """The shipped configuration with these addresses, by job, and no others; scraped faster."""
    document = yaml.safe_load((RULES / "prometheus.yml").read_text())
    document["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    document["rule_files"] = [str(RULES / name) for name in document["rule_files"]]
    document["scrape_configs"] = [job for job in document["scrape_configs"] if job["job_name"] in where]
    for job in document["scrape_configs"]:
        job.pop("dns_sd_configs", None)
        job["static_configs"] = [{"targets": list(where[job["job_name"]])}]
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(document))
    return path


@contextlib.asynccontextmanager
async def scraping(folder: Path, where: Mapping[str, Sequence[str]]) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a Prometheus that scrapes these addresses until the block ends; its log is in `folder`."""
    port = free_port()
    words = (
        f"--config.file={config(folder, where)}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
        "--enable-feature=exemplar-storage",  # as docker-compose.yml has it
    )
    with (folder / "prometheus.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(tool("prometheus"), *words, stderr=log)
    try:
        async with client(f"http://127.0.0.1:{port}") as http:
            yield http
    finally:
        process.terminate()
        await process.wait()


@contextlib.asynccontextmanager
async def client(url: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the Prometheus there, once it is ready."""
    async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
        await until_async(lambda: _is_ready(http), timeout_s=30)
        yield http


async def _is_ready(http: httpx.AsyncClient) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return (await http.get("/-/ready")).status_code == 200
    return False
