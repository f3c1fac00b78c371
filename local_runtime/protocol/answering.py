"""What both servers do alike with the runtime's answers and descriptions."""

import importlib.metadata
from collections.abc import Mapping

import msgspec

from local_runtime.errors import ErrorCode, InferenceError
from local_runtime.messages import InferAnswer, InferRequest
from local_runtime.protocol.oip_classes import top_classes
from local_runtime.protocol.oip_tensors import refusing
from local_runtime.runtime import LocalRuntime

INTERNAL_TEXT = "internal error of the server: its log has the reason"


async def infer_once(runtime: LocalRuntime, request: InferRequest, *, decoupled: str) -> InferAnswer:
    """The one answer of a request; a decoupled model is refused with the words that Triton has for this protocol."""
    try:
        return await runtime.infer(request)
    except InferenceError as error:
        is_unsupported = error.code is ErrorCode.UNSUPPORTED
        if is_unsupported and runtime.model_config(request.model, request.version).model_transaction_policy.decoupled:
            raise InferenceError(ErrorCode.UNSUPPORTED, decoupled) from error
        raise


def with_classes(runtime: LocalRuntime, answer: InferAnswer, classes: Mapping[str, int]) -> InferAnswer:
    """The answer with the outputs named in `classes` replaced by their best classes; INVALID_ARG if they have none."""
    if not classes or answer.error is not None:
        return answer
    is_batched = runtime.model_config(answer.model, answer.version).max_batch_size > 0
    with refusing():
        outputs = {
            name: top_classes(
                name,
                array,
                count=classes[name],
                is_batched=is_batched,
                labels=runtime.labels(answer.model, answer.version, name),
            )
            if name in classes
            else array
            for name, array in answer.outputs.items()
        }
    return msgspec.structs.replace(answer, outputs=outputs)


def server_version() -> str:
    """The installed distribution's version."""
    try:
        return importlib.metadata.version("hybrid-inference-gateway")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
