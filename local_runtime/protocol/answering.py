"""What both servers do alike with the runtime's answers and descriptions."""

import dataclasses
import importlib.metadata
from collections.abc import Mapping, Sequence

import msgspec

from local_runtime.errors import ErrorCode, InferenceError
from local_runtime.messages import InferAnswer, InferRequest
from local_runtime.protocol.oip_classes import top_classes
from local_runtime.protocol.oip_tensors import refusing
from local_runtime.runtime import LocalRuntime

INTERNAL_TEXT = "internal error of the server: its log has the reason"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Classes:
    """What is needed to put the best classes in place of an output's values.

    Args:
        counts: how many are wanted, by output.
        labels: names of an output's classes, for those outputs.
        is_batched: the first dimension of outputs is the batch.
    """

    counts: Mapping[str, int]
    labels: Mapping[str, Sequence[str]]
    is_batched: bool


def classes_of(runtime: LocalRuntime, request: InferRequest, counts: Mapping[str, int]) -> Classes | None:
    """What `with_classes` needs, None where nothing is asked. NOT_FOUND if the model is not served.

    Asked before the inference: behind it, the model may be gone.
    """
    if not counts:
        return None
    return Classes(
        counts=counts,
        labels={name: runtime.labels(request.model, request.version, name) for name in counts},
        is_batched=runtime.model_config(request.model, request.version).max_batch_size > 0,
    )


def with_classes(answer: InferAnswer, classes: Classes | None) -> InferAnswer:
    """The answer with the best classes of the outputs that they are wanted of; INVALID_ARG if they have none."""
    if classes is None or answer.error is not None:
        return answer
    with refusing():
        outputs = {
            name: top_classes(
                name,
                array,
                count=classes.counts[name],
                is_batched=classes.is_batched,
                labels=classes.labels[name],
            )
            if name in classes.counts
            else array
            for name, array in answer.outputs.items()
        }
    return msgspec.structs.replace(answer, outputs=outputs)


async def infer_once(
    runtime: LocalRuntime, request: InferRequest, *, counts: Mapping[str, int], decoupled: str
) -> InferAnswer:
    """The one answer of a request, with the best classes of the outputs in `counts`.

    A decoupled model is refused with the words that Triton has for this protocol.
    """
    classes = classes_of(runtime, request, counts) if counts else None
    try:
        answer = await runtime.infer(request)
    except InferenceError as error:
        if error.code is ErrorCode.UNSUPPORTED and is_decoupled(runtime, request):
            raise InferenceError(ErrorCode.UNSUPPORTED, decoupled) from error
        raise
    return with_classes(answer, classes)


def is_decoupled(runtime: LocalRuntime, request: InferRequest) -> bool:
    """Whether the model is one that answers any number of times; False if it is not served."""
    try:
        config = runtime.model_config(request.model, request.version)
    except InferenceError:
        return False
    return bool(config.model_transaction_policy.decoupled)


def server_version() -> str:
    """The installed distribution's version."""
    try:
        return importlib.metadata.version("hybrid-inference-gateway")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
