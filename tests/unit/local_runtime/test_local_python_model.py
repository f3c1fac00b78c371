import concurrent.futures
import json
import sys
import textwrap
import threading
import types

import numpy as np
import pytest

from local_runtime.errors import ErrorCode, InferenceError, ModelLoadError
from local_runtime.executors import faults
from local_runtime.executors import triton_python_backend_utils as pb_utils
from local_runtime.executors.model_files import python_auto_complete
from local_runtime.executors.own_modules import OwnModules
from local_runtime.executors.python_model import PythonModel
from local_runtime.executors.shim import context
from local_runtime.executors.shim.context import ModelContext
from local_runtime.messages import InferRequest
from local_runtime.repository.completion import place
from local_runtime.repository.parsing import parse
from local_runtime.scheduling.execution import Deferred
from local_runtime.scheduling.validation import CheckedRequest, RequestChecker

CONFIG = parse(
    """backend: "python" max_batch_size: 8
    input [ { name: "X" data_type: TYPE_FP32 dims: [ 2 ] }, { name: "S" data_type: TYPE_STRING dims: [ 1 ] } ]
    output [ { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] }, { name: "T" data_type: TYPE_STRING dims: [ 1 ] } ]
    instance_group [ { count: 2 kind: KIND_CPU } ]
    parameters { key: "SCALE" value { string_value: "3" } }""",
    folder_name="m",
)
ECHO = """
class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [
                    pb_utils.Tensor("Y", pb_utils.get_input_tensor_by_name(r, "X").as_numpy()),
                    pb_utils.Tensor("T", pb_utils.get_input_tensor_by_name(r, "S").as_numpy()),
                ]
            )
            for r in requests
        ]
"""
# As little as can be loaded.
EMPTY = "class TritonPythonModel:\n    execute = list\n"
IMPORT = "import triton_python_backend_utils as pb_utils\n"


@pytest.fixture(autouse=True)
def clean_modules():
    before = dict(sys.modules)
    yield
    for name in set(sys.modules) - set(before):
        del sys.modules[name]


@pytest.fixture
def load(tmp_path):
    def load_instance(code, *, instance=0, config=CONFIG):
        folder = tmp_path / "m" / "1"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.py").write_text(IMPORT + textwrap.dedent(code))
        placements = place(config, cuda_devices=0)
        model = PythonModel(
            config=config,
            folder=folder.parent,
            file=folder / "model.py",
            version="1",
            placement=placements[instance],
            placements=placements,
            services=None,
        )
        models.append(model)
        return model

    models = []
    yield load_instance
    for model in models:
        model.close()


def member(value=1, *, rows=1, outputs=(), config=CONFIG, respond=None, **fields):
    inputs = {
        "X": np.full((rows, 2), value, np.float32),
        "S": np.full((rows, 1), b"s%d" % value, dtype=object),
    }
    request = InferRequest(model="m", inputs=inputs, outputs=outputs, **fields)
    return RequestChecker(config).check(request, respond=respond)


def test_initialize_gets_tritons_arguments(load, tmp_path):
    model = load(
        """
        class TritonPythonModel:
            execute = list

            def initialize(self, args):
                self.args = args
                self.folder = pb_utils.get_model_dir()
        """,
        instance=1,
    )
    args = model._model.args
    config = json.loads(args.pop("model_config"))
    assert args == {
        "model_name": "m",
        "model_version": "1",
        "model_repository": str(tmp_path / "m"),
        "model_instance_name": "m_0_1",
        "model_instance_kind": "CPU",
        "model_instance_device_id": "0",
    }
    assert config["parameters"]["SCALE"]["string_value"] == "3"
    assert pb_utils.get_input_config_by_name(config, "S")["data_type"] == "TYPE_STRING"
    assert pb_utils.get_output_config_by_name(config, "Y")["dims"] == [2]
    assert pb_utils.get_output_config_by_name(config, "nope") is None
    assert not pb_utils.using_decoupled_model_transaction_policy(config)
    assert model._model.folder == str(tmp_path / "m" / "1")


def test_execute_gets_one_request_per_member_and_each_its_own_answer(load):
    outcomes = load(ECHO).execute([member(1), member(2, rows=3), member(3, outputs=("T",))]).outcomes
    assert [sorted(outcome) for outcome in outcomes] == [["T", "Y"], ["T", "Y"], ["T"]]
    assert outcomes[1]["Y"].tolist() == [[2, 2]] * 3
    assert outcomes[2]["T"].tolist() == [[b"s3"]]


def test_request_tells_who_asked_for_what(load):
    model = load(
        """
        class TritonPythonModel:
            def execute(self, requests):
                self.seen = [
                    (
                        r.request_id(), r.requested_output_names(), r.model_name(), r.model_version(),
                        r.correlation_id(), r.flags(), r.timeout(), r.parameters(), r.is_cancelled(), r.trace(),
                    )
                    for r in requests
                ]
                return []
        """
    )
    mine = member(
        request_id="r1",
        outputs=("T",),
        sequence_id="user",
        sequence_start=True,
        sequence_end=True,
        queue_timeout_us=5,
        parameters={"k": "v", "n": 1, "b": True},
    )
    mine.cancellation.is_cancelled = True
    model.execute([mine])
    assert model._model.seen == [("r1", ["T"], "m", 1, "user", 3, 5, '{"k": "v", "n": 1, "b": true}', True, None)]


def test_model_may_work_in_place_without_harm_to_others(load):
    model = load(
        """
        class TritonPythonModel:
            def execute(self, requests):
                requests[0].inputs()[0].as_numpy()[:] = 99
                raise pb_utils.TritonModelException("done")
        """
    )
    mine = member(1)
    model.execute([mine])
    assert mine.inputs["X"].tolist() == [[1, 1]]


def test_an_exception_has_tritons_text(load):
    model = load(
        """
        def inner():
            raise ValueError("plain python exception")

        class TritonPythonModel:
            def execute(self, requests):
                inner()
        """
    )
    outcomes = model.execute([member(), member()]).outcomes
    assert [outcome.code for outcome in outcomes] == [ErrorCode.INTERNAL] * 2
    lines = outcomes[0].message.splitlines()
    assert lines[0] == (
        "Failed to process the request(s) for model 'm_0_0', message: ValueError: plain python exception"
    )
    assert lines[2] == "At:"
    assert lines[3].endswith("model.py(4): inner")
    assert lines[4].endswith("model.py(8): execute")
    assert len(lines) == 5


def nested(depth):
    if depth == 0:
        raise ValueError("\udcff" + "€" * 5000)
    nested(depth - 1)


def test_the_text_of_an_exception_is_short_and_well_formed():
    with pytest.raises(ValueError, match="€") as caught:
        nested(100)
    text = faults.raised(caught.value)
    assert len(text.encode()) < 7000
    assert text.startswith("ValueError: ?€")
    assert text.count(": nested\n") == 20


def test_the_text_of_an_exception_is_had_whatever_its_class_does():
    class Name(type):
        @property
        def __name__(cls):
            raise KeyError

    class Text(str):
        __slots__ = ()

        def __getitem__(self, key):
            raise KeyError

        def encode(self, *_):
            raise KeyError

    class Odd(Exception, metaclass=Name):
        def __str__(self):
            return Text("odd")

    assert faults.named(Odd()) == "Odd: odd"


RAISES = """
import sys

class Mute(Exception):
    def __str__(self):
        raise self

class TritonPythonModel:
    def initialize(self, args):
        self.batches = []

    def execute(self, requests):
        values = [r.inputs()[0].as_numpy()[0, 0] for r in requests]
        self.batches.append(len(values))
        if 0 in values:
            raise ZeroDivisionError("zero")
        if -1 in values:
            sys.exit(3)
        if -2 in values:
            raise Mute
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", r.inputs()[0].as_numpy())]) for r in requests]
"""


@pytest.mark.parametrize(
    ("bad", "text"),
    [(0, "ZeroDivisionError: zero"), (-1, "SystemExit: 3"), (-2, "Mute: <str() of Mute failed>")],
)
def test_after_an_exception_every_member_runs_alone(load, bad, text):
    model = load(RAISES)
    outcomes = model.execute([member(value, outputs=("Y",)) for value in (1, bad, 2)]).outcomes
    assert (outcomes[0]["Y"].tolist(), outcomes[2]["Y"].tolist()) == ([[1, 1]], [[2, 2]])
    assert text in outcomes[1].message
    assert model._model.batches == [3, 1, 1, 1]


SEQUENCE_CONFIG = parse(
    str(CONFIG.message)
    + """sequence_batching {
        control_input [ { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } ] } ]
        state [ { input_name: "IN" output_name: "OUT" data_type: TYPE_FP32 dims: [ 2 ] } ]
    }""",
    folder_name="m",
)


def sequence_member(value, *, ready=1):
    inputs = member(value).inputs
    return CheckedRequest(
        source=InferRequest(model="m", inputs={}, sequence_id=7),
        inputs={**inputs, "READY": np.array([[ready]], np.int32), "IN": np.full((1, 2), 9, np.float32)},
        rows=1,
        batch_key=(),
        outputs=("Y", "OUT"),
    )


def test_an_exception_of_a_sequence_model_fails_its_batch_since_it_may_have_changed_state(load):
    model = load(RAISES, config=SEQUENCE_CONFIG)
    outcomes = model.execute([sequence_member(value) for value in (1, 0)]).outcomes
    assert ["zero" in outcome.message for outcome in outcomes] == [True, True]
    assert model._model.batches == [2]


def test_controls_are_inputs_and_a_state_that_is_not_returned_stays_as_it_was(load):
    model = load(
        """
        class TritonPythonModel:
            def execute(self, requests):
                self.ready = [pb_utils.get_input_tensor_by_name(r, "READY").as_numpy().tolist() for r in requests]
                changed = pb_utils.Tensor("OUT", pb_utils.get_input_tensor_by_name(requests[0], "IN").as_numpy() + 1)
                outputs = [[pb_utils.Tensor("Y", r.inputs()[0].as_numpy())] for r in requests]
                return [pb_utils.InferenceResponse([*outputs[0], changed]), pb_utils.InferenceResponse(outputs[1])]
        """,
        config=SEQUENCE_CONFIG,
    )
    outcomes = model.execute([sequence_member(1), sequence_member(2, ready=0)]).outcomes
    assert model._model.ready == [[[1]], [[0]]]
    assert [outcome["OUT"].tolist() for outcome in outcomes] == [[[10, 10]], [[9, 9]]]


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        ("None", "Failed to process the request(s) for model 'm_0_0', message: execute returned None and sent no"),
        ("[None, pb_utils.InferenceResponse()]", "execute returned None and sent no response for a request"),
        ("7", "Expected a list in the execute return, found type '<class 'int'>'."),
        ("[]", "Number of InferenceResponse objects do not match the number of InferenceRequest objects."),
        ("['x'] * len(requests)", "Expected an 'InferenceResponse' object in the execute function return list, found"),
        ("[pb_utils.InferenceResponse([]) for _ in requests]", "model 'm' did not return output 'Y'"),
        (
            (
                "[pb_utils.InferenceResponse([pb_utils.Tensor('Y', r.inputs()[0].as_numpy()[:0]), r.inputs()[1]]) "
                "for r in requests]"
            ),
            "did not return output 'T'",
        ),
        (
            (
                "[pb_utils.InferenceResponse([pb_utils.Tensor('Y', r.inputs()[0].as_numpy()[:0]), "
                "pb_utils.Tensor('T', r.inputs()[1].as_numpy())]) for r in requests]"
            ),
            "model 'm' returned 0 rows in output 'Y' for a batch of 1 rows",
        ),
        (
            (
                "[pb_utils.InferenceResponse([pb_utils.Tensor('Y', r.inputs()[0].as_numpy()), "
                "pb_utils.Tensor('T', r.inputs()[0].as_numpy().astype(object))]) for r in requests]"
            ),
            "an element of a BYTES tensor is float, not bytes or str",
        ),
        ("[pb_utils.InferenceResponse(error=pb_utils.TritonError(None)) for _ in requests]", "None"),
        ("[pb_utils.InferenceResponse(parameters={'k': []}) for _ in requests]", "str, int, float or bool, not list"),
        ("[pb_utils.Tensor(b'Y', None) for _ in requests]", "a tensor's name must be str, not bytes"),
    ],
)
def test_answers_that_break_the_contract(load, returned, text):
    model = load(f"class TritonPythonModel:\n    def execute(self, requests):\n        return {returned}\n")
    outcomes = model.execute([member(), member()]).outcomes
    assert [isinstance(outcome, InferenceError) for outcome in outcomes] == [True, True]
    assert {outcome.code for outcome in outcomes} == {ErrorCode.INTERNAL}
    assert text in outcomes[0].message


def own_names():
    return {name for name in sys.modules if name.startswith("triton_model_")}


def beside(tmp_path, files):
    """Files by their path in the version folder."""
    for name, content in files.items():
        file = tmp_path / "m" / "1" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)


COUNTER = "counter = []"
FUNCTION = "def f(): pass\nf.counter = []"


@pytest.mark.parametrize(
    ("files", "statement"),
    [
        ({"sibling.py": COUNTER}, "from sibling import counter"),
        ({"sibling.py": COUNTER}, "from .sibling import counter"),
        ({"load.py": COUNTER}, "from . import load\ncounter = load.counter"),
        ({"one.py": "import two\ncounter = two.counter", "two.py": COUNTER}, "from one import *"),
        ({"../of_all_versions.py": COUNTER}, "from of_all_versions import counter"),
        ({"parts/__init__.py": COUNTER}, "import parts\ncounter = parts.counter"),
        ({"parts/__init__.py": "from parts.one import counter", "parts/one.py": COUNTER}, "from parts import counter"),
        ({"parts/one.py": "from .two import counter", "parts/two.py": COUNTER}, "from parts.one import counter"),
        ({"parts/one.py": COUNTER}, "import parts.one\ncounter = parts.one.counter"),
        ({"parts/one.py": COUNTER}, "import parts.one as one\ncounter = one.counter"),
        ({"parts/one.py": COUNTER}, "from parts import one\ncounter = one.counter"),
        ({"parts/one.py": COUNTER}, "import importlib\ncounter = importlib.import_module('parts.one').counter"),
        ({"parts/one.py": FUNCTION}, "import pickle\ncounter = pickle.loads(b'cparts.one\\nf\\n.').counter"),
    ],
)
@pytest.mark.parametrize("is_lazy", [False, True])
def test_modules_beside_the_model_belong_to_one_instance(load, tmp_path, files, statement, is_lazy):
    is_lazy = is_lazy and "*" not in statement  # Python allows that outside of functions alone
    beside(tmp_path, files)
    code = """
    EARLY
    class TritonPythonModel:
        def execute(self, requests):
            LAZY
            counter.append(1)
            answer = requests[0].inputs()[0].as_numpy() * len(counter)
            return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", answer)])]
    """
    code = code.replace("LAZY", statement.replace("\n", "\n            ") if is_lazy else "")
    code = code.replace("EARLY", "" if is_lazy else statement.replace("\n", "\n    "))
    path, before = list(sys.path), own_names()
    models = [load(code, instance=instance) for instance in (0, 1)]
    for count in (1, 2):
        for model in models:
            answer = in_a_thread_of(model, lambda model=model: model.execute([member(1, outputs=("Y",))]).outcomes[0])
            assert answer["Y"].tolist() == [[count, count]]
    assert sys.path == path
    for model in models:
        model.close()
    assert own_names() == before


def in_a_thread_of(model, call):
    """An instance has a thread of its own; the fixture's models have all been made in this one."""
    with context.entered(model._modules.marks[context.MARK]):
        return call()


def test_a_reload_takes_the_modules_as_they_are_now(load, tmp_path):
    code = """
    import parts.one

    class TritonPythonModel:
        execute = list
        value = parts.one.value
    """
    values = []
    for value in (1, 2):
        beside(tmp_path, {"parts/one.py": f"value = {value}"})
        values.append(load(code)._model.value)
    assert values == [1, 2]
    assert not list(tmp_path.rglob("__pycache__"))


def test_a_model_never_gets_anothers_modules(load, tmp_path):
    beside(tmp_path, {"parts/one.py": "value = 1"})
    code = """
    import importlib

    class TritonPythonModel:
        execute = list

        def initialize(self, args):
            self.value = importlib.import_module("parts.one").value
    """
    assert load(code)._model.value == 1
    (tmp_path / "m" / "1" / "parts" / "one.py").unlink()
    (tmp_path / "m" / "1" / "parts").rmdir()
    with pytest.raises(ModelLoadError, match=r"ImportError|ModuleNotFoundError|AttributeError"):
        load(code)
    with pytest.raises(ModelLoadError, match="ModuleNotFoundError"):
        load("import parts.one")


def test_folders_of_data_and_copies_of_tritons_module_hide_nothing(load, tmp_path):
    beside(tmp_path, {"numpy/vocab.txt": "", "triton_python_backend_utils.py": "", "json.py": "value = 1"})
    model = load(
        """
        import json
        import numpy

        class TritonPythonModel:
            execute = list
            has_all = (numpy.zeros, pb_utils.Tensor, json.loads)
        """
    )
    assert model._model.has_all == (np.zeros, pb_utils.Tensor, json.loads)


def test_instances_may_import_at_the_same_time(tmp_path):
    files = {
        "model.py": "from slow import value\n\nclass TritonPythonModel:\n    value = value\n",
        "slow.py": "import meeting_place\nmeeting_place.barrier.wait(30)\nvalue = object()\n",
    }
    beside(tmp_path, files)
    meeting_place = types.ModuleType("meeting_place")
    meeting_place.barrier = threading.Barrier(4)
    sys.modules["meeting_place"] = meeting_place
    folder = tmp_path / "m" / "1"

    def execute(index):
        owner = ModelContext(folder=str(folder), package=context.new_package(str(index)), services=None)
        return OwnModules(folder, owner=owner).execute(folder / "model.py").TritonPythonModel.value

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(execute, range(4)))) == 4


def test_an_answer_stays_as_it_was_given(load):
    model = load(
        """
        import numpy as np

        class TritonPythonModel:
            def initialize(self, args):
                self.kept = np.zeros((1, 2), np.float32)
                self.parameters = {}

            def execute(self, requests):
                self.kept += 1
                self.parameters["n"] = int(self.kept[0, 0])
                return [
                    pb_utils.InferenceResponse([pb_utils.Tensor("Y", self.kept)], parameters=self.parameters)
                    for _ in requests
                ]
        """
    )
    outcomes = [model.execute([member(outputs=("Y",))]).outcomes[0] for _ in range(3)]
    assert [outcome.outputs["Y"].tolist() for outcome in outcomes] == [[[1, 1]], [[2, 2]], [[3, 3]]]
    assert [outcome.parameters["n"] for outcome in outcomes] == [1, 2, 3]


def test_finalize_is_called_if_there_is_one(load):
    model = load(EMPTY + "    def finalize(self):\n        self.is_final = True\n")
    model.close()
    assert model._model.is_final
    load(EMPTY).close()


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("x = 1", "model.py of model 'm' has no class TritonPythonModel"),
        ("class TritonPythonModel: pass", "TritonPythonModel in model.py of model 'm' has no method execute"),
        (
            "class TritonPythonModel:\n    execute = 3",
            "TritonPythonModel in model.py of model 'm' has no method execute",
        ),
        ("\nraise KeyError('x')", "KeyError: 'x'\n\nAt:\n  FOLDER/1/model.py(3): <module>"),
        (
            "class TritonPythonModel:\n    def initialize(self, args):\n        raise ValueError('no weights')",
            "ValueError: no weights\n\nAt:\n  FOLDER/1/model.py(4): initialize",
        ),
        (
            "import json\njson.loads('x')",
            "JSONDecodeError: Expecting value: line 1 column 1 (char 0)\n\nAt:\n  FOLDER/1/model.py(3): <module>",
        ),
        ("import absent_x", "ModuleNotFoundError: No module named 'absent_x'\n\nAt:\n  FOLDER/1/model.py(2): <module>"),
        ("import helps", "ModuleNotFoundError: No module named 'absent_x'\n\nAt:\n  FOLDER/helps.py(1): <module>"),
        ("def f(:", "SyntaxError: invalid syntax (model.py, line 2)"),
    ],
)
def test_a_model_that_cannot_be_made_says_where_and_leaves_no_module_behind(load, tmp_path, code, text):
    before = own_names()
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "helps.py").write_text("import absent_x")
    with pytest.raises(ModelLoadError) as refused:
        load(code)
    assert str(refused.value) == text.replace("FOLDER", str(tmp_path / "m"))
    assert own_names() == before


def test_a_closed_model_leaves_no_module_behind(load):
    before = own_names()
    model = load(EMPTY)
    assert own_names() > before
    model.close()
    assert own_names() == before


SENDER = """
class TritonPythonModel:
    def execute(self, requests):
        for r in requests:
            sender = r.get_response_sender()
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", r.inputs()[0].as_numpy())]))
            AFTER
        return RETURN
"""


def test_a_sender_may_send_the_one_response_of_a_model_that_is_not_decoupled(load):
    code = SENDER.replace("AFTER", "sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)")
    outcomes = load(code.replace("RETURN", "None")).execute([member(3, outputs=("Y",))]).outcomes
    assert outcomes[0]["Y"].tolist() == [[3, 3]]


@pytest.mark.parametrize(
    ("after", "returned"),
    [
        ("sender.send(pb_utils.InferenceResponse([]))", "None"),
        ("pass", "[pb_utils.InferenceResponse([]) for _ in requests]"),
    ],
)
def test_but_no_second_one(load, after, returned):
    code = SENDER.replace("AFTER", after).replace("RETURN", returned)
    (outcome,) = load(code).execute([member(3, outputs=("Y",))]).outcomes
    assert "Non-decoupled model cannot send more than one response." in outcome.message


def test_a_coroutine_is_waited_for_and_its_loop_lives_on(load):
    model = load(
        """
        import asyncio

        class TritonPythonModel:
            def initialize(self, args):
                self.ticks = 0
                self.loops = set()

            async def tick(self):
                while True:
                    self.ticks += 1
                    await asyncio.sleep(0)

            async def execute(self, requests):
                self.loops.add(id(asyncio.get_running_loop()))
                self.task = asyncio.ensure_future(self.tick())
                await asyncio.sleep(0)
                if requests[0].inputs()[0].as_numpy()[0, 0] < 0:
                    raise ValueError("negative")
                self.folder = pb_utils.get_model_dir()
                return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", r.inputs()[0].as_numpy())]) for r in requests]
        """
    )
    for value in (1, 2):
        assert model.execute([member(value, outputs=("Y",))]).outcomes[0]["Y"].tolist() == [[value, value]]
    (failed,) = model.execute([member(-1, outputs=("Y",))]).outcomes
    assert failed.message.splitlines()[0].endswith("message: ValueError: negative")
    assert failed.message.splitlines()[3].endswith(": execute")
    assert (len(model._model.loops), model._model.ticks > 0) == (1, True)
    assert model._model.folder.endswith("/m/1")
    model.close()
    assert model._model.task.cancelled()


DECOUPLED_CONFIG = parse(str(CONFIG.message) + "model_transaction_policy { decoupled: true }", folder_name="m")


class Sent:
    """What a decoupled request's caller has got; `last` is set by the final one."""

    def __init__(self):
        self.answers = []
        self.last = threading.Event()

    def __call__(self, outcome, is_final):
        self.answers.append((outcome, is_final))
        if is_final:
            self.last.set()


def decoupled(model, value, **fields):
    """The outcome of one request, and what was sent."""
    sent = Sent()
    (outcome,) = model.execute([member(value, config=DECOUPLED_CONFIG, respond=sent, **fields)]).outcomes
    assert outcome is Deferred.DEFERRED
    return sent


COUNT = """
import threading

class TritonPythonModel:
    def execute(self, requests):
        for r in requests:
            n = int(r.inputs()[0].as_numpy()[0, 0])
            threading.Thread(target=self.count, args=(n, r.get_response_sender())).start()

    def count(self, n, sender):
        for i in range(n):
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("T", array(i))]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        try:
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        except pb_utils.TritonModelException as error:
            self.error = str(error)
        self.folder = pb_utils.get_model_dir()

import numpy as np

def array(i):
    return np.array([[b"%d" % i]], dtype=object)
"""


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_decoupled_model_answers_as_often_as_it_likes_from_any_thread(load, count):
    model = load(COUNT, config=DECOUPLED_CONFIG)
    sent = decoupled(model, count)
    assert sent.last.wait(30)
    assert [(outcome and outcome["T"].tolist(), is_final) for outcome, is_final in sent.answers] == [
        *(([[b"%d" % index]], False) for index in range(count)),
        (None, True),
    ]


def test_a_sender_is_closed_by_its_final_response_and_the_models_threads_know_their_model(load):
    model = load(COUNT, config=DECOUPLED_CONFIG)
    before = set(threading.enumerate())
    assert decoupled(model, 0).last.wait(30)
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
    assert model._model.error == "Unable to send response. Response sender has been closed."
    assert model._model.folder.endswith("/m/1")


def decoupled_text(load, body, *, value=1):
    code = "import asyncio\n\nclass TritonPythonModel:\n" + textwrap.indent(textwrap.dedent(body), "    ")
    sent = decoupled(load(code, config=DECOUPLED_CONFIG), value)
    assert sent.last.wait(30)
    return [(getattr(outcome, "message", outcome), is_final) for outcome, is_final in sent.answers]


def test_an_exception_ends_what_is_still_open(load):
    ((text, is_final),) = decoupled_text(load, "def execute(self, requests):\n    raise ValueError('x')")
    assert (text.splitlines()[0], is_final) == (
        "Failed to process the request(s) for model 'm_0_0', message: ValueError: x",
        True,
    )


def test_an_exception_of_a_coroutine_does_so_too(load):
    body = "async def execute(self, requests):\n    await asyncio.sleep(0)\n    raise ValueError('x')"
    ((text, _),) = decoupled_text(load, body)
    assert "ValueError: x" in text


def test_a_coroutine_that_exits_ends_only_itself(load):
    body = """
    async def execute(self, requests):
        await asyncio.sleep(0)
        raise SystemExit(requests[0].inputs()[0].as_numpy()[0, 0])
    """
    code = "import asyncio\n\nclass TritonPythonModel:\n" + textwrap.indent(textwrap.dedent(body), "    ")
    model = load(code)
    for value in (4, 5):
        (outcome,) = model.execute([member(value)]).outcomes
        assert f"SystemExit: {value}" in outcome.message


def test_a_response_that_cannot_be_looked_at_does_not_close_its_sender(load):
    body = """
    def execute(self, requests):
        requests[0].get_response_sender().send("no response", pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    """
    ((text, is_final),) = decoupled_text(load, body)
    assert ("AttributeError" in text, is_final) == (True, True)


def test_a_filled_slot_of_a_decoupled_sequence_model_is_answered_like_any_other(load):
    body = """
    def execute(self, requests):
        for request in requests:
            request.get_response_sender().send(pb_utils.InferenceResponse())
            request.get_response_sender().send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    """
    code = "class TritonPythonModel:\n" + textwrap.indent(textwrap.dedent(body), "    ")
    sent = Sent()
    members = [member(config=DECOUPLED_CONFIG), member(config=DECOUPLED_CONFIG, respond=sent)]
    outcomes = load(code, config=DECOUPLED_CONFIG).execute(members).outcomes
    assert outcomes == [Deferred.DEFERRED] * 2
    assert sent.answers == [({}, False), (None, True)]


def test_what_was_ended_before_the_exception_stays_ended(load):
    body = """
    def execute(self, requests):
        requests[0].get_response_sender().send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        raise ValueError("late")
    """
    assert decoupled_text(load, body) == [(None, True)]


@pytest.mark.parametrize("prefix", ["", "async "])
def test_a_decoupled_execute_must_return_none(load, prefix):
    body = f"{prefix}def execute(self, requests):\n    return [pb_utils.InferenceResponse() for _ in requests]"
    ((text, _),) = decoupled_text(load, body)
    assert "is using the decoupled mode and the execute function must return None." in text


def test_a_sender_that_is_let_go_of_ends_its_request_with_an_error(load):
    assert decoupled_text(load, "def execute(self, requests):\n    pass") == [
        ("the model gave up the request without a final response", True)
    ]


def test_errors_and_broken_answers_are_sent_as_errors(load):
    body = """
    def execute(self, requests):
        (request,) = requests
        sender = request.get_response_sender()
        sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("no", pb_utils.TritonError.NOT_FOUND)))
        wrong = pb_utils.Tensor("Y", request.inputs()[0].as_numpy().astype("float64"))
        sender.send(pb_utils.InferenceResponse([wrong]), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    """
    assert decoupled_text(load, body) == [
        ("no", False),
        ("model 'm' returned output 'Y' as 'FP64', but its config says 'FP32'", True),
    ]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("flags=2", "Unable to send response. Unsupported flag provided."),
        ("", "Inference Response object must be provided when the response flags is set to zero."),
    ],
)
def test_sending_wrongly_is_the_models_error(load, arguments, text):
    ((error, _),) = decoupled_text(
        load, f"def execute(self, requests):\n    requests[0].get_response_sender().send({arguments})"
    )
    assert text in error


COMPLETES = """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        {}
"""


def test_a_config_is_completed_by_the_model(tmp_path):
    file = tmp_path / "model.py"
    file.write_text(
        IMPORT
        + textwrap.dedent(
            """
            class TritonPythonModel:
                @staticmethod
                def auto_complete_config(config):
                    assert config.as_dict()["name"] == "m"
                    config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [-1], "optional": True})
                    config.add_output({"name": "Y", "data_type": "TYPE_STRING", "dims": [1]})
                    config.set_max_batch_size(4)
                    config.set_dynamic_batching()
                    config.set_model_transaction_policy({"decoupled": True})
                    return config
            """
        )
    )
    message = type(CONFIG.message)(name="m", backend="python")
    completed = parse(str(python_auto_complete(file, message)), folder_name="m")
    assert (completed.max_batch_size, completed.is_decoupled) == (4, True)
    assert completed.dynamic_batching is not None
    assert (completed.inputs[0].dims, completed.inputs[0].is_optional) == ((-1,), True)
    assert completed.outputs[0].datatype == "BYTES"
    assert message == type(message)(name="m", backend="python")


def test_a_model_without_that_function_leaves_its_config_alone(tmp_path):
    (tmp_path / "model.py").write_text("class TritonPythonModel: pass")
    assert python_auto_complete(tmp_path / "model.py", CONFIG.message) is CONFIG.message


@pytest.mark.parametrize("code", ["{}", COMPLETES])
@pytest.mark.parametrize(
    ("statement", "text"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt: "),
        ("import asyncio; raise asyncio.CancelledError", "CancelledError: "),
    ],
)
def test_a_model_that_fails_to_complete_its_config_says_so(tmp_path, code, statement, text):
    before = own_names()
    (tmp_path / "model.py").write_text(code.format(statement))
    with pytest.raises(ModelLoadError, match=f"auto-complete config of model 'm': {text}"):
        python_auto_complete(tmp_path / "model.py", CONFIG.message)
    assert own_names() == before
