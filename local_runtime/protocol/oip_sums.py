"""Statistics of several servers of the same models as those of one. Pure."""

from collections.abc import Iterable
from typing import Any

from tritonclient.grpc import service_pb2


def summed(parts: Iterable[Any]) -> Any:
    """One `ModelStatisticsResponse` out of many: counts and times are sums, `last_inference` is the latest."""
    totals: dict[tuple[str, str], Any] = {}
    for part in parts:
        for model in part.model_stats:
            total = totals.setdefault((model.name, model.version), service_pb2.ModelStatistics())
            _add_model(total, model)
    return service_pb2.ModelStatisticsResponse(model_stats=totals.values())


def _add_model(total: Any, model: Any) -> None:
    total.name, total.version = model.name, model.version
    total.last_inference = max(total.last_inference, model.last_inference)
    total.inference_count += model.inference_count
    total.execution_count += model.execution_count
    _add_durations(total.inference_stats, model.inference_stats)
    batches = {batch.batch_size: batch for batch in total.batch_stats}
    for batch in model.batch_stats:
        if batch.batch_size not in batches:
            batches[batch.batch_size] = total.batch_stats.add(batch_size=batch.batch_size)
        _add_durations(batches[batch.batch_size], batch)


def _add_durations(total: Any, part: Any) -> None:
    """Add up the `StatisticDuration`s among the fields of two messages of the same kind."""
    for field, value in part.ListFields():
        if field.message_type is not None:
            summand = getattr(total, field.name)
            summand.count += value.count
            summand.ns += value.ns
