"""The runtime's metrics as Prometheus text, under Triton's names (`user_guide/metrics.md`). Pure."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from local_runtime.executors.model_metrics import MetricFamilySample, MetricKind, MetricSample
from local_runtime.scheduling.stats import ModelStatistics

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

# Name, kind, help, value. Times of counters are in microseconds.
_FAMILIES: "tuple[tuple[str, str, str, Callable[[ModelStatistics], float]], ...]" = (
    ("nv_inference_count", "counter", "Rows answered by the model", lambda s: s.inference_count),
    ("nv_inference_exec_count", "counter", "Executions of the model", lambda s: s.execution_count),
    (
        "nv_inference_request_duration_us",
        "counter",
        "Time of answered requests, queue and execution",
        lambda s: s.success.total_us,
    ),
    ("nv_inference_queue_duration_us", "counter", "Time that requests waited", lambda s: s.queue.total_us),
    (
        "nv_inference_compute_input_duration_us",
        "counter",
        "Time to put batches together",
        lambda s: s.compute_input.total_us,
    ),
    (
        "nv_inference_compute_infer_duration_us",
        "counter",
        "Time that the model ran",
        lambda s: s.compute_infer.total_us,
    ),
    (
        "nv_inference_compute_output_duration_us",
        "counter",
        "Time to take outputs apart",
        lambda s: s.compute_output.total_us,
    ),
    (
        "nv_cache_num_hits_per_model",
        "counter",
        "Requests answered from the response cache",
        lambda s: s.cache_hit.count,
    ),
    (
        "nv_cache_num_misses_per_model",
        "counter",
        "Requests looked for in the response cache in vain",
        lambda s: s.cache_miss.count,
    ),
    ("nv_cache_hit_duration_per_model", "counter", "Time of look-ups that hit, in us", lambda s: s.cache_hit.total_us),
    (
        "nv_cache_miss_duration_per_model",
        "counter",
        "Time of look-ups that missed and of storing, in us",
        lambda s: s.cache_miss.total_us,
    ),
    ("nv_inference_pending_request_count", "gauge", "Requests that wait", lambda s: s.pending_count),
    ("nv_model_load_duration_secs", "gauge", "Time that loading took, in seconds", lambda s: s.load_us / 1_000_000),
)
_ESCAPES: Mapping[int, str] = MappingProxyType(str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"}))
_HELP_ESCAPES: Mapping[int, str] = MappingProxyType(str.maketrans({"\\": r"\\", "\n": r"\n"}))


def render(statistics: Sequence[ModelStatistics], families: Iterable[MetricFamilySample]) -> str:
    """The page: the runtime's own counters by model and version, then what models keep of their own.

    A model's family that is named like one of the runtime's is left out: a page may hold a name only once.
    """
    lines = _head("nv_inference_request_success", "counter", "Requests answered")
    lines += [_line("nv_inference_request_success", _labels_of(model), model.success.count) for model in statistics]
    lines += _head("nv_inference_request_failure", "counter", "Requests that failed, by reason")
    lines += [
        _line("nv_inference_request_failure", {**_labels_of(model), "reason": reason.value}, count)
        for model in statistics
        for reason, count in model.failures.items()
    ]
    for name, kind, text, value in _FAMILIES:
        lines += _head(name, kind, text)
        lines += [_line(name, _labels_of(model), value(model)) for model in statistics]
    taken = {"nv_inference_request_success", "nv_inference_request_failure", *(name for name, *_ in _FAMILIES)}
    for family in families:
        if family.name not in taken:
            lines += _own(family)
    return "\n".join(lines) + "\n"


def _own(family: MetricFamilySample) -> list[str]:
    lines = _head(family.name, family.kind.value, family.description)
    for sample in family.samples:
        if family.kind is MetricKind.HISTOGRAM:
            lines += _histogram(family.name, sample)
        else:
            lines.append(_line(family.name, sample.labels, sample.value))
    return lines


def _histogram(name: str, sample: MetricSample) -> list[str]:
    bounds = [(_number(bound), count) for bound, count in sample.buckets] + [("+Inf", sample.count)]
    lines = [_line(f"{name}_bucket", {**sample.labels, "le": bound}, count) for bound, count in bounds]
    return [
        *lines,
        _line(f"{name}_sum", sample.labels, sample.value),
        _line(f"{name}_count", sample.labels, sample.count),
    ]


def _head(name: str, kind: str, text: str) -> list[str]:
    return [f"# HELP {name} {text.translate(_HELP_ESCAPES)}", f"# TYPE {name} {kind}"]


def _labels_of(model: ModelStatistics) -> dict[str, str]:
    return {"model": model.name, "version": model.version}


def _line(name: str, labels: Mapping[str, str], value: float) -> str:
    listed = ",".join(f'{label}="{text.translate(_ESCAPES)}"' for label, text in labels.items())
    return f"{name}{{{listed}}} {_number(value)}" if listed else f"{name} {_number(value)}"


def _number(value: float) -> str:
    if isinstance(value, float) and math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if value != value else repr(value)  # noqa: PLR0124 - only NaN differs from itself
