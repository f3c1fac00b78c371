"""Traces end to end: the real exporter to an OTLP receiver, real sockets to LLM endpoints and to a gRPC server."""

import asyncio
import json
from contextlib import aclosing, asynccontextmanager

import hpack
import httpx
import pytest
from prometheus_client import CollectorRegistry

from gateway.backends.grpc import http2
from gateway.backends.grpc.channel import GrpcChannel
from gateway.backends.scripted import ScriptedBackend
from gateway.backends.triton.replica import TritonReplica
from gateway.core.errors import BackendError, Fault, FaultKind
from gateway.core.types import BackendCall, OpenAIPayload, Place, Tensor, TensorPayload
from gateway.core.watching.steps import TracedAttempt
from gateway.settings import load_settings
from gateway.telemetry import span_attributes
from gateway.telemetry.span_attributes import Endpoint
from gateway.telemetry.tracing import open_tracing
from gateway.wiring import data_plane, monotonic_us
from tests.kit.app import embedding, running
from tests.kit.llm_plane import CHAT, llm_plane
from tests.kit.otlp import receiving
from tests.kit.raw_http2 import RawServer
from tests.kit.relayed import asked, script, text_of
from tests.kit.served import served
from tests.kit.upstream import Upstream, completion, error_reply, json_reply
from tests.kit.wait import until

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"
EMBED = "/v1/infer"
ASK = {"task": "text-embedding", "input": {"text": "a secret"}}
STEPS = [("INTERNAL", "admit"), ("INTERNAL", "route")]
SETTLE = ("INTERNAL", "settle")


@asynccontextmanager
async def traced(**options):
    """A receiver, and what traces to it; closing it, all spans are there."""
    with receiving() as receiver:
        fixed = {"endpoint": receiver.url, "sample_ratio": None, "clock": monotonic_us, "record_content": False}
        endpoints = {"up2": Endpoint("openai", "llm.example", 443)}
        tracing = open_tracing(**{**fixed, "endpoints": endpoints, **options})
        try:
            yield receiver, tracing
        finally:
            await tracing.close()


async def test_a_unary_request_on_a_tensor_backend():
    triton = ScriptedBackend("triton", [embedding()])
    async with traced() as (receiver, tracing):
        async with running([triton, ScriptedBackend("local", [embedding()])], tracing=tracing) as gw:
            answer = await gw.post(EMBED, ASK, traceparent=PARENT, tracestate="a=1")
            assert answer.status_code == 200
        await tracing.close()
        attempt = ("CLIENT", "infer text_embedding")
        tree = ("SERVER", "POST text-embedding", [*STEPS, ("INTERNAL", "dispatch", [attempt]), SETTLE])
        assert receiver.tree() == tree
        server, client = receiver.named("POST text-embedding"), receiver.named("infer text_embedding")
    assert set(receiver.paths) == {"/v1/traces"}
    assert (server.trace_id, server.parent_id, server.state) == (TRACE, SPAN, "a=1")
    assert {one.trace_id for one in receiver.spans} == {TRACE}
    assert dict(triton.calls[0].call.trace) == {"traceparent": f"00-{TRACE}-{client.span_id}-01", "tracestate": "a=1"}
    assert all(server.start <= one.start <= one.end <= server.end for one in receiver.spans)
    told = {
        "http.request.method": "POST",
        "url.scheme": "http",
        "url.path": EMBED,
        "http.route": EMBED,
        "http.response.status_code": 200,
        "gateway.request_id": answer.headers["x-request-id"],
        "gateway.task": "text-embedding",
        "gateway.tenant": "t1",
        "gateway.rule": "embeddings",
        "gateway.backend": "triton",
        "gateway.attempts": 1,
    }
    assert told.items() <= server.attributes.items()
    assert client.attributes["gateway.backend_queue_seconds"] == 0.0015
    assert server.resource["service.name"] == "hybrid-inference-gateway"
    assert b"a secret" not in b"".join(receiver.bodies)
    assert gw.seen.records[0].trace.trace_id == TRACE


async def test_a_streamed_chat_with_failover():
    first = Upstream(error_reply(503, {"message": "no", "type": "t", "param": None, "code": None}))
    second = Upstream(script("a secret answer", stream=True))
    async with traced() as (receiver, tracing):
        async with llm_plane(first, second, tracing=tracing) as gw:
            answer = await gw.post(CHAT, asked(stream=True, max_tokens=9))
            assert text_of(answer) == "a secret answer"
        await tracing.close()
        attempts = [("CLIENT", "chat model-1"), ("CLIENT", "chat model-2")]
        tree = ("SERVER", "POST general_llm", [*STEPS, ("INTERNAL", "dispatch", attempts), SETTLE])
        assert receiver.tree() == tree
        failed, answered = receiver.named("chat model-1"), receiver.named("chat model-2")
    server = receiver.named("POST general_llm")
    assert server.parent_id == ""
    assert [failed.is_failed, answered.is_failed, server.is_failed] == [True, False, False]
    assert failed.attributes["error.type"] == "overloaded"
    told = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "model-2",
        "gen_ai.request.stream": True,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 2,
        "server.address": "llm.example",
        "server.port": 443,
    }
    assert told.items() <= answered.attributes.items()
    assert answered.attributes["gen_ai.response.time_to_first_chunk"] > 0
    for up, span in ((first, failed), (second, answered)):
        assert up.requests[0].header("traceparent") == f"00-{server.trace_id}-{span.span_id}-03"
    assert b"secret" not in b"".join(receiver.bodies)


async def test_a_refused_request():
    async with traced() as (receiver, tracing):
        async with running([ScriptedBackend("triton", [embedding()])], tracing=tracing) as gw:
            assert (await gw.post(EMBED, ASK, authorization="Bearer nobody")).status_code == 401
            assert (await gw.post(EMBED, {"task": "text-embedding", "input": {"secret": 1}})).status_code == 422
        await tracing.close()
        spans = receiver.spans
    assert [(one.kind, one.name) for one in spans] == [("SERVER", "POST"), ("SERVER", "POST text-embedding")]
    assert [one.attributes["error.type"] for one in spans] == ["unauthorized", "invalid_input"]
    assert [one.is_failed for one in spans] == [False, False]  # the caller's faults are not the server's
    assert b"secret" not in b"".join(receiver.bodies)


async def test_a_route_has_its_parameters_names_and_not_what_callers_put_there():
    async with traced() as (receiver, tracing):
        async with running([ScriptedBackend("triton", [embedding()])], tracing=tracing) as gw:
            assert (await gw.post("/v1/tasks/text-embedding", {"input": {"text": "x"}})).status_code == 200
            assert (await gw.post("/v1/tasks/nothing", {})).status_code == 404
        await tracing.close()
        servers = [one.attributes for one in receiver.spans if one.kind == "SERVER"]
    assert [one["http.route"] for one in servers] == ["/v1/tasks/{task}"] * 2
    assert [one["url.path"] for one in servers] == ["/v1/tasks/text-embedding", "/v1/tasks/nothing"]


async def test_a_request_that_no_backend_can_answer():
    broken = [Fault(kind=FaultKind.FAILED, message="a secret")]
    backends = [ScriptedBackend("triton", broken), ScriptedBackend("local", broken)]
    async with traced() as (receiver, tracing):
        async with running(backends, tracing=tracing) as gw:
            status = (await gw.post(EMBED, ASK)).status_code
            assert status >= 500
        await tracing.close()
        failed = {one.name for one in receiver.spans if one.is_failed}
    assert failed == {"POST text-embedding", "dispatch", "infer text_embedding"}
    assert b"secret" not in b"".join(receiver.bodies)


async def test_a_request_that_waits_for_its_limit_in_vain_ends_in_admit():
    async with traced() as (receiver, tracing):
        async with running([ScriptedBackend("triton", [embedding()])], tracing=tracing) as gw:
            limited = {"authorization": "Bearer secret-limited"}
            codes = [(await gw.post(EMBED, ASK, **limited)).status_code for _ in range(4)]
        await tracing.close()
        assert codes == [200, 200, 200, 429]
        (server,) = (one for one in receiver.spans if one.attributes.get("error.type") == "rate_limited")
        below = {one.name for one in receiver.spans if one.parent_id == server.span_id}
    assert below == {"admit", "settle"}


async def test_each_item_of_a_batch_has_a_span_of_its_own_in_the_callers_trace():
    items = [{"id": str(number), "task": "text-embedding", "input": {"text": "x"}} for number in range(3)]
    async with traced() as (receiver, tracing):
        async with running([ScriptedBackend("triton", [embedding()])], tracing=tracing) as gw:
            assert (await gw.post("/v1/infer/batch", {"requests": items}, traceparent=PARENT)).status_code == 200
        await tracing.close()
        servers = [one for one in receiver.spans if one.kind == "SERVER"]
    assert [(one.trace_id, one.parent_id) for one in servers] == [(TRACE, SPAN)] * 3
    assert len({one.span_id for one in servers}) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_content_is_recorded_only_where_it_is_switched_on(stream):
    async with traced(record_content=True) as (receiver, tracing):
        async with llm_plane(Upstream(script("an answer", stream=stream)), tracing=tracing) as gw:
            assert text_of(await gw.post(CHAT, asked(stream=stream))) == "an answer"
        await tracing.close()
        told = receiver.named("chat model-1").attributes
    part = {"type": "text", "content": "hi"}
    assert json.loads(told["gen_ai.input.messages"]) == [{"role": "user", "parts": [part]}]
    answered = {"role": "assistant", "parts": [{**part, "content": "an answer"}], "finish_reason": "stop"}
    assert json.loads(told["gen_ai.output.messages"]) == [answered]


@pytest.mark.parametrize(
    ("events", "texts"),
    [
        ([b'{"choices": [{"index": 1, "text": "b"}, {"index": 0, "text": "a"}]}'], ["a", "b"]),
        ([b'{"type": "response.output_text.delta", "output_index": 0, "delta": "a"}'] * 2, ["aa"]),
        ([b"no json", b"[]", b'{"choices": 7}', b'{"choices": [{}]}', b'{"choices": [{"index": 0, "text": 1}]}'], [""]),
        ([b'{"choices": []}'], []),
    ],
)
def test_streamed_answers_are_put_together_of_what_can_be_read(events, texts):
    place, payload = Place(backend="b", model="m"), OpenAIPayload(body={})
    told = span_attributes.content(
        TracedAttempt(place=place, began_us=0, ended_us=1, payload=payload, events=tuple(events))
    )
    messages = json.loads(told["gen_ai.output.messages"])
    assert [one["parts"][0]["content"] for one in messages] == texts


def test_what_callers_choose_cannot_make_spans_that_are_not_sendable():
    body = {"max_tokens": 10**30, "temperature": 1e300, "top_p": 0.5, "messages": [{"role": 1, "content": "\ud83d"}, 7]}
    place = Place(backend="b", model="m\ud83d" + "x" * 2000)
    payload = OpenAIPayload(body=body)
    tried = TracedAttempt(place=place, began_us=0, ended_us=1, payload=payload, body=b"no json")
    told = span_attributes.of_attempt(tried, None)
    assert (told["gen_ai.request.top_p"], told["gen_ai.request.model"][:3]) == (0.5, "m?x")
    assert len(told["gen_ai.request.model"]) == span_attributes.MAX_TEXT
    assert not {"gen_ai.request.max_tokens", "gen_ai.request.temperature"} & told.keys()
    recorded = span_attributes.content(tried)
    parts = [{"type": "text", "content": "?"}]
    assert json.loads(recorded["gen_ai.input.messages"])[0] == {"role": "user", "parts": parts}
    assert recorded["gen_ai.output.messages"] == "[]"


@pytest.mark.parametrize("options", [{"sample_ratio": 0.0}, {}], ids=["new ones by ratio", "all new ones"])
async def test_what_is_sampled(options):
    triton = ScriptedBackend("triton", [embedding()])
    async with traced(**options) as (receiver, tracing):
        async with running([triton], tracing=tracing) as gw:
            await gw.post(EMBED, ASK, traceparent=PARENT)
            await gw.post(EMBED, ASK, traceparent=f"{PARENT[:-2]}00")
            await gw.post(EMBED, ASK)
        await tracing.close()
        recorded = sum(one.kind == "SERVER" for one in receiver.spans)
    sent = [dict(one.call.trace)["traceparent"] for one in triton.calls]
    assert recorded == (1 if options else 2)  # the caller's that is sampled; without a ratio new ones too
    assert sent[0] != PARENT
    assert sent[0].endswith("-01")
    assert sent[1] == f"{PARENT[:-2]}00"  # passed through as it came
    assert sent[2].endswith("-02" if options else "-03")
    assert all(one.trace is not None for one in gw.seen.records)


@pytest.mark.parametrize("given", [PARENT, f"00-{TRACE}-{SPAN}-00", "00-nonsense", None])
async def test_without_tracing_a_valid_trace_is_passed_through_to_an_llm(given):
    up = Upstream(json_reply(200, completion()))
    headers = {"tracestate": "a=1"} | ({"traceparent": given} if given else {})
    async with llm_plane(up) as gw:
        await gw.post(CHAT, asked(stream=False), **headers)
    is_valid = given is not None and "nonsense" not in given
    assert up.requests[0].header("traceparent") == (given if is_valid else None)
    assert up.requests[0].header("tracestate") == ("a=1" if is_valid else None)
    trace = gw.seen.records[0].trace
    assert (trace and trace.trace_id) == (TRACE if is_valid else None)


async def _first_of(replica, call):
    async with aclosing(replica.stream(call, call.payload, timeout_us=2_000_000)) as answers:
        return await anext(answers)


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
async def test_triton_gets_the_trace_as_metadata(stream):
    tensor = Tensor(name="x", datatype="FP32", shape=(1,), data=b"\0\0\0\0")
    payload = TensorPayload(inputs=(tensor,), stream=stream)
    sent = (("traceparent", PARENT), ("tracestate", "a=1"))
    call = BackendCall(request_id="r", model="m", version="", payload=payload, trace=sent)
    async with RawServer() as server:
        replica = TritonReplica("one", GrpcChannel(server.target))
        try:
            with pytest.raises(BackendError):  # its answers are no Triton's
                await (_first_of(replica, call) if stream else replica.infer(call, payload, timeout_us=2_000_000))
        finally:
            await replica.close()
        decoder = hpack.Decoder()
        blocks = [dict(decoder.decode(payload, raw=True)) for *_, payload in server.kinds(http2.HEADERS)]
    path = b"/inference.GRPCInferenceService/" + (b"ModelStreamInfer" if stream else b"ModelInfer")
    (found,) = (block for block in blocks if block[b":path"] == path)
    assert (found[b"traceparent"], found[b"tracestate"]) == (PARENT.encode(), b"a=1")


async def test_a_receiver_that_fails_costs_spans_and_nothing_else():
    with receiving(status=400) as receiver:
        tracing = open_tracing(
            endpoint=receiver.url, sample_ratio=1.0, clock=monotonic_us, endpoints={}, record_content=False
        )
        async with running([ScriptedBackend("triton", [embedding()])], tracing=tracing) as gw:
            assert (await gw.post(EMBED, ASK)).status_code == 200
        await tracing.close()
        await until(lambda: receiver.bodies)


@pytest.mark.parametrize("state", ["0a=1,b=2", "a@b@c=1,b=2", "a=,b=2", "a=1,a=2"])
async def test_a_tracestate_that_the_sdk_does_not_know_is_passed_on_without_a_word(caplog, state):
    triton = ScriptedBackend("triton", [embedding()])
    async with traced(sample_ratio=1.0) as (receiver, tracing):
        async with running([triton], tracing=tracing) as gw:
            assert (await gw.post(EMBED, ASK, traceparent=PARENT, tracestate=state)).status_code == 200
        await tracing.close()
        assert receiver.named("POST text-embedding").trace_id == TRACE
    assert dict(triton.calls[0].call.trace)["tracestate"] == state
    assert not [one for one in caplog.records if one.name.startswith("opentelemetry")]


async def test_a_caller_that_leaves_leaves_a_span_that_says_so():
    wait = asyncio.Event()
    async with traced() as (receiver, tracing):
        async with running([ScriptedBackend("triton", [wait, embedding()])], tracing=tracing) as gw:
            asking = asyncio.create_task(gw.post(EMBED, ASK))
            await until(lambda: gw.backends["triton"].calls)
            asking.cancel()
            await until(lambda: gw.seen.records)
        await tracing.close()
        server, client = receiver.named("POST text-embedding"), receiver.named("infer text_embedding")
    assert server.attributes["error.type"] == "client_closed"
    assert client.attributes["error.type"] == "cancelled"


CONFIGURED = """\
backends: {{llm: {{kind: openai, base_url: "{base_url}", hosted: true}}}}
tasks: {{general_llm: {{contract: chat}}}}
rules: [{{name: chat, match: {{task: general_llm}}, split: [{{backend: llm, model: m}}]}}]
keys: [{{id: dev, tenant: dev, key_env: DEV_KEY}}]
telemetry: {{access_log: false, traces: {{endpoint: "{receiver}", sample_ratio: 1}}}}
"""


async def test_a_configured_worker_traces_and_sends_its_last_spans_when_it_stops(tmp_path, monkeypatch):
    monkeypatch.setenv("DEV_KEY", "secret-dev")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chosen")
    path = tmp_path / "gateway.yaml"
    with receiving() as receiver:
        async with Upstream(json_reply(200, completion())) as up:
            path.write_text(CONFIGURED.format(base_url=up.base_url, receiver=receiver.url))
            plane = data_plane(load_settings(path), CollectorRegistry(), is_draining=lambda: False)
            async with plane as app, served(app) as url:
                headers = {"authorization": "Bearer secret-dev", "traceparent": PARENT}
                async with httpx.AsyncClient(base_url=url, headers=headers, trust_env=False) as http:
                    assert (await http.post(CHAT, json=asked(stream=False))).status_code == 200
        server, client = receiver.named("POST general_llm"), receiver.named("chat m")
    assert (server.trace_id, server.parent_id, server.resource["service.name"]) == (TRACE, SPAN, "chosen")
    assert (client.attributes["server.address"], client.attributes["server.port"]) == ("127.0.0.1", up.port)
    assert up.requests[0].header("traceparent") == f"00-{TRACE}-{client.span_id}-01"
