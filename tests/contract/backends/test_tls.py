"""TLS to servers that are who they should be, and no word to any other: our gRPC client and our HTTP client."""

import asyncio
import contextlib
import ssl
from contextlib import AsyncExitStack

import grpc
import grpc.aio
import pytest
import uvloop

from gateway.backends.grpc.headers import GrpcError
from gateway.backends.llm.http_client import HttpClient
from gateway.backends.llm.http_connection import HttpError
from gateway.backends.triton.channels import COMPRESSIONS, opener
from gateway.core.errors import BackendError
from gateway.core.types import Place
from gateway.settings import Settings, TlsSettings
from gateway.wiring_backends import open_backends
from tests.kit.tls import Authority
from tests.kit.wait import until

LONG_S = 20.0
LONG_US = 20_000_000
BIG = 20_000_000
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


class Service(grpc.GenericRpcHandler):
    """`/test/echo`, `/test/thrice`, `/test/hang`, and who called whom what."""

    def __init__(self):
        self.heard = []
        self.cancelled = asyncio.Event()

    def service(self, call):
        name = call.method.removeprefix("/test/")
        kind = grpc.stream_stream_rpc_method_handler if name == "thrice" else grpc.unary_unary_rpc_method_handler
        return kind(getattr(self, name))

    async def echo(self, request, context):
        self.heard.append(context.auth_context())
        return request

    async def thrice(self, requests, context):
        async for request in requests:
            for _ in range(3):
                yield request

    async def hang(self, request, context):
        self.heard.append(context.auth_context())
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


@contextlib.asynccontextmanager
async def served(signed, *, asks=None):
    """gRPC's own server with this certificate; with `asks` callers need one of that authority."""
    pairs = [(signed.key.read_bytes(), signed.cert.read_bytes())]
    root = asks.cert.read_bytes() if asks else None
    server, service = grpc.aio.server(options=UNLIMITED), Service()
    server.add_generic_rpc_handlers((service,))
    credentials = grpc.ssl_server_credentials(pairs, root_certificates=root, require_client_auth=asks is not None)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield service, port
    finally:
        await server.stop(0)


@contextlib.asynccontextmanager
async def channel(port, *, compression="none", host="localhost", **tls):
    made = opener(compression, TlsSettings(**tls))(f"127.0.0.1:{port}", host)
    try:
        yield made
    finally:
        await made.close()


async def refusal(port, **tls):
    async with channel(port, **tls) as made:
        with pytest.raises(GrpcError) as refused:
            await made.unary(b"/test/echo", b"secret", timeout_s=LONG_S)
    assert refused.value.code == "UNAVAILABLE"
    assert not refused.value.is_reply
    return refused.value.details


@pytest.mark.parametrize("compression", COMPRESSIONS)
async def test_calls_and_streams_small_and_large(authority, compression):
    async with (
        served(authority.sign("localhost")) as (service, port),
        channel(port, compression=compression, ca_file=authority.cert) as made,
    ):
        assert await made.unary(b"/test/echo", b"hello", timeout_s=LONG_S) == b"hello"
        big = bytes(range(256)) * (BIG // 256)
        answers = await asyncio.gather(
            *(made.unary(b"/test/echo", big[n:], timeout_s=LONG_S) for n in range(3)),
            *(made.unary(b"/test/echo", b"%d" % n, timeout_s=LONG_S) for n in range(50)),
        )
        assert [bytes(one) for one in answers] == [big[n:] for n in range(3)] + [b"%d" % n for n in range(50)]
        parts = [bytes(one) async for one in made.stream(b"/test/thrice", [b"a", big], timeout_s=LONG_S)]
        assert parts == [b"a"] * 3 + [big] * 3
    assert all(one["transport_security_type"] == [b"ssl"] for one in service.heard)


def test_the_same_on_the_loop_of_the_workers(authority):
    uvloop.run(test_calls_and_streams_small_and_large(authority, "none"))


async def test_a_caller_that_leaves_is_told_of_and_a_lost_connection_is_made_anew(authority):
    async with (
        served(authority.sign("localhost")) as (service, port),
        channel(port, ca_file=authority.cert) as made,
    ):
        task = asyncio.create_task(made.unary(b"/test/hang", b"", timeout_s=LONG_S))
        await until(lambda: service.heard)
        task.cancel()
        await asyncio.wait_for(service.cancelled.wait(), LONG_S)
        made._connection._transport.abort()
        await until(lambda: made._connection is None)
        assert await made.unary(b"/test/echo", b"again", timeout_s=LONG_S) == b"again"


async def test_a_certificate_of_the_gateways_own(authority, tmp_path):
    own, stranger = authority.sign("gateway"), Authority(tmp_path).sign("gateway")
    async with served(authority.sign("localhost"), asks=authority) as (service, port):
        async with channel(port, ca_file=authority.cert, cert_file=own.cert, key_file=own.key) as made:
            assert await made.unary(b"/test/echo", b"hello", timeout_s=LONG_S) == b"hello"
        assert service.heard[0]["x509_subject_alternative_name"] == [b"gateway"]
        assert "failed to connect" in await refusal(port, ca_file=authority.cert)
        assert "failed to connect" in await refusal(
            port, ca_file=authority.cert, cert_file=stranger.cert, key_file=stranger.key
        )
        assert len(service.heard) == 1


@pytest.mark.parametrize("compression", COMPRESSIONS)
async def test_a_server_that_is_another_is_told_nothing(authority, tmp_path, compression):
    given = {"compression": compression, "ca_file": authority.cert}
    cases = {
        "certificate verify failed: unable to get local issuer": Authority(tmp_path).sign("localhost"),
        "certificate verify failed: certificate has expired": authority.sign("localhost", hours=0),
        "certificate verify failed: Hostname mismatch": authority.sign("another.host"),
    }
    for words, signed in cases.items():
        async with served(signed) as (service, port):
            told = await refusal(port, **given)
            assert "failed to connect" in told
            assert words in told or compression == "gzip"
            assert not service.heard
            if words.endswith("mismatch"):
                async with channel(port, server_name="another.host", **given) as made:
                    assert await made.unary(b"/test/echo", b"hello", timeout_s=LONG_S) == b"hello"


@contextlib.asynccontextmanager
async def bytes_heard(signed=None, *, alpn=()):
    """A server that notes what it is told, over TLS or in the clear, and the port."""
    context, heard = None, bytearray()
    if signed is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(signed.cert, signed.key)
        context.set_alpn_protocols(list(alpn))

    async def hear(reader, writer):
        with contextlib.suppress(OSError):
            while part := await reader.read(65536):
                heard.extend(part)
                if context is None:
                    writer.write(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(hear, "127.0.0.1", 0, ssl=context)
    async with server:
        yield heard, server.sockets[0].getsockname()[1]


async def test_a_server_that_speaks_in_the_clear_hears_no_request(authority):
    async with bytes_heard() as (heard, port):
        assert "failed to connect" in await refusal(port, ca_file=authority.cert)
    assert heard
    assert b"PRI * HTTP/2.0" not in heard
    assert b"secret" not in heard


@pytest.mark.parametrize(("alpn", "told"), [((), "no HTTP/2"), (("http/1.1",), "no HTTP/2")])
async def test_a_web_server_on_that_port_is_named(authority, alpn, told):
    async with bytes_heard(authority.sign("localhost"), alpn=alpn) as (heard, port):
        assert told in await refusal(port, ca_file=authority.cert)
    assert b"secret" not in heard


# --- LLM endpoints ----------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def endpoint(signed, *, asks=None):
    """An https origin that says whom it has heard."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=asks.cert if asks else None)
    context.load_cert_chain(signed.cert, signed.key)
    if asks is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    heard = []

    async def answer(reader, writer):
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            heard.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    async with server:
        yield heard, f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def got(url, **tls):
    """The answer of an https origin to a client with these settings."""
    context = TlsSettings(**tls).context()
    client = HttpClient(url, headers={}, tls=context, server_name=tls.get("server_name", ""))
    try:
        async with client.exchange("GET", "/", timeout_us=LONG_US) as response:
            return await response.read_all(100)
    finally:
        await client.close()


async def test_an_endpoint_of_a_private_authority(authority, tmp_path):
    own = authority.sign("gateway")
    mutual = {"cert_file": own.cert, "key_file": own.key}
    async with endpoint(authority.sign("127.0.0.1"), asks=authority) as (heard, url):
        assert await got(url, ca_file=authority.cert, **mutual) == b"ok"
        for wrong in ({}, mutual, {"ca_file": authority.cert}, {"ca_file": Authority(tmp_path).cert, **mutual}):
            with pytest.raises(HttpError):
                await got(url, **wrong)
        assert len(heard) == 1
    async with endpoint(authority.sign("llm.internal")) as (heard, url):
        with pytest.raises(HttpError, match="IP address mismatch"):
            await got(url, ca_file=authority.cert)
        assert not heard
        assert await got(url, ca_file=authority.cert, server_name="llm.internal") == b"ok"


KINDS = {
    "openai": {"base_url": "/v1"},
    "anthropic": {"base_url": "/v1"},
    "triton_generate": {"base_url": ""},
}


@pytest.mark.parametrize("kind", KINDS)
async def test_every_kind_of_endpoint_is_probed_and_asked_as_its_settings_say(authority, kind):
    own = authority.sign("gateway")
    tls = {"ca_file": authority.cert, "cert_file": own.cert, "key_file": own.key, "server_name": "llm.internal"}
    place = Place(backend="llm", model="m")
    async with endpoint(authority.sign("llm.internal"), asks=authority) as (heard, url), AsyncExitStack() as stack:
        made = {}
        for name, given in (("good", tls), ("system", {}), ("name", {**tls, "server_name": None}), ("none", None)):
            one = {"kind": kind, "base_url": url + KINDS[kind]["base_url"], **({} if given is None else {"tls": given})}
            settings = Settings.model_validate({"backends": {"llm": one}, "tasks": {}, "rules": []})
            made[name] = (await open_backends(settings, stack))["llm"]
        await made["good"].probe(place)
        assert len(heard) == 1
        await made["good"].figures()
        asked = len(heard)
        for name in ("system", "name", "none"):
            with pytest.raises(BackendError, match="certificate"):
                await made[name].probe(place)
            await made[name].figures()
        assert len(heard) == asked


def test_files_that_are_no_certificates_are_named(authority, tmp_path):
    (tmp_path / "no.pem").write_text("no certificate")
    own = authority.sign("gateway")
    sealed = tmp_path / "sealed.key"
    sealed.write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n")
    for name in ("no.pem", "missing.pem"):
        with pytest.raises(ValueError, match=r"tls\.ca_file: cannot be read"):
            TlsSettings(ca_file=tmp_path / name).context()
    for cert, key in ((tmp_path / "no.pem", own.key), (own.cert, authority.sign("b").key), (own.cert, sealed)):
        with pytest.raises(ValueError, match=r"tls\.cert_file, tls\.key_file: cannot be read"):
            TlsSettings(cert_file=cert, key_file=key).context()
