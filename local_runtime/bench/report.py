"""The results for a reader: table, comparison of adaptive, and what to write into `config.pbtxt`."""

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from local_runtime.bench.results import Results
from local_runtime.bench.variants import Kind, Variant, config_text, configured

# Setting of the runtime, field of config.pbtxt.
_FIELDS = (
    ("most rows in one batch", "max_batch_size"),
    ("batching on (Triton's rule)", "dynamic_batching { }"),
    ("how long the oldest request waits for company", "dynamic_batching.max_queue_delay_microseconds"),
    ("batch sizes that leave at once", "dynamic_batching.preferred_batch_size"),
    ("adaptive batching (the local runtime only)", 'parameters { key: "ADAPTIVE_BATCHING" value: "true" }'),
    ("bound of its waiting", 'parameters { key: "ADAPTIVE_LATENCY_TARGET_MICROSECONDS" }'),
    ("copies of the model", "instance_group.count"),
    ("CPU threads of a copy", 'parameters { key: "INTRA_OP_THREAD_COUNT" }'),
)


def table(results: Results) -> Table:
    """All variants at all concurrencies; the fastest of each concurrency in bold."""
    shown = Table("in flight", "setting", "QPS", "p50 ms", "p99 ms", "mean batch", "x naive", title=results.model)
    for column in shown.columns[2:]:
        column.justify = "right"
    for concurrency in results.concurrencies:
        fastest = max(results.variants, key=lambda variant: results.measured[variant, concurrency].qps)
        for variant in results.variants:
            one = results.measured[variant, concurrency]
            shown.add_row(
                str(concurrency),
                title(variant),
                f"{one.qps:,.1f}",
                f"{one.p50_ms:.2f}",
                f"{one.p99_ms:.2f}",
                f"{one.mean_batch:.1f}",
                f"{results.relative(variant, concurrency):.2f}",
                style="bold" if variant == fastest else None,
            )
        shown.add_section()
    return shown


def comparison(results: Results) -> Table:
    """Adaptive with the largest size, untuned, against naive and the best of the sweep; and its worst size."""
    shown = Table("in flight", "adaptive / naive", "adaptive / best swept", "best swept", "lowest adaptive / naive")
    largest = results.of(Kind.ADAPTIVE)[-1]
    for concurrency in results.concurrencies:
        best = results.best_static(concurrency)
        ratio = results.measured[largest, concurrency].qps / results.measured[best, concurrency].qps
        worst = min(results.of(Kind.ADAPTIVE), key=lambda variant: results.relative(variant, concurrency))
        shown.add_row(
            str(concurrency),
            f"{results.relative(largest, concurrency):.2f}",
            f"{ratio:.2f}",
            title(best),
            f"{results.relative(worst, concurrency):.2f} (max {worst.max_batch_size})",
        )
    return shown


def title(variant: Variant) -> str:
    """The variant in words."""
    if variant.kind is Kind.NAIVE:
        return "naive"
    if variant.kind is Kind.ADAPTIVE:
        return f"adaptive, max {variant.max_batch_size}"
    return f"max {variant.max_batch_size}, delay {variant.delay_us} us"


def advice(results: Results, message: Any) -> Iterator[str]:
    """The best setting as a `config.pbtxt`, and which setting is which field."""
    best = results.best()
    yield f"# Best over all concurrencies: {title(best)} ({results.overall(best):.2f} x naive). Its config.pbtxt:"
    yield config_text(configured(message, best)).rstrip()
    yield ""
    yield "# Runtime setting -> config field"
    width = max(len(setting) for setting, _ in _FIELDS)
    for setting, field in _FIELDS:
        yield f"#   {setting:<{width}}  ->  {field}"
