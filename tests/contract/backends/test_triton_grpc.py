"""The Triton adapter against a small servicer of our own, which can misbehave as Triton would."""

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import grpc.aio
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc as pb_grpc

from gateway.backends.triton import backend as triton_grpc
from gateway.backends.triton import replica as triton_replica
from gateway.backends.triton.backend import TritonBackend
from gateway.backends.triton.channels import COMPRESSIONS
from gateway.core.errors import BackendError, FaultKind, Reply
from gateway.core.types import ANY, BackendCall, OpenAIPayload, Place, Tensor, TensorPayload, Tensors
from tests.kit.wait import until

LONG_US = 5_000_000
GOOD = Place(backend="triton", model="good")


class Servicer(pb_grpc.GRPCInferenceServiceServicer):
    def __init__(self, answer: Callable | None = None) -> None:
        self.answer = answer or echo
        self.requests = []
        self.deadlines = []
        self.arrived = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.described = []
        self.metadata = described()
        self.facts_error = None
        self.may_describe = asyncio.Event()
        self.may_describe.set()
        self.changes = []

    async def ModelInfer(self, request, context):  # noqa: N802 - gRPC's name
        self.requests.append(request)
        self.deadlines.append(context.time_remaining())
        self.arrived.set()
        try:
            return await self.answer(request, context)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def ModelStreamInfer(self, requests, context):  # noqa: N802 - gRPC's name
        async for request in requests:
            self.requests.append(request)
            self.arrived.set()
            try:
                async for answer in self.answer(request, context):
                    yield answer
            except asyncio.CancelledError:
                self.cancelled.set()
                raise

    async def ServerLive(self, request, context):  # noqa: N802 - gRPC's name
        return pb.ServerLiveResponse(live=True)

    async def ModelReady(self, request, context):  # noqa: N802 - gRPC's name
        return pb.ModelReadyResponse(ready=request.name == "good")

    async def ModelMetadata(self, request, context):  # noqa: N802 - gRPC's name
        self.described.append((request.name, request.version))
        await self.may_describe.wait()
        if self.facts_error:
            await context.abort(*self.facts_error)
        return self.metadata

    async def ModelConfig(self, request, context):  # noqa: N802 - gRPC's name
        response = pb.ModelConfigResponse()
        response.config.name = request.name
        return response

    async def ModelStatistics(self, request, context):  # noqa: N802 - gRPC's name
        response = pb.ModelStatisticsResponse()
        stats = response.model_stats.add(name=request.name or "m", version="1", inference_count=6, execution_count=2)
        batch = stats.batch_stats.add(batch_size=3)
        batch.compute_infer.count = 2
        return response

    async def RepositoryModelLoad(self, request, context):  # noqa: N802 - gRPC's name
        self.changes.append(("load", request.model_name))
        return pb.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(self, request, context):  # noqa: N802 - gRPC's name
        self.changes.append(("unload", request.model_name, request.parameters["unload_dependents"].bool_param))
        return pb.RepositoryModelUnloadResponse()


def described(*outputs):
    """Of a model that answers with its inputs: any of X and T, unless said otherwise."""
    response = pb.ModelMetadataResponse(name="good", versions=["1"])
    for name, datatype in outputs or (("X", "UINT8"),):
        response.outputs.add(name=name, datatype=datatype, shape=[-1])
    return response


async def echo(request, context):
    response = pb.ModelInferResponse(model_version="1", id=request.id)
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        response.raw_output_contents.append(raw)
    return response


async def hang(request, context):
    await asyncio.sleep(60)


def aborting(code, text):
    async def abort(request, context):
        await context.abort(code, text)

    return abort


@asynccontextmanager
async def served(answer=None, *, address="127.0.0.1:0", compression="none"):
    servicer = Servicer(answer)
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 8_000_000)])
    pb_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port(address)
    await server.start()
    url = address if address.startswith("unix:") else f"127.0.0.1:{port}"
    backend = await TritonBackend.open("triton", url, compression=compression)
    try:
        yield backend, servicer, server
    finally:
        await backend.close()
        await server.stop(0)


def call(*inputs, payload=None, **fields):
    payload = payload or TensorPayload(inputs=inputs or (tensor(),), **fields)
    return BackendCall(request_id="req-1", model="good", version="1", payload=payload)


def streamed(**fields):
    return call(stream=True, **fields)


def tensor(size=8):
    return Tensor(name="X", datatype="UINT8", shape=(size,), data=bytes(size))


async def answer_of(backend, request=None, *, timeout_us=LONG_US):
    return [item async for item in backend.infer(request or call(), timeout_us=timeout_us)]


async def fault_of(backend, request=None, *, timeout_us=LONG_US):
    with pytest.raises(BackendError) as caught:
        await answer_of(backend, request, timeout_us=timeout_us)
    return caught.value.fault


async def test_one_answer_with_its_bytes():
    text = Tensor(name="T", datatype="BYTES", shape=(1,), data=b"\x02\x00\x00\x00\xff\x00")
    async with served() as (backend, servicer, _):
        servicer.metadata = described(("T", "BYTES"), ("X", "UINT8"))
        answer = await answer_of(backend, call(text, tensor(), outputs=("X", "T")))
    assert answer == [Tensors(outputs=(text, tensor()), version="1")]
    assert servicer.requests[0].id == "req-1"
    assert LONG_US / 2e6 < servicer.deadlines[0] < LONG_US / 0.5e6  # gRPC rounds; it is there, that is all


async def test_a_unix_socket_is_one_server(tmp_path):
    async with served(address=f"unix:{tmp_path}/s") as (backend, _, _):
        assert len(await answer_of(backend)) == 1
        assert backend.replicas() == ()


def test_the_constructor_needs_no_loop():
    assert TritonBackend("t", "127.0.0.1:1").replicas() == ()


@pytest.mark.parametrize("compression", COMPRESSIONS)
async def test_both_kinds_of_channels(compression):
    async with served(compression=compression) as (backend, servicer, _):
        assert len(await answer_of(backend, call(tensor(100_000)))) == 1
        servicer.answer = parts(1)
        assert len(await answer_of(backend, streamed())) == 1
        servicer.answer = aborting(grpc.StatusCode.INTERNAL, "boom")
        assert (await fault_of(backend)).reply == Reply(code="INTERNAL", text="boom")
        servicer.answer = hang
        assert (await fault_of(backend, timeout_us=20_000)).reply is None


async def test_large_tensors_pass():  # TN-13
    async with served() as (backend, _, _):
        (answer,) = await answer_of(backend, call(tensor(5_000_000)))
    assert len(answer.outputs[0].data) == 5_000_000


@pytest.mark.parametrize(
    ("code", "text", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, "[request id: a] Exceeds maximum queue size", FaultKind.OVERLOADED),
        (grpc.StatusCode.UNAVAILABLE, "model is going away", FaultKind.UNAVAILABLE),
        (grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'x' is not found", FaultKind.UNKNOWN_MODEL),
        (grpc.StatusCode.INVALID_ARGUMENT, "[request id: a] bad 'X' for model 'm'", FaultKind.REFUSED_INPUT),
        (grpc.StatusCode.INTERNAL, "Stub process 'good_0_0' is not healthy.", FaultKind.DEAD),
        (grpc.StatusCode.INTERNAL, "boom", FaultKind.FAILED),
        (grpc.StatusCode.UNIMPLEMENTED, "decoupled", FaultKind.UNSUPPORTED),
        (grpc.StatusCode.CANCELLED, "by the server", FaultKind.UNAVAILABLE),
    ],
)
async def test_errors(code, text, kind):
    async with served(aborting(code, text)) as (backend, _, _):
        found = await fault_of(backend)
    assert found.kind is kind
    assert found.reply == Reply(code=code.name, text=text)
    assert not found.is_server
    if kind is FaultKind.REFUSED_INPUT:
        assert found.message == "bad 'X' for the model"


async def test_a_request_over_the_servers_bound_is_the_callers_fault():
    async with served() as (backend, _, _):
        assert (await fault_of(backend, call(tensor(9_000_000)))).kind is FaultKind.REFUSED_INPUT


async def test_an_answer_that_breaks_the_protocol():
    async def short(request, context):
        response = await echo(request, context)
        response.outputs[0].shape[0] += 1
        return response

    async with served(short) as (backend, _, _):
        assert (await fault_of(backend)).kind is FaultKind.BROKEN


@pytest.mark.parametrize(
    ("outputs", "request_"),
    [
        ((("Y", "UINT8"),), call()),  # an output that the model does not have
        ((("X", "FP32"),), call()),  # of another datatype
        ((("X", "UINT8"),), call(outputs=("Y",))),
    ],
)
async def test_an_answer_that_does_not_fit_the_model(outputs, request_):
    async with served() as (backend, servicer, _):
        servicer.metadata = described(*outputs)
        found = await fault_of(backend, request_)
    assert found.kind is FaultKind.BROKEN


async def test_facts_are_asked_for_once_for_all():
    async with served() as (backend, servicer, _):
        await asyncio.gather(*(answer_of(backend) for _ in range(5)))
        assert servicer.described == [("good", "1")]
        await backend.facts(replace(GOOD, version="1"))
        assert servicer.described == [("good", "1")]


async def test_a_model_that_has_changed_since_is_asked_for_anew_before_a_verdict():
    async with served() as (backend, servicer, _):
        servicer.metadata = described(("Y", "UINT8"))
        assert list((await backend.facts(replace(GOOD, version="1"))).outputs) == ["Y"]
        servicer.metadata = described()
        assert len(await answer_of(backend)) == 1
        assert len(servicer.described) == 2
        await answer_of(backend)
        assert len(servicer.described) == 2


async def test_old_facts_are_used_once_more_while_new_ones_are_asked_for():
    async with served() as (backend, servicer, _):
        await answer_of(backend)
        (replica,) = backend._replicas.values()
        ((key, known),) = replica._known.items()
        replica._known[key] = replace(known, until=known.until - triton_replica.FACTS_FRESH_S - 1)
        servicer.may_describe.clear()
        assert len(await answer_of(backend)) == 1
        await until(lambda: len(servicer.described) == 2)
        servicer.may_describe.set()
        await until(lambda: replica._known[key].until >= known.until)
        replica._known[key] = replace(known, until=0)
        servicer.may_describe.clear()
        waiting = asyncio.create_task(answer_of(backend))
        await until(lambda: len(servicer.described) == 3)
        assert len(servicer.requests) == 2
        servicer.may_describe.set()
        assert len(await waiting) == 1


async def test_what_is_known_of_models_is_bounded(monkeypatch):
    monkeypatch.setattr(triton_replica, "MAX_FACTS", 3)
    async with served() as (backend, _, _):
        for number in range(10):
            await answer_of(backend, replace(call(), model=f"m{number}"))
        (replica,) = backend._replicas.values()
        assert len(replica._known) <= 3
        assert not replica._asking


async def test_loads_and_unloads_forget_what_was_known():
    async with served() as (backend, servicer, _):
        (replica,) = backend.replicas()
        for change in (backend.load("good", replica=replica), backend.unload("x", replica=replica)):
            await backend.facts(GOOD)
            await change
        await backend.facts(GOOD)
        assert len(servicer.described) == 3
        await backend.unload("y", replica=replica, unload_dependents=True)
        assert servicer.changes == [("load", "good"), ("unload", "x", False), ("unload", "y", True)]


async def test_without_facts_a_request_is_sent_all_the_same():
    async with served() as (backend, servicer, _):
        servicer.facts_error = (grpc.StatusCode.INTERNAL, "no facts")
        assert len(await answer_of(backend, call(priority=1))) == 1
        assert not servicer.requests[0].parameters
        with pytest.raises(BackendError) as caught:
            await backend.facts(GOOD)
        assert caught.value.fault.reply == Reply(code="INTERNAL", text="no facts")


async def test_an_unknown_model_is_not_sent_at_all():
    async with served() as (backend, servicer, _):
        servicer.facts_error = (grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'good' is not found")
        assert (await fault_of(backend)).kind is FaultKind.UNKNOWN_MODEL
        assert not servicer.requests


async def test_a_deadline():
    async with served(hang) as (backend, _, _):
        found = await fault_of(backend, timeout_us=20_000)
    assert (found.kind, found.reply, found.is_server) == (FaultKind.TIMEOUT, None, False)


async def test_cancelling_the_wait_reaches_the_server():
    async with served(hang) as (backend, servicer, _):
        task = asyncio.create_task(answer_of(backend))
        await servicer.arrived.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(servicer.cancelled.wait(), 1)


async def test_closing_the_backend_ends_calls_in_flight_as_unavailable():
    async with served(hang) as (backend, servicer, _):
        task = asyncio.create_task(fault_of(backend))
        await servicer.arrived.wait()
        await backend.close()
        assert (await task).kind is FaultKind.UNAVAILABLE


async def test_a_server_that_dies_and_one_that_is_not_there():
    async with served(hang) as (backend, servicer, server):
        task = asyncio.create_task(fault_of(backend))
        await servicer.arrived.wait()
        await server.stop(0)
        assert (await task).kind is FaultKind.UNAVAILABLE
        found = await fault_of(backend)
        assert (found.kind, found.is_server, found.reply) == (FaultKind.UNAVAILABLE, True, None)
        for asked in (backend.probe(GOOD), backend.probe(replace(GOOD, model=ANY)), backend.figures()):
            with pytest.raises(BackendError) as caught:
                await asked
            assert caught.value.fault.kind is FaultKind.UNAVAILABLE


async def test_probe():
    async with served() as (backend, _, _):
        await backend.probe(GOOD)
        await backend.probe(replace(GOOD, model=ANY))
        with pytest.raises(BackendError) as caught:
            await backend.probe(replace(GOOD, model="bad", version="1"))
    assert (caught.value.fault.kind, caught.value.fault.is_server) == (FaultKind.UNAVAILABLE, False)


async def test_figures():
    async with served() as (backend, _, _):
        (one,) = await backend.figures()
        assert (one.model, one.batch_sizes, one.replica) == ("m", {3: 2}, backend.replicas()[0])


async def test_chat_is_not_for_this_backend():
    backend = TritonBackend("t", "127.0.0.1:1")
    assert (await fault_of(backend, call(payload=OpenAIPayload(body={})))).kind is FaultKind.UNSUPPORTED
    await backend.close()


async def test_a_server_that_does_not_describe_its_model_takes_no_more_than_the_calls_time(monkeypatch):
    monkeypatch.setattr(triton_replica, "FACTS_TIMEOUT_US", 60_000_000)
    async with served() as (backend, servicer, _), asyncio.timeout(30):
        servicer.may_describe.clear()
        assert (await fault_of(backend, timeout_us=50_000)).kind is FaultKind.TIMEOUT
        assert servicer.requests == []
        servicer.may_describe.set()


async def test_a_call_that_waits_for_facts_ends_with_the_connection():
    async with served() as (backend, servicer, _):
        servicer.may_describe.clear()
        waiting = asyncio.create_task(fault_of(backend))
        await until(lambda: servicer.described)
        await backend.close()
        assert (await waiting).kind is FaultKind.UNAVAILABLE
        servicer.may_describe.set()


# --- a process that has died ----------------------------------------------------------------------


async def test_what_waits_for_a_dead_process_ends_with_the_first_that_hears_of_it():
    died = asyncio.Event()

    async def first_hears(request, context):
        if len(servicer.requests) > 1:
            await asyncio.sleep(60)
        await died.wait()
        await context.abort(grpc.StatusCode.INTERNAL, "Stub process 'good_0_0' is not healthy.")

    async with served(first_hears) as (backend, servicer, _):
        tasks = [asyncio.create_task(fault_of(backend)) for _ in range(4)]
        other = asyncio.create_task(answer_of(backend, replace(call(), model="other")))
        await until(lambda: len(servicer.requests) == 5)
        died.set()
        for found in await asyncio.gather(*tasks):
            assert (found.kind, found.dead_model) == (FaultKind.DEAD, "good")
        assert not other.done()
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)
        assert not backend._replicas[backend.replicas()[0]]._calls


async def test_one_workers_word_ends_the_calls_of_another():
    async def hangs(request, context):
        await asyncio.sleep(60)

    async with (
        served(aborting(grpc.StatusCode.INTERNAL, "Stub process 'good_0_0' is not healthy.")) as (one, _, _),
        served(hangs) as (other, servicer, _),
    ):
        (replica,) = other.replicas()
        one.on_death = lambda place, fault: other.died(replace(place, replica=replica), fault)
        waiting = asyncio.create_task(fault_of(other))
        await until(lambda: servicer.requests)
        assert (await fault_of(one)).kind is FaultKind.DEAD
        found = await waiting
        other.died(replace(GOOD, replica="gone"), found)  # a server that has left
    assert (found.kind, found.dead_model) == (FaultKind.DEAD, "good")


async def test_a_caller_that_leaves_a_dead_process_is_cancelled_all_the_same():
    died = asyncio.Event()

    async def dead(request, context):
        await died.wait()
        await context.abort(grpc.StatusCode.INTERNAL, "Stub process 'good_0_0' is not healthy.")

    async def both():
        async with asyncio.TaskGroup() as group:
            one = group.create_task(fault_of(backend))
            two = group.create_task(answer_of(backend))
            await until(lambda: len(servicer.requests) == 2)
            two.cancel()
            died.set()
        return one.result(), two.cancelled()

    async with served(dead) as (backend, servicer, _):
        found, is_cancelled = await both()
    assert found.kind is FaultKind.DEAD
    assert is_cancelled


# --- streams --------------------------------------------------------------------------------------


def parts(count, *, then=None, ends=True):
    """A decoupled model: so many answers, then perhaps an error."""

    async def answer(request, context):
        for at in range(count):
            part = await echo(request, context)
            part.parameters["triton_final_response"].bool_param = ends and then is None and at == count - 1
            yield pb.ModelStreamInferResponse(infer_response=part)
        if isinstance(then, str):
            yield pb.ModelStreamInferResponse(error_message=then)
        elif then is not None:
            await then(request, context)

    return answer


async def test_a_stream_brings_every_answer():
    async with served(parts(3)) as (backend, servicer, _):
        found = await answer_of(backend, streamed(wants_empty_final=True))
    assert [(len(one.outputs), one.is_final) for one in found] == [(1, False), (1, False), (1, True)]
    assert servicer.requests[0].parameters["triton_enable_empty_final_response"].bool_param


@pytest.mark.parametrize(
    ("then", "kind"),
    [
        ("the model says no", FaultKind.FAILED),
        ("Request for unknown model: 'x' is not found", FaultKind.UNKNOWN_MODEL),
        ("Stub process 'good_0_0' is not healthy.", FaultKind.DEAD),
        (aborting(grpc.StatusCode.INVALID_ARGUMENT, "bad 'X'"), FaultKind.REFUSED_INPUT),
    ],
)
async def test_a_stream_that_ends_with_an_error(then, kind):
    async with served(parts(1, then=then)) as (backend, _, _):
        answers = backend.infer(streamed(), timeout_us=LONG_US)
        assert isinstance(await anext(answers), Tensors)
        with pytest.raises(BackendError) as caught:
            await anext(answers)
    assert caught.value.fault.kind is kind
    assert caught.value.fault.reply is not None


async def test_a_wrong_answer_in_a_stream():
    async with served(parts(2)) as (backend, servicer, _):
        servicer.metadata = described(("X", "FP32"))
        assert (await fault_of(backend, streamed())).kind is FaultKind.BROKEN


async def test_leaving_a_stream_reaches_the_server():
    async with served(parts(1, then=hang)) as (backend, servicer, _):
        answers = backend.infer(streamed(), timeout_us=LONG_US)
        assert isinstance(await anext(answers), Tensors)
        await answers.aclose()
        await asyncio.wait_for(servicer.cancelled.wait(), 1)


async def test_a_stream_has_a_deadline():
    async with served(parts(1, then=hang)) as (backend, _, _):
        found = await fault_of(backend, streamed(), timeout_us=50_000)
    assert (found.kind, found.reply) == (FaultKind.TIMEOUT, None)


# --- several servers ------------------------------------------------------------------------------


class Dns:
    def __init__(self, *hosts):
        self.hosts = hosts

    async def __call__(self, host, port):
        if not self.hosts:
            raise OSError("no such name")
        return self.hosts


@asynccontextmanager
async def named(dns, *hosts):
    """Servers on the loopback addresses `hosts`, all on one port, behind the name `tritons`."""
    servicers, servers, port = {}, [], 0
    for host in hosts:
        server = grpc.aio.server()
        servicers[host] = Servicer()
        pb_grpc.add_GRPCInferenceServiceServicer_to_server(servicers[host], server)
        port = server.add_insecure_port(f"{host}:{port}")
        await server.start()
        servers.append(server)
    backend = TritonBackend("triton", f"tritons:{port}", resolve=dns)
    try:
        yield backend, servicers, port
    finally:
        await backend.close()
        for server in servers:
            await server.stop(0)


async def test_each_address_of_a_name_is_a_server():
    async with named(Dns("127.0.0.1", "127.0.0.2"), "127.0.0.1", "127.0.0.2") as (backend, servicers, port):
        assert backend.replicas() == ()
        assert len(await answer_of(backend)) == 1  # before the first look-up: it waits for it
        assert backend.replicas() == (f"127.0.0.1:{port}", f"127.0.0.2:{port}")
        await answer_of(backend, replace(call(), replica=f"127.0.0.2:{port}"))
        assert [len(one.requests) for one in servicers.values()] == [1, 1]
        assert {one.replica for one in await backend.figures()} == set(backend.replicas())


async def test_servers_come_and_go_with_dns(monkeypatch):
    monkeypatch.setattr(triton_grpc, "REFRESH_S", 0.01)
    dns = Dns("127.0.0.1")
    async with named(dns, "127.0.0.1", "127.0.0.2") as (backend, servicers, port):
        await backend.probe(GOOD)
        servicers["127.0.0.1"].answer = hang
        first = replace(call(), replica=f"127.0.0.1:{port}")
        in_flight = asyncio.create_task(answer_of(backend, first))
        await servicers["127.0.0.1"].arrived.wait()
        dns.hosts = ("127.0.0.2",)
        await until(lambda: backend.replicas() == (f"127.0.0.2:{port}",))
        assert not in_flight.done()
        found = await fault_of(backend, first)
        assert (found.kind, found.is_server) == (FaultKind.UNAVAILABLE, True)
        (leaving,) = backend._leaving
        assert not leaving.is_closed
        in_flight.cancel()
        await asyncio.gather(in_flight, return_exceptions=True)
        await until(lambda: leaving.is_closed)
        dns.hosts = ()
        await answer_of(backend, replace(call(), replica=f"127.0.0.2:{port}"))


async def test_a_name_that_cannot_be_looked_up():
    async with named(Dns(), "127.0.0.1") as (backend, _, _):
        found = await fault_of(backend)
        assert (found.kind, found.is_server) == (FaultKind.UNAVAILABLE, True)
        backend._addresses._resolve.hosts = ("127.0.0.1",)
        assert len(await answer_of(backend)) == 1


async def test_figures_of_those_servers_that_answer():
    async with named(Dns("127.0.0.1", "127.0.0.9"), "127.0.0.1") as (backend, _, port):
        await backend.probe(GOOD)
        assert [one.replica for one in await backend.figures()] == [f"127.0.0.1:{port}"]
