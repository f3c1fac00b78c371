import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from gateway.backends.triton.codec import decode, decode_streamed, encode
from gateway.core.errors import BackendError, FaultKind
from gateway.core.models import ModelFacts
from gateway.core.types import BackendCall, SequenceStep, Tensor, TensorPayload, Tensors


def answer(*outputs, raw=None, **fields):
    response = pb.ModelInferResponse(model_version="3", **fields)
    for name, datatype, shape, data in outputs:
        response.outputs.add(name=name, datatype=datatype, shape=shape)
        response.raw_output_contents.append(data)
    if raw is not None:
        del response.raw_output_contents[:]
        response.raw_output_contents.extend(raw)
    return response


def encoded(payload, *, facts=None, sequence=None):
    call = BackendCall(request_id="r-1", model="m", version="2", payload=payload, sequence=sequence)
    return pb.ModelInferRequest.FromString(b"".join(encode(call, payload, facts)))


def parameters(request):
    return {name: getattr(p, p.WhichOneof("parameter_choice")) for name, p in request.parameters.items()}


INPUT = Tensor(name="A", datatype="FP32", shape=(1, 2), data=bytes(8))


def test_a_request_is_raw_and_complete():
    payload = TensorPayload(
        inputs=(INPUT, Tensor(name="B", datatype="BYTES", shape=(1, 1), data=memoryview(b"\x01\x00\x00\x00x"))),
        outputs=("P",),
    )
    request = encoded(payload)
    assert (request.model_name, request.model_version, request.id) == ("m", "2", "r-1")
    assert [(i.name, i.datatype, list(i.shape)) for i in request.inputs] == [
        ("A", "FP32", [1, 2]),
        ("B", "BYTES", [1, 1]),
    ]
    assert list(request.raw_input_contents) == [bytes(8), b"\x01\x00\x00\x00x"]
    assert [o.name for o in request.outputs] == ["P"]
    assert not request.parameters


@given(st.lists(st.binary(max_size=300) | st.integers(0, 70_000).map(bytes), max_size=5))
def test_contents_of_any_length_are_as_protobuf_would_write_them(contents):
    inputs = tuple(
        Tensor(name=f"I{at}", datatype="UINT8", shape=(len(data),), data=data) for at, data in enumerate(contents)
    )
    assert list(encoded(TensorPayload(inputs=inputs)).raw_input_contents) == contents
    response = answer(*((one.name, "UINT8", [len(one.data)], one.data) for one in inputs), model_name="m", id="r")
    assert [bytes(one.data) for one in decode(response.SerializeToString(), ()).outputs] == contents


@pytest.mark.parametrize("request_id", ["", "r-2", "x" * 128])
def test_requests_that_look_alike_have_their_own_ids_and_contents(request_id):
    for data in (bytes(8), b"12345678"):
        payload = TensorPayload(inputs=(Tensor(name="A", datatype="FP32", shape=(1, 2), data=data),))
        call = BackendCall(request_id=request_id, model="m", version="2", payload=payload)
        sent = pb.ModelInferRequest.FromString(b"".join(encode(call, payload, None)))
        assert (sent.id, list(sent.raw_input_contents)) == (request_id, [data])


@pytest.mark.parametrize("name", ["A", "A" * 200, "A" * 10_000])
def test_answers_that_look_alike_have_their_own_contents(name):
    for data in (bytes(8), b"12345678"):
        response = answer((name, "FP32", [1, 2], data), model_name="m", id=f"r-{data!r}")
        (tensor,) = decode(response.SerializeToString(), ()).outputs
        assert tensor == Tensor(name=name, datatype="FP32", shape=(1, 2), data=data)
    with pytest.raises(BackendError):
        decode(response.SerializeToString(), ("B",))
    assert decode(response.SerializeToString(), (name,)).outputs == (tensor,)


@pytest.mark.parametrize(
    ("facts", "sent"),
    [
        (None, {}),
        (ModelFacts(name="m"), {}),
        (ModelFacts(name="m", has_priority_levels=True), {"priority": 2}),
        (ModelFacts(name="m", allows_timeout=True), {"timeout": 900}),
    ],
)
def test_priority_and_timeout_are_sent_to_models_that_declare_them(facts, sent):
    payload = TensorPayload(inputs=(INPUT,), priority=2, queue_timeout_us=900)
    assert parameters(encoded(payload, facts=facts)) == sent


def test_parameters_keep_their_kinds():
    own = {"a": True, "b": "x", "c": 1.5, "d": -3, "e": 2**64 - 1}
    request = encoded(TensorPayload(inputs=(INPUT,), parameters=own, wants_empty_final=True))
    assert parameters(request) == own | {"triton_enable_empty_final_response": True}
    assert request.parameters["d"].WhichOneof("parameter_choice") == "int64_param"
    assert request.parameters["e"].WhichOneof("parameter_choice") == "uint64_param"


def test_classes_are_asked_for_by_output():
    request = encoded(TensorPayload(inputs=(INPUT,), outputs=("P", "Q"), classes={"Q": 3}))
    assert [dict(one.parameters) != {} for one in request.outputs] == [False, True]
    assert request.outputs[1].parameters["classification"].int64_param == 3


@pytest.mark.parametrize("number", [1, 2**63 - 1, 2**63, 2**64 - 1])
def test_every_sequence_id_fits(number):
    request = encoded(TensorPayload(inputs=(INPUT,)), sequence=SequenceStep(id=number, is_start=True))
    found = parameters(request)
    assert found["sequence_id"] % 2**64 == number
    assert (found["sequence_start"], found["sequence_end"]) == (True, False)


def test_an_answer_comes_in_the_servers_order():
    response = answer(
        ("B", "INT8", [2], b"ab"), ("A", "BYTES", [1], struct.pack("<I", 1) + b"x"), ("C", "BF16", [0], b"")
    ).SerializeToString()
    tensors = decode(response, ["A", "B"])
    assert [(t.name, t.datatype, t.shape) for t in tensors.outputs] == [("B", "INT8", (2,)), ("A", "BYTES", (1,))]
    assert tensors.version == "3"
    assert [t.name for t in decode(response, []).outputs] == ["B", "A", "C"]


def test_a_models_own_parameters_come_along():
    response = answer(("A", "INT8", [1], b"a"))
    response.parameters["score"].double_param = 0.5
    response.parameters["triton_final_response"].bool_param = False
    assert decode(response.SerializeToString(), ()) == Tensors(
        outputs=(Tensor(name="A", datatype="INT8", shape=(1,), data=b"a"),),
        version="3",
        parameters={"score": 0.5},
        is_final=False,
    )


def test_fields_in_any_order_are_read():
    first = answer(("A", "INT8", [1], b"a")).SerializeToString()
    last = pb.ModelInferResponse(id="r").SerializeToString()
    assert decode(last + first, ()) == decode(first + last, ())


@pytest.mark.parametrize(
    ("response", "wanted"),
    [
        (answer(("A", "FP32", [2], bytes(4))), []),
        (answer(("A", "FP32", [2], bytes(12))), []),
        (answer(("A", "FP32", [-1], bytes(4))), []),
        (answer(("A", "NOPE", [1], bytes(4))), []),
        (answer(("A", "BYTES", [1], b"\x09\x00\x00\x00x")), []),
        (answer(("A", "FP32", [1], bytes(4))), ["A", "B"]),
        (answer(), ["A"]),
        (answer(("A", "FP32", [1], bytes(4)), ("A", "FP32", [1], bytes(4))), ["A"]),
        (answer(("A", "FP32", [1], bytes(4)), raw=[]), []),
    ],
)
def test_wrong_answers_are_the_backends_fault(response, wanted):
    with pytest.raises(BackendError) as caught:
        decode(response.SerializeToString(), wanted)
    assert caught.value.fault.kind is FaultKind.BROKEN
    if response.outputs:  # without any it is the end of a stream
        with pytest.raises(BackendError) as caught:
            decode_streamed(pb.ModelStreamInferResponse(infer_response=response).SerializeToString(), wanted)
        assert caught.value.fault.kind is FaultKind.BROKEN


@pytest.mark.parametrize("cut", [b"\x0a", b"\x0a\x05ab", b"\x08\x01", b"\xff" * 12, b"\x2a\x02\xff\xff", b"\x32\x80"])
def test_what_is_no_message_is_broken(cut):
    with pytest.raises(BackendError) as caught:
        decode(cut, ())
    assert caught.value.fault.kind is FaultKind.BROKEN


@given(st.binary(max_size=60))
def test_no_bytes_make_it_fail_in_another_way(noise):
    for read in (decode, decode_streamed):
        with contextlib.suppress(BackendError):
            read(noise, ())


def test_a_stream_brings_answers_errors_and_an_empty_end():
    def read(**fields):
        return decode_streamed(pb.ModelStreamInferResponse(**fields).SerializeToString(), ["A"])

    assert read(error_message="boom") == "boom"
    end = answer()
    end.parameters["triton_final_response"].bool_param = True
    assert read(infer_response=end) == Tensors(outputs=(), version="3", is_final=True)
    part = answer(("A", "INT8", [1], b"a"))
    part.parameters["triton_final_response"].bool_param = False
    assert not read(infer_response=part).is_final
