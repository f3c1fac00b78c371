import json
import re

import pytest
from typer.testing import CliRunner

from gateway.__main__ import app
from gateway.cli.tuning import sweep_run as command
from gateway.tuning.charts import STYLE
from gateway.tuning.curves import parse_curve
from gateway.tuning.sweep.local import digest
from gateway.tuning.sweep.settings import Axes
from local_runtime.repository.parsing import parse

CONFIG = """backend: "python"
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""
# A millisecond for each batch, however many rows it has.
ECHO = """import time
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.001)
        inputs = [pb_utils.get_input_tensor_by_name(request, "X").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)]) for x in inputs]
"""
SHORT = ("--duration", "50ms", "--max-batch-size", "1,4", "--delay-us", "0", "--count", "1,2", "--concurrency", "4")


def write_model(repository, name="one", *, config="max_batch_size: 4", code=ECHO):
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(code)
    (folder / "config.pbtxt").write_text(CONFIG + config)
    return folder


def swept(*arguments):
    return CliRunner().invoke(app, ["sweep", *map(str, arguments)])


def test_one_command_measures_and_writes_everything(tmp_path, monkeypatch):
    for one in ("SAMPLES", "LEAST_SAMPLES", "BUSY_BATCHES"):
        monkeypatch.setattr(f"gateway.tuning.sweep.curve.{one}", 3)
    folder = write_model(tmp_path / "models", config="max_batch_size: 4 response_cache { enable: true }")
    before = (folder / "config.pbtxt").read_text()
    out = tmp_path / "out"
    done = swept("--repository", tmp_path / "models", *SHORT, "--output", out)
    assert done.exit_code == 0, done.output
    assert "max 4, delay 0 us" in done.stdout
    assert "as found, max 4, no dynamic batching, 1 instance" in done.output
    assert (folder / "config.pbtxt").read_text() == before

    document = json.loads((out / "sweep.json").read_text())
    assert document["form"] == "sweep/1"
    assert len(document["runs"]) == document["cells"] == 5  # so few are all measured
    chosen = document["runs"][document["chosen"]]
    assert chosen["setting"]["max_batch_size"] == 4  # a batch costs the same, whatever its size
    assert chosen["report"]["form"] == "traffic-report/1"
    assert document["chosen"] in document["front"]

    text = (out / "config.pbtxt").read_text()
    assert re.search(r"#   max 4, delay 0 us, \d instances?: [\d,.]+ answers/s at 4 in flight, p99 [\d,.]+ ms", text)
    assert "measured without the model's response_cache" in text
    advised = parse(text, folder_name="one")
    assert advised.max_batch_size == 4
    assert advised.dynamic_batching is not None
    assert advised.has_response_cache

    curve = parse_curve(json.loads((out / "curve.json").read_text()))
    assert sorted(curve.compute_us) == [1, 4]
    assert curve.mean_us(4) >= 1000
    assert curve.overhead_us
    assert set(curve.slowdown) == {1, 2}

    assert (out / "plot.png").read_bytes().startswith(b"\x89PNG")
    page = (out / "report.html").read_text()
    assert "<title>one: swept on local runtime" in page
    assert STYLE in page  # looks as all reports do
    assert page.count("<tr class=chosen>") == 1
    assert "config.pbtxt" in page
    assert 'src="http' not in page


def test_a_sweep_goes_on_where_it_was_and_gives_json(tmp_path, monkeypatch):
    monkeypatch.setattr("gateway.tuning.sweep.curve.SAMPLES", 1)
    write_model(tmp_path / "models")
    arguments = ("--repository", tmp_path / "models", *SHORT, "--output", tmp_path / "out")
    assert swept(*arguments).exit_code == 0
    runs = tmp_path / "out" / "runs.jsonl"
    lines = runs.read_text().splitlines(keepends=True)
    runs.write_text("".join(lines[:3]))
    assert "--resume" in swept(*arguments).stderr
    again = swept(*arguments, "--resume", "--json")
    assert again.exit_code == 0
    assert runs.read_text().splitlines(keepends=True)[:3] == lines[:3]
    assert len(json.loads(again.stdout)["runs"]) == 5
    other = swept(*arguments[:-4], "--concurrency", "2", *arguments[-2:], "--resume")
    assert "holds a sweep of something else: its settings differ" in other.stderr


def test_where_no_setting_keeps_the_bounds_the_nearest_is_told_and_the_status_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("gateway.tuning.sweep.curve.SAMPLES", 1)
    write_model(tmp_path / "models")
    done = swept("--repository", tmp_path / "models", *SHORT, "--slo", "0.001ms", "--output", tmp_path / "out")
    assert done.exit_code == 1
    assert "NO setting kept the bounds; this one comes nearest" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "--repository or --triton: one of the two"),
        (("--repository", "x", "--triton", "h:1"), "--repository or --triton: one of the two"),
        (("--repository", "x", "--quick", "--brute-force"), "--quick and --brute-force"),
        (("--triton", "h:1"), "--model: says which model"),
        (("--triton", "nonsense", "--model", "m"), "--triton: 'nonsense' is neither host:port"),
        (("--repository", "/absent"), "--repository /absent: is not a folder"),
        (("--repository", "x", "--restore"), "--restore: is for --triton"),
        (("--repository", "x", "--max-batch-size", "0"), "--max-batch-size 0: write whole numbers of 1 to 9999999"),
        (("--repository", "x", "--delay-us", "1.5"), "--delay-us 1.5: write whole numbers of 0 to 9999999"),
        (("--repository", "x", "--count", "two"), "--count two: write whole numbers"),
        (("--repository", "x", "--rate", "0"), "--rate 0: must be above 0"),
        (("--repository", "x", "--rate", "fast"), "--rate fast: write numbers"),
        (("--repository", "x", "--rate", "5", "--concurrency", "4"), "--rate and --concurrency: one of the two"),
        (("--repository", "x", "--shape", "3,4"), "--shape 3,4: write INPUT:D,D"),
        (("--repository", "x", "--slo", "p95=1s"), "--slo p95=1s: must be of one of the percentiles p99"),
        (("--repository", "x", "--duration", "10ms"), "--duration 10ms: must be from 50ms to 1h"),
        (("--repository", "x", "--duration", "3"), "--duration 3: write a time as"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(arguments, words):
    done = swept(*arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith(words)


def test_a_triton_that_does_not_answer_has_a_status_of_its_own():
    done = swept("--triton", "127.0.0.1:1", "--model", "m")
    assert done.exit_code == 3
    assert done.stderr.startswith("--triton 127.0.0.1:1: RepositoryIndex: UNAVAILABLE: failed to")


@pytest.mark.parametrize(
    ("config", "arguments", "words"),
    [
        ("max_batch_size: 4", ("--model", "two"), "--model two: is not in"),
        ("max_batch_size: 4", ("--shape", "Z:3"), "--shape Z: the model's inputs are X"),
        ("max_batch_size: 4", ("--max-batch-size", "8"), "--max-batch-size 8: 'one' takes 4 rows at most"),
        ("max_batch_size: 0", ("--delay-us", "5"), "--delay-us: 'one' takes no batches"),
        ("max_batch_size: 4 sequence_batching { }", (), "--model one: is a sequence model"),
        ("model_transaction_policy { decoupled: true }", (), "--model one: is decoupled"),
    ],
)
def test_models_that_cannot_be_swept_so_are_refused_by_the_option(tmp_path, config, arguments, words):
    write_model(tmp_path / "models", config=config)
    done = swept("--repository", tmp_path / "models", "--output", tmp_path / "out", *arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith(words)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise RuntimeError('no weights here')", "one: cannot be loaded as 'max 4, no dynamic batching, 1 instance'"),
        (ECHO.replace("time.sleep(0.001)", "raise ValueError('not this')"), "one: no answer to made-up inputs"),
    ],
)
def test_a_model_that_fails_is_told_with_its_reason(tmp_path, code, words):
    write_model(tmp_path / "models", code=code)
    done = swept("--repository", tmp_path / "models", *SHORT, "--output", tmp_path / "out")
    assert done.exit_code == 1
    assert words in done.stderr
    assert "no weights here" in done.stderr or "not this" in done.stderr


def test_a_setting_that_cannot_be_served_is_a_run_that_failed(tmp_path):
    code = f"""import json
{ECHO}
    def initialize(self, args):
        if json.loads(args["model_config"])["max_batch_size"] == 1:
            raise ValueError("not this")
"""
    write_model(tmp_path / "models", code=code)
    done = swept("--repository", tmp_path / "models", *SHORT, "--output", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "no curve.json: one: cannot be loaded as 'max 1, delay 0 us, 1 instance'" in done.stderr
    runs = json.loads((tmp_path / "out" / "sweep.json").read_text())["runs"]
    assert {run["setting"]["max_batch_size"] for run in runs if "not this" in run["error"]} == {1}
    assert not (tmp_path / "out" / "curve.json").exists()


def test_ranges_double():
    assert command._whole_numbers("1,4..20,64", "--x") == (1, 4, 8, 16, 20, 64)
    assert command._preferred("none,8,8+4") == ((), (8,), (4, 8))


def test_presets_are_curves_of_one_thing_and_options_change_them():
    nothing = dict.fromkeys(("max_batch_size", "delay_us", "count", "concurrency", "rate"), ())
    delays = command._axes(nothing, command.Preset.DELAY_CURVE, ((),))
    assert delays == Axes(max_batch_size=(), delay_us=(0, 500, 2000, 10_000), count=(), concurrency=(16,))
    sizes = command._axes(nothing, command.Preset.MAX_BATCH, ((),))
    assert sizes == Axes(max_batch_size=None, delay_us=(), count=(), concurrency=(16,))
    changed = command._axes({**nothing, "rate": (5.0,)}, command.Preset.DELAY_CURVE, ((),))
    assert (changed.rate, changed.concurrency) == ((5.0,), ())
    plain = command._axes(nothing, None, ((),))
    assert plain.max_batch_size is plain.delay_us is plain.count is None


def test_other_files_of_the_model_are_another_sweep(tmp_path, monkeypatch):
    monkeypatch.setattr("gateway.tuning.sweep.curve.SAMPLES", 1)
    folder = write_model(tmp_path / "models")
    arguments = ("--repository", tmp_path / "models", *SHORT, "--output", tmp_path / "out")
    assert swept(*arguments).exit_code == 0
    assert swept(*arguments, "--resume").exit_code == 0
    (folder / "1" / "model.py").write_text(f"{ECHO}\n# other weights\n")
    other = swept(*arguments, "--resume")
    assert other.exit_code == 2
    assert "holds a sweep of something else: its files differ" in other.stderr


def test_a_digest_is_of_names_and_contents_and_not_of_what_python_keeps(tmp_path):
    one, other = write_model(tmp_path / "a"), write_model(tmp_path / "b")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "weights").write_bytes(b"1")
    same = digest(one)
    assert same == digest(other)
    (other / "1" / "__pycache__").mkdir()
    (other / "1" / "__pycache__" / "model.pyc").write_bytes(b"1")
    assert digest(other) == same
    (other / "2").symlink_to(tmp_path / "elsewhere")
    linked = digest(other)
    (tmp_path / "elsewhere" / "weights").write_bytes(b"2")
    (one / "config.pbtxt").write_text(CONFIG)
    assert len({same, linked, digest(other), digest(one)}) == 4
