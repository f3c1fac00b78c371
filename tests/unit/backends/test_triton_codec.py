import struct

import pytest
from tritonclient.grpc import service_pb2 as pb

from gateway.backends.triton_codec import batch_sizes, decode, encode
from gateway.core.errors import BackendError, FaultKind
from gateway.core.types import BackendCall, Tensor, TensorPayload


def answer(*outputs, raw=None):
    response = pb.ModelInferResponse(model_version="3")
    for name, datatype, shape, data in outputs:
        response.outputs.add(name=name, datatype=datatype, shape=shape)
        response.raw_output_contents.append(data)
    if raw is not None:
        del response.raw_output_contents[:]
        response.raw_output_contents.extend(raw)
    return response


def test_a_request_is_raw_and_complete():
    payload = TensorPayload(
        inputs=(
            Tensor(name="A", datatype="FP32", shape=(1, 2), data=bytes(8)),
            Tensor(name="B", datatype="BYTES", shape=(1, 1), data=memoryview(b"\x01\x00\x00\x00x")),
        ),
        outputs=("P",),
    )
    request = encode(BackendCall(request_id="r-1", model="m", version="2", payload=payload), payload)
    assert (request.model_name, request.model_version, request.id) == ("m", "2", "r-1")
    assert [(i.name, i.datatype, list(i.shape)) for i in request.inputs] == [
        ("A", "FP32", [1, 2]),
        ("B", "BYTES", [1, 1]),
    ]
    assert list(request.raw_input_contents) == [bytes(8), b"\x01\x00\x00\x00x"]
    assert [o.name for o in request.outputs] == ["P"]


def test_an_answer_comes_in_the_order_asked_for():
    response = answer(
        ("B", "INT8", [2], b"ab"), ("A", "BYTES", [1], struct.pack("<I", 1) + b"x"), ("C", "BF16", [0], b"")
    )
    tensors = decode(response, ["A", "B"])
    assert [(t.name, t.datatype, t.shape) for t in tensors.outputs] == [("A", "BYTES", (1,)), ("B", "INT8", (2,))]
    assert tensors.version == "3"
    assert [t.name for t in decode(response, []).outputs] == ["B", "A", "C"]


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
        decode(response, wanted)
    assert caught.value.fault.kind is FaultKind.BROKEN


def test_batch_sizes_of_all_versions_together():
    response = pb.ModelStatisticsResponse()
    for version in ("1", "2"):
        stats = response.model_stats.add(name="m", version=version)
        for size, count in ((1, 2), (4, 2)):
            batch = stats.batch_stats.add(batch_size=size)
            batch.compute_infer.count = count
    assert batch_sizes(response) == {"m": {1: 4, 4: 4}}
