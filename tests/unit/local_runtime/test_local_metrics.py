from prometheus_client.parser import text_string_to_metric_families

from local_runtime.executors.model_metrics import MetricFamilySample, MetricKind, MetricRegistry, MetricSample
from local_runtime.protocol.metrics import render
from tests.kit.local_fake import statistics


def read(page):
    """Values by name and labels, as a Prometheus client understands the page (it adds _total to counters)."""
    return {
        (sample.name.removesuffix("_total"), *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def test_the_runtimes_counters_have_tritons_names_and_labels():
    values = read(render([statistics("m")], ()))
    labels = (("model", "m"), ("version", "1"))
    assert {
        name: values[name, *labels]
        for name in (
            "nv_inference_request_success",
            "nv_inference_count",
            "nv_inference_exec_count",
            "nv_inference_request_duration_us",
            "nv_inference_queue_duration_us",
            "nv_inference_compute_input_duration_us",
            "nv_inference_compute_infer_duration_us",
            "nv_inference_compute_output_duration_us",
            "nv_inference_pending_request_count",
            "nv_model_load_duration_secs",
            "nv_cache_num_hits_per_model",
            "nv_cache_num_misses_per_model",
        )
    } == {
        "nv_inference_request_success": 2,
        "nv_inference_count": 3,
        "nv_inference_exec_count": 1,
        "nv_inference_request_duration_us": 348,
        "nv_inference_queue_duration_us": 300,
        "nv_inference_compute_input_duration_us": 2,
        "nv_inference_compute_infer_duration_us": 40,
        "nv_inference_compute_output_duration_us": 6,
        "nv_inference_pending_request_count": 4,
        "nv_model_load_duration_secs": 1.5,
        "nv_cache_num_hits_per_model": 0,
        "nv_cache_num_misses_per_model": 0,
    }
    failures = {
        reason: values["nv_inference_request_failure", labels[0], ("reason", reason), labels[1]]
        for reason in ("REJECTED", "CANCELED", "BACKEND", "OTHER")
    }
    assert failures == {"REJECTED": 1, "CANCELED": 0, "BACKEND": 0, "OTHER": 0}


def test_every_family_is_typed_once():
    page = render([statistics("a"), statistics("b")], ())
    types = [line.split()[2] for line in page.splitlines() if line.startswith("# TYPE ")]
    assert len(types) == len(set(types))
    assert "# TYPE nv_inference_pending_request_count gauge" in page
    assert "# TYPE nv_inference_count counter" in page


def test_odd_names_are_escaped():
    name = 'a"b\\c\nd'
    values = read(render([statistics(name)], ()))
    assert values["nv_inference_count", ("model", name), ("version", "1")] == 3


def test_models_own_metrics_follow():
    registry = MetricRegistry()
    families = [
        registry.family(kind.value + "_of_mine", description="a\nb", kind=kind)
        for kind in (MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM)
    ]
    counter, gauge = families[0].metric({"k": "v"}), families[1].metric({})
    histogram = families[2].metric({"k": "v"}, bounds=(0.1, 1.0))
    counter.increment(2)
    gauge.set(-0.5)
    for value in (0.05, 0.5, 5.0):
        histogram.observe(value)
    page = render([], registry.families())
    assert "# HELP gauge_of_mine a\\nb" in page
    lines = page.splitlines()
    assert 'counter_of_mine{k="v"} 2.0' in lines
    assert "gauge_of_mine -0.5" in lines
    assert [line for line in lines if line.startswith("histogram_of_mine")] == [
        'histogram_of_mine_bucket{k="v",le="0.1"} 1',
        'histogram_of_mine_bucket{k="v",le="1.0"} 2',
        'histogram_of_mine_bucket{k="v",le="+Inf"} 3',
        'histogram_of_mine_sum{k="v"} 5.55',
        'histogram_of_mine_count{k="v"} 3',
    ]


def test_values_that_are_no_numbers_are_prometheus_words():
    samples = tuple(
        MetricSample(labels={"n": str(value)}, value=value) for value in (float("nan"), float("inf"), float("-inf"))
    )
    page = render([], [MetricFamilySample(name="g", description="", kind=MetricKind.GAUGE, samples=samples)])
    assert 'g{n="nan"} NaN' in page
    assert 'g{n="inf"} +Inf' in page
    assert 'g{n="-inf"} -Inf' in page


def test_a_model_cannot_take_a_name_of_the_runtime():
    sample = MetricSample(labels={}, value=99.0)
    family = MetricFamilySample(name="nv_inference_count", description="", kind=MetricKind.GAUGE, samples=(sample,))
    assert "99" not in render([statistics("m")], [family])
