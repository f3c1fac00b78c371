"""An OTLP/HTTP receiver on loopback: takes what real exporters send, and shows it as trees of spans."""

import base64
import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1 import trace_pb2 as pb


@dataclass(frozen=True, kw_only=True)
class Span:
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    state: str
    flags: int
    start: int
    end: int
    is_failed: bool
    attributes: dict[str, Any]
    resource: dict[str, Any]


@dataclass
class Receiver:
    """`bodies` are whole requests as they came."""

    url: str = ""
    bodies: list[bytes] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)

    @property
    def spans(self) -> list[Span]:
        return [one for body in list(self.bodies) for one in _spans(body)]

    def tree(self) -> Any:
        """The only root, as (kind, name, [children]); children in the order in which they began."""
        spans = sorted(self.spans, key=lambda one: one.start)
        ids = {one.span_id for one in spans}
        (root,) = (one for one in spans if one.parent_id not in ids)

        def below(one: Span) -> Any:
            children = [below(child) for child in spans if child.parent_id == one.span_id]
            return (one.kind, one.name, children) if children else (one.kind, one.name)

        return below(root)

    def named(self, name: str) -> Span:
        (found,) = (one for one in self.spans if one.name == name)
        return found


@contextmanager
def receiving(*, status: int = 200) -> Iterator[Receiver]:
    """Until the block ends."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            receiver.paths.append(self.path)
            receiver.bodies.append(gzip.decompress(body) if self.headers["content-encoding"] == "gzip" else body)
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    receiver.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _spans(body: bytes) -> Iterator[Span]:
    read = _of_json if body.startswith(b"{") else ExportTraceServiceRequest.FromString
    for resource in read(body).resource_spans:
        for scope in resource.scope_spans:
            for one in scope.spans:
                yield Span(
                    name=one.name,
                    kind=pb.Span.SpanKind.Name(one.kind).removeprefix("SPAN_KIND_"),
                    trace_id=one.trace_id.hex(),
                    span_id=one.span_id.hex(),
                    parent_id=one.parent_span_id.hex(),
                    state=one.trace_state,
                    flags=one.flags,
                    start=one.start_time_unix_nano,
                    end=one.end_time_unix_nano,
                    is_failed=one.status.code == pb.Status.STATUS_CODE_ERROR,
                    attributes=_values(one.attributes),
                    resource=_values(resource.resource.attributes),
                )


def _of_json(body: bytes) -> ExportTraceServiceRequest:
    """Triton's exporter sends OTLP's JSON: protobuf's own, but for ids, which are hexadecimal."""

    def read(one: dict[str, Any]) -> dict[str, Any]:
        ids = {name: value for name, value in one.items() if name in ("traceId", "spanId", "parentSpanId")}
        return one | {name: base64.b64encode(bytes.fromhex(value)).decode() for name, value in ids.items()}

    document = json.loads(body, object_hook=read)
    return json_format.ParseDict(document, ExportTraceServiceRequest(), ignore_unknown_fields=True)


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
