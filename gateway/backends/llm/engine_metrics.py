"""What LLM servers say of their load on `/metrics`, in Prometheus' text format. Pure.

A page may be large (vLLM's is 60 kB), and is read every other second: only the few lines that matter are looked for, by
their names, and nothing else is parsed.
"""

import re
from dataclasses import dataclass
from typing import Final

from gateway.core.types import EngineLoad

MOST: Final = 1e9  # requests, or a share of a cache: what is above is none
_LINE = re.compile(rb"(\{[^\n]*\})?[ \t]+([^\s]+)")  # labels and value, behind a name


@dataclass(frozen=True, slots=True)
class _Gauge:
    """A metric by its name; `label` is how one of its label pairs is written, where only those samples are meant."""

    name: bytes
    label: bytes = b""

    def values(self, page: bytes) -> list[float]:
        """Every sample's; those that are no number that a load can be are left out."""
        found: list[float] = []
        mark = b"\n" + self.name
        at = page.find(mark)
        while at >= 0:
            end = at + len(mark)
            line = _LINE.match(page, end)
            if line is not None and self.label in (line[1] or b""):
                value = _number(line[2])
                found += [] if value is None else [value]
            at = page.find(mark, end)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Engine:
    """The names of one server. `kv_used`: the first that is there counts; 1 is a full cache."""

    running: _Gauge
    waiting: _Gauge
    kv_used: tuple[_Gauge, ...]


def _engine(running: str, waiting: str, *kv_used: str) -> _Engine:
    return _Engine(
        running=_Gauge(running.encode()),
        waiting=_Gauge(waiting.encode()),
        kv_used=tuple(_Gauge(name.encode()) for name in kv_used),
    )


ENGINES: Final = (
    _engine(
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",  # until vLLM 0.10
    ),
    _engine("llamacpp:requests_processing", "llamacpp:requests_deferred", "llamacpp:kv_cache_usage_ratio"),
    _engine("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage"),
    _engine("trtllm_num_requests_running", "trtllm_num_requests_waiting", "trtllm_kv_cache_utilization"),
    # Triton with its TensorRT-LLM backend: one metric, told apart by a label.
    _Engine(
        running=_Gauge(b"nv_trt_llm_request_metrics", b'request_type="scheduled"'),
        waiting=_Gauge(b"nv_trt_llm_request_metrics", b'request_type="waiting"'),
        kv_used=(_Gauge(b"nv_trt_llm_kv_cache_block_metrics", b'kv_cache_block_type="fraction"'),),
    ),
)


def load_in(page: bytes) -> EngineLoad | None:
    """The load that a page tells of; None where it is of no engine that is known.

    The requests of several engines or models behind one address are summed; of their caches the fullest counts.
    """
    page = b"\n" + page
    for engine in ENGINES:
        running = engine.running.values(page)
        if not running:
            continue
        kv_used = next((values for gauge in engine.kv_used if (values := gauge.values(page))), None)
        return EngineLoad(
            running=round(sum(running)),
            waiting=round(sum(engine.waiting.values(page))),
            kv_used=None if kv_used is None else min(1.0, max(kv_used)),
        )
    return None


def _number(text: bytes) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value <= MOST else None  # NaN neither
