"""Exemplars of several workers, as a real Prometheus has them; both forms of the page have the same series."""

import os
import signal

import httpx
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain

from tests.kit.llm_plane import CHAT
from tests.kit.prometheus import scraping
from tests.kit.relayed import asked, script
from tests.kit.serving import children, serving
from tests.kit.stack import is_running
from tests.kit.upstream import Upstream
from tests.kit.wait import until, until_async

DURATION, FIRST = "gateway_request_duration_seconds", "gateway_first_token_seconds"
TYPES = "application/openmetrics-text;version=1.0.0;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"


def trace_id(number):
    return f"0af7651916cd43dd8448eb21{number:08x}"


def labelled(name, labels, without=()):
    """A series; to Prometheus an empty label is none."""
    return (name, frozenset((key, value) for key, value in labels.items() if value and key not in without))


def series(families):
    return {labelled(one.name, one.labels) for family in families for one in family.samples}


def exemplars(page):
    """Those of a page, by histogram; whoever reads it so strictly also checks all of its form."""
    found = {}
    for family in openmetrics(page):
        for one in family.samples:
            if one.exemplar:
                assert one.exemplar.value <= float(one.labels["le"])
                found.setdefault(family.name, set()).add(one.exemplar.labels["trace_id"])
    return found


async def is_stored(prometheus, name, number):
    query = {"query": f"{name}_bucket", "start": "2000-01-01T00:00:00Z", "end": "2100-01-01T00:00:00Z"}
    answer = (await prometheus.get("/api/v1/query_exemplars", params=query)).json()
    assert answer["status"] == "success", answer
    return any(
        one["labels"] == {"trace_id": trace_id(number)}
        for found in answer["data"]
        for one in found["exemplars"]
        if found["seriesLabels"]["task"] == "general_llm"
    )


async def has_the_series_of(prometheus, ops):
    """Whether Prometheus, which asked for OpenMetrics, has the series of the text form."""
    query = {"match[]": '{__name__=~"gateway_.*",job="gateway"}'}
    found = (await prometheus.get("/api/v1/series", params=query)).json()["data"]
    of_page = series(plain((await ops.get("/metrics", headers={"accept": "text/plain"})).text))
    return {labelled(one.pop("__name__"), one, without=("job", "instance")) for one in found} == of_page


async def test_exemplars_of_several_workers_are_in_prometheus_and_stay_when_a_worker_is_killed(tmp_path):
    async with (
        Upstream(script("an answer", stream=True)) as up,
        serving(tmp_path, up.base_url, "--workers", "2") as gateway,
        scraping(tmp_path, {"gateway": [gateway.ops_url.removeprefix("http://")]}) as prometheus,
        httpx.AsyncClient(base_url=gateway.ops_url, headers={"accept": TYPES}, trust_env=False) as ops,
    ):

        async def ask(number, flags):
            headers = {"traceparent": f"00-{trace_id(number)}-b7ad6b7169203331-{flags}"}
            async with gateway.http() as http:  # a connection of its own: any worker may have it
                assert (await http.post(CHAT, json=asked(stream=True), headers=headers)).status_code == 200

        async def shown():
            return exemplars((await ops.get("/metrics")).text)

        async def is_shown(name, number):
            return trace_id(number) in (await shown()).get(name, ())

        await ask(1, "00")
        await ask(2, "01")
        for name in (DURATION, FIRST):
            await until_async(lambda name=name: is_shown(name, 2))
        assert trace_id(1) not in str(await shown())
        open_page, text_page = await ops.get("/metrics"), await ops.get("/metrics", headers={"accept": "text/plain"})
        assert open_page.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
        assert text_page.headers["content-type"].startswith("text/plain; version=1.0.0")
        assert (open_page.text.endswith("# EOF\n"), " # {" in text_page.text) == (True, False)
        assert series(openmetrics(open_page.text)) == series(plain(text_page.text))

        for name in (DURATION, FIRST):
            await until_async(lambda name=name: is_stored(prometheus, name, 2), timeout_s=15)

        await until_async(lambda: has_the_series_of(prometheus, ops), timeout_s=15)

        workers = children(gateway.process.pid)
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        await until(lambda: not any(map(is_running, workers)))
        assert await is_shown(DURATION, 2)
