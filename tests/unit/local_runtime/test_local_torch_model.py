import types
import warnings

import ml_dtypes
import numpy as np
import pytest

from local_runtime.errors import ErrorCode, InferenceError, ModelLoadError
from local_runtime.executors.torch_model import TorchModel, _Device
from local_runtime.messages import InferRequest
from local_runtime.repository.completion import Placement, place
from local_runtime.repository.model_config import NUMPY_TYPES, InstanceKind
from local_runtime.repository.parsing import parse
from local_runtime.scheduling.validation import CheckedRequest, RequestChecker

ADD = """
def forward(self, a, b):
    return a + b, a - b
"""


def config(inputs="INPUT__1 INPUT__0", outputs="OUTPUT__1 OUTPUT__0", *, max_batch=8, datatype="TYPE_FP32", more=""):
    tensors = " ".join(
        f'{kind} [ {{ name: "{name}" data_type: {datatype} dims: [ 2 ] }} ]'
        for kind, names in (("input", inputs), ("output", outputs))
        for name in names.split()
    )
    return parse(
        f'platform: "pytorch_libtorch" max_batch_size: {max_batch} {tensors} instance_group [ {{ kind: KIND_CPU }} ] '
        + more,
        folder_name="add",
    )


@pytest.fixture
def load(write_torch):
    def load_model(model_config, source=ADD):
        file = write_torch("add", source) / "1" / "model.pt"
        return TorchModel(config=model_config, file=file, placement=place(model_config, cuda_devices=0)[0])

    return load_model


@pytest.fixture
def load_exported(tmp_path):
    def load_model(model_config, module, arguments, keywords=None):
        import torch  # noqa: PLC0415 - only the tests that need it pay for it

        batch = torch.export.Dim("batch", min=1, max=64)
        names = (*(f"x{index}" for index in range(len(arguments))), *(keywords or {}))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(
                module, arguments, keywords, dynamic_shapes={name: {0: batch} for name in names}
            )
            torch.export.save(program, tmp_path / "model.pt2")
        return TorchModel(
            config=model_config, file=tmp_path / "model.pt2", placement=place(model_config, cuda_devices=0)[0]
        )

    return load_model


def request_of(model_config, arrays, *, outputs=()):
    return RequestChecker(model_config).check(InferRequest(model="add", inputs=arrays, outputs=outputs))


def member(model_config, a, b, *, outputs=(), rows=1):
    shape = (rows, 2) if model_config.max_batch_size else (2,)
    names = sorted(spec.name for spec in model_config.inputs)
    arrays = {name: np.full(shape, value, np.float32) for name, value in zip(names, (a, b), strict=True)}
    return request_of(model_config, arrays, outputs=outputs)


def outcomes_of(model, members):
    return model.execute(members).outcomes


def test_names_say_the_position_not_the_order(load):
    model_config = config()
    model = load(model_config)
    members = [member(model_config, 5, 3, rows=2), member(model_config, 1, 1, outputs=("OUTPUT__1",))]
    first, second = outcomes_of(model, members)
    assert (first["OUTPUT__0"].tolist(), first["OUTPUT__1"].tolist()) == ([[8, 8]] * 2, [[2, 2]] * 2)
    assert list(second) == ["OUTPUT__1"]
    model.close()


def test_names_may_be_the_arguments_of_forward_and_outputs_come_in_config_order(load):
    model_config = config("b a", "SUM DIFFERENCE")
    (outcome,) = outcomes_of(load(model_config), [member(model_config, 5, 3)])
    assert {name: array.tolist() for name, array in outcome.items()} == {"SUM": [[8, 8]], "DIFFERENCE": [[2, 2]]}


def test_other_names_are_arguments_in_config_order(load):
    model_config = config("X1 X2", "OUTPUT__0 OUTPUT__1")
    (outcome,) = outcomes_of(load(model_config), [member(model_config, 5, 3)])
    assert outcome["OUTPUT__1"].tolist() == [[2, 2]]


def test_outputs_of_a_dict_go_by_key(load):
    model_config = config(outputs="d s")
    source = "def forward(self, a, b):\n    return {'s': a + b, 'd': a - b}"
    model = load(model_config, source)
    (outcome,) = outcomes_of(model, [member(model_config, 5, 3)])
    assert {name: array.tolist() for name, array in outcome.items()} == {"d": [[2, 2]], "s": [[8, 8]]}


def test_without_batch_dimension_members_run_one_at_a_time(load):
    model_config = config(max_batch=0)
    members = [member(model_config, 5, 3), member(model_config, 1, 1)]
    first, second = outcomes_of(load(model_config), members)
    assert (first["OUTPUT__0"].tolist(), second["OUTPUT__0"].tolist()) == ([8, 8], [2, 2])


def test_received_memory_is_read_only_and_stays_as_it_was(load):
    model_config = config()
    mine = [member(model_config, 5, 3), member(model_config, 6, 3)]
    for array in (array for one in mine for array in one.inputs.values()):
        array.flags.writeable = False
    model = load(model_config, "def forward(self, a, b):\n    return a.add_(b), b")
    for members in (mine, mine[:1]):
        assert outcomes_of(model, members)[0]["OUTPUT__0"].tolist() == [[8, 8]]
    assert mine[0].inputs["INPUT__0"].tolist() == [[5, 5]]


def test_an_answer_stays_as_it_was_given(tmp_path):
    import torch  # noqa: PLC0415 - only the tests that need it pay for it

    class Counts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("kept", torch.zeros(1, 2))

        def forward(self, a):
            self.kept.add_(1)
            return self.kept

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch would rather have another format is no news here
        torch.jit.script(Counts()).save(tmp_path / "model.pt")
    model_config = config("a", "OUTPUT__0")
    (placement,) = place(model_config, cuda_devices=0)
    model = TorchModel(config=model_config, file=tmp_path / "model.pt", placement=placement)
    array = np.ones((1, 2), np.float32)
    answers = [outcomes_of(model, [request_of(model_config, {"a": array})])[0] for _ in range(3)]
    assert [answer["OUTPUT__0"].tolist() for answer in answers] == [[[1, 1]], [[2, 2]], [[3, 3]]]


def test_a_batch_that_failed_is_told_in_the_log(load, caplog):
    model_config = config()
    model = load(model_config, "def forward(self, a, b):\n    assert a.shape[0] == 1, 'no batches'\n    return a, b")
    members = [member(model_config, value, 0) for value in (1, 2, 3)]
    assert [outcome["OUTPUT__0"].tolist() for outcome in outcomes_of(model, members)] == [[[1, 1]], [[2, 2]], [[3, 3]]]
    (record,) = caplog.records
    assert (record.levelname, record.model, record.members) == ("WARNING", "add", 3)
    assert "no batches" in record.error


def test_a_bad_item_fails_alone(load):
    model_config = config()
    source = """
    def forward(self, a, b):
        if bool((a < 0).any()):
            raise RuntimeError("negative")
        return a, b
    """
    members = [member(model_config, value, 0) for value in (1, -1, 2)]
    executed = load(model_config, source).execute(members)
    first, bad, last = executed.outcomes
    assert (first["OUTPUT__0"].tolist(), last["OUTPUT__0"].tolist()) == ([[1, 1]], [[2, 2]])
    assert bad.code is ErrorCode.INTERNAL
    assert bad.message.startswith("PyTorch execute failure: ")
    assert "negative" in bad.message


def test_the_time_is_told_by_part(load):
    model_config = config()
    executed = load(model_config).execute([member(model_config, 5, 3)])
    compute = executed.compute
    assert min(compute.input_us, compute.infer_us, compute.output_us) >= 0
    assert compute.total_us > 0


@pytest.mark.parametrize("datatype", [name for name in NUMPY_TYPES if name != "BYTES"])
def test_every_datatype_goes_in_and_out_unchanged(load, datatype):
    model_config = config("INPUT__0", "OUTPUT__0", datatype=f"TYPE_{datatype}")
    array = np.array([[0, 1]]).astype(NUMPY_TYPES[datatype])
    model = load(model_config, "def forward(self, a):\n    return a")
    (outcome,) = outcomes_of(model, [request_of(model_config, {"INPUT__0": array})])
    assert outcome["OUTPUT__0"].dtype == array.dtype
    assert outcome["OUTPUT__0"].tolist() == array.tolist()


def test_bfloat16_is_computed_as_such(load):
    model_config = config("INPUT__0", "OUTPUT__0", datatype="TYPE_BF16")
    array = np.array([[1.5, -2]], ml_dtypes.bfloat16)
    model = load(model_config, "def forward(self, a):\n    return (a * 2).t().contiguous().t()")
    (outcome,) = outcomes_of(model, [request_of(model_config, {"INPUT__0": array})])
    assert outcome["OUTPUT__0"].astype(np.float32).tolist() == [[3, -4]]


SEQUENCE = """sequence_batching {
    control_input [ { name: "READY__1" control [ { kind: CONTROL_SEQUENCE_READY fp32_false_true: [ 0, 1 ] } ] } ]
    state [ { input_name: "INPUT__2" output_name: "OUTPUT__1" data_type: TYPE_FP32 dims: [ 2 ] } ]
}"""


def test_controls_and_states_have_positions_as_inputs_and_outputs_have(load):
    model_config = config("INPUT__0", "OUTPUT__0", more=SEQUENCE)
    model = load(model_config, "def forward(self, x, ready, total):\n    return x * ready, total + x * ready")
    ones = np.ones((1, 2), np.float32)
    members = [
        CheckedRequest(
            source=InferRequest(model="add", inputs={}),
            inputs={"INPUT__0": ones * value, "READY__1": np.array([[ready]], np.float32), "INPUT__2": ones * state},
            rows=1,
            batch_key=(),
            outputs=("OUTPUT__0", "OUTPUT__1"),
        )
        for value, ready, state in ((3, 1, 10), (4, 0, 20))
    ]
    first, idle = outcomes_of(model, members)
    assert (first["OUTPUT__0"].tolist(), first["OUTPUT__1"].tolist()) == ([[3, 3]], [[13, 13]])
    assert (idle["OUTPUT__0"].tolist(), idle["OUTPUT__1"].tolist()) == ([[0, 0]], [[20, 20]])


def sequence_member(value, state):
    return CheckedRequest(
        source=InferRequest(model="add", inputs={}),
        inputs={
            "INPUT__0": np.full((1, 2), value, np.float32),
            "READY__1": np.ones((1, 1), np.float32),
            "INPUT__2": np.array([state], np.float32),
        },
        rows=1,
        batch_key=(),
        outputs=("OUTPUT__0", "OUTPUT__1"),
    )


def test_sequences_fail_together_since_their_row_is_their_place(load):
    model_config = config("INPUT__0", "OUTPUT__0", more=SEQUENCE)
    source = """
    def forward(self, x, ready, total):
        assert bool((x > 0).all()), "not positive"
        return x, total
    """
    outcomes = outcomes_of(load(model_config, source), [sequence_member(value, [0, 0]) for value in (1, -1)])
    assert ["not positive" in outcome.message for outcome in outcomes] == [True, True]


def test_states_that_grow_cannot_be_a_batch(load):
    model_config = config("INPUT__0", "OUTPUT__0", more=SEQUENCE.replace("dims: [ 2 ]", "dims: [ -1 ]"))
    model = load(model_config, "def forward(self, x, ready, total):\n    return x, torch.cat([total, x], dim=1)")
    members = [sequence_member(1, [0, 0, 0]), sequence_member(1, [0])]
    (alone,) = outcomes_of(model, members[:1])
    assert alone["OUTPUT__1"].shape == (1, 5)
    text = (
        "model 'add' cannot run sequences together whose state 'INPUT__2' has the shapes [1, 1] and [1, 3]: a state "
        "that grows needs max_batch_size 1"
    )
    outcomes = outcomes_of(model, members)
    assert [(outcome.code, outcome.message) for outcome in outcomes] == [(ErrorCode.INTERNAL, text)] * 2


class Cuda:
    """`torch` with a GPU that is none: its tensors are the CPU's, and what memory was asked for is kept."""

    def __init__(self):
        import torch  # noqa: PLC0415 - only the tests that need it pay for it

        self._torch = torch
        self.pinned = []
        stream = types.SimpleNamespace(synchronize=lambda: None)
        self.cuda = types.SimpleNamespace(
            set_device=lambda device: None, Stream=lambda device: stream, set_stream=lambda stream: None
        )

    def __getattr__(self, name):
        return getattr(self._torch, name)

    def device(self, name):
        assert name == "cuda:1"
        return self._torch.device("cpu")

    def empty(self, shape, *, dtype, pin_memory):
        self.pinned.append(pin_memory)
        return self._torch.empty(shape, dtype=dtype)


class OnGpu:
    """As much of a tensor on a GPU as the way back needs."""

    def __init__(self, tensor):
        self.device = types.SimpleNamespace(type="cuda")
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.tensor = tensor


@pytest.mark.parametrize(
    ("optimization", "pinned"),
    [
        ("", [True, True]),
        ("optimization { input_pinned_memory { enable: false } }", [False, True]),
        ("optimization { input_pinned_memory { enable: true } output_pinned_memory { enable: false } }", [True, False]),
    ],
)
def test_memory_is_pinned_unless_the_config_forbids_it(monkeypatch, optimization, pinned):
    import torch  # noqa: PLC0415 - only the tests that need it pay for it

    copy = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda to, source, non_blocking: copy(to, source.tensor))
    cuda = Cuda()
    placement = Placement(name="add_0_0", kind=InstanceKind.GPU, device_id=1)
    device = _Device(cuda, placement, optimization=config(more=optimization).message.optimization)
    batch = device.batch([{"X": np.full((1, 2), value, np.float32)} for value in (1, 2)])
    there = device.host({"Y": OnGpu(batch["X"] * 2)})
    assert (there["Y"].tolist(), cuda.pinned) == ([[2, 2], [4, 4]], pinned)


def test_an_optional_input_that_is_absent_is_the_arguments_default(load):
    model_config = parse(
        """platform: "pytorch_libtorch" max_batch_size: 8
        input [ { name: "a" data_type: TYPE_FP32 dims: [ 2 ] },
                { name: "b" data_type: TYPE_FP32 dims: [ 2 ] optional: true } ]
        output [ { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 2 ] } ]
        instance_group [ { kind: KIND_CPU } ]""",
        folder_name="add",
    )
    source = """
    def forward(self, a, b: Optional[Tensor] = None):
        if b is None:
            return a
        return a + b
    """
    model = load(model_config, source)
    ones = np.ones((1, 2), np.float32)
    (alone,) = outcomes_of(model, [request_of(model_config, {"a": ones})])
    (both,) = outcomes_of(model, [request_of(model_config, {"a": ones, "b": ones})])
    assert (alone["OUTPUT__0"].tolist(), both["OUTPUT__0"].tolist()) == ([[1, 1]], [[2, 2]])


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("def forward(self, a, b):\n    return a", "model 'add' returned 1 outputs, none for 'OUTPUT__1'"),
        (
            "def forward(self, a, b):\n    return {'OUTPUT__0': a}",
            "model 'add' returned 1 outputs, none for 'OUTPUT__1'",
        ),
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
    (outcome,) = outcomes_of(load(model_config, source), [member(model_config, 5, 3)])
    assert isinstance(outcome, InferenceError)
    assert (outcome.code, outcome.message) == (ErrorCode.INTERNAL, text)


def test_mixed_up_rows_are_nobodys_answer_so_every_member_runs_alone(load):
    model_config = config()
    model = load(model_config, "def forward(self, a, b):\n    return a[:1], b[:1]")
    outcomes = outcomes_of(model, [member(model_config, 5, 3), member(model_config, 7, 4, rows=2)])
    alone = outcomes_of(model, [member(model_config, 5, 3)])
    assert outcomes[0].keys() == alone[0].keys()
    assert all(np.array_equal(outcomes[0][name], alone[0][name]) for name in alone[0])
    assert outcomes[1].message == "model 'add' returned 1 rows in output 'OUTPUT__1' for a batch of 2 rows"


@pytest.mark.parametrize(
    ("model_config", "reason"),
    [
        (
            config(inputs="A"),
            r"the inputs of the config \['A'\] do not fit the arguments of forward \['a', 'b'\]: nothing .* for 'b'",
        ),
        (config(inputs="INPUT__0 INPUT__2"), "nothing is given for 'b', there is no argument 2, counted from 0"),
        (config(inputs="b"), "nothing is given for 'a'"),
        (config(inputs="INPUT__0"), "nothing is given for 'b'"),
        (config(inputs="C B A"), "there is no argument 2, counted from 0"),
        (config(inputs="INPUT__0 INPUT__1 INPUT__2"), "there is no argument 2, counted from 0"),
        (config(inputs="A__0 B__0 C__1"), r"input positions must be 0, 1, \.\.\."),
        (config(outputs="A__0 B__0"), r"output positions must be without repetition, got \[0, 0\]"),
        (config(datatype="TYPE_STRING"), "TYPE_STRING of 'INPUT__1' is not supported for PyTorch models"),
    ],
)
def test_refused_at_load(load, model_config, reason):
    with pytest.raises(ModelLoadError, match=reason):
        load(model_config)


@pytest.mark.parametrize("inputs", ["a", "INPUT__0", "X"])
def test_arguments_with_a_default_need_no_input(load, inputs):
    model_config = config(inputs, "OUTPUT__0")
    model = load(model_config, "def forward(self, a, b: Optional[Tensor] = None, n: int = 3):\n    return a * n")
    (outcome,) = outcomes_of(model, [request_of(model_config, {inputs: np.ones((1, 2), np.float32)})])
    assert outcome["OUTPUT__0"].tolist() == [[3, 3]]


@pytest.mark.parametrize("name", ["model.pt", "model.pt2"])
def test_broken_file(tmp_path, name):
    model_config = config()
    (tmp_path / name).write_bytes(b"junk")
    (placement,) = place(model_config, cuda_devices=0)
    with pytest.raises(ModelLoadError, match="failed to load model 'add'"):
        TorchModel(config=model_config, file=tmp_path / name, placement=placement)
    with pytest.raises(ModelLoadError, match="no such file"):
        TorchModel(config=model_config, file=tmp_path / "absent.pt", placement=placement)


def test_parameter_switches_the_optimized_executor_off(load):
    import torch  # noqa: PLC0415 - only the tests that need it pay for it

    more = 'parameters { key: "DISABLE_OPTIMIZED_EXECUTION" value { string_value: "true" } }'
    model_config = config("INPUT__0", "OUTPUT__0", more=more)
    model = load(model_config, "def forward(self, a):\n    return a")
    seen = []
    program = model._program.call
    model._program = type(model._program)(
        call=lambda x: (seen.append((torch._C._get_graph_executor_optimize(), torch.is_inference_mode_enabled())), x)[
            1
        ],
        arguments=("a",),
    )
    model.execute([request_of(model_config, {"INPUT__0": np.ones((1, 2), np.float32)})])
    assert seen == [(False, True)]
    assert program is not None


class TestExported:
    def test_by_position_and_by_argument_name(self, load_exported):
        import torch  # noqa: PLC0415 - only the tests that need it pay for it

        class Both(torch.nn.Module):
            def forward(self, x0, x1):
                return x0 + x1, x0 - x1

        for names in ("INPUT__1 INPUT__0", "x1 x0"):
            model_config = config(names)
            model = load_exported(model_config, Both(), (torch.ones(2, 2), torch.ones(2, 2)))
            first, second = outcomes_of(model, [member(model_config, 5, 3, rows=2), member(model_config, 1, 1)])
            assert (first["OUTPUT__0"].tolist(), first["OUTPUT__1"].tolist()) == ([[8, 8]] * 2, [[2, 2]] * 2)
            assert second["OUTPUT__0"].tolist() == [[2, 2]]
            model.close()

    def test_arguments_that_were_exported_as_keywords(self, load_exported):
        import torch  # noqa: PLC0415 - only the tests that need it pay for it

        class Keywords(torch.nn.Module):
            def forward(self, x0, y, z):
                return {"s": x0 + y, "d": x0 - z}

        model_config = parse(
            """platform: "pytorch_libtorch" max_batch_size: 8
            input [ { name: "z" data_type: TYPE_FP32 dims: [ 2 ] }, { name: "x0" data_type: TYPE_FP32 dims: [ 2 ] },
                    { name: "y" data_type: TYPE_FP32 dims: [ 2 ] } ]
            output [ { name: "d" data_type: TYPE_FP32 dims: [ 2 ] }, { name: "s" data_type: TYPE_FP32 dims: [ 2 ] } ]
            instance_group [ { kind: KIND_CPU } ]""",
            folder_name="add",
        )
        model = load_exported(
            model_config, Keywords(), (torch.ones(2, 2),), {"y": torch.ones(2, 2), "z": torch.ones(2, 2)}
        )
        arrays = {name: np.full((1, 2), value, np.float32) for name, value in (("x0", 5), ("y", 3), ("z", 1))}
        (outcome,) = outcomes_of(model, [request_of(model_config, arrays)])
        assert {name: array.tolist() for name, array in outcome.items()} == {"d": [[4, 4]], "s": [[8, 8]]}

    def test_a_shape_that_the_program_does_not_take_is_an_outcome(self, load_exported):
        import torch  # noqa: PLC0415 - only the tests that need it pay for it

        class Same(torch.nn.Module):
            def forward(self, x0):
                return x0 * 2

        model_config = config("INPUT__0", "OUTPUT__0")
        model = load_exported(model_config, Same(), (torch.ones(2, 3),))
        (outcome,) = outcomes_of(model, [request_of(model_config, {"INPUT__0": np.ones((1, 2), np.float32)})])
        assert outcome.message.startswith("PyTorch execute failure: ")

    def test_names_of_arguments_may_have_capitals(self, load_exported):
        import torch  # noqa: PLC0415 - only the tests that need it pay for it

        class Capitals(torch.nn.Module):
            def forward(self, x0, A, B):  # noqa: N803 - the names are what is tested
                return x0 + A - B

        model_config = config("B A x0", "OUTPUT__0")
        keywords = {"A": torch.ones(2, 2), "B": torch.ones(2, 2)}
        model = load_exported(model_config, Capitals(), (torch.ones(2, 2),), keywords)
        arrays = {name: np.full((1, 2), value, np.float32) for name, value in (("x0", 5), ("A", 3), ("B", 1))}
        (outcome,) = outcomes_of(model, [request_of(model_config, arrays)])
        assert outcome["OUTPUT__0"].tolist() == [[7, 7]]

    @pytest.mark.parametrize(
        ("model_config", "reason"),
        [
            (config("x0", "s"), r"\['x0'\] do not fit the arguments of forward \['x0', 'x1'\]: .* for 'x1'"),
            (config("x0 x1", "s t"), r"forward returns a dict with the keys \['d', 's'\], without \['t'\]"),
        ],
    )
    def test_a_config_that_does_not_fit_is_refused(self, load_exported, model_config, reason):
        import torch  # noqa: PLC0415 - only the tests that need it pay for it

        class Both(torch.nn.Module):
            def forward(self, x0, x1):
                return {"s": x0 + x1, "d": x0 - x1}

        with pytest.raises(ModelLoadError, match=reason):
            load_exported(model_config, Both(), (torch.ones(2, 2), torch.ones(2, 2)))
