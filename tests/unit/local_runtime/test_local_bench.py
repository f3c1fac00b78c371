import argparse
import json

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from local_runtime.bench import command, load, plot, report
from local_runtime.bench.results import Results
from local_runtime.bench.variants import Kind, Variant, config_text, configured, left_out, measurable, sweep
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


OWN_SETTINGS = """
instance_group [ { count: 2 kind: KIND_CPU } ]
response_cache { enable: true }
model_warmup { name: "w" batch_size: 64
  inputs { key: "INPUT__0" value { data_type: TYPE_FP32 dims: 4 zero_data: true } } }
"""
OWN_BATCHING = """priority_levels: 2 default_priority_level: 1
default_queue_policy { max_queue_size: 5 } priority_queue_policy { key: 1 value { max_queue_size: 3 } } }"""


def own_message():
    text = CONFIG.replace("microseconds: 7 }", f"microseconds: 7 {OWN_BATCHING}") + OWN_SETTINGS
    return text_format.Parse(text, model_config_pb2.ModelConfig())


@pytest.mark.parametrize("variant", [static(8, 500), ADAPTIVE], ids=lambda variant: variant.name)
def test_the_advised_config_changes_what_was_measured_and_keeps_the_rest(variant):
    message = own_message()
    changed = configured(message, variant)
    parse(config_text(changed), folder_name="m")
    assert changed.model_warmup[0].batch_size == 8
    for one in (message, changed):
        one.ClearField("max_batch_size")
        one.model_warmup[0].ClearField("batch_size")
        one.dynamic_batching.ClearField("preferred_batch_size")
        one.dynamic_batching.ClearField("max_queue_delay_microseconds")
        one.parameters.pop("ADAPTIVE_BATCHING", None)
    assert changed == message


def test_measured_copies_lack_what_is_told_to_be_left_out():
    message = own_message()
    assert left_out(message) == ["response_cache", "model_warmup", "default_queue_policy", "priority_queue_policy"]
    copy = measurable(message, static(8, 500), threads=3)
    assert left_out(copy) == []
    assert copy.dynamic_batching.priority_levels == 2
    assert copy.parameters["INTRA_OP_THREAD_COUNT"].string_value == "3"


def test_a_setting_has_one_colour_in_both_pictures():
    found = results({**FIGURES, static(8, 500): (50, 60)})
    latency = {line.name: line.colour for line in plot._latency_lines(found)}
    sweep = {line.name: line.colour for line in plot._sweep_lines(found)}
    assert sweep["naive"] == latency["naive"]
    assert sweep["adaptive"] == latency["adaptive, max 8"]
    assert sweep["delay 0 us"] == latency["max 8, delay 0 us"]
    assert sweep["delay 500 us"] == latency["max 8, delay 500 us"]
    assert len(set(sweep.values())) == 4


@pytest.mark.parametrize("values", [(576, 1492), (2, 1200), (100, 140), (9.5, 9.5), (0.02, 3), (99, 990), (0, 0)])
def test_a_logarithmic_axis_has_enough_numbers_and_not_too_many(values):
    line = plot.Line(name="", colour="", x=[1, 2], y=values, marks=["", ""])
    ticks = plot._log_ticks(plot.Picture(title="", x_label="", y_label="", lines=[line], is_y_log=True))
    assert ticks == sorted(set(ticks))
    shown = [one for one in ticks if min(values) <= one <= max(values)]
    assert len(shown) <= 14
    assert len(shown) >= 3 or min(values) == max(values)
    assert min(ticks) > 0
    assert max(ticks) >= max(values)


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
        *("--concurrency", "1", "--concurrency", "2", "--seconds", "0.02", "--rounds", "1", "--lead-in", "0"),
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
    assert "<title>mlp (built in): batching measured</title>" in page
    assert '<script src="http' not in page


PYTHON_CONFIG = """backend: "python"
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""
ECHO = """import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "X").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)]) for x in inputs]
"""
CALLING = """import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(requests[0], "X")]
        call = pb_utils.InferenceRequest(model_name="other", requested_output_names=["Y"], inputs=inputs)
        answer = call.exec()
        if answer.has_error():
            raise pb_utils.TritonModelException(answer.error().message())
        return [answer]
"""
SHORT = ("--max-batch-size", "2", "--delay-us", "0", "--concurrency", "2", "--seconds", "0.02", "--rounds", "1")


def write_model(repository, name, *, config="max_batch_size: 4", code=ECHO):
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(code)
    (folder / "config.pbtxt").write_text(PYTHON_CONFIG + config)
    return folder


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("", "takes no batches"),
        ("sequence_batching { }", "is a sequence model"),
        ("max_batch_size: 4 sequence_batching { }", "is a sequence model"),
        ("model_transaction_policy { decoupled: true }", "is decoupled"),
        ("max_batch_size: 4 model_transaction_policy { decoupled: true }", "is decoupled"),
    ],
)
def test_a_model_that_cannot_be_measured_is_refused_before_it_is_loaded(tmp_path, capsys, config, reason):
    write_model(tmp_path, "one", config=config, code="raise RuntimeError('loaded')")
    assert command.run(options("--repository", str(tmp_path))) == 1
    said = capsys.readouterr().err
    assert f"model 'one' cannot be measured by this command, it {reason}" in said
    assert "loaded" not in said


def test_an_ensemble_is_refused_with_the_models_to_measure_instead(tmp_path, capsys):
    write_model(tmp_path, "inner")
    (tmp_path / "outer" / "1").mkdir(parents=True)
    step = 'model_name: "inner" model_version: -1 input_map { key: "X" value: "X" } output_map { key: "Y" value: "Y" }'
    text = PYTHON_CONFIG.replace('backend: "python"', 'platform: "ensemble"')
    (tmp_path / "outer" / "config.pbtxt").write_text(f"{text} ensemble_scheduling {{ step [ {{ {step} }} ] }}")
    assert command.run(options("--repository", str(tmp_path), "--model", "outer")) == 1
    assert "is an ensemble; measure the models that it is made of: inner" in capsys.readouterr().err


def test_why_a_model_does_not_load_is_told_once(tmp_path, capsys):
    write_model(tmp_path, "one", code="raise RuntimeError('no weights here')")
    assert command.run(options("--repository", str(tmp_path), *SHORT)) == 1
    said = capsys.readouterr().err
    assert "model 'one' cannot be loaded as 'naive': " in said
    assert said.count("no weights here") == 1


def test_a_model_that_calls_another_is_refused_with_the_reason(tmp_path, capsys):
    write_model(tmp_path, "one", code=CALLING)
    write_model(tmp_path, "other")
    assert command.run(options("--repository", str(tmp_path), "--model", "one", *SHORT)) == 1
    assert "models that call others cannot be measured by this command" in capsys.readouterr().err


def test_what_would_distort_the_figures_is_left_out_and_told(tmp_path, capsys):
    folder = write_model(
        tmp_path,
        "one",
        config="""max_batch_size: 4 response_cache { enable: true }
        dynamic_batching { default_queue_policy { max_queue_size: 1 } }
        model_warmup { name: "w" batch_size: 4
          inputs { key: "X" value { data_type: TYPE_FP32 dims: 1 zero_data: true } } }
        """,
    )
    text = (folder / "config.pbtxt").read_text().replace('name: "Y"', 'name: "Y" label_filename: "labels.txt"')
    (folder / "config.pbtxt").write_text(text)
    (folder / "labels.txt").write_text("only\n")
    assert command.run(options("--repository", str(tmp_path), *SHORT, "--lead-in", "0")) == 0
    said = capsys.readouterr()
    assert "measured without the model's response_cache, model_warmup, default_queue_policy" in said.err
    assert 'label_filename: "labels.txt"' in said.out
    assert "response_cache" in said.out


def test_a_repository_of_several_models_has_its_names_told_without_loading_any(tmp_path, capsys):
    for name in ("one", "two"):
        write_model(tmp_path, name, code="raise RuntimeError('loaded')")
    for more in ((), ("--model", "three")):
        assert command.run(options("--repository", str(tmp_path), *more)) == 1
        assert "--model must name one of: one, two" in capsys.readouterr().err


def test_a_repository_that_is_not_there_is_told_as_by_serve(tmp_path, capsys):
    assert command.run(options("--repository", str(tmp_path / "absent"))) == 1
    assert f"model repository {tmp_path / 'absent'} is not a folder" in capsys.readouterr().err


def test_a_config_that_its_model_changes_back_is_refused(tmp_path, capsys):
    code = f"{ECHO}    @staticmethod\n    def auto_complete_config(config):\n        config.set_dynamic_batching()\n"
    write_model(tmp_path, "one", code=f"{code}        return config\n")
    assert command.run(options("--repository", str(tmp_path), *SHORT)) == 1
    assert "auto_complete_config changes how it batches" in capsys.readouterr().err


async def test_every_setting_runs_uncounted_before_its_first_round(monkeypatch):
    seen = []

    async def warm(runtime, request, *, concurrency, seconds):
        seen.append(("warm", request.model, concurrency, seconds))

    async def run(runtime, request, *, concurrency, seconds):
        seen.append(("run", request.model, concurrency, seconds))
        return measured(1)

    monkeypatch.setattr(load, "warm", warm)
    monkeypatch.setattr(load, "run", run)
    requests = {one: InferRequest(model=one.name, inputs={}) for one in (NAIVE, ADAPTIVE)}
    await command._take_turns(None, requests, options("--quick", "--lead-in", "0.7"), label="m")
    for name in ("naive", "adaptive_8"):
        of_name = [(what, *rest) for what, model, *rest in seen if model == name]
        assert of_name == [("warm", 1, 0.7), ("run", 1, 0.3), ("warm", 16, 0.7), ("run", 16, 0.3)]


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
