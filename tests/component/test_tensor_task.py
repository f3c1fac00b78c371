"""The task `tensor` on the task API: any model's tensors in JSON."""

import jsonschema
import numpy as np
import orjson
import pytest

from gateway.backends.scripted import ScriptedBackend
from gateway.backends.triton.faults import fault_of
from gateway.core.tensors import from_numpy
from gateway.core.types import Tensor, Tensors
from gateway.tasks.tensor import TensorTask
from tests.kit.app import running

RULES = [{"name": "tensors", "match": {"task": "tensor"}, "split": [{"backend": "triton", "model": "*"}]}]
PATH = "/v1/tasks/tensor"
INPUT = {"model": "m", "inputs": [{"name": "X", "datatype": "FP32", "shape": [2], "data": [1, 2]}]}


def serving(*outputs: Tensor):
    triton = ScriptedBackend("triton", (Tensors(outputs=outputs, version="3"),))
    return triton, running([triton], rules=RULES, more_tasks={"tensor": TensorTask()})


async def test_tensors_go_in_and_come_out():
    triton, harness = serving(from_numpy("Y", np.array([[0.5, np.nan, np.inf, -np.inf]], np.float32)))
    async with harness as gw:
        given = {**INPUT, "version": "2", "outputs": [{"name": "Y"}]}
        reply = await gw.post(PATH, {"input": given, "parameters": {"priority": 1, "own": "x"}})
        told = orjson.loads(reply.content)  # a strict parser
        assert told["output"] == {
            "outputs": [
                {"name": "Y", "datatype": "FP32", "shape": [1, 4], "data": [0.5, "NaN", "Infinity", "-Infinity"]}
            ]
        }
        jsonschema.validate(told["output"], TensorTask.output_schema)
        jsonschema.validate(given, TensorTask.input_schema)
        assert (told["route"]["model"], told["route"]["version"]) == ("m", "3")
        call = triton.calls[0].call
        assert (call.model, call.version) == ("m", "2")
        assert (call.payload.outputs, call.payload.priority, call.payload.parameters) == (("Y",), 1, {"own": "x"})
        assert (await gw.post("/v1/infer", {"task": "tensor", "input": INPUT})).status_code == 200


async def test_what_is_wrong_is_named():
    triton, harness = serving()
    async with harness as gw:
        for given, status, field in (
            ({}, 422, "input.model"),
            ({**INPUT, "model": 5}, 422, "input.model"),
            ({**INPUT, "version": 2}, 422, "input.version"),
            ({**INPUT, "other": 1}, 422, "input.other"),
            ({"model": "m"}, 422, "input.inputs"),
            ({**INPUT, "inputs": [{**INPUT["inputs"][0], "shape": [3]}]}, 422, "input.inputs"),
            ({**INPUT, "model": "../x"}, 404, None),
            ({**INPUT, "version": "1" * 21}, 404, None),  # it would be remembered, however long
        ):
            reply = await gw.post(PATH, {"input": given})
            problem = reply.json()
            assert (reply.status_code, problem.get("errors", [{}])[0].get("field")) == (status, field), problem
            assert "request id" not in problem["detail"]
        assert not triton.calls


@pytest.mark.parametrize(
    ("code", "text", "status", "told"),
    [
        (
            "NOT_FOUND",
            "Request for unknown model: 'm' is not found",
            404,
            "Request for unknown model: 'm' is not found",
        ),
        (
            "INVALID_ARGUMENT",
            "[request id: r1] unexpected inference input 'X' for model 'm'",
            422,
            "unexpected inference input 'X' for model 'm'",
        ),
    ],
)
async def test_what_the_server_says_of_the_callers_model_is_plain(code, text, status, told):
    triton = ScriptedBackend("triton", [fault_of(code, text)])
    async with running([triton], rules=RULES, more_tasks={"tensor": TensorTask()}) as gw:
        reply = await gw.post(PATH, {"input": INPUT})
    assert (reply.status_code, reply.json()["detail"]) == (status, told)


async def test_what_json_cannot_hold_is_a_clear_error():
    for tensor in (
        Tensor(name="Y", datatype="BF16", shape=(1,), data=b"xx"),
        Tensor(name="Y", datatype="FP16", shape=(1,), data=b"xx"),
        Tensor(name="Y", datatype="BYTES", shape=(1,), data=b"\x01\0\0\0\xff"),
    ):
        _, harness = serving(tensor)
        async with harness as gw:
            reply = await gw.post(PATH, {"input": INPUT})
            assert (reply.status_code, "JSON" in reply.json()["detail"]) == (400, True)


async def test_it_is_listed_with_its_schemas():
    _, harness = serving()
    async with harness as gw:
        told = (await gw.http.get(PATH)).json()
        assert told["contract"] == "tensor"
        assert told["route"]["split"][0]["model"] == "*"
        jsonschema.Draft202012Validator.check_schema(told["input_schema"])
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**INPUT, "other": 1}, told["input_schema"])
