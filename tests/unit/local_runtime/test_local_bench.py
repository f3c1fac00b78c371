import argparse
import json

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from local_runtime.bench import command, load, report
from local_runtime.bench.results import Results
from local_runtime.bench.variants import Kind, Variant, config_text, configured, sweep
from local_runtime.errors import ErrorCode, InferenceError
from local_runtime.messages import InferRequest, TensorMetadata
from local_runtime.repository.parsing import parse

NAIVE = Variant(kind=Kind.NAIVE, max_batch_size=8)
ADAPTIVE = Variant(kind=Kind.ADAPTIVE, max_batch_size=8)
CONFIG = """name: "m" platform: "pytorch_libtorch" max_batch_size: 64
input [ { name: "INPUT__0" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 4 ] } ]
dynamic_batching { preferred_batch_size: [ 32 ] max_queue_delay_microseconds: 7 }
parameters { key: "OWN" value: { string_value: "kept" } }
"""


def options(*arguments):
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers(dest="command"))
    return parser.parse_args(["bench", *arguments])


def static(size, delay_us=0):
    return Variant(kind=Kind.STATIC, max_batch_size=size, delay_us=delay_us)


def measured(qps):
    return load.Measured(qps=qps, p50_ms=1.0, p99_ms=2.0, mean_batch=1.5)


def results(qps_by_variant, *, concurrencies=(1, 16)):
    """`qps_by_variant` holds one figure for each concurrency."""
    return Results(
        model="m",
        variants=list(qps_by_variant),
        concurrencies=concurrencies,
        measured={
            (variant, concurrency): measured(qps)
            for variant, column in qps_by_variant.items()
            for concurrency, qps in zip(concurrencies, column, strict=True)
        },
    )


FIGURES = {NAIVE: (100, 100), static(1): (100, 110), static(8): (90, 400), ADAPTIVE: (100, 390)}


def test_the_sweep_has_naive_once_and_each_size_with_each_delay_and_adaptive():
    names = [variant.name for variant in sweep([4, 1], [500, 0])]
    assert names == ["naive", "static_1_0us", "adaptive_1", "static_4_0us", "static_4_500us", "adaptive_4"]


@pytest.mark.parametrize("variant", [NAIVE, static(8, 500), ADAPTIVE], ids=lambda variant: variant.name)
def test_a_variant_replaces_the_batching_of_the_model_and_nothing_else(variant):
    message = text_format.Parse(CONFIG, model_config_pb2.ModelConfig())
    config = parse(config_text(configured(message, variant)), folder_name="m")
    assert config.max_batch_size == 8
    assert config.parameters["OWN"] == "kept"
    batching = config.dynamic_batching
    assert (batching is None) == (variant is NAIVE)
    if batching is not None:
        assert batching.preferred_batch_size == ()
        assert batching.max_queue_delay_microseconds == variant.delay_us
        assert (batching.adaptive is not None) == (variant is ADAPTIVE)
    assert message.dynamic_batching.max_queue_delay_microseconds == 7


def test_results_are_compared_with_naive_at_the_same_concurrency():
    found = results(FIGURES)
    assert found.relative(static(8), 16) == pytest.approx(4.0)
    assert found.best_static(1) == static(1)
    assert found.best_static(16) == static(8)
    assert found.overall(static(8)) == pytest.approx((0.9 * 4.0) ** 0.5)
    assert found.best() == ADAPTIVE


def test_the_json_holds_every_figure():
    document = json.loads(json.dumps(results(FIGURES).as_json()))
    assert document["best"] == "adaptive_8"
    assert len(document["results"]) == 8
    assert document["results"][-1] == {
        "variant": "adaptive_8",
        "kind": "adaptive",
        "max_batch_size": 8,
        "delay_us": 0,
        "concurrency": 16,
        "qps": 390,
        "p50_ms": 1.0,
        "p99_ms": 2.0,
        "mean_batch": 1.5,
        "relative_to_naive": 3.9,
    }


def test_the_advice_is_a_config_that_loads_followed_by_what_is_which_field():
    message = text_format.Parse(CONFIG, model_config_pb2.ModelConfig())
    text = "\n".join(report.advice(results(FIGURES), message))
    assert parse(text, folder_name="m").dynamic_batching.adaptive is not None
    assert "->  dynamic_batching.max_queue_delay_microseconds" in text


def test_medians_are_taken_figure_by_figure():
    runs = [load.Measured(qps=q, p50_ms=p, p99_ms=9.0, mean_batch=1.0) for q, p in ((1, 5.0), (2, 4.0), (9, 6.0))]
    assert load.medians(runs) == load.Measured(qps=2, p50_ms=5.0, p99_ms=9.0, mean_batch=1.0)


class Answering:
    """In place of a runtime: answers at once, as part of batches of four."""

    def __init__(self):
        self.most = self.now = 0

    async def infer(self, request):
        self.now += 1
        self.most = max(self.most, self.now)
        await load.asyncio.sleep(0)
        self.now -= 1
        return argparse.Namespace(batch_size=4)


async def test_the_load_keeps_so_many_requests_in_flight():
    runtime = Answering()
    found = await load.run(runtime, InferRequest(model="m", inputs={}), concurrency=5, seconds=0.02)
    assert runtime.most == 5
    assert runtime.now == 0
    assert found.mean_batch == pytest.approx(4.0)
    assert 0 < found.p50_ms <= found.p99_ms
    assert found.qps > 0


async def test_a_refused_request_ends_the_run():
    class Refusing:
        async def infer(self, request):
            raise InferenceError(ErrorCode.INTERNAL, "no")

    with pytest.raises(InferenceError, match="no"):
        await load.run(Refusing(), InferRequest(model="m", inputs={}), concurrency=3, seconds=0.02)


def test_one_command_measures_and_writes_everything(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    pytest.importorskip("plotly")
    arguments = (
        *("--builtin", "mlp", "--max-batch-size", "1", "--max-batch-size", "2", "--delay-us", "0"),
        *("--concurrency", "1", "--concurrency", "2", "--seconds", "0.02", "--rounds", "1"),
        *("--output", str(tmp_path / "out"), "--json", str(tmp_path / "bench.json")),
    )
    assert command.run(options(*arguments)) == 0
    said = capsys.readouterr()
    assert "adaptive, max 2" in said.out
    assert "max_batch_size: " in said.out
    document = json.loads((tmp_path / "bench.json").read_text())
    assert {one["variant"] for one in document["results"]} == {
        *("naive", "static_1_0us", "adaptive_1", "static_2_0us", "adaptive_2")
    }
    assert all(one["qps"] > 0 for one in document["results"])
    assert (tmp_path / "out" / "bench.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "out" / "bench.html").read_text()
    assert "adaptive" in page
    assert '<script src="http' not in page


def test_a_model_that_cannot_be_batched_is_refused_by_name(tmp_path, capsys):
    folder = tmp_path / "one" / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(
        "class TritonPythonModel:\n    def execute(self, requests):\n        return [None for _ in requests]\n"
    )
    text = CONFIG.replace('platform: "pytorch_libtorch" max_batch_size: 64', 'backend: "python"').replace(
        '"m"', '"one"'
    )
    (folder.parent / "config.pbtxt").write_text(text.partition("dynamic_batching")[0])
    assert command.run(options("--repository", str(tmp_path))) == 1
    assert "model 'one' takes no batches" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [("--seconds", "0"), ("--concurrency", "0"), ("--delay-us", "-1"), ("--shape", "3,4"), ("--builtin", "rnn")],
)
def test_options_that_make_no_sense_are_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        options(*arguments)
    assert arguments[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("datatype", "shape", "expected"),
    [("FP32", (-1, 3, -1), (1, 3, 1)), ("INT64", (-1, -1), (1, 7)), ("BYTES", (-1, 2), (1, 2))],
)
def test_inputs_are_made_of_one_row_each(datatype, shape, expected):
    spec = TensorMetadata(name="x", datatype=datatype, shape=shape)
    tensor = command.tensor(spec, {"x": (7,)} if datatype == "INT64" else {})
    assert tensor.shape == expected
    assert datatype != "BYTES" or tensor.dtype == np.object_
