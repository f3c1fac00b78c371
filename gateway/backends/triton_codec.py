"""Core values to and from Triton's protobuf messages. Pure: no channel, no clock."""

from collections.abc import Sequence

from tritonclient.grpc import service_pb2 as pb

from gateway.backends.triton_faults import wrong_names
from gateway.core.errors import BackendError, Fault, FaultKind
from gateway.core.models import ModelFigures
from gateway.core.tensors import check
from gateway.core.types import BackendCall, Tensor, TensorPayload, Tensors


def encode(call: BackendCall, payload: TensorPayload) -> pb.ModelInferRequest:
    """The request, all inputs in raw form."""
    request = pb.ModelInferRequest(model_name=call.model, model_version=call.version, id=call.request_id)
    raw = request.raw_input_contents
    for tensor in payload.inputs:
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        # protobuf takes `bytes` only; for those there is one copy, into the message
        raw.append(tensor.data if isinstance(tensor.data, bytes) else bytes(tensor.data))
    for name in payload.outputs:
        request.outputs.add(name=name)
    return request


def decode(response: pb.ModelInferResponse, wanted: Sequence[str]) -> Tensors:
    """The answer in the order of `wanted` (all of it where nothing is named).

    Triton checks none of its models' outputs, so this does: raises `BackendError` BROKEN for missing or double names,
    and for sizes that do not fit shape and datatype.
    """
    raw = response.raw_output_contents
    if len(raw) != len(response.outputs):
        raise _broken(f"{len(response.outputs)} outputs with {len(raw)} raw contents")
    outputs = {}
    for output, contents in zip(response.outputs, raw, strict=True):
        tensor = Tensor(name=output.name, datatype=output.datatype, shape=tuple(output.shape), data=contents)
        try:
            check(tensor)
        except ValueError as error:
            raise _broken(str(error)) from error
        outputs[output.name] = tensor
    wrong = wrong_names([output.name for output in response.outputs], wanted)
    if wrong:
        raise _broken(wrong)
    picked = tuple(outputs[name] for name in wanted) if wanted else tuple(outputs.values())
    return Tensors(outputs=picked, version=response.model_version)


def figures(response: pb.ModelStatisticsResponse, *, replica: str) -> list[ModelFigures]:
    """The counters of every version of every model, nanoseconds as microseconds."""
    return [
        ModelFigures(
            replica=replica,
            model=stats.name,
            version=stats.version,
            requests=stats.inference_stats.success.count,
            failures=stats.inference_stats.fail.count,
            inferences=stats.inference_count,
            executions=stats.execution_count,
            queue_us=stats.inference_stats.queue.ns // 1000,
            compute_input_us=stats.inference_stats.compute_input.ns // 1000,
            compute_infer_us=stats.inference_stats.compute_infer.ns // 1000,
            compute_output_us=stats.inference_stats.compute_output.ns // 1000,
            batch_sizes={batch.batch_size: batch.compute_infer.count for batch in stats.batch_stats},
        )
        for stats in response.model_stats
    ]


def _broken(text: str) -> BackendError:
    return BackendError(Fault(kind=FaultKind.BROKEN, message=text))
