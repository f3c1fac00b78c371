"""What of a repository is served, how that changes, and what is said about the rest."""

import asyncio
import contextlib
import json
import os
import shutil
import threading

import numpy as np
import pytest

from local_runtime.repository.parsing import parse
from local_runtime.runtime import (
    ErrorCode,
    InferenceError,
    InferRequest,
    LocalRuntime,
    ModelControl,
    ModelLoadError,
    ModelState,
    RuntimeOptions,
)
from local_runtime.serving.loader import thread_share
from tests.kit.wait import until, until_async

ENSEMBLE = """
platform: "ensemble"
max_batch_size: 8
input [ { name: "A" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "B" data_type: TYPE_FP32 dims: [ 2 ] } ]
ensemble_scheduling { step [ { model_name: "MODEL" model_version: -1
  input_map { key: "INPUT" value: "A" } output_map { key: "OUTPUT" value: "B" } } ] }
"""


def ensemble(model, source="A", target="B"):
    return ENSEMBLE.replace("MODEL", model).replace("INPUT", source).replace("OUTPUT", target)


@contextlib.asynccontextmanager
async def opened(repository, **arguments):
    runtime = await LocalRuntime.open(repository, **arguments)
    try:
        yield runtime
    finally:
        await runtime.close()


async def reasons(repository):
    async with opened(repository) as runtime:
        return {status.name: status.reason for status in runtime.index() if status.reason}


async def test_broken_models_do_not_stop_the_others(repository, write_python, write_config):
    write_python("good")
    write_python("raises", "raise RuntimeError('no weights')")
    write_python("empty", "x = 1")
    write_python("odd", config="what: 1")
    write_config("ens", ensemble("gone"))
    request = InferRequest(model="good", inputs={"X": np.ones((1, 2), np.float32)})
    async with opened(repository) as runtime:
        index = {status.name: status for status in runtime.index()}
        assert runtime.is_ready("good")
        assert not runtime.is_ready("raises")
        with pytest.raises(InferenceError) as refused:
            await runtime.infer(InferRequest(model="raises", inputs={}))
        assert (await runtime.infer(request)).outputs["Y"][0, 0] == 2
    assert refused.value.message == "Request for unknown model: 'raises' has no available versions"
    assert [name for name, status in index.items() if status.state is ModelState.READY] == ["good"]
    assert index["raises"].reason == f"RuntimeError: no weights\n\nAt:\n  {repository}/raises/1/model.py(1): <module>"
    assert index["empty"].reason == "model.py of model 'empty' has no class TritonPythonModel"
    assert index["odd"].reason.startswith("failed to read text proto from odd/config.pbtxt")
    assert index["ens"].reason == "ensemble 'ens' depends on 'gone' which has no loaded version"


async def test_named_models_only(repository, write_python):
    write_python("one")
    write_python("two")
    async with opened(repository, models=["two", "absent"]) as runtime:
        assert [(status.name, status.state) for status in runtime.index()] == [
            ("absent", ModelState.UNAVAILABLE),
            ("two", ModelState.READY),
        ]


async def test_no_such_repository(tmp_path):
    with pytest.raises(ModelLoadError, match="is not a folder"):
        await LocalRuntime.open(tmp_path / "absent")


async def test_ensemble_of_an_ensemble(repository, write_python, write_config):
    write_python("double")
    write_config("a_outer", ensemble("inner"))
    write_config("inner", ensemble("double", "X", "Y"))
    request = InferRequest(model="a_outer", inputs={"A": np.ones((1, 2), np.float32)})
    async with opened(repository) as runtime:
        answer = await runtime.infer(request)
    assert answer.outputs["B"].tolist() == [[2, 2]]


async def test_ensembles_that_contain_each_other(repository, write_config):
    write_config("one", ensemble("two"))
    write_config("two", ensemble("one"))
    assert await reasons(repository) == {
        "one": "circular dependency of ensemble 'one'",
        "two": "circular dependency of ensemble 'two'",
    }


async def test_one_failing_instance_fails_the_model(repository, write_python):
    code = """
    class TritonPythonModel:
        execute = list

        def initialize(self, args):
            if args["model_instance_name"] == "m_0_1":
                raise OSError("no room")
    """
    folder = write_python("m", code)
    text = (folder / "config.pbtxt").read_text()
    (folder / "config.pbtxt").write_text(text.replace("count: 1", "count: 2"))
    assert await reasons(repository) == {"m": f"OSError: no room\n\nAt:\n  {folder}/1/model.py(7): initialize"}


TORCH = """
name: "m" platform: "pytorch_libtorch" max_batch_size: 1
input [ { name: "INPUT__0" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 1 ] } ]
instance_group [ { count: COUNT kind: KIND_CPU } ]
"""


@pytest.mark.parametrize(("counts", "threads", "expected"), [((1, 1), 8, 4), ((2, 2), 8, 2), ((3,), 1, 1)])
def test_threads_are_shared_out_between_instances(counts, threads, expected):
    configs = [parse(TORCH.replace("COUNT", str(count)), folder_name="m") for count in counts]
    assert thread_share(configs, threads=threads) == expected


async def test_a_model_may_ask_for_its_own_number_of_threads(repository, write_torch):
    folder = write_torch("m", "def forward(self, x):\n    return x")
    entry = 'parameters { key: "INTRA_OP_THREAD_COUNT" value { string_value: "none" } }'
    (folder / "config.pbtxt").write_text((folder / "config.pbtxt").read_text() + entry)
    [reason] = (await reasons(repository)).values()
    assert "must be a positive number, not 'none'" in reason


# --- model control -------------------------------------------------------------------------------

PYTHON_CONFIG = """
backend: "python"
max_batch_size: 8
input [ { name: "X" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
EXPLICIT = RuntimeOptions(control_mode=ModelControl.EXPLICIT)
ONES = np.ones((1, 2), np.float32)
TIMES = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", FACTOR * r.inputs()[0].as_numpy())]) for r in requests]
"""
# Runs only while the gate is open; the tests hold it in `threading`, which all modules share.
GATED = """
import threading
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        threading.test_entered.set()
        assert threading.test_gate.wait(30)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", r.inputs()[0].as_numpy())]) for r in requests]
"""


def times(factor):
    return TIMES.replace("FACTOR", str(factor))


@pytest.fixture
def gate(monkeypatch):
    opened_gate = threading.Event()
    monkeypatch.setattr(threading, "test_gate", opened_gate, raising=False)
    monkeypatch.setattr(threading, "test_entered", threading.Event(), raising=False)
    yield opened_gate
    opened_gate.set()


async def value(runtime, model="m", version=""):
    answer = await runtime.infer(InferRequest(model=model, inputs={"X": ONES}, version=version))
    return answer.version, float(answer.outputs["Y"][0, 0])


def states(runtime):
    return [(status.name, status.version, status.state.value, status.reason) for status in runtime.index()]


async def test_explicit_control_serves_what_is_loaded(repository, write_python):
    write_python("m", times(2))
    write_python("other", times(3))
    async with opened(repository, options=EXPLICIT) as runtime:
        assert states(runtime) == [("m", "", "", ""), ("other", "", "", "")]
        assert runtime.is_server_ready()
        with pytest.raises(InferenceError) as unknown:
            await value(runtime)
        assert unknown.value.code is ErrorCode.NOT_FOUND
        await runtime.load("m")
        assert await value(runtime) == ("1", 2.0)
        assert states(runtime) == [("m", "1", "READY", ""), ("other", "", "", "")]
        assert [status.name for status in runtime.index(ready_only=True)] == ["m"]
        await runtime.unload("m")
        with pytest.raises(InferenceError, match="has no available versions"):
            await value(runtime)
        await until(lambda: states(runtime)[0] == ("m", "1", "UNAVAILABLE", "unloaded"))
        assert runtime.is_server_ready()
        await runtime.load("m")
        assert await value(runtime) == ("1", 2.0)


async def test_unload_of_what_is_not_served_is_no_fault(repository, write_python):
    write_python("m")
    async with opened(repository, options=EXPLICIT) as runtime:
        await runtime.unload("m")
        await runtime.unload("never-heard-of")


@pytest.mark.parametrize("control", [ModelControl.NONE, ModelControl.POLL])
async def test_load_and_unload_belong_to_explicit_control(repository, write_python, control):
    write_python("m")
    async with opened(repository, options=RuntimeOptions(control_mode=control)) as runtime:
        for change in (runtime.load("m"), runtime.unload("m")):
            with pytest.raises(InferenceError) as refused:
                await change
            assert refused.value.code is ErrorCode.UNAVAILABLE
            assert refused.value.message == "explicit model load / unload is not allowed if polling is enabled"
        assert await value(runtime) == ("1", 2.0)


async def test_named_models_and_the_star_are_loaded_at_the_start(repository, write_python):
    write_python("m")
    write_python("other")
    async with opened(repository, models=["m"], options=EXPLICIT) as runtime:
        assert [runtime.is_ready(name) for name in ("m", "other")] == [True, False]
    async with opened(repository, models=["*"], options=EXPLICIT) as runtime:
        assert [runtime.is_ready(name) for name in ("m", "other")] == [True, True]


async def test_a_new_version_takes_over_and_the_old_one_ends_its_requests(repository, write_python, gate):
    write_python("m", GATED)
    async with opened(repository, models=["m"], options=EXPLICIT) as runtime:
        running = asyncio.create_task(value(runtime))
        assert await asyncio.to_thread(threading.test_entered.wait, 30)
        queued = asyncio.create_task(value(runtime))
        await asyncio.sleep(0)
        folder = repository / "m" / "2"
        folder.mkdir()
        (folder / "model.py").write_text(times(5))
        await runtime.load("m")
        assert await value(runtime) == ("2", 5.0)
        assert ("m", "1", "UNLOADING", "") in states(runtime)
        gate.set()
        assert await asyncio.gather(running, queued) == [("1", 1.0), ("1", 1.0)]
        await until(lambda: ("m", "1", "UNAVAILABLE", "unloaded") in states(runtime))


async def test_no_request_is_lost_while_a_model_is_reloaded_again_and_again(repository, write_python):
    write_python("m", times(2))
    answers = []
    async with opened(repository, models=["m"], options=EXPLICIT) as runtime:
        stop = asyncio.Event()

        async def client():
            while not stop.is_set():
                answers.append(await value(runtime))

        clients = [asyncio.create_task(client()) for _ in range(8)]
        for factor in (3, 4, 5):
            (repository / "m" / "1" / "model.py").write_text(times(factor))
            await runtime.load("m")
            assert await value(runtime) == ("1", float(factor))
        stop.set()
        await asyncio.gather(*clients)
    assert {result for _, result in answers} <= {2.0, 3.0, 4.0, 5.0}


async def test_an_unchanged_model_is_not_loaded_again(repository, write_python):
    counted = "import threading\nthreading.test_loads = getattr(threading, 'test_loads', 0) + 1\n" + times(2)
    write_python("m", counted)
    try:
        async with opened(repository, models=["m"], options=EXPLICIT) as runtime:
            await runtime.load("m")
            assert threading.test_loads == 1
            (repository / "m" / "2").mkdir()
            (repository / "m" / "2" / "model.py").write_text(times(3))
            config = repository / "m" / "config.pbtxt"
            config.write_text(config.read_text() + "version_policy { all { } }")
            await runtime.load("m")
            assert [await value(runtime, version=version) for version in ("", "1", "2")] == [
                ("2", 3.0),
                ("1", 2.0),
                ("2", 3.0),
            ]
    finally:
        del threading.test_loads


@pytest.mark.parametrize("what", ["version", "config"])
async def test_a_broken_change_leaves_the_old_model_serving(repository, write_python, what):
    write_python("m", times(2))
    async with opened(repository, models=["m"], options=EXPLICIT) as runtime:
        if what == "version":
            (repository / "m" / "3").mkdir()
            (repository / "m" / "3" / "model.py").write_text("raise RuntimeError('torn')")
            text = (
                "load failed for model 'm': version 3 is at UNAVAILABLE state: Internal: RuntimeError: torn\n\nAt:\n"
                f"  {repository}/m/3/model.py(1): <module>;"
            )
            code = ErrorCode.INVALID_ARG
        else:
            (repository / "m" / "config.pbtxt").write_text("what is this")
            text = "failed to load 'm', failed to poll from model repository"
            code = ErrorCode.INTERNAL
        for _ in range(2):
            with pytest.raises(InferenceError) as refused:
                await runtime.load("m")
            assert (refused.value.code, refused.value.message) == (code, text)
        assert await value(runtime) == ("1", 2.0)
        assert any(reason for _, _, state, reason in states(runtime) if state == "UNAVAILABLE")
        assert ("m", "1", "READY", "") in states(runtime)


async def test_a_broken_model_can_be_mended_and_loaded(repository, write_python):
    folder = write_python("m", times(2))
    config = (folder / "config.pbtxt").read_text()
    (folder / "config.pbtxt").write_text("max_batch_size: true")
    async with opened(repository, options=EXPLICIT) as runtime:
        for _ in range(2):
            with pytest.raises(InferenceError):
                await runtime.load("m")
            [(_, _, state, reason)] = states(runtime)
            assert state == "UNAVAILABLE"
            assert reason.startswith("failed to read text proto from m/config.pbtxt")
            assert not runtime.is_server_ready()
        (folder / "config.pbtxt").write_text(config)
        await runtime.load("m")
        assert await value(runtime) == ("1", 2.0)
        assert runtime.is_server_ready()


@pytest.mark.parametrize(
    ("policy", "versions"),
    [
        ("", ["10"]),
        ("version_policy { latest { num_versions: 2 } }", ["3", "10"]),
        ("version_policy { all { } }", ["1", "3", "10"]),
        ("version_policy { specific { versions: [ 1, 3 ] } }", ["1", "3"]),
    ],
)
async def test_version_policies(repository, write_python, policy, versions):
    for version in ("1", "3", "10"):
        folder = write_python("m", times(int(version)), version=version)
    (folder / "config.pbtxt").write_text((folder / "config.pbtxt").read_text() + policy)
    async with opened(repository) as runtime:
        assert [status.version for status in runtime.index()] == versions
        assert list(runtime.model_metadata("m").versions) == versions
        assert [statistics.version for statistics in runtime.statistics("m")] == versions
        assert await value(runtime) == (versions[-1], float(versions[-1]))
        for version in versions:
            assert await value(runtime, version=version) == (version, float(version))


async def test_a_policy_that_finds_no_version_fails_the_model(repository, write_python):
    folder = write_python("m")
    (folder / "config.pbtxt").write_text(
        (folder / "config.pbtxt").read_text() + "version_policy { specific { versions: [ 9 ] } }"
    )
    assert await reasons(repository) == {
        "m": "at least one version must be available under the version policy of model 'm'"
    }


async def test_a_config_override_holds_until_the_files_change(repository, write_python):
    folder = write_python("m", times(2))
    async with opened(repository, models=["m"], options=EXPLICIT) as runtime:
        override = {
            "name": "m",
            "backend": "python",
            "max_batch_size": 2,
            "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [2]}],
            "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [2]}],
        }
        await runtime.load("m", config=json.dumps(override))
        assert runtime.model_config("m").max_batch_size == 2
        with pytest.raises(InferenceError, match="must be <= 2"):
            await runtime.infer(InferRequest(model="m", inputs={"X": np.ones((3, 2), np.float32)}))
        await runtime.load("m")
        assert runtime.model_config("m").max_batch_size == 2
        (folder / "1" / "model.py").write_text(times(3))
        await runtime.load("m")
        assert runtime.model_config("m").max_batch_size == 8
        assert await value(runtime) == ("1", 3.0)


async def test_a_model_can_be_loaded_from_files_that_come_with_the_call(repository):
    config = {
        "backend": "python",
        "max_batch_size": 8,
        "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [2]}],
        "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [2]}],
    }
    async with opened(repository, options=EXPLICIT) as runtime:
        await runtime.load("sent", config=json.dumps(config), files={"1/model.py": times(4).encode()})
        assert await value(runtime, "sent") == ("1", 4.0)
        with pytest.raises(InferenceError):
            await runtime.load("alone", files={"1/model.py": times(4).encode()})
        for name in ("../evil.py", "/tmp/evil.py", "1/../../evil.py"):  # noqa: S108 - refused, never written
            with pytest.raises(InferenceError):
                await runtime.load("evil", config=json.dumps(config), files={name: b""})


@pytest.mark.parametrize("name", ["", "..", "../models", "a/b", "a\0b", "/etc"])
async def test_names_that_are_no_model_names_are_refused_and_leave_no_trace(repository, write_python, name):  # SC-05
    write_python("m")
    async with opened(repository, options=EXPLICIT) as runtime:
        with pytest.raises(InferenceError):
            await runtime.load(name)
        assert states(runtime) == [("m", "", "", "")]


async def test_an_ensemble_brings_its_models_and_can_take_them_away(repository, write_python, write_config):
    write_python("double")
    write_config("ens", ensemble("double", "X", "Y"))
    request = InferRequest(model="ens", inputs={"A": ONES})
    async with opened(repository, options=EXPLICIT) as runtime:
        await runtime.load("ens")
        assert (await runtime.infer(request)).outputs["B"].tolist() == [[2, 2]]
        await runtime.unload("ens")
        assert runtime.is_ready("double")
        await runtime.load("ens")
        await runtime.unload("ens", unload_dependents=True)
        assert not runtime.is_ready("double")


async def test_an_ensemble_without_its_model_is_not_ready_until_it_is_back(repository, write_python, write_config):
    write_python("double")
    write_config("ens", ensemble("double", "X", "Y"))
    request = InferRequest(model="ens", inputs={"A": ONES})
    async with opened(repository, models=["*"], options=EXPLICIT) as runtime:
        await runtime.unload("double")
        assert not runtime.is_ready("ens")
        with pytest.raises(InferenceError) as refused:
            await runtime.infer(request)
        assert refused.value.code is ErrorCode.NOT_FOUND
        await runtime.load("double")
        assert runtime.is_ready("ens")
        assert (await runtime.infer(request)).outputs["B"].tolist() == [[2, 2]]


async def test_polling_follows_the_repository(repository, write_python):
    write_python("m", times(2))
    options = RuntimeOptions(control_mode=ModelControl.POLL, poll_interval_us=20_000)
    async with opened(repository, options=options) as runtime:
        write_python("new", times(3))
        await until(lambda: runtime.is_ready("new"))
        (repository / "m" / "2").mkdir()
        (repository / "m" / "2" / "model.py").write_text(times(7))
        await until(lambda: runtime.is_ready("m", "2"))
        assert await value(runtime) == ("2", 7.0)
        (repository / "m" / "config.pbtxt").write_text("nonsense {")
        (repository / "new" / "1" / "model.py").write_text(times(4))

        async def is_followed():
            return await value(runtime, "new") == ("1", 4.0)

        await until_async(is_followed)
        assert await value(runtime) == ("2", 7.0)
        shutil.rmtree(repository / "new")
        await until(lambda: not runtime.is_ready("new"))
        with pytest.raises(InferenceError, match="has no available versions"):
            await value(runtime, "new")


async def test_loads_and_unloads_at_the_same_time_leave_one_of_their_outcomes(repository, write_python):
    write_python("m", times(2))
    async with opened(repository, options=EXPLICIT) as runtime:
        await asyncio.gather(*(change for _ in range(5) for change in (runtime.load("m"), runtime.unload("m"))))
        await runtime.load("m")
        assert await value(runtime) == ("1", 2.0)
        await until(lambda: states(runtime) == [("m", "1", "READY", "")])


async def test_warm_up_runs_before_the_model_is_ready_and_counts(repository, write_python):
    code = (
        times(1)
        + """
    def initialize(self, args):
        import threading
        threading.test_calls = self.calls = []
"""
    ).replace("def execute(self, requests):", "def execute(self, requests):\n        self.calls.append(len(requests))")
    folder = write_python("m", code)
    warmup = """
    model_warmup [ { name: "w" batch_size: 4 count: 2
      inputs { key: "X" value: { data_type: TYPE_FP32 dims: [ 2 ] zero_data: true } } } ]
    """
    (folder / "config.pbtxt").write_text((folder / "config.pbtxt").read_text() + warmup)
    async with opened(repository) as runtime:
        [statistics] = runtime.statistics("m")
    assert (statistics.execution_count, statistics.inference_count) == (2, 8)
    assert (statistics.success.count, statistics.batch_sizes) == (8, {4: 2})
    try:
        assert threading.test_calls == [4, 4]
    finally:
        del threading.test_calls


async def test_a_python_model_may_complete_its_own_config(repository, write_python):
    code = (
        times(6)
        + """
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [2]})
        config.add_output({"name": "Y", "data_type": "TYPE_FP32", "dims": [2]})
        config.set_max_batch_size(4)
        config.set_dynamic_batching()
        return config
"""
    )
    folder = write_python("m", code)
    (folder / "config.pbtxt").unlink()
    async with opened(repository) as runtime:
        assert await value(runtime) == ("1", 6.0)
        assert runtime.model_config("m").max_batch_size == 4


async def test_a_config_that_a_model_fails_to_complete_is_the_models_fault(repository, write_python):
    code = (
        times(6)
        + """
    @staticmethod
    def auto_complete_config(config):
        raise ValueError("which inputs?")
"""
    )
    folder = write_python("m", code)
    text = f"ValueError: which inputs?\n\nAt:\n  {folder}/1/model.py(10): auto_complete_config"
    assert await reasons(repository) == {"m": f"failed to auto-complete config of model 'm': {text}"}


async def test_ensembles_of_ensembles_are_loaded_from_the_inside(repository, write_python, write_config):
    write_python("double")
    write_config("a_outer", ensemble("m_middle"))
    write_config("m_middle", ensemble("z_inner"))
    write_config("z_inner", ensemble("double", "X", "Y"))
    async with opened(repository, options=EXPLICIT) as runtime:
        await runtime.load("a_outer")
        answer = await runtime.infer(InferRequest(model="a_outer", inputs={"A": ONES}))
    assert answer.outputs["B"].tolist() == [[2, 2]]


async def test_unloading_an_ensemble_with_its_models_lets_its_requests_end(
    repository, write_python, write_config, gate
):
    write_python("gated", GATED)
    write_python("double")
    steps = """
      { model_name: "gated" model_version: -1 input_map { key: "X" value: "A" } output_map { key: "Y" value: "t" } },
      { model_name: "double" model_version: -1 input_map { key: "X" value: "t" } output_map { key: "Y" value: "B" } }"""
    head = ENSEMBLE[: ENSEMBLE.index("ensemble_scheduling")]
    write_config("ens", head + "ensemble_scheduling { step [" + steps + "] }")
    async with opened(repository, models=["*"], options=EXPLICIT) as runtime:
        asked = asyncio.create_task(runtime.infer(InferRequest(model="ens", inputs={"A": ONES})))
        assert await asyncio.to_thread(threading.test_entered.wait, 30)
        unloading = asyncio.create_task(runtime.unload("ens", unload_dependents=True))
        await until(lambda: not runtime.is_ready("ens"))
        gate.set()
        assert (await asked).outputs["B"].tolist() == [[2, 2]]
        await unloading
        assert not runtime.is_ready("double")


async def test_an_ensemble_whose_model_was_unloaded_is_no_fault_of_the_server(repository, write_python, write_config):
    write_python("double")
    write_config("ens", ensemble("double", "X", "Y"))
    async with opened(repository, models=["*"], options=EXPLICIT) as runtime:
        await runtime.unload("double")
        assert runtime.is_server_ready()
        with pytest.raises(InferenceError, match="'ens' has no available versions"):
            await runtime.infer(InferRequest(model="ens", inputs={"A": ONES}))


async def test_a_served_model_that_fails_to_reload_leaves_the_server_ready(repository, write_python):
    write_python("m", times(2))
    async with opened(repository, models=["m"], options=EXPLICIT) as runtime:
        (repository / "m" / "3").mkdir()
        (repository / "m" / "3" / "model.py").write_text("raise RuntimeError('torn')")
        with pytest.raises(InferenceError):
            await runtime.load("m")
        assert runtime.is_server_ready()


async def test_a_load_goes_on_when_its_caller_has_left(repository, write_python):
    write_python("m", times(2))
    async with opened(repository, options=EXPLICIT) as runtime:
        load = asyncio.create_task(runtime.load("m"))
        await asyncio.sleep(0)
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
        await until(lambda: runtime.is_ready("m"), timeout_s=20)
        assert await value(runtime) == ("1", 2.0)


async def test_a_closing_runtime_loads_nothing_and_ends_what_loads(repository, write_python):
    slow = "import threading\nthreading.test_entered.set()\nthreading.test_gate.wait(30)\n" + times(2)
    write_python("m", slow)
    runtime = await LocalRuntime.open(repository, options=EXPLICIT)
    threads = set(threading.enumerate())
    threading.test_gate, threading.test_entered = threading.Event(), threading.Event()
    try:
        load = asyncio.create_task(runtime.load("m"))
        assert await asyncio.to_thread(threading.test_entered.wait, 30)
        closing = asyncio.create_task(runtime.close())
        await asyncio.sleep(0)
        with pytest.raises(InferenceError) as refused:
            await runtime.load("m")
        assert refused.value.code is ErrorCode.UNAVAILABLE
        threading.test_gate.set()
        await closing
        await asyncio.gather(load, return_exceptions=True)
        await until(lambda: not {t for t in threading.enumerate() if t.name.startswith("m_")} - threads)
    finally:
        del threading.test_gate, threading.test_entered
    assert not runtime.is_ready("m")


async def test_what_one_model_does_wrong_never_stops_the_others(repository, write_python):
    write_python("good")
    write_python("leaves", "import sys\nsys.exit(3)")
    folder = write_python("huge", times(2), PYTHON_CONFIG.replace("dims: [ 2 ]", "dims: [ -1 ]", 1))
    warmup = """
    model_warmup [ { name: "w" batch_size: 1
      inputs { key: "X" value: { data_type: TYPE_FP32 dims: [ 100000000000000 ] zero_data: true } } } ]
    """
    (folder / "config.pbtxt").write_text((folder / "config.pbtxt").read_text() + warmup)
    async with opened(repository) as runtime:
        assert runtime.is_ready("good")
        assert {status.name for status in runtime.index() if status.reason} == {"huge", "leaves"}


async def test_polling_finds_a_new_ensemble_and_its_model_whatever_their_names(repository, write_python, write_config):
    options = RuntimeOptions(control_mode=ModelControl.POLL, poll_interval_us=20_000)
    async with opened(repository, options=options) as runtime:
        write_config("a_ens", ensemble("z_double", "X", "Y"))
        await until(lambda: any(status.reason for status in runtime.index()))
        write_python("z_double")
        await until(lambda: runtime.is_ready("a_ens"))


async def test_a_reload_keeps_the_models_share_of_threads(repository, write_torch):
    options = RuntimeOptions(control_mode=ModelControl.EXPLICIT, threads=8)
    folder = write_torch("m", "def forward(self, x):\n    return x")
    async with opened(repository, models=["m"], options=options) as runtime:
        for _ in range(2):
            assert runtime._models.find("m").instances[0]._threads == 8
            (folder / "config.pbtxt").write_text((folder / "config.pbtxt").read_text() + "\n")
            await runtime.load("m")


async def test_a_load_request_with_a_config_of_its_own_is_told_what_is_wrong_with_it(repository, write_python):
    write_python("m", times(2))
    async with opened(repository, models=["m"], options=EXPLICIT) as runtime:
        with pytest.raises(InferenceError, match="max_batch_sizes") as refused:
            await runtime.load("m", config='{"max_batch_sizes": 1}')
        assert refused.value.code is ErrorCode.INVALID_ARG
        assert await value(runtime) == ("1", 2.0)


async def test_polling_forgets_a_broken_model_that_has_left_or_was_put_right(repository, write_python):
    folder = write_python("m", times(2))
    config = folder / "config.pbtxt"
    right, before = config.read_text(), config.stat()
    options = RuntimeOptions(control_mode=ModelControl.POLL, poll_interval_us=20_000)
    async with opened(repository, options=options) as runtime:
        write_python("broken", config="nonsense")
        await until(lambda: not runtime.is_server_ready())
        shutil.rmtree(repository / "broken")
        await until(runtime.is_server_ready)
        assert {status.name for status in runtime.index()} == {"m"}
        config.write_text(right + "nonsense")
        await until(lambda: any(status.reason for status in runtime.index()))
        config.write_text(right)
        os.utime(config, ns=(before.st_atime_ns, before.st_mtime_ns))
        await until(lambda: states(runtime) == [("m", "1", "READY", "")])


async def test_unloading_goes_on_when_its_caller_has_left(repository, write_python, write_config, gate):
    write_python("gated", GATED)
    write_config("ens", ensemble("gated", "X", "Y"))
    async with opened(repository, models=["*"], options=EXPLICIT) as runtime:
        asked = asyncio.create_task(runtime.infer(InferRequest(model="ens", inputs={"A": ONES})))
        assert await asyncio.to_thread(threading.test_entered.wait, 30)
        unloading = asyncio.create_task(runtime.unload("ens", unload_dependents=True))
        await until(lambda: not runtime.is_ready("ens"))
        unloading.cancel()
        gate.set()
        await asked
        await until(lambda: not runtime.is_ready("gated"))


async def test_instances_that_started_are_stopped_when_another_cannot(repository, write_python, monkeypatch):
    folder = write_python("m", times(2))
    text = (folder / "config.pbtxt").read_text()
    (folder / "config.pbtxt").write_text(text.replace("count: 1", "count: 3"))
    start, started = threading.Thread.start, []

    def scarce(thread):
        if thread.name.startswith("m_"):
            if len(started) == 2:
                raise RuntimeError("can't start new thread")
            started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", scarce)
    assert await reasons(repository) == {"m": "RuntimeError: can't start new thread"}
    await until(lambda: not any(thread.is_alive() for thread in started))
