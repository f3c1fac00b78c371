"""The table of attacks by raw sockets: every shape on every path, with every name at every place."""

import gzip
import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from gateway.admin.access.roles import PREFIX, ROWS
from gateway.api.app import PATHS
from tests.fuzz.planes import MAX_BODY_BYTES
from tests.fuzz.wire import Attack

JSON: Final = "content-type: application/json"
BINARY: Final = "content-type: application/octet-stream\r\ninference-header-content-length: "
OIP: Final = (
    "/v2/models/text_embedding/infer",
    "/v2/models/text_embedding/versions/1/infer",
    "/v2/models/text_embedding/generate",
    "/v2/models/text_embedding/generate_stream",
    "/v2/repository/index",
    "/v2/repository/models/nothing/load",
    "/v2/repository/models/nothing/unload",
)
DRAINED_S: Final = 10.0  # 2 s that a body has here, and 3 s in which the rest of a refused one may come, and more
CHAT: Final = b'{"model":"general_llm","messages":[{"role":"user","content":"hi"}]}'
EMBED: Final = b'{"input":{"text":"hello"}}'
BODIES: Final[Mapping[str, bytes]] = {
    "/v1/infer": b'{"task":"text-embedding","input":{"text":"hello"}}',
    "/v1/infer/batch": b'{"requests":[{"task":"text-embedding","input":{"text":"hello"}}]}',
    "/v1/tasks/text-embedding": EMBED,
    "/v1/chat/completions": CHAT,
    "/v1/completions": b'{"model":"general_llm","prompt":"hi"}',
    "/v1/responses": b'{"model":"general_llm","input":"hi"}',
    "/v1/embeddings": b'{"model":"text-embedding","input":"hi"}',
}


def data_posts() -> list[str]:
    """The data plane's paths that take a body."""
    return sorted({path.replace("{task}", "text-embedding") for method, path, *_ in PATHS if method == "POST"} | {*OIP})


def data_gets() -> list[str]:
    """Those that take none."""
    own = {p.replace("{task}", "x").replace("{model:path}", "x") for method, p, *_ in PATHS if method == "GET"}
    return sorted(
        own
        | {
            "/v2",
            "/v2/models/x",
            "/v2/models/x/ready",
            "/v2/models/x/config",
            "/v2/models/x/stats",
            "/healthz/ready",
            "/openapi.json",
        }
    )


def admin_paths(name: str = "x") -> list[tuple[str, str]]:
    """Every method and path of the control plane, `name` in the place of each parameter."""
    made = []
    for row in ROWS:
        path = row.path
        for parameter in (
            "deploy_id",
            "key_id",
            "model",
            "request_id",
            "rollout_id",
            "revision",
            "name:path",
            "switch_id",
            "rule:path",
        ):
            path = path.replace("{" + parameter + "}", name)
        made.append((row.method, PREFIX + path))
    return made


def request(method: str, path: str, key: str, body: bytes = b"", *lines: str, framing: str | None = None) -> bytes:
    """A request's bytes; with a length of its own where nothing else is said."""
    told = f"content-length: {len(body)}" if framing is None else framing
    rest = (*lines, told, "connection: close") if told else (*lines, "connection: close")
    head = "\r\n".join((f"{method} {path} HTTP/1.1", "host: x", f"authorization: Bearer {key}", *rest, "", ""))
    return head.encode("utf-8", "surrogatepass") + body


# --- framing --------------------------------------------------------------------------------------

HIDDEN: Final = (
    b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-request-id: smuggled-answer\r\nauthorization: Bearer %b\r\n\r\n"
)
CHUNKED: Final = "transfer-encoding: chunked"
FRAMINGS: Final[Mapping[str, tuple[Sequence[str], str]]] = {
    # name: header lines, and where the hidden request is: "length" behind a right body, "chunks" behind the last chunk
    "length and chunked": (("content-length: {n}", CHUNKED), "chunks"),
    "chunked and length": ((CHUNKED, "content-length: {n}"), "chunks"),
    "length of all, chunked": ((CHUNKED, "content-length: {all}"), "chunks"),
    "two lengths": (("content-length: {n}", "content-length: {all}"), "length"),
    "two lengths, reversed": (("content-length: {all}", "content-length: {n}"), "length"),
    "two lengths in one": (("content-length: {n}, {all}",), "length"),
    "the same length twice": (("content-length: {n}", "content-length: {n}"), "length"),
    "a plus": (("content-length: +{n}",), "length"),
    "a minus": (("content-length: -{n}",), "length"),
    "hexadecimal": (("content-length: 0x{n}",), "length"),
    "an underscore": (("content-length: 1_0",), "length"),
    "two numbers": (("content-length: {n} {n}",), "length"),
    "beyond 64 bits": (("content-length: 18446744073709551617",), "length"),
    "an empty length": (("content-length: ",), "length"),
    "a length of Arabic digits": (("content-length: \u0665\u0662",), "length"),
    "space before the colon": (("content-length : {n}", CHUNKED), "chunks"),
    "space before chunked's colon": (("transfer-encoding : chunked", "content-length: {n}"), "chunks"),
    "xchunked": (("transfer-encoding: xchunked", "content-length: {n}"), "chunks"),
    "chunked, identity": (("transfer-encoding: chunked, identity",), "chunks"),
    "identity, chunked": (("transfer-encoding: identity, chunked",), "chunks"),
    "chunked twice": ((CHUNKED, CHUNKED), "chunks"),
    "chunked, chunked": (("transfer-encoding: chunked, chunked",), "chunks"),
    "two encodings": (("transfer-encoding: gzip", CHUNKED), "chunks"),
    "quoted": (('transfer-encoding: "chunked"', "content-length: {n}"), "chunks"),
    "folded": (("transfer-encoding:\r\n chunked", "content-length: {n}"), "chunks"),
    "folded length": (("content-length:\r\n {n}",), "length"),
    "vertical tab": (("transfer-encoding:\x0bchunked", "content-length: {n}"), "chunks"),
    "tab": (("transfer-encoding:\tchunked",), "chunks"),
    "NUL in the value": (("transfer-encoding: chunked\x00", "content-length: {n}"), "chunks"),
    "NUL in the name": (("transfer\x00-encoding: chunked", "content-length: {n}"), "chunks"),
    "a bare CR": (("x: y\rtransfer-encoding: chunked", "content-length: {n}"), "chunks"),
    "a bare LF": (("x: y\ntransfer-encoding: chunked", "content-length: {n}"), "chunks"),
    "an empty name": ((": chunked", "content-length: {n}"), "length"),
    "no colon": (("transfer-encoding chunked", "content-length: {n}"), "length"),
    "a name with a space": (("transfer encoding: chunked", "content-length: {n}"), "length"),
    "an underscore for the hyphen": (("transfer_encoding: chunked", "content-length: {n}"), "length"),
    "capitals": (("TRANSFER-ENCODING: CHUNKED",), "chunks"),
    "a length of nothing": (("content-length: 0",), "length"),
    "no framing": ((), "length"),
    "upgrade to h2c": (("connection: upgrade, http2-settings", "upgrade: h2c",
    "http2-settings: AAMAAABkAARAAAAAAAIAAAAA", "content-length: {n}"), "length"),
    "expect": (("expect: 100-continue", "content-length: {n}"), "length"),
    "expect of another kind": (("expect: 200-ok", "content-length: {n}"), "length"),
}  # fmt: skip
CHUNKS: Final[Mapping[str, bytes]] = {
    "a size beyond 64 bits": b"FFFFFFFFFFFFFFFFF\r\nx\r\n0\r\n\r\n",
    "the largest size": b"FFFFFFFFFFFFFFFF\r\nx\r\n0\r\n\r\n",
    "a minus": b"-1\r\nx\r\n0\r\n\r\n",
    "0x": b"0x1\r\nx\r\n0\r\n\r\n",
    "a plus": b"+1\r\nx\r\n0\r\n\r\n",
    "spaces": b" 1 \r\nx\r\n0\r\n\r\n",
    "no line end": b"1\r\nxy\r\n0\r\n\r\n",
    "a bare LF": b"1\nx\n0\n\n",
    "a bare CR": b"1\rx\r0\r\r",
    "an empty size": b"\r\nx\r\n0\r\n\r\n",
    "a long extension": b"1;" + b"a" * 70_000 + b"\r\nx\r\n0\r\n\r\n",
    "many extensions": b"1;" + b"a=b;" * 20_000 + b"\r\nx\r\n0\r\n\r\n",
    "an extension with a line feed": b"1;a\nx\r\n0\r\n\r\n",
    "an extension with a NUL": b"1;a\0\r\nx\r\n0\r\n\r\n",
    "endless trailers": b"1\r\nx\r\n0\r\n" + b"a: b\r\n" * 20_000 + b"\r\n",
    "a trailer that frames": b"1\r\nx\r\n0\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
    "a trailer that authorises": b"1\r\nx\r\n0\r\nauthorization: Bearer other\r\nx-api-key: other\r\n\r\n",
    "thousands of one byte": b"1\r\nx\r\n" * 20_000 + b"0\r\n\r\n",
    "many zeros": b"0" * 1000 + b"1\r\nx\r\n0\r\n\r\n",
}


def framing(posts: Sequence[tuple[str, str]], key: str) -> Iterator[Attack]:
    """Every shape on every path; what is hidden behind the body must not be answered."""
    hidden = HIDDEN % key.encode()
    for (method, path), (name, (lines, kind)) in itertools.product(posts, FRAMINGS.items()):
        body = BODIES.get(path, b"{}")
        chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        sent = chunks if kind == "chunks" else body
        told = [line.replace("{n}", str(len(body))).replace("{all}", str(len(sent) + len(hidden))) for line in lines]
        whole = request(method, path, key, sent + hidden, JSON, *told, framing="")
        yield Attack(name=f"{method} {path}: framing: {name}", parts=[whole])
    for (method, path), (name, chunk) in itertools.product(posts, CHUNKS.items()):
        yield Attack(
            name=f"{method} {path}: chunks: {name}",
            parts=[request(method, path, key, chunk + hidden, JSON, framing=CHUNKED)],
        )


# --- sizes and times ------------------------------------------------------------------------------


def heads(paths: Sequence[tuple[str, str]], key: str) -> Iterator[Attack]:
    """Heads that are too large, or none."""
    shapes: Mapping[str, bytes] = {
        "one large header": b"x: " + b"a" * 70_000,
        "many headers": b"\r\n".join(b"x-%d: y" % number for number in range(9000)),
        "a large name": b"a" * 70_000 + b": y",
        "a large cookie": b"cookie: " + b"a=b;" * 20_000,
        "control characters": b"x: \x01\x02\x7f",
        "other alphabets": "x-request-id: \u043f\u0440\u0438\u0432\u0435\u0442\u202e".encode(),
        "no UTF-8": b"x-ordering-key: \xff\xfe",
        "two keys": b"x-api-key: other\r\nauthorization: Basic eDp5",
        "a forwarded address": b"x-forwarded-for: 127.0.0.1\r\nx-forwarded-host: evil\r\nforwarded: for=127.0.0.1",
        "a method override": b"x-http-method-override: DELETE\r\nx-method: PUT",
    }
    for (method, path), (name, lines) in itertools.product(paths, shapes.items()):
        begin = request(method, path, key).removesuffix(b"\r\n")
        yield Attack(name=f"{method} {path}: head: {name}", parts=[begin + lines + b"\r\n\r\n"])
    for line in (
        b"GET / HTTP/0.9", b"GET /", b"", b"PRI * HTTP/2.0", b"GET / HTTP/1.2", b"GET / HTTP/11.1",
        b"CONNECT 127.0.0.1:22 HTTP/1.1",
        b"TRACE /v1/models HTTP/1.1", b"GET http://127.0.0.1:1/ HTTP/1.1", b"GET //evil/v1/models HTTP/1.1",
        b"GET \x00 HTTP/1.1", b"GET /\x00 HTTP/1.1",
        b"GET /%00 HTTP/1.1", b"GET /" + b"a" * 70_000 + b" HTTP/1.1", b"GET /../../etc/passwd HTTP/1.1",
        b"GET /v1/\xff HTTP/1.1", b"A" * 70_000,
        b"GET /v1/models#x HTTP/1.1", b"OPTIONS * HTTP/1.1", b"get /v1/models HTTP/1.1", b"GET  /v1/models  HTTP/1.1",
        b"GET /v1/models HTTP/1.1 x",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"*1\r\n$4\r\nPING",
        b"GET /v1/models?" + b"a=b&" * 10_000 + b" HTTP/1.1", b"SSH-2.0-x",
    ):  # fmt: skip
        yield Attack(
            name=f"request line {line[:60]!r}",
            parts=[line + b"\r\nhost: x\r\nconnection: close\r\nauthorization: Bearer %b\r\n\r\n" % key.encode()],
        )


def packed() -> Mapping[str, tuple[str, bytes]]:
    """Bodies that unpack to two hundred times what is taken, and some that are broken."""
    zeros = bytes(200 * MAX_BODY_BYTES)
    bomb = gzip.compress(zeros, 9)
    deflate = zlib.compress(zeros, 9)
    return {
        "gzip bomb": ("gzip", bomb),
        "gzip of gzip": ("gzip", gzip.compress(bomb)),
        "gzip twice": ("gzip, gzip", gzip.compress(bomb)),
        "deflate bomb": ("deflate", deflate),
        "bare deflate bomb": ("deflate", deflate[2:-4]),
        "many members": ("gzip", gzip.compress(b" ") * 10_000),
        "cut gzip": ("gzip", bomb[:50]),
        "no gzip": ("gzip", b"{}"),
        "brotli": ("br", b"\x0b\x02\x80"),
        "zstd": ("zstd", b"\x28\xb5\x2f\xfd\x04\x00"),
        "unknown": ("x" * 1000, b"{}"),
        "identity": ("identity", b"{}"),
        "an empty list": (",,,", b"{}"),
    }


def bodies(posts: Sequence[tuple[str, str]], key: str) -> Iterator[Attack]:
    """Bodies that are too large, too deep, packed, or not what they say."""
    large = b"x" * (MAX_BODY_BYTES + 1)
    shapes: dict[str, tuple[str, bytes]] = {
        "too large": (JSON, large),
        "deep lists": (JSON, b"[" * 400_000),
        "deep objects": (JSON, b'{"a":' * 150_000),
        "deep and closed": (JSON, b'{"input":' + b"[" * 5000 + b"]" * 5000 + b"}"),
        "many names": (JSON, b"{" + b",".join(b'"%d":1' % n for n in range(80_000)) + b"}"),
        "one name many times": (JSON, b"{" + b'"input":1,' * 80_000 + b'"a":1}'),
        "a long number": (JSON, b'{"input":' + b"9" * 900_000 + b"}"),
        "a long fraction": (JSON, b'{"input":0.' + b"1" * 900_000 + b"}"),
        "a large exponent": (JSON, b'{"input":1e999999999}'),
        "NUL": (JSON, b"\0" * 1000),
        "half a pair": (JSON, b'{"input":"\\ud800"}'),
        "no form": ("content-type: multipart/form-data; boundary=b", b"--b\r\n" * 10_000 + b"--b--"),
        "parts without end": (
            "content-type: multipart/form-data; boundary=b",
            b'--b\r\ncontent-disposition: form-data; name="a"\r\n\r\nx\r\n' * 15_000 + b"--b--\r\n",
        ),
        "a part's endless head": ("content-type: multipart/form-data; boundary=b",
        b"--b\r\n" + b"a: b\r\n" * 100_000 + b"\r\n\r\n--b--"),
        "an endless boundary": ("content-type: multipart/form-data; boundary=" + "b" * 40_000,
        b"--" + b"b" * 40_000 + b"--"),
        "a folder in a file's name": (
            "content-type: multipart/form-data; boundary=b",
            b'--b\r\ncontent-disposition: form-data; name="image"; filename="../../etc/passwd\0\r\n\r\nx\r\n--b--\r\n',
        ),
        "UTF-7": ("content-type: application/json; charset=utf-7", b"+ADw-"),
        "UTF-16": (JSON, b'\xff\xfe{\0"\0a\0"\0:\x001\0}\0'),
        "a picture of nothing": ("content-type: image/png", b"\x89PNG\r\n\x1a\n"),
        "no kind": ("x: y", b"{}"),
        "a long kind": ("content-type: " + "a/" * 20_000, b"{}"),
        "a lying head": (f"{BINARY}99999999999999999999", b"{}"),
        "a negative head": (f"{BINARY}-1", b"{}"),
    }  # fmt: skip
    for name, (encoding, content) in packed().items():
        shapes[name] = (f"{JSON}\r\ncontent-encoding: {encoding}", content)
    for (method, path), (name, (line, content)) in itertools.product(posts, shapes.items()):
        yield Attack(name=f"{method} {path}: body: {name}", parts=[request(method, path, key, content, line)])


def slow(posts: Sequence[tuple[str, str]], key: str) -> Iterator[Attack]:
    """Bodies, chunks and heads a byte at a time, or not at all: each ends within its documented time."""
    for method, path in posts:
        head = request(method, path, key, b"", JSON, framing="content-length: 100000")
        yield Attack(name=f"{method} {path}: slow body", parts=[head, *[b" "] * 400], pause_s=0.1)
        head = request(method, path, key, b"", JSON, framing=CHUNKED)
        yield Attack(name=f"{method} {path}: slow chunks", parts=[head, *[b"1\r\n \r\n"] * 400], pause_s=0.1)
        yield Attack(name=f"{method} {path}: a body that never comes", parts=[head], patience_s=DRAINED_S)
        yield Attack(name=f"{method} {path}: slow extension", parts=[head, b"1;", *[b"a"] * 400], pause_s=0.1)


def slow_heads(key: str) -> Iterator[Attack]:
    """Heads that never end: 30 s is their time."""
    line = f"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n".encode()
    yield Attack(name="a head a byte at a time", parts=[line, *[b"a"] * 400], pause_s=0.1)
    yield Attack(name="a header at a time", parts=[line, *[b"a: b\r\n"] * 400], pause_s=0.1)
    yield Attack(name="a request line that never ends", parts=[*[b"G"] * 400], pause_s=0.1)
    yield Attack(name="empty lines for ever", parts=[*[b"\r\n"] * 400], pause_s=0.1)
