import asyncio

import numpy as np
import pytest

from local_runtime.errors import ErrorCode, InferenceError, ModelLoadError
from local_runtime.messages import InferAnswer, InferRequest
from local_runtime.repository.parsing import parse
from local_runtime.scheduling import ensemble
from local_runtime.scheduling.validation import RequestChecker


def model(name, inputs="X", outputs="Y", *, datatype="TYPE_FP32", dims="2", max_batch=8):
    tensors = " ".join(
        f'{kind} [ {{ name: "{tensor}" data_type: {datatype} dims: [ {dims} ] }} ]'
        for kind, names in (("input", inputs), ("output", outputs))
        for tensor in names
    )
    return parse(f'backend: "python" max_batch_size: {max_batch} {tensors}', folder_name=name)


def step(name, inputs, outputs):
    maps = [f'input_map {{ key: "{key}" value: "{value}" }}' for key, value in inputs.items()]
    maps += [f'output_map {{ key: "{key}" value: "{value}" }}' for key, value in outputs.items()]
    return f'{{ model_name: "{name}" model_version: -1 {" ".join(maps)} }}'


def ens(*steps, output="C", dims="2", max_batch=8):
    return parse(
        f"""platform: "ensemble" max_batch_size: {max_batch}
        input [ {{ name: "A" data_type: TYPE_FP32 dims: [ 2 ] }} ]
        output [ {{ name: "{output}" data_type: TYPE_FP32 dims: [ {dims} ] }} ]
        ensemble_scheduling {{ step [ {", ".join(steps)} ] }}""",
        folder_name="ens",
    )


FIRST = step("m", {"X": "A"}, {"Y": "tmp"})
LAST = step("m", {"X": "tmp"}, {"Y": "C"})


def test_steps_in_any_order_and_free_dimensions():
    ensemble.check_steps(ens(LAST, FIRST), {"m": model("m")})
    ensemble.check_steps(ens(FIRST, LAST), {"m": model("m", dims="-1")})


@pytest.mark.parametrize(
    ("config", "inner", "reason"),
    [
        (ens(FIRST), None, "depends on 'm' which has no loaded version"),
        (ens(FIRST), model("m"), "no step makes output 'C'"),
        (ens(LAST), model("m"), "nothing makes tensor 'tmp'"),
        (ens(FIRST, FIRST, LAST), model("m"), "tensor 'tmp' is made more than once"),
        (ens(step("m", {"X": "A"}, {"Z": "C"})), model("m"), "which 'm' does not have"),
        (
            ens(step("m", {"Q": "A"}, {"Y": "C"})),
            model("m"),
            "must name exactly its inputs ['X'] (optional ones may be left out): 'X' is missing, 'Q' is none of them",
        ),
        (ens(FIRST, LAST), model("m", datatype="TYPE_INT32"), "tensor 'A' is FP32, but 'X' is INT32"),
        (ens(FIRST, LAST), model("m", dims="3"), "has dims [-1, 2], but 'X' has [-1, 3]"),
        (ens(FIRST, LAST), model("m", max_batch=4), "only allows maximum batch size to be 4"),
        (ens(FIRST, LAST, max_batch=0), model("m"), "has dims [2], but 'X' has [-1, 2]"),
        (
            ens(
                step("m", {"X": "t2"}, {"Y": "t1"}),
                step("m", {"X": "t1"}, {"Y": "t2"}),
                step("m", {"X": "A"}, {"Y": "C"}),
            ),
            model("m"),
            "steps wait for each other in a circle",
        ),
    ],
)
def test_refused_at_load_with_the_reason(config, inner, reason):
    with pytest.raises(ModelLoadError) as refused:
        ensemble.check_steps(config, {"m": inner} if inner else {})
    assert reason in str(refused.value)


def checked(config, value=1.0, **fields):
    request = InferRequest(model="ens", inputs={"A": np.full((1, 2), value, np.float32)}, **fields)
    return RequestChecker(config).check(request)


def answering(function):
    """A stand-in for the models: `function(model name, value)` gives the value of every output."""

    async def infer(request):
        value = function(request.model, *(array[0, 0] for array in request.inputs.values()))
        if isinstance(value, Exception):
            raise value
        outputs = {name: np.full((1, 2), value, np.float32) for name in request.outputs}
        return InferAnswer(model=request.model, version="1", outputs=outputs, queue_us=1, compute_us=10, batch_size=1)

    return infer


async def test_chain_passes_tensors_and_adds_times():
    config = ens(step("b", {"X": "tmp"}, {"Y": "C"}), step("a", {"X": "A"}, {"Y": "tmp"}))
    infer = answering(lambda name, x: x + 1 if name == "a" else x * 10)
    result = await ensemble.run(checked(config, 2), config=config, infer=infer)
    assert result.outputs["C"][0, 0] == 30
    assert (result.queue_us, result.compute_us) == (2, 20)


DIAMOND = ens(
    step("a", {"X": "A"}, {"Y": "t"}),
    step("left", {"X": "t"}, {"Y": "l"}),
    step("right", {"X": "t"}, {"Y": "r"}),
    step("join", {"L": "l", "R": "r"}, {"Y": "C"}),
)


async def test_branches_run_at_the_same_time():
    meeting = asyncio.Barrier(2)
    plain = answering(lambda _name, *values: sum(values) + 1)

    async def infer(request):
        if request.model in ("left", "right"):
            await meeting.wait()
        return await plain(request)

    result = await asyncio.wait_for(ensemble.run(checked(DIAMOND, 1), config=DIAMOND, infer=infer), 30)
    assert result.outputs["C"][0, 0] == 7


async def test_failing_branch_ends_the_other_and_keeps_its_code():
    ended = []

    async def infer(request):
        if request.model == "right":
            raise InferenceError(ErrorCode.UNAVAILABLE, "right: busy")
        if request.model == "left":
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("left")
        return await answering(lambda _name, x: x)(request)

    with pytest.raises(InferenceError) as failed:
        await ensemble.run(checked(DIAMOND), config=DIAMOND, infer=infer)
    assert (failed.value.code, failed.value.message) == (
        ErrorCode.UNAVAILABLE,
        "in ensemble 'ens', right: busy",
    )
    assert ended == ["left"]


async def test_cancelling_cancels_the_steps():
    started = asyncio.Event()

    async def infer(_request):
        started.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(ensemble.run(checked(DIAMOND), config=DIAMOND, infer=infer))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_request_id_reaches_every_step():
    seen = []

    async def infer(request):
        seen.append(request.request_id)
        return await answering(lambda _name, *values: sum(values))(request)

    await ensemble.run(checked(DIAMOND, request_id="r1"), config=DIAMOND, infer=infer)
    assert seen == ["r1"] * 4
