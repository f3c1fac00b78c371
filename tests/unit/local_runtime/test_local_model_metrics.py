"""`pb_utils.MetricFamily` and what the runtime's metrics endpoint sees of it."""

import gc
import threading
import types

import pytest

from local_runtime.executors import triton_python_backend_utils as pb_utils
from local_runtime.executors.model_metrics import MetricKind, MetricRegistry
from local_runtime.executors.shim.context import ModelContext, entered


@pytest.fixture
def services():
    fake = types.SimpleNamespace(metrics=MetricRegistry())
    with entered(ModelContext(folder="/repository/m/1", package="own", services=fake)):
        yield fake


def test_counters_and_gauges(services):
    counters = pb_utils.MetricFamily(name="c", description="text", kind=pb_utils.MetricFamily.COUNTER)
    counter = counters.Metric(labels={"model": "m", "version": 1})
    counter.increment(2)
    counter.increment(0.5)
    gauges = pb_utils.MetricFamily("g", "text", pb_utils.MetricFamily.GAUGE)
    gauge = gauges.Metric()
    gauge.set(5)
    gauge.increment(-7)
    assert (counter.value(), gauge.value()) == (2.5, -2)
    first, second = services.metrics.families()
    assert (first.name, first.description, first.kind) == ("c", "text", MetricKind.COUNTER)
    assert [(dict(sample.labels), sample.value) for sample in first.samples] == [({"model": "m", "version": "1"}, 2.5)]
    assert (second.name, second.samples[0].value) == ("g", -2)


def test_histograms_count_up_to_and_with_their_bounds(services):
    family = pb_utils.MetricFamily("h", "text", pb_utils.MetricFamily.HISTOGRAM)
    metric = family.Metric(buckets=[1.0, 5.0])
    for value in (0.5, 1, 3, 99):
        metric.observe(value)
    ((sample,),) = [one.samples for one in services.metrics.families()]
    assert (sample.buckets, sample.count, sample.value) == (((1.0, 2), (5.0, 3)), 4, 103.5)


def test_what_is_made_twice_is_one(services):
    families = [pb_utils.MetricFamily("c", "text", pb_utils.MetricFamily.COUNTER) for _ in range(2)]
    first, second = (family.Metric(labels={"a": "1", "b": "2"}) for family in families)
    first.increment(1)
    second.increment(1)
    assert (first.value(), second.value()) == (2, 2)
    assert len(services.metrics.families()[0].samples) == 1


def test_metrics_live_as_long_as_their_model(services):
    metric = pb_utils.MetricFamily("c", "text", pb_utils.MetricFamily.COUNTER).Metric()
    assert len(services.metrics.families()) == 1  # the metric alone holds its family
    del metric
    gc.collect()
    assert services.metrics.families() == ()


@pytest.mark.parametrize(
    ("kind", "call", "text"),
    [
        (
            "COUNTER",
            lambda metric: metric.increment(-1),
            (
                "Failed to increment metric value: TRITONSERVER_METRIC_KIND_COUNTER can only be incremented "
                "monotonically by non-negative values."
            ),
        ),
        ("COUNTER", lambda metric: metric.set(1), "TRITONSERVER_METRIC_KIND_COUNTER does not support Set"),
        ("COUNTER", lambda metric: metric.observe(1), "TRITONSERVER_METRIC_KIND_COUNTER does not support Observe"),
        ("GAUGE", lambda metric: metric.observe(1), "TRITONSERVER_METRIC_KIND_GAUGE does not support Observe"),
        (
            "HISTOGRAM",
            lambda metric: metric.increment(1),
            "TRITONSERVER_METRIC_KIND_HISTOGRAM does not support Increment",
        ),
        ("HISTOGRAM", lambda metric: metric.set(1), "TRITONSERVER_METRIC_KIND_HISTOGRAM does not support Set"),
        ("HISTOGRAM", lambda metric: metric.value(), "TRITONSERVER_METRIC_KIND_HISTOGRAM does not support Value"),
    ],
)
def test_what_a_kind_cannot_do(services, kind, call, text):
    family = pb_utils.MetricFamily("x", "text", getattr(pb_utils.MetricFamily, kind))
    metric = family.Metric(buckets=[1] if kind == "HISTOGRAM" else None)
    with pytest.raises(pb_utils.TritonModelException, match=text):
        call(metric)


@pytest.mark.parametrize(
    ("kind", "arguments", "text"),
    [
        ("COUNTER", {"labels": [1]}, "Failed to create metric. Labels must be a dictionary."),
        ("COUNTER", {"buckets": [1]}, "Failed to create metric. Unexpected buckets found."),
        ("COUNTER", {"labels": {"no-label": "1"}}, "Error when creating Metric: invalid label name 'no-label'"),
        ("COUNTER", {"labels": {"__own": "1"}}, "Error when creating Metric: invalid label name '__own'"),
        ("HISTOGRAM", {}, "Failed to create metric. Missing required buckets."),
        ("HISTOGRAM", {"buckets": (1,)}, "Failed to create metric. Buckets must be a list."),
        ("HISTOGRAM", {"buckets": [2, 1]}, "Bucket boundaries must be in increasing order"),
    ],
)
def test_metrics_that_cannot_be(services, kind, arguments, text):
    family = pb_utils.MetricFamily("x", "text", getattr(pb_utils.MetricFamily, kind))
    with pytest.raises(pb_utils.TritonModelException, match=text):
        family.Metric(**arguments)


def test_families_that_cannot_be(services):
    with pytest.raises(pb_utils.TritonModelException, match="Error when creating MetricFamily: invalid metric"):
        pb_utils.MetricFamily("no name", "text", pb_utils.MetricFamily.COUNTER)
    kept = pb_utils.MetricFamily("x", "text", pb_utils.MetricFamily.COUNTER)
    with pytest.raises(pb_utils.TritonModelException, match="exists already as a counter"):
        pb_utils.MetricFamily("x", "text", pb_utils.MetricFamily.GAUGE)
    assert kept is not None


def test_threads_lose_no_increment(services):
    metric = pb_utils.MetricFamily("c", "text", pb_utils.MetricFamily.COUNTER).Metric()
    threads = [threading.Thread(target=lambda: [metric.increment(1) for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert metric.value() == 2000
