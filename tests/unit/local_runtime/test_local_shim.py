"""`triton_python_backend_utils` as a model sees it; see test_local_python_model.py for models as a whole."""

import asyncio
import concurrent.futures
import json
import threading

import ml_dtypes
import numpy as np
import pytest

from local_runtime.errors import ErrorCode, InferenceError, ModelLoadError, unknown_model
from local_runtime.executors import triton_python_backend_utils as pb_utils
from local_runtime.executors.shim.context import ModelContext, entered
from local_runtime.executors.shim.errors import inference_error
from local_runtime.messages import InferAnswer
from local_runtime.repository.model_config import NUMPY_TYPES


class FakeServices:
    """A runtime with one model, `double`, and one decoupled model, `count`."""

    def __init__(self):
        self.asked = []
        self.calls = []
        self.is_closed = False

    def infer(self, request):
        self.asked.append(request)
        future = concurrent.futures.Future()
        if request.model == "raises":
            raise InferenceError(ErrorCode.UNAVAILABLE, "full")
        if request.model != "double":
            future.set_exception(unknown_model(request.model))
        elif request.inputs["X"][0] < 0:
            future.set_exception(InferenceError(ErrorCode.NOT_FOUND, "no such row"))
        else:
            future.set_result(answer({"Y": 2 * request.inputs["X"]}, parameters={"k": 1}))
        return future

    def stream(self, request):
        self.asked.append(request)
        if request.model == "raises":
            raise InferenceError(ErrorCode.UNAVAILABLE, "full")
        return self._count(int(request.inputs["X"][0]))

    def _count(self, count):
        try:
            for index in range(abs(count)):
                yield answer({"Y": np.array([index])}, is_final=False)
            if count < 0:
                raise InferenceError(ErrorCode.INTERNAL, "broke")
            yield answer({})
        finally:
            self.is_closed = True

    def load(self, model, *, config=None, files=None):
        self.calls.append(("load", model, config, files))
        if model == "broken":
            raise ModelLoadError("no such file")

    def unload(self, model, *, unload_dependents=False):
        self.calls.append(("unload", model, unload_dependents))
        if model == "broken":
            raise InferenceError(ErrorCode.UNAVAILABLE, "not allowed")

    def is_ready(self, model, version=""):
        if model == "broken":
            raise InferenceError(ErrorCode.INVALID_ARG, "bad version")
        return model == "double"


def answer(outputs, **fields):
    return InferAnswer(model="double", version="1", outputs=outputs, queue_us=0, compute_us=0, batch_size=1, **fields)


@pytest.fixture
def services():
    fake = FakeServices()
    with entered(ModelContext(folder="/repository/m/1", package="own", services=fake)):
        yield fake


def request_to(model, value=1, **fields):
    return pb_utils.InferenceRequest(
        model_name=model,
        requested_output_names=["Y"],
        inputs=[pb_utils.Tensor("X", np.array([value]))],
        **fields,
    )


def outcome(response):
    return response.error().message() if response.has_error() else response.output_tensors()[0].as_numpy().tolist()


class TestAskingOtherModels:
    def test_exec_answers_with_the_other_models_outputs(self, services):
        response = request_to("double", 21).exec()
        assert (outcome(response), json.loads(response.parameters())) == ([42], {"k": 1})
        assert pb_utils.get_output_tensor_by_name(response, "Y").name() == "Y"

    def test_all_that_a_request_says_arrives(self, services):
        request_to(
            "double",
            request_id="r",
            correlation_id="user",
            model_version=3,
            flags=pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
            timeout=500,
            parameters={"p": True},
            preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_GPU, 0),
            trace=None,
        ).exec()
        (asked,) = services.asked
        assert (asked.request_id, asked.sequence_id, asked.version, asked.outputs) == ("r", "user", "3", ("Y",))
        assert (asked.sequence_start, asked.sequence_end) == (True, False)
        assert (asked.timeout_us, asked.queue_timeout_us, asked.parameters) == (None, 500, {"p": True})

    def test_a_read_only_answer_is_copied_so_that_the_model_can_work_in_it(self, services):
        kept = np.array([1])
        kept.setflags(write=False)
        asked = concurrent.futures.Future()
        asked.set_result(answer({"Y": kept}))
        services.infer = lambda request: asked
        given = request_to("double").exec().output_tensors()[0].as_numpy()
        given += 1
        assert (given.tolist(), kept.tolist()) == ([2], [1])

    def test_parameters_that_no_protocol_has_are_refused(self, services):
        with pytest.raises(pb_utils.TritonModelException, match="must be str, int, float or bool, not NoneType"):
            request_to("double", parameters={"k": None}).exec()

    def test_what_is_not_said_is_left_to_the_runtime(self, services):
        request_to("double").exec()
        (asked,) = services.asked
        assert (asked.version, asked.sequence_id, asked.timeout_us, asked.parameters) == ("", 0, None, {})

    @pytest.mark.parametrize(
        ("model", "value", "text"),
        [
            ("nosuch", 1, "Failed for execute the inference request. Model 'nosuch' is not ready."),
            ("double", -1, "no such row"),
            ("raises", 1, "full"),
        ],
    )
    def test_a_failure_is_a_response_whose_inner_code_is_lost(self, services, model, value, text):
        async def both():
            return await request_to(model, value).async_exec()

        for response in (request_to(model, value).exec(), asyncio.run(both())):
            assert (outcome(response), response.error().code()) == (text, pb_utils.TritonError.INTERNAL)

    def test_async_exec_asks_at_once_and_can_be_gathered(self, services):
        async def gather():
            asked = [request_to("double", value).async_exec() for value in (1, 2, 3)]
            assert len(services.asked) == 3
            return await asyncio.gather(*asked)

        assert [outcome(response) for response in asyncio.run(gather())] == [[2], [4], [6]]

    def test_what_was_asked_stays_so_whatever_the_model_does_to_its_array(self, services):
        async def gather(request):
            return await request.async_exec()

        array = np.array([1])
        request = pb_utils.InferenceRequest(
            model_name="double", requested_output_names=["Y"], inputs=[pb_utils.Tensor("X", array)]
        )
        request.exec()
        asyncio.run(gather(request))
        array[:] = 9
        assert [asked.inputs["X"].tolist() for asked in services.asked] == [[1], [1]]

    def test_a_decoupled_model_answers_with_an_iterator(self, services):
        async def asked():
            return await request_to("count", 2).async_exec(decoupled=True)

        for responses in (request_to("count", 2).exec(decoupled=True), asyncio.run(asked())):
            first, second, last = responses
            assert (outcome(first), outcome(second), last.output_tensors()) == ([0], [1], [])

    @pytest.mark.parametrize(("model", "value", "texts"), [("count", -1, [[0], "broke"]), ("raises", 1, ["full"])])
    def test_a_stream_that_fails_ends_with_an_error(self, services, model, value, texts):
        assert [outcome(response) for response in request_to(model, value).exec(decoupled=True)] == texts

    def test_a_stream_can_be_given_up(self, services):
        responses = request_to("count", 5).exec(decoupled=True)
        next(responses)
        responses.cancel()
        assert services.is_closed
        assert list(responses) == []

    def test_a_request_of_the_models_own_has_no_caller(self, services):
        request = request_to("double")
        assert not request.is_cancelled()
        with pytest.raises(pb_utils.TritonModelException):
            request.get_response_sender()
        request.set_flags(2)
        assert request.flags() == 2
        request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_ALL)
        with pytest.raises(pb_utils.TritonModelException, match="not supported by the local runtime"):
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)

    def test_a_correlation_id_is_a_number_or_text(self):
        with pytest.raises(pb_utils.TritonModelException, match="Correlation ID must be integer or string"):
            request_to("double", correlation_id=1.5)


class TestModelControl:
    def test_models_can_be_loaded_and_unloaded(self, services):
        pb_utils.load_model(model_name="a")
        pb_utils.load_model(model_name="a", config="{}", files={"file:1/model.py": b"x"})
        pb_utils.unload_model(model_name="a", unload_dependents=True)
        pb_utils.unload_model("b")
        assert services.calls == [
            ("load", "a", None, None),
            ("load", "a", "{}", {"1/model.py": b"x"}),
            ("unload", "a", True),
            ("unload", "b", False),
        ]
        assert pb_utils.is_model_ready("double", model_version="1")
        assert not pb_utils.is_model_ready("a")

    @pytest.mark.parametrize(
        ("call", "text"),
        [
            (pb_utils.load_model, "Failed to load model: no such file"),
            (pb_utils.unload_model, "Failed to unload model: not allowed"),
            (pb_utils.is_model_ready, "Failed to check model readiness: bad version"),
        ],
    )
    def test_failures_are_exceptions(self, services, call, text):
        with pytest.raises(pb_utils.TritonModelException, match=text):
            call("broken")


class TestContext:
    def test_only_a_models_code_is_in_a_model(self, services):
        failures = []

        def outside():
            for call in (pb_utils.get_model_dir, request_to("double").exec):
                try:
                    call()
                except pb_utils.TritonModelException as error:
                    failures.append(error.message())

        thread = threading.Thread(target=outside)
        thread.start()
        thread.join(30)
        assert failures == ["this works only in a thread that runs a model's code"] * 2
        assert pb_utils.get_model_dir() == "/repository/m/1"

    def test_a_config_is_completed_without_a_runtime(self):
        with (
            entered(ModelContext(folder="f", package="own", services=None)),
            pytest.raises(pb_utils.TritonModelException),
        ):
            pb_utils.is_model_ready("m")


class TestTensors:
    def test_a_tensor_tells_what_it_is(self):
        tensor = pb_utils.Tensor("X", np.zeros((2, 3), np.float32))
        assert (tensor.name(), tensor.shape(), tensor.triton_dtype(), tensor.is_cpu()) == ("X", [2, 3], 11, True)

    @pytest.mark.parametrize("name", list(NUMPY_TYPES))
    def test_types_have_tritons_numbers(self, name):
        number = pb_utils.numpy_to_triton_type(NUMPY_TYPES[name])
        assert pb_utils.triton_to_numpy_type(number) is NUMPY_TYPES[name]

    def test_some_of_the_numbers(self):
        numbers = [pb_utils.numpy_to_triton_type(one) for one in (np.bool_, np.int8, np.float64, np.object_, np.bytes_)]
        assert [*numbers, pb_utils.numpy_to_triton_type(ml_dtypes.bfloat16)] == [1, 6, 12, 13, 13, 14]
        assert pb_utils.triton_to_numpy_type(99) is None
        with pytest.raises(pb_utils.TritonModelException, match="no Triton type for numpy's complex128"):
            pb_utils.numpy_to_triton_type(np.complex128)
        assert pb_utils.triton_string_to_numpy("TYPE_FP16") is np.float16
        assert pb_utils.triton_string_to_numpy("TYPE_STRING") is np.object_

    @pytest.mark.parametrize("array", [[1, 2], np.array(["text"]), np.array([(1,)], [("a", "i4")])])
    def test_what_a_tensor_cannot_hold(self, array):
        with pytest.raises(pb_utils.TritonModelException):
            pb_utils.Tensor("X", array)

    def test_dlpack_with_numpy_shares_memory_out_and_copies_in(self):
        array = np.arange(3)
        tensor = pb_utils.Tensor("X", array)
        shared = np.from_dlpack(tensor)
        array[0] = 7
        assert shared.tolist() == [7, 1, 2]
        copied = pb_utils.Tensor.from_dlpack("Y", array)
        array[0] = 8
        assert copied.as_numpy().tolist() == [7, 1, 2]
        assert pb_utils.Tensor.from_dlpack("Z", tensor.to_dlpack()).as_numpy().tolist() == [8, 1, 2]

    def test_dlpack_with_torch(self):
        import torch  # noqa: PLC0415 - only the tests that need it pay for it

        tensor = pb_utils.Tensor("X", np.arange(3))
        assert torch.from_dlpack(tensor.to_dlpack()).tolist() == [0, 1, 2]
        assert torch.from_dlpack(tensor).tolist() == [0, 1, 2]
        source = torch.tensor([1.5, 2], dtype=torch.bfloat16)
        for one in (source, torch.utils.dlpack.to_dlpack(source)):
            tensor = pb_utils.Tensor.from_dlpack("X", one)
            assert tensor.as_numpy().dtype == ml_dtypes.bfloat16
            assert torch.from_dlpack(tensor).tolist() == [1.5, 2]

    def test_dlpack_takes_only_whole_tensors(self):
        with pytest.raises(pb_utils.TritonModelException, match="DLPack tensor is not contiguous"):
            pb_utils.Tensor.from_dlpack("X", np.zeros((2, 3)).T)
        with pytest.raises(pb_utils.TritonModelException, match="Provided tensor is not supported"):
            pb_utils.Tensor.from_dlpack("X", [1])
        with pytest.raises(pb_utils.TritonModelException, match="cannot be an empty string"):
            pb_utils.Tensor.from_dlpack("", np.zeros(1))
        with pytest.raises(pb_utils.TritonModelException, match="DLPack does not have support for string tensors"):
            pb_utils.Tensor("X", np.array([b"x"], dtype=object)).to_dlpack()


class TestResponses:
    def test_a_response_holds_tensors_or_an_error(self):
        tensor = pb_utils.Tensor("X", np.zeros(1))
        response = pb_utils.InferenceResponse(output_tensors=[tensor], parameters={"a": 1})
        assert pb_utils.get_output_tensor_by_name(response, "X") is tensor
        assert pb_utils.get_output_tensor_by_name(response, "nope") is None
        assert not response.has_error()
        assert json.loads(response.parameters()) == {"a": 1}
        failed = pb_utils.InferenceResponse(error=pb_utils.TritonError("text"))
        assert failed.has_error()
        assert (failed.error().message(), failed.error().code()) == ("text", pb_utils.TritonError.INTERNAL)


@pytest.mark.parametrize(
    ("call", "level"),
    [("log_info", "INFO"), ("log_warn", "WARNING"), ("log_error", "ERROR"), ("log_verbose", "DEBUG")],
)
def test_logger(caplog, call, level):
    caplog.set_level("DEBUG", logger="local_runtime.model")
    getattr(pb_utils.Logger, call)("hello")
    pb_utils.Logger.log("again", {"DEBUG": pb_utils.Logger.VERBOSE}.get(level, getattr(pb_utils.Logger, level, 0)))
    assert [(record.levelname, record.message) for record in caplog.records] == [(level, "hello"), (level, "again")]


@pytest.mark.parametrize("code", ["NOT_FOUND", "ALREADY_EXISTS", "UNKNOWN", "CANCELLED", "INTERNAL"])
def test_errors_keep_their_code(code):
    error = inference_error(pb_utils.TritonError("text", getattr(pb_utils.TritonError, code)))
    assert (error.code, error.message) == (ErrorCode[code], "text")


class TestCompletedConfigs:
    @pytest.fixture
    def config(self):
        return pb_utils.ModelConfig(
            json.dumps(
                {
                    "name": "m",
                    "max_batch_size": 4,
                    "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [2], "optional": False}],
                    "output": [{"name": "Y", "data_type": "TYPE_INVALID", "dims": []}],
                }
            )
        )

    def test_what_is_there_may_be_said_again_and_completed(self, config):
        config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [2]})
        config.add_output({"name": "Y", "data_type": "TYPE_INT8", "dims": [1]})
        config.add_output({"name": "Z", "data_type": "TYPE_INT8", "dims": [1]})
        config.set_max_batch_size(8)
        config.set_dynamic_batching()
        config.set_dynamic_batching()
        config.set_model_transaction_policy({"decoupled": False})
        tree = config.as_dict()
        assert [(one["name"], one["data_type"]) for one in tree["output"]] == [("Y", "TYPE_INT8"), ("Z", "TYPE_INT8")]
        assert (len(tree["input"]), tree["max_batch_size"], tree["dynamic_batching"]) == (1, 8, {})
        assert tree["model_transaction_policy"] == {"decoupled": False}

    @pytest.mark.parametrize(
        ("call", "text"),
        [
            (
                lambda c: c.set_max_batch_size(2),
                "configuration specified max_batch_size 4, but in auto-complete-config",
            ),
            (
                lambda c: c.add_input({"name": "X", "data_type": "TYPE_INT8", "dims": [2]}),
                "configuration expects datatype TYPE_FP32 for input 'X', model provides TYPE_INT8",
            ),
            (
                lambda c: c.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [3]}),
                r"the model expects dims \[3\] but the model configuration specifies dims \[2\]",
            ),
            (lambda c: c.add_input({"name": "Q", "dims": [1]}), "input 'Q' in .* is missing 'data_type' property."),
            (lambda c: c.add_output({"data_type": "TYPE_FP32"}), "output in .* is missing 'name' property."),
            (
                lambda c: c.add_output({"name": "Q", "optional": True}),
                "contains property other than 'name', 'data_type' and 'dims'.",
            ),
            (lambda c: c.set_model_transaction_policy({"x": 1}), "contains property other than 'decoupled'"),
        ],
    )
    def test_what_is_there_may_not_be_contradicted(self, config, call, text):
        with pytest.raises(ValueError, match=text):
            call(config)

    def test_nor_its_scheduler_and_policy(self, config):
        config.as_dict()["sequence_batching"] = {}
        with pytest.raises(ValueError, match="scheduling_choice as 'sequence_batching'"):
            config.set_dynamic_batching()
        config.set_model_transaction_policy({"decoupled": True})
        with pytest.raises(ValueError, match="already set to 'True'"):
            config.set_model_transaction_policy({"decoupled": False})


class TestSerializedBytes:
    def test_there_and_back(self):
        array = np.array([[b"ab", "h\u00e9"], [b"", 7]], dtype=object)
        raw = pb_utils.serialize_byte_tensor(array)
        assert raw == b"\x02\0\0\0ab\x03\0\0\0h\xc3\xa9\0\0\0\0\x01\0\0\0007"
        for given in (raw, memoryview(raw), np.frombuffer(raw, np.uint8)):
            back = pb_utils.deserialize_bytes_tensor(given)
            assert (back.dtype, back.tolist()) == (object, [b"ab", b"h\xc3\xa9", b"", b"7"])

    def test_fixed_width_empty_and_other_arrays(self):
        assert pb_utils.serialize_byte_tensor(np.array([b"a", b"bc"])) == b"\x01\0\0\0a\x02\0\0\0bc"
        assert pb_utils.serialize_byte_tensor(np.array([], dtype=object)) == b""
        assert pb_utils.serialize_byte_tensor(np.zeros(2)) is None
        assert pb_utils.deserialize_bytes_tensor(b"").tolist() == []

    def test_bytes_that_are_cut_off(self):
        with pytest.raises(ValueError, match="unexpected end"):
            pb_utils.deserialize_bytes_tensor(b"\x05\0\0\0ab")


class Mute(Exception):
    """Its text cannot be had."""

    def __str__(self):
        raise self


@pytest.mark.parametrize(
    ("given", "text"), [(None, "None"), (ValueError("x"), "x"), (Mute(), "<str() of Mute failed>"), ("a\ud800", "a?")]
)
def test_every_error_has_a_text(given, text):
    assert inference_error(pb_utils.TritonError(given)).message == text
    assert pb_utils.TritonModelException(given).message() == text.replace("Mute", "TritonModelException")


def test_an_error_code_of_another_type_is_internal():
    assert inference_error(pb_utils.TritonError("x", [])).code is ErrorCode.INTERNAL


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"k": None}, "a parameter must be str, int, float or bool, not NoneType"),
        ({"k": np.float32(1)}, "a parameter must be str, int, float or bool, not float32"),
        ({1: "v"}, "the name of a parameter must be str, not int"),
        ({"k": "\ud800"}, "text of the parameters is not well-formed Unicode"),
        ({"k": 2**64}, "an int of the parameters does not fit into 64 bits"),
        ([("k", 1)], "parameters must be a dict, not list"),
    ],
)
def test_parameters_that_no_protocol_can_carry_are_refused(parameters, text):
    with pytest.raises(pb_utils.TritonModelException, match=text):
        pb_utils.InferenceResponse(parameters=parameters)


def test_parameters_are_kept_as_they_were_given():
    given = {"k": "v", "i": 2**64 - 1, "f": np.float64(0.5), "b": True}
    response = pb_utils.InferenceResponse(parameters=given)
    given["k"] = []
    assert json.loads(response.parameters()) == {"k": "v", "i": 2**64 - 1, "f": 0.5, "b": True}


def test_a_tensors_name_is_text():
    with pytest.raises(pb_utils.TritonModelException, match="a tensor's name must be str, not NoneType"):
        pb_utils.Tensor(None, np.zeros(1))
