"""Texts that people and peers write: configurations, rules, events, headers, JSON of any depth."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from google.protobuf.json_format import MessageToDict
from hypothesis import strategies as st

from gateway.api import request_headers
from gateway.api.auth import shown_key
from gateway.api.body import json_object
from gateway.api.endpoint import request_id
from gateway.core import client_tokens
from gateway.core.error_forms import problem_document
from gateway.core.errors import GatewayError, InvalidInput
from gateway.core.keys import split_key
from gateway.core.rules import parse_rules, rules_document
from gateway.core.rules.fields import RuleError
from gateway.core.sse import SseParser, SseTooLarge
from gateway.core.trace import incoming
from gateway.http.exchange import _lines
from gateway.pipeline import Task
from gateway.settings import ConfigError, load_settings
from gateway.settings.yaml_text import YamlFault, read_yaml
from gateway.tasks.chat import Chat
from local_runtime.errors import InferenceError, ModelLoadError
from local_runtime.protocol.json_text import parse as parse_json
from local_runtime.repository.parsing import parse, parse_message, read_json, read_text
from tests.fuzz.making import DRAWN, cut, documents, mutated
from tests.fuzz.target import Target

ROOT = Path(__file__).parents[2]


# --- events ---------------------------------------------------------------------------------------

EVENTS = [
    b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\ndata: [DONE]\n\n',
    b"event: ping\r\ndata: a\r\ndata: b\r\n\r\n: comment\r\n\r\ndata:\r\r",
    b"\xef\xbb\xbfdata: {}\n\nid: 1\nretry: 5\ndata\n\n",
]
MAX_EVENT = 64


def _events_are_the_same(reads: list[bytes]) -> None:
    whole, parts = _events([b"".join(reads)]), _events(reads)
    if whole[1] or parts[1]:  # what is over the bound may be told earlier, but of the same events
        assert parts[0] == whole[0][: len(parts[0])] or whole[0] == parts[0][: len(whole[0])]
        return
    assert whole[0] == parts[0]
    assert all(len(data) <= MAX_EVENT for _, data in whole[0])


def _events(reads: list[bytes]) -> tuple[list[Any], bool]:
    parser, found = SseParser(max_event_bytes=MAX_EVENT), []
    for read in reads:
        try:
            found += parser.feed_named(read)
        except SseTooLarge as error:
            return found + error.complete, True
    return found, False


# --- configurations -------------------------------------------------------------------------------

PBTXT = [path.read_bytes() for path in sorted((ROOT / "triton_models").glob("*/config.pbtxt"))]
PBTXT_PIECES = [
    b"{", b"}", b"[", b"]", b"<", b">", b":", b'"', b"'", b"\\", b"\0", b"#", b"-1", b"99999999999999999999", b"1e999",
    b"name: ", b"max_batch_size: ", b"dims: [ ", b"input { ", b"data_type: TYPE_", b"dynamic_batching { ", b"key: ",
    b"value { ",
    b"sequence_batching { ", b"ensemble_scheduling { step { ", b"version_policy { specific { versions: ",
    b"instance_group { count: ",
    b"\xff", b"\xed\xa0\x80", b'"\\377"', b"parameters { ", b"{" * 300, b"input {" * 200, b"optimization { ", b"warmup",
]  # fmt: skip


OVERRIDES = [
    json.dumps(MessageToDict(read_text(text.decode(), folder_name=""), preserving_proto_field_name=True)).encode()
    for text in PBTXT
]
OVERRIDE_PIECES = [
    b'"\\ud800"',
    b"\\ud800",
    b"1e999",
    b"NaN",
    b'"Infinity"',
    b"[" * 500,
    b'{"a":' * 500,
    b"null",
    b'"name":',
    b"-1",
    b"9" * 400,
    b"\xff",
]


def _pbtxt(text: bytes) -> None:
    _only((ModelLoadError,), lambda: parse(text.decode("utf-8", "replace"), folder_name="m"))


def _override(text: bytes) -> None:
    """As `config` of a load: what JSON can say, and what Python's own reader takes besides."""
    read = _only((ModelLoadError,), lambda: read_json(text.decode("utf-8", "replace"), folder_name="m"))
    if read is not None:
        _only((ModelLoadError,), lambda: parse_message(read, folder_name=read.name or "m"))


SETTINGS = [
    (ROOT / "deploy/gateway.yaml").read_bytes(),
    b"server: {port: 8080}\nbackends: {l: {kind: local, repository: m}}\ntasks: {t: {contract: chat}}\nrules: []\n",
    b"a: &a [1, 2]\nb: *a\nc: {<<: *a}\n",
]
YAML_PIECES = [
    b"&a ", b"*a", b"<<: ", b"!!python/object/apply:os.system [id]", b"!!binary x", b"!!timestamp 9999-99-99",
    b"- " * 300, b"[" * 300,
    b"{" * 300, b"? ", b"|", b">", b"%YAML 9.9", b"---", b"...", b"\t", b"\0", b"\xff\xfe", b"\xed\xa0\x80",
    b"${HOME}", b"${", b"${X:-",
    b"0x", b"1_000", b"1:2:3", b".inf", b".nan", b"\x85", b"\xe2\x80\xa8", b"key_env: ", b"? [a]: b", b"2001-99-01",
    b"!!set {a}",
]  # fmt: skip


def _settings(text: bytes) -> None:
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        path = Path(folder) / "gateway.yaml"
        path.write_bytes(text)
        _only((ConfigError,), lambda: load_settings(path))
    _only((YamlFault,), lambda: read_yaml(text.decode("utf-8", "replace")))


SETTINGS_DOCUMENTS = [yaml.safe_load(SETTINGS[0]), yaml.safe_load(SETTINGS[1])]


def _settings_document(document: Any) -> None:
    _settings(json.dumps(document).encode())  # JSON is YAML


RULES: list[Any] = [
    [
        {
            "name": "a",
            "match": {
                "task": "t", "tenant": "x*", "model": "*", "key": "k", "priority": "batch", "headers": {"x-a": "b"},
                "min_input_tokens": 1, "max_input_bytes": 5, "times": [{"days": ["mon"], "from": "08:00",
                "to": "24:00", "zone": "Asia/Seoul"}],
            },
            "split": [{"backend": "b", "model": "m", "version": "1", "weight": 2, "parameters": {"temperature": 0.5}},
            {"backend": "c", "model": "m"}],
            "strategy": "weighted", "sticky_by": "session", "fallback": [{"backend": "d", "model": "m"}],
            "retries": 1, "hedge": True,
            "timeout_ms": 5, "attempt_timeout_ms": 5, "limits": [{"tokens": 5, "per": "minute", "burst": 9},
            {"concurrent": 3}, {"usd": 0.5, "per": "day"}],
            "shadow": {"backend": "c", "model": "m", "percent": 5}, "guard": {"max_error_ratio": 0.5, "window_s": 60,
            "min_requests": 5},
            "ordering": {"mode": "release", "max_queue_size": 7}, "cache": {"ttl_s": 60}, "on_store_down": "closed",
            "idempotency": "wait", "enabled": False,
        }
    ],
    [{"name": "a", "split": [{"backend": "b", "model": "m"}]}],
]  # fmt: skip


def _rules(document: Any) -> None:
    read = _only((RuleError,), lambda: parse_rules(document))
    if read is not None:
        written = rules_document(read)
        assert parse_rules(json.loads(json.dumps(written))) == read


# --- headers --------------------------------------------------------------------------------------

STEERING = (
    "x-timeout-ms", "x-request-id", "x-priority", "x-ordering-key", "x-session-id", "x-sequence-id",
    "x-sequence-start", "x-sequence-end",
    "idempotency-key", "authorization", "x-api-key", "traceparent", "tracestate", "cache-control", "content-type",
    "content-length",
)  # fmt: skip
PARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
VALUES = [
    b"1000", b"batch", b"true", PARENT, b"a=1,b=2", b'"quoted \\" key"', b"Bearer secret-one", b"Bearer gwc_e30.e30",
    b"gw-live-abc-def",
    b"no-store, max-age=5", b"\xb2", b"9" * 5000, b"\xff" * 20, b"18446744073709551616",
    b"application/json; charset=x", b"00-" + b"0" * 32,
]  # fmt: skip
HEADERS = st.dictionaries(
    st.sampled_from(STEERING),
    mutated(VALUES, [b"\0", b"\r\n", b"\t", b" ", b",", b"=", b'"', b"\x7f", b"\xe9"]).map(
        lambda raw: raw.decode("latin-1")
    ),
    max_size=6,
)
CHAT = Task(name="t", contract=Chat(), timeout_us=5_000_000, attempt_timeout_us=1_000_000)


def _headers(headers: dict[str, str]) -> None:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    readings: tuple[Callable[[], Any], ...] = (
        lambda: request_headers.timeout_us(headers, CHAT),
        lambda: request_headers.priority(headers),
        lambda: request_headers.ordering_key(headers),
        lambda: request_headers.session(headers),
        lambda: request_headers.idempotency_key(headers),
        lambda: request_headers.sequence_step(headers, CHAT),
        lambda: shown_key({"headers": raw}, headers),
    )
    for reading in readings:
        try:
            reading()
        except GatewayError as error:
            json.dumps(problem_document(error))
    own = request_id(headers)
    assert own.isascii()
    assert own.isprintable()
    assert len(own) <= 128
    trace = incoming(headers)
    if trace is not None:  # it is sent on: nothing in it may be another header
        _lines(200, trace.headers())
    split_key(headers.get("authorization", ""))
    client_tokens.read(headers.get("x-api-key", ""), b"secret")


def _answer_headers(fields: dict[str, str]) -> None:
    """What is written is a status and as many lines as there are headers, or refused."""
    try:
        written = _lines(200, fields.items())
    except (ValueError, UnicodeEncodeError):
        return
    assert written.count(b"\n") == written.count(b"\r") == 1 + len(fields)


# --- JSON -----------------------------------------------------------------------------------------

OPEN = {b"[": b"]", b'{"a":': b"}", b'[{"a":[': b"]}]"}


@st.composite
def _nested(draw: st.DrawFn) -> bytes:
    begin = draw(st.sampled_from(sorted(OPEN)))
    levels = draw(st.sampled_from([1, 50, 200, 999, 1000, 1024, 1025, 5000, 100_000, 300_000]))
    middle = draw(st.sampled_from([b"1", b"", b'"x"', b"NaN", b"1" * 5000, b"-", b'"\\ud83d"', b"1e400", b"0" * 40]))
    end = OPEN[begin] * levels if draw(st.booleans()) else b""
    text = begin * levels + middle + end
    return b'{"a":' + text + b"}" if draw(st.booleans()) else text


def _json(body: bytes) -> None:
    _only((GatewayError,), lambda: json_object({"content-type": "application/json"}, body))
    _only((InferenceError,), lambda: parse_json(body))


def _only(errors: tuple[type[BaseException], ...], reading: Callable[[], Any]) -> Any:
    """What is read; None for an error that is declared, whose words can be sent. Any other goes up."""
    try:
        return reading()
    except errors as error:
        json.dumps(str(error))
        return None


CHAT_INPUTS: list[Any] = [
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": []}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url",
    "image_url": {"url": "http://127.0.0.1/"}}]}]},
]  # fmt: skip


def _chat(given: Any) -> None:
    fields, parameters = given
    _only((InvalidInput,), lambda: Chat().parse(fields, parameters))


TARGETS = (
    Target(
        name="sse-events",
        about="any cut of a stream gives the same events, each within the bound",
        inputs=cut(
            mutated(
                EVENTS,
                [b"\n", b"\r", b"\r\n", b"\n\n", b"data:", b"data", b":", b"event: x", b"\xef\xbb\xbf", b"a" * 70],
            )
        ),
        check=_events_are_the_same,
    ),
    Target(
        name="config-pbtxt",
        about="config.pbtxt: the declared error, in words that can be sent",
        inputs=mutated(PBTXT, PBTXT_PIECES),
        check=_pbtxt,
    ),
    Target(
        name="config-overrides",
        about="a configuration in JSON that comes with a load: the declared error, in words that can be sent",
        inputs=mutated(OVERRIDES, OVERRIDE_PIECES),
        check=_override,
    ),
    Target(
        name="settings-text",
        about="the configuration file as bytes: the declared error only",
        inputs=mutated(SETTINGS, YAML_PIECES),
        check=_settings,
        is_slow=True,
    ),
    Target(
        name="settings-documents",
        about="the configuration's sections: the declared error only",
        inputs=documents(SETTINGS_DOCUMENTS),
        check=_settings_document,
        is_slow=True,
    ),
    Target(
        name="rules-documents",
        about="rules are read and come back the same, or the declared error",
        inputs=documents(RULES),
        check=_rules,
    ),
    Target(
        name="request-headers",
        about="headers that steer: the declared error, a safe id, a safe trace",
        inputs=HEADERS,
        check=_headers,
    ),
    Target(
        name="answer-headers",
        about="no value of a header brings another one along",
        inputs=st.dictionaries(st.sampled_from(["x-a", "x-b"]) | DRAWN, DRAWN, max_size=4),
        check=_answer_headers,
    ),
    Target(
        name="json-depth",
        about="JSON of any depth and any number: the declared error only",
        inputs=_nested(),
        check=_json,
    ),
    Target(
        name="chat-inputs",
        about="what a chat asks: the declared error only",
        inputs=st.tuples(documents(CHAT_INPUTS), st.dictionaries(DRAWN, st.integers() | DRAWN, max_size=3)),
        check=_chat,
    ),
)
