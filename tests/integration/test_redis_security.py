"""Who may speak with Redis: the ACL line of docs/redis.md, TLS, and a Redis that is full."""

import asyncio
import contextlib
import re
import ssl
import subprocess
from pathlib import Path

import pytest
from redis.exceptions import AuthenticationError, NoPermissionError

from gateway.core.admissions import Wanted
from gateway.core.rate_limit import counters
from gateway.core.rules import RuleSet
from gateway.core.types import Caller, Limit, Place
from gateway.settings import RedisSettings
from gateway.stores.control.rule_store import RedisRuleStore
from gateway.stores.leases import RedisLeases
from gateway.stores.memory_admissions import MemoryAdmissions
from gateway.stores.redis_admissions import RedisAdmissions
from gateway.stores.redis_deploys import RedisDeployStore
from gateway.stores.redis_events import RedisEvents
from gateway.stores.redis_outcomes import RedisOutcomes
from gateway.stores.redis_rules import RedisRuleSource
from gateway.stores.redis_script import UNREACHABLE, connect
from gateway.stores.redis_sequences import RedisSequenceStore
from gateway.stores.redis_usage import RedisUsageSource, utc_today
from tests.kit.control_walk import change_rules_and_switches, count_what_happens, keep_who_did_what
from tests.kit.redis import HOST, RedisServer
from tests.kit.redis_many import RedisCluster, say
from tests.kit.wait import until, until_async

DOCUMENT = Path(__file__).parents[2] / "docs" / "redis.md"
PREFIX = "gateway:"
PLACE = Place(backend="triton", model="m")
VARIABLE = "SOME_PASSWORD"
SECRET = "s3cr3t/with@signs"  # noqa: S105 - of this test alone


def limited(kind: str, **limit) -> Wanted:
    limits = (Limit(kind=kind, amount=10, **limit),)
    caller = Caller(key_id="k", tenant="acme", limits=limits)
    return Wanted(tenant="acme", takes=counters(caller, "t", "m", "batch"), ordering_key="o", queue_bound=5)


# --- the ACL line ---------------------------------------------------------------------------------


def the_line() -> list[str]:
    """What docs/redis.md says, with our password."""
    (found,) = re.findall(r"^user (gateway on >CHANGE-ME resetkeys .*)$", DOCUMENT.read_text(), re.MULTILINE)
    return found.replace("CHANGE-ME", SECRET).split()


@pytest.fixture(params=["single", "cluster"])
def guarded(request):
    """A Redis where the default user may do nothing, and the documented one what it needs."""
    with RedisServer() if request.param == "single" else RedisCluster() as redis:
        for server in [redis] if request.param == "single" else [*redis.masters, redis.replica]:
            say(server, "ACL", "SETUSER", *the_line())
        yield redis


async def test_the_documented_user_can_do_all_that_the_gateway_does_and_no_more(guarded, monkeypatch):
    monkeypatch.setenv(VARIABLE, SECRET)
    settings = RedisSettings(url=guarded.url, username="gateway", password_env=VARIABLE)
    client = connect(settings)
    admissions = RedisAdmissions(client, PREFIX, MemoryAdmissions(lambda: 0), timeout_s=5)
    rules = RedisRuleSource(client, PREFIX, RuleSet(revision=0, rules=()), lambda _: None, "w")
    try:
        admissions.start()
        for wanted in (limited("requests", per="day", burst=10), limited("usd", per="month"), limited("concurrent")):
            admission = await admissions.admit(wanted)
            assert admission.verdict.allowed
            assert not admission.verdict.degraded
            await admission.turn(within_us=10**6)
            admission.settle(tokens=1, nano_usd=1)
        await rules.start()
        store = RedisRuleStore(client, PREFIX)
        assert await store.put((), expected_revision=1) == 2
        await until(lambda: rules.current().revision == 2)
        assert [worker.id for worker in await store.workers()] == ["w"]
        sequences = RedisSequenceStore(client, PREFIX, timeout_s=5)
        assert await sequences.pin("o", PLACE, [1], idle_us=10**9, for_us=0) == 1
        await sequences.end("o", await sequences.find("o", for_us=0))
        leases, deploys, events = (kind(client, PREFIX) for kind in (RedisLeases, RedisDeployStore, RedisEvents))
        assert await leases.take("a", 30)
        await deploys.save({"id": "d", "started_ms": 1})
        assert await deploys.claim("m", "o")
        await deploys.release("m", "o")
        await events.add({"n": 1})
        assert await events.read() == [{"n": 1}]
        for part in (change_rules_and_switches, keep_who_did_what, count_what_happens):
            await part(client, PREFIX)
        assert await RedisUsageSource(client, PREFIX).read(utc_today(), utc_today()) == []
        assert await RedisOutcomes(client, PREFIX).read("m") == {}
        for forbidden in (
            ("GET", "other:key"),
            ("FLUSHALL",),
            ("KEYS", "*"),
            ("CONFIG", "GET", "*"),
            ("PUBLISH", "x", "y"),
        ):
            with pytest.raises(NoPermissionError):
                await client.execute_command(*forbidden)
        script = "return redis.call('GET', 'other:key')"
        with pytest.raises(UNREACHABLE, match=r"(?i)can't access|permission|NOPERM"):
            await client.eval(script, 1, f"{PREFIX}a")
    finally:
        await rules.close()
        await admissions.close()
        await client.aclose()


async def test_a_wrong_password_is_told_and_never_repeated(redis_server, caplog, monkeypatch):
    monkeypatch.setenv(VARIABLE, "wrong-one")
    client = connect(RedisSettings(url=redis_server.url, username="nobody", password_env=VARIABLE))
    with pytest.raises(AuthenticationError) as refused:
        await client.get("a")
    assert "wrong-one" not in f"{refused.value!r}{caplog.text}"
    await client.aclose()


# --- TLS ------------------------------------------------------------------------------------------


def certificate(folder: Path, name: str, subject: str) -> tuple[Path, Path]:
    """One that signs itself, for `subject`."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=gateway-test"
    made = [*words.split(), "-addext", f"subjectAltName={subject}", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(made, check=True, capture_output=True)
    return cert, key


@contextlib.asynccontextmanager
async def tls_before(server: RedisServer, cert: Path, key: Path, client_cert: Path | None = None):
    """A port that speaks TLS, with a Redis behind it; the Redis at hand may be built without."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=client_cert)
    context.load_cert_chain(cert, key)
    if client_cert is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    open_tasks: set[asyncio.Task] = set()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(65536):
                writer.write(chunk)
                await writer.drain()
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection(HOST, server.port)
        both = [asyncio.create_task(copy(reader, inner_writer)), asyncio.create_task(copy(inner_reader, writer))]
        open_tasks.update(both)
        await asyncio.gather(*both, return_exceptions=True)

    listener = await asyncio.start_server(accept, HOST, 0, ssl=context)
    try:
        yield f"rediss://{HOST}:{listener.sockets[0].getsockname()[1]}/0"
    finally:
        listener.close()
        for task in open_tasks:
            task.cancel()
        await asyncio.gather(*open_tasks, return_exceptions=True)


async def answers(settings: RedisSettings) -> bool:
    client = connect(settings)
    try:
        return bool(await client.ping())
    except UNREACHABLE:
        return False
    finally:
        await client.aclose()


async def test_tls_with_a_certificate_that_is_checked(redis_server, tmp_path):
    cert, key = certificate(tmp_path, "server", f"IP:{HOST}")
    elsewhere, elsewhere_key = certificate(tmp_path, "elsewhere", "DNS:another.host")
    async with tls_before(redis_server, cert, key) as url:
        assert await answers(RedisSettings(url=url, ca_file=cert))
        assert not await answers(RedisSettings(url=url))  # nobody knows who signed it
        assert not await answers(RedisSettings(url=url, ca_file=elsewhere))
        assert not await answers(RedisSettings(url=url.replace("rediss:", "redis:")))
    async with tls_before(redis_server, elsewhere, elsewhere_key) as url:
        assert not await answers(RedisSettings(url=url, ca_file=elsewhere))  # another host's


async def test_tls_with_a_certificate_of_the_gateways_own(redis_server, tmp_path):
    cert, key = certificate(tmp_path, "server", f"IP:{HOST}")
    own, own_key = certificate(tmp_path, "own", "DNS:gateway")
    async with tls_before(redis_server, cert, key, client_cert=own) as url:
        assert await answers(RedisSettings(url=url, ca_file=cert, cert_file=own, key_file=own_key))
        assert not await answers(RedisSettings(url=url, ca_file=cert))


def test_certificates_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "no.pem").write_text("no certificate")
    for name in ("no.pem", "missing.pem"):
        with pytest.raises(ValueError, match=r"redis\.ca_file: cannot be read"):
            connect(RedisSettings(url="rediss://h", ca_file=tmp_path / name))


# --- a Redis that is full -------------------------------------------------------------------------


async def test_a_full_redis_is_like_one_that_is_away_and_what_is_held_is_given_back():
    wanted = limited("concurrent")
    with RedisServer("--maxmemory-policy", "noeviction") as server:
        client = connect(server.url)
        admissions = RedisAdmissions(client, PREFIX, MemoryAdmissions(lambda: 0, is_degraded=True))
        try:
            held = await admissions.admit(wanted)
            assert not held.verdict.degraded
            say(server, "CONFIG", "SET", "maxmemory", "1")
            alone = await admissions.admit(Wanted(tenant="acme", takes=wanted.takes))
            assert alone.verdict.allowed
            assert alone.verdict.degraded
            assert (await RedisRuleStore(client, PREFIX).get()).revision == 0  # what needs no room goes on
            held.settle(tokens=0, nano_usd=0)
            say(server, "CONFIG", "SET", "maxmemory", "0")

            async def is_back() -> bool:
                return not (await admissions.admit(Wanted(tenant="acme", takes=wanted.takes))).verdict.degraded

            await until_async(is_back)
            await until_async(lambda: nothing_waits(client))
        finally:
            await admissions.close()
            await client.aclose()


async def nothing_waits(client) -> bool:
    return await client.zcard(f"{PREFIX}adm:{{acme}}:queue:acme:o") == 0
