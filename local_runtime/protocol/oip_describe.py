"""What the protocol tells about models, as plain values: JSON over HTTP, fields of messages over gRPC. Pure.

The keys are the fields of `grpc_service.proto`, which Triton's HTTP answers use as well.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from local_runtime.messages import ModelMetadata, ModelStatus
from local_runtime.protocol.error_texts import safe_text
from local_runtime.scheduling.stats import BatchStatistics, Duration, ModelStatistics

# Only what is served: no shared memory, trace or logging.
EXTENSIONS = (
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "binary_tensor_data",
    "parameters",
    "statistics",
)
SERVER_NAME = "local_runtime"


def server(version: str) -> dict[str, Any]:
    """Name, version and extensions of the server."""
    return {"name": SERVER_NAME, "version": version, "extensions": list(EXTENSIONS)}


def metadata(model: ModelMetadata) -> dict[str, Any]:
    """A model's `ModelMetadataResponse`."""
    return {
        "name": model.name,
        "versions": list(model.versions),
        "platform": model.platform,
        "inputs": [{"name": t.name, "datatype": t.datatype, "shape": list(t.shape)} for t in model.inputs],
        "outputs": [{"name": t.name, "datatype": t.datatype, "shape": list(t.shape)} for t in model.outputs],
    }


def index(statuses: Iterable[ModelStatus]) -> list[dict[str, str]]:
    """The repository index; a model that was never loaded has a name alone, as in Triton."""
    return [_status(status) for status in statuses]


def statistics(models: Iterable[ModelStatistics]) -> dict[str, Any]:
    """The `ModelStatisticsResponse`."""
    return {"model_stats": [_model(model) for model in models]}


def _status(status: ModelStatus) -> dict[str, str]:
    told = {
        "name": status.name,
        "version": status.version,
        "state": status.state.value,
        "reason": safe_text(status.reason),
    }
    return told if status.state else {"name": status.name}


def _model(model: ModelStatistics) -> dict[str, Any]:
    return {
        "name": model.name,
        "version": model.version,
        "last_inference": model.last_inference_ms,
        "inference_count": model.inference_count,
        "execution_count": model.execution_count,
        "inference_stats": {
            "success": _duration(model.success),
            "fail": _duration(model.fail),
            "queue": _duration(model.queue),
            "compute_input": _duration(model.compute_input),
            "compute_infer": _duration(model.compute_infer),
            "compute_output": _duration(model.compute_output),
            "cache_hit": _duration(model.cache_hit),
            "cache_miss": _duration(model.cache_miss),
        },
        "batch_stats": _batches(model.batch_stats),
    }


def _batches(batches: Mapping[int, BatchStatistics]) -> list[dict[str, Any]]:
    return [
        {
            "batch_size": rows,
            "compute_input": _duration(batch.compute_input),
            "compute_infer": _duration(batch.compute_infer),
            "compute_output": _duration(batch.compute_output),
        }
        for rows, batch in batches.items()
    ]


def _duration(duration: Duration) -> dict[str, int]:
    return {"count": duration.count, "ns": 1000 * duration.total_us}
