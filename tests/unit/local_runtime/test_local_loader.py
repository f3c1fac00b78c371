"""What of a repository is served, and what is said about the rest."""

import contextlib

import numpy as np
import pytest

from local_runtime.lifecycle import LoadOptions, load
from local_runtime.runtime import InferenceError, InferRequest, LocalRuntime, ModelLoadError, ModelState

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
    assert index["raises"].reason == "RuntimeError: no weights"
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
        def initialize(self, args):
            if args["model_instance_name"] == "m_0_1":
                raise OSError("no room")
    """
    folder = write_python("m", code)
    text = (folder / "config.pbtxt").read_text()
    (folder / "config.pbtxt").write_text(text.replace("count: 1", "count: 2"))
    assert await reasons(repository) == {"m": "OSError: no room"}


IDENTITY = "def forward(self, x):\n    return x"


@pytest.mark.parametrize(("parameter", "threads", "expected"), [("", 8, 4), ("", 1, 1), ("7", 8, 7), ("none", 8, None)])
async def test_threads_are_shared_out_between_instances(repository, write_torch, parameter, threads, expected):
    for name in ("m", "other"):
        folder = write_torch(name, IDENTITY)
    folder = repository / "m"
    if parameter:
        entry = f'parameters {{ key: "INTRA_OP_THREAD_COUNT" value {{ string_value: "{parameter}" }} }}'
        (folder / "config.pbtxt").write_text((folder / "config.pbtxt").read_text() + entry)
    options = LoadOptions(threads=threads, max_queue_size=1, load_threads=1, observer=None)
    loaded = await load(repository, None, options)
    for model in loaded.served.values():
        for instance in model.instances:
            instance.stop().result(30)
    if expected is None:
        assert "must be a positive number, not 'none'" in loaded.failed["m"].reason
    else:
        assert loaded.served["m"].instances[0]._threads == expected
