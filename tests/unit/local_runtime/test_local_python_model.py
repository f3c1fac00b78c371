import json
import sys
import textwrap

import numpy as np
import pytest

from local_runtime.errors import ErrorCode, InferenceError, ModelLoadError
from local_runtime.executors import triton_python_backend_utils as pb_utils
from local_runtime.executors.python_model import PythonModel
from local_runtime.messages import InferRequest
from local_runtime.repository.completion import place
from local_runtime.repository.model_config import parse
from local_runtime.scheduling.validation import check

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
IMPORT = "import triton_python_backend_utils as pb_utils\n"


@pytest.fixture(autouse=True)
def clean_modules():
    before = dict(sys.modules)
    yield
    for name in set(sys.modules) - set(before):
        del sys.modules[name]


@pytest.fixture
def load(tmp_path):
    def load_instance(code, *, instance=0):
        folder = tmp_path / "m" / "1"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.py").write_text(IMPORT + textwrap.dedent(code))
        placements = place(CONFIG, cuda_devices=0)
        return PythonModel(
            config=CONFIG,
            file=folder / "model.py",
            version="1",
            placement=placements[instance],
            placements=placements,
        )

    return load_instance


def member(value=1, *, rows=1, outputs=(), request_id=""):
    inputs = {
        "X": np.full((rows, 2), value, np.float32),
        "S": np.full((rows, 1), b"s%d" % value, dtype=object),
    }
    return check(InferRequest(model="m", inputs=inputs, outputs=outputs, request_id=request_id), CONFIG)


def test_initialize_gets_tritons_arguments(load, tmp_path):
    model = load(
        """
        class TritonPythonModel:
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
    outcomes = load(ECHO).execute([member(1), member(2, rows=3), member(3, outputs=("T",))])
    assert [sorted(outcome) for outcome in outcomes] == [["T", "Y"], ["T", "Y"], ["T"]]
    assert outcomes[1]["Y"].tolist() == [[2, 2]] * 3
    assert outcomes[2]["T"].tolist() == [[b"s3"]]


def test_request_tells_who_asked_for_what(load):
    model = load(
        """
        class TritonPythonModel:
            def execute(self, requests):
                self.seen = [
                    (r.request_id(), r.requested_output_names(), r.model_name(), r.model_version()) for r in requests
                ]
                return []
        """
    )
    model.execute([member(request_id="r1", outputs=("T",))])
    assert model._model.seen == [("r1", ["T"], "m", 1)]


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


def test_an_exception_fails_every_member_with_tritons_text(load):
    model = load(
        """
        def inner():
            raise ValueError("plain python exception")

        class TritonPythonModel:
            def execute(self, requests):
                inner()
        """
    )
    outcomes = model.execute([member(), member()])
    assert [outcome.code for outcome in outcomes] == [ErrorCode.INTERNAL] * 2
    lines = outcomes[0].message.splitlines()
    assert lines[0] == (
        "Failed to process the request(s) for model 'm_0_0', message: ValueError: plain python exception"
    )
    assert lines[2] == "At:"
    assert lines[3].endswith("model.py(4): inner")
    assert lines[4].endswith("model.py(8): execute")


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        ("None", "execute must return a list of InferenceResponse"),
        ("[]", "Number of InferenceResponse objects do not match the number of InferenceRequest objects."),
        ("['x'] * len(requests)", "instead of an InferenceResponse"),
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
    ],
)
def test_answers_that_break_the_contract(load, returned, text):
    model = load(f"class TritonPythonModel:\n    def execute(self, requests):\n        return {returned}\n")
    outcomes = model.execute([member(), member()])
    assert [isinstance(outcome, InferenceError) for outcome in outcomes] == [True, True]
    assert {outcome.code for outcome in outcomes} == {ErrorCode.INTERNAL}
    assert text in outcomes[0].message


def test_instances_share_no_globals_and_no_sibling_modules(load, tmp_path):
    folder = tmp_path / "m" / "1"
    folder.mkdir(parents=True)
    (folder / "sibling_of_model.py").write_text("counter = []")
    code = """
    import sibling_of_model

    class TritonPythonModel:
        def initialize(self, args):
            sibling_of_model.counter.append(1)
            self.count = len(sibling_of_model.counter)
    """
    path = list(sys.path)
    models = [load(code, instance=instance) for instance in (0, 1)]
    assert [model._model.count for model in models] == [1, 1]
    assert "sibling_of_model" not in sys.modules
    assert sys.path == path


def test_finalize_is_called_if_there_is_one(load):
    model = load("class TritonPythonModel:\n    def finalize(self):\n        self.is_final = True\n")
    model.close()
    assert model._model.is_final
    load("class TritonPythonModel: pass").close()


def test_no_such_file(tmp_path):
    (placement, *_), placements = place(CONFIG, cuda_devices=0), place(CONFIG, cuda_devices=0)
    with pytest.raises(ModelLoadError, match=r"no such file: 1/model\.py"):
        PythonModel(
            config=CONFIG,
            file=tmp_path / "1" / "model.py",
            version="1",
            placement=placement,
            placements=placements,
        )


def test_shim_values():
    tensor = pb_utils.Tensor("X", np.zeros(1))
    response = pb_utils.InferenceResponse(output_tensors=[tensor])
    assert pb_utils.get_output_tensor_by_name(response, "X") is tensor
    assert pb_utils.get_output_tensor_by_name(response, "nope") is None
    assert not response.has_error()
    failed = pb_utils.InferenceResponse(error=pb_utils.TritonError("text"))
    assert failed.has_error()
    assert (failed.error().message(), failed.error().code()) == ("text", pb_utils.TritonError.INTERNAL)
    assert pb_utils.triton_string_to_numpy("TYPE_FP16") is np.float16
    assert pb_utils.triton_string_to_numpy("TYPE_STRING") is np.object_
    with pytest.raises(pb_utils.TritonModelException):
        pb_utils.Tensor("X", [1, 2])


@pytest.mark.parametrize(
    ("call", "level"),
    [("log_info", "INFO"), ("log_warn", "WARNING"), ("log_error", "ERROR"), ("log_verbose", "DEBUG")],
)
def test_logger(caplog, call, level):
    caplog.set_level("DEBUG", logger="local_runtime.model")
    getattr(pb_utils.Logger, call)("hello")
    assert [(record.levelname, record.message) for record in caplog.records] == [(level, "hello")]
