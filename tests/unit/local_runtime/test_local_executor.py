import threading

import numpy as np
import pytest

from local_runtime.errors import ErrorCode, InferenceError, ModelLoadError
from local_runtime.executors.instance import Instance, TorchScriptModel
from local_runtime.messages import InferRequest
from local_runtime.repository.completion import place
from local_runtime.repository.model_config import parse
from local_runtime.scheduling.validation import check

ADD = """
def forward(self, a, b):
    return a + b, a - b
"""


def config(inputs="INPUT__1 INPUT__0", outputs="OUTPUT__1 OUTPUT__0", *, max_batch=8, datatype="TYPE_FP32"):
    tensors = " ".join(
        f'{kind} [ {{ name: "{name}" data_type: {datatype} dims: [ 2 ] }} ]'
        for kind, names in (("input", inputs), ("output", outputs))
        for name in names.split()
    )
    return parse(
        f'platform: "pytorch_libtorch" max_batch_size: {max_batch} {tensors} instance_group [ {{ kind: KIND_CPU }} ]',
        folder_name="add",
    )


@pytest.fixture
def load(write_torch):
    def load_model(model_config, source=ADD):
        file = write_torch("add", source) / "1" / "model.pt"
        return TorchScriptModel(config=model_config, file=file, placement=place(model_config, cuda_devices=0)[0])

    return load_model


def member(model_config, a, b, *, outputs=()):
    shape = (1, 2) if model_config.max_batch_size else (2,)
    inputs = {"INPUT__0": np.full(shape, a, np.float32), "INPUT__1": np.full(shape, b, np.float32)}
    return check(InferRequest(model="add", inputs=inputs, outputs=outputs), model_config)


def test_names_say_the_position_not_the_order(load):
    model_config = config()
    model = load(model_config)
    first, second = model.execute([member(model_config, 5, 3), member(model_config, 1, 1, outputs=("OUTPUT__1",))])
    assert (first["OUTPUT__0"].tolist(), first["OUTPUT__1"].tolist()) == ([[8, 8]], [[2, 2]])
    assert list(second) == ["OUTPUT__1"]
    model.close()


def test_without_batch_dimension(load):
    model_config = config(max_batch=0)
    (outcome,) = load(model_config).execute([member(model_config, 5, 3)])
    assert outcome["OUTPUT__0"].tolist() == [8, 8]


def test_received_memory_is_read_only_and_stays_as_it_was(load):
    model_config = config()
    mine = member(model_config, 5, 3)
    for array in mine.inputs.values():
        array.flags.writeable = False
    load(model_config, "def forward(self, a, b):\n    return a.add_(b), b").execute([mine])
    assert mine.inputs["INPUT__0"].tolist() == [[5, 5]]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("def forward(self, a, b):\n    return a", "model 'add' returned 1 outputs, none for 'OUTPUT__1'"),
        (
            "def forward(self, a, b):\n    return a.long(), b",
            "model 'add' returned output 'OUTPUT__0' as 'INT64', but its config says 'FP32'",
        ),
        (
            "def forward(self, a, b):\n    return a[:, :1], b",
            "model 'add' returned output 'OUTPUT__0' of shape [1,1], but its config says [-1,2]",
        ),
    ],
)
def test_answers_that_break_the_config(load, source, text):
    model_config = config()
    (outcome,) = load(model_config, source).execute([member(model_config, 5, 3)])
    assert isinstance(outcome, InferenceError)
    assert (outcome.code, outcome.message) == (ErrorCode.INTERNAL, text)


@pytest.mark.parametrize(
    ("model_config", "reason"),
    [
        (config(inputs="A"), "input 'A' does not follow <name>__<index> naming convention"),
        (config(outputs="B"), "output 'B' does not follow <name>__<index> naming convention"),
        (config(inputs="INPUT__0 INPUT__2"), r"input positions must be 0, 1, \.\.\."),
        (config(datatype="TYPE_STRING"), "TYPE_STRING of 'INPUT__1' is not supported for TorchScript models"),
    ],
)
def test_refused_at_load(load, model_config, reason):
    with pytest.raises(ModelLoadError, match=reason):
        load(model_config)


def test_broken_file(tmp_path):
    model_config = config()
    (tmp_path / "model.pt").write_bytes(b"junk")
    (placement,) = place(model_config, cuda_devices=0)
    with pytest.raises(ModelLoadError, match="failed to load model 'add'"):
        TorchScriptModel(config=model_config, file=tmp_path / "model.pt", placement=placement)
    with pytest.raises(ModelLoadError, match="no such file"):
        TorchScriptModel(config=model_config, file=tmp_path / "absent.pt", placement=placement)


def test_parameter_switches_the_optimized_executor_off(load):
    import torch  # noqa: PLC0415 - only here

    model_config = parse(
        """platform: "pytorch_libtorch" max_batch_size: 8
        input [ { name: "INPUT__0" data_type: TYPE_FP32 dims: [ 2 ] } ]
        output [ { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 2 ] } ]
        instance_group [ { kind: KIND_CPU } ]
        parameters { key: "DISABLE_OPTIMIZED_EXECUTION" value { string_value: "true" } }""",
        folder_name="add",
    )
    model = load(model_config, "def forward(self, a):\n    return a")
    seen = []
    run = model._module
    model._module = lambda x: (seen.append(torch._C._get_graph_executor_optimize()), run(x))[1]
    model.execute([check(InferRequest(model="m", inputs={"INPUT__0": np.ones((1, 2), np.float32)}), model_config)])
    assert seen == [False]


class Stub:
    """A model that answers with the name of the thread that runs it."""

    def __init__(self, error=None):
        self.error = error
        self.is_closed = False

    def execute(self, members):
        if self.error is not None:
            raise self.error
        return [threading.current_thread().name] * len(members)

    def close(self):
        self.is_closed = True
        if self.error is not None:
            raise self.error


def run_one(instance):
    done = threading.Event()
    results = []
    instance.submit([None, None], lambda executed: (results.append(executed), done.set()))
    assert done.wait(30)
    return results[0]


def test_instance_loads_runs_and_closes_in_its_own_thread():
    stub = Stub()
    loaded_in = []
    instance = Instance(name="m_0_0", load=lambda: loaded_in.append(threading.current_thread().name) or stub, threads=1)
    instance.start().result(30)
    executed = run_one(instance)
    instance.stop().result(30)
    assert (loaded_in, executed.outcomes, stub.is_closed) == (["m_0_0"], ["m_0_0", "m_0_0"], True)


def test_instance_survives_a_model_that_breaks_every_promise():
    instance = Instance(name="m_0_0", load=lambda: Stub(KeyError("x")), threads=1)
    instance.start().result(30)
    for _ in range(2):
        assert [outcome.code for outcome in run_one(instance).outcomes] == [ErrorCode.INTERNAL] * 2
    instance.stop().result(30)


def test_failed_load_is_one_kind_of_error():
    def load():
        raise KeyError("x")

    instance = Instance(name="m_0_0", load=load, threads=1)
    with pytest.raises(ModelLoadError, match="KeyError: 'x'"):
        instance.start().result(30)
    instance.stop().result(30)
