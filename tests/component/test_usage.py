"""`GET /admin/v1/usage` and `gateway usage`, over books on a variable."""

import csv
import io
import json
import threading
import time
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta

import httpx
import pytest
import uvicorn
from typer.testing import CliRunner

from gateway.__main__ import app as cli
from gateway.admin.app import create_admin_app
from gateway.admin.plane import Plane
from gateway.admin_ports import UsageRow
from gateway.core.errors import RulesUnavailable
from tests.kit.admin_plane import Asked
from tests.kit.redis import HOST
from tests.kit.serving import free_port

TOKEN = "admin-secret"  # noqa: S105 - made up here
FIRST, SECOND = date(2026, 3, 1), date(2026, 3, 2)


def row(day=FIRST, tenant="acme", task="general_llm", model="gpt-4.1", n=1, nano=2_100_000) -> UsageRow:
    return UsageRow(
        day=day,
        tenant=tenant,
        task=task,
        backend="openai",
        model=model,
        requests=2 * n,
        failed=n,
        input_tokens=1000 * n,
        output_tokens=10 * n,
        cached_tokens=900 * n,
        reasoning_tokens=3 * n,
        estimated_requests=n,
        cost_nano_usd=nano * n,
    )


class Books:
    """A `UsageSource` on a variable."""

    def __init__(self) -> None:
        self.rows = [row(), row(SECOND, n=2), row(SECOND, model="deepseek-chat"), row(SECOND, tenant="b", nano=0)]
        self.asked: tuple[date, date] | None = None
        self.is_away = False

    async def read(self, first_day: date, last_day: date) -> list[UsageRow]:
        if self.is_away:
            raise RulesUnavailable("the books of usage cannot be read now")
        self.asked = (first_day, last_day)
        return [row for row in self.rows if first_day <= row.day <= last_day]


def plane(books: Books):
    return create_admin_app(Plane(usage=books), TOKEN)


@pytest.fixture
def books():
    return Books()


@pytest.fixture
async def admin(books):
    transport = Asked(plane(books))
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://admin/admin/v1", headers=headers) as client:
        yield client


async def items(admin, **asked):
    answer = await admin.get("/usage", params={"from": "2026-03-01", "to": "2026-03-02", **asked})
    assert answer.status_code == 200, answer.text
    document = answer.json()
    assert document["next"] is None
    return document["items"]


async def test_the_default_is_today_by_tenant_and_task(admin, books):
    today = datetime.now(UTC).date()
    books.rows = [row(today), row(today, model="other"), row(today - timedelta(days=1))]
    answer = await admin.get("/usage")
    assert answer.json() == {
        "items": [
            {
                "tenant": "acme",
                "task": "general_llm",
                "requests": 4,
                "failed": 2,
                "input_tokens": 2000,
                "output_tokens": 20,
                "cached_tokens": 1800,
                "reasoning_tokens": 6,
                "estimated_requests": 2,
                "cost_usd": 0.0042,
            }
        ],
        "next": None,
    }


@pytest.mark.parametrize(
    ("by", "groups"),
    [
        ("tenant", [("acme", 8, 0.0084), ("b", 2, 0)]),
        ("day", [("2026-03-01", 2, 0.0021), ("2026-03-02", 8, 0.0063)]),
        (
            "day, model,day",
            [
                ("2026-03-01", "gpt-4.1", 2, 0.0021),
                ("2026-03-02", "deepseek-chat", 2, 0.0021),
                ("2026-03-02", "gpt-4.1", 6, 0.0042),
            ],
        ),
        ("backend", [("openai", 10, 0.0084)]),
    ],
)
async def test_it_is_summed_as_asked(admin, by, groups):
    names = list(dict.fromkeys(name.strip() for name in by.split(",")))
    found = await items(admin, by=by)
    assert [tuple(one[key] for key in (*names, "requests", "cost_usd")) for one in found] == groups
    assert all(not {"tenant", "task", "backend", "model", "day"} - set(names) & one.keys() for one in found)


async def test_sums_are_exact(admin, books):
    books.rows = [row(nano=100_000_000) for _ in range(3)] + [row(nano=1)]
    assert (await items(admin, by="model"))[0]["cost_usd"] == 0.300000001


async def test_a_first_day_alone_leads_to_today_and_a_last_day_alone_is_one_day(admin, books):
    today = datetime.now(UTC).date()
    await admin.get("/usage", params={"from": str(today - timedelta(days=3))})
    assert books.asked == (today - timedelta(days=3), today)
    await admin.get("/usage", params={"to": "2026-03-01"})
    assert books.asked == (FIRST, FIRST)


@pytest.mark.parametrize(
    ("asked", "field", "told"),
    [
        ({"from": "yesterday"}, "from", "must be a day such as 2026-01-31"),
        ({"to": "2026-02-30"}, "to", "must be a day"),
        ({"from": ""}, "from", "must be a day"),
        ({"from": "2026-03-02", "to": "2026-03-01"}, "from", "is after the last day, 2026-03-01"),
        ({"from": "2020-01-01", "to": "2026-03-01"}, "from", "more than 400 days"),
        ({"by": "tenant,team"}, "by", "must be some of tenant, task, backend, model, day"),
        ({"by": ""}, "by", "must be some of"),
        ({"form": "2026-03-01"}, "form", "there are from, to, by"),
    ],
)
async def test_a_bad_parameter_is_named(admin, books, asked, field, told):
    answer = await admin.get("/usage", params=asked)
    assert (answer.status_code, answer.headers["content-type"]) == (422, "application/problem+json")
    document = answer.json()
    assert document["code"] == "invalid_input"
    assert document["errors"][0]["field"] == field
    assert told in document["detail"]
    assert books.asked is None


async def test_the_longest_time(admin):
    last = date(2026, 3, 2)
    assert (await items(admin, **{"from": str(last - timedelta(days=399))})) != []


async def test_without_the_store_or_the_token(admin, books):
    books.is_away = True
    answer = await admin.get("/usage")
    assert (answer.status_code, answer.json()["code"]) == (503, "store_unavailable")
    assert (await admin.get("/usage", headers={"authorization": ""})).status_code == 401


async def test_a_plane_without_books_has_no_such_path():
    transport = httpx.ASGITransport(create_admin_app(Plane(), TOKEN))
    async with httpx.AsyncClient(transport=transport, headers={"authorization": f"Bearer {TOKEN}"}) as client:
        assert (await client.get("http://admin/admin/v1/usage")).status_code == 404


# --- the command ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Books, str]]:
    books, port = Books(), free_port()
    config = uvicorn.Config(plane(books), host=HOST, port=port, log_level="error", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    yield books, f"http://{HOST}:{port}"
    server.should_exit = True
    thread.join()


@pytest.fixture
def gateway_usage(served, monkeypatch, tmp_path):
    books, url = served
    books.__init__()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GATEWAY_ADMIN_URL", url)
    monkeypatch.setenv("GATEWAY_ADMIN_TOKEN", TOKEN)
    monkeypatch.setenv("COLUMNS", "140")

    def run(*args: str):
        return CliRunner().invoke(cli, ["usage", *args])

    return run


MARCH = ("--from", "2026-03-01", "--to", "2026-03-02")


def test_a_table_with_totals(gateway_usage):
    done = gateway_usage(*MARCH)
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.stdout.splitlines()]
    first = lines.index(["acme", "general_llm", "8", "4,000", "40", "4", "0.008400"])
    assert lines[first + 1] == ["(4)", "(3,600)", "(12)"]
    assert lines[-3:] == [["total", "-", "10", "5,000", "50", "5", "0.008400"], ["(5)", "(4,500)", "(15)"], []]


def test_a_narrow_terminal_cuts_no_figure(gateway_usage, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = gateway_usage(*MARCH).stdout
    assert all(figure in shown for figure in ("0.008400", "4,000", "4,500"))
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_a_tiny_cost_is_not_shown_as_none(gateway_usage, served):
    served[0].rows = [row(nano=1), row(tenant="b", nano=0)]
    shown = gateway_usage(*MARCH, "--by", "tenant").stdout
    assert "< 0.000001" in shown
    assert " 0.000000 " in shown


def test_values_for_a_spreadsheet(gateway_usage):
    done = gateway_usage(*MARCH, "--by", "model,day", "--csv")
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [(r["model"], r["day"], r["input_tokens"], r["cost_usd"]) for r in rows] == [
        ("deepseek-chat", "2026-03-02", "1000", "0.002100000"),
        ("gpt-4.1", "2026-03-01", "1000", "0.002100000"),
        ("gpt-4.1", "2026-03-02", "3000", "0.004200000"),
    ]


def test_json_is_the_planes_own_answer(gateway_usage):
    assert json.loads(gateway_usage(*MARCH, "--json", "--by", "tenant").stdout)["items"][1]["tenant"] == "b"


def test_nothing_was_used(gateway_usage):
    done = gateway_usage()
    assert (done.exit_code, done.stdout) == (0, "nothing was used in this time\n")
    assert gateway_usage("--csv").stdout.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "code", "told"),
    [
        (("--by", "team"), 1, "refused: by: must be some of tenant, task, backend, model, day"),
        (("--from", "monday"), 1, "refused: from: must be a day such as 2026-01-31"),
        (("--json", "--csv"), 2, "give either --json or --csv"),
        (("--admin-url", f"http://{HOST}:1"), 3, "no control plane answers"),
    ],
)
def test_what_cannot_be_done_is_one_line(gateway_usage, args, code, told):
    done = gateway_usage(*args)
    assert done.exit_code == code
    assert told in done.stderr
    assert done.stderr.count("\n") == 1
