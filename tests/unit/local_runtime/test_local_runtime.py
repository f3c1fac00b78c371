"""The whole runtime on small real models."""

import asyncio
import contextlib
import gc
import threading

import numpy as np
import pytest

from local_runtime.runtime import (
    ErrorCode,
    InferenceError,
    InferRequest,
    LocalRuntime,
    RuntimeOptions,
)
from local_runtime.serving import decoupled
from tests.kit.wait import until

PYTHON_CONFIG = """
backend: "python"
max_batch_size: 8
input [ { name: "X" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
dynamic_batching { }
"""
# Runs only while the gate of its name is open; the tests hold the gates in `threading`, which all modules share.
GATED = """
import threading
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        threading.test_entered.set()
        assert threading.test_gate.wait(30)
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("Y", r.inputs()[0].as_numpy())]) for r in requests
        ]
"""
PICKY = """
import triton_python_backend_utils as pb_utils

def answer(request):
    x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
    if x[0, 0] < 0:
        return pb_utils.InferenceResponse(error=pb_utils.TritonError("negative", pb_utils.TritonError.INVALID_ARG))
    return pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)])

class TritonPythonModel:
    def execute(self, requests):
        return [answer(request) for request in requests]
"""
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 8
input [ { name: "A" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "C" data_type: TYPE_FP32 dims: [ 2 ] } ]
ensemble_scheduling { step [
  { model_name: "post" model_version: -1
    input_map { key: "INPUT__0" value: "tmp" } output_map { key: "OUTPUT__0" value: "C" } },
  { model_name: "pre" model_version: -1
    input_map { key: "X" value: "A" } output_map { key: "Y" value: "tmp" } }
] }
"""
# Fails if any row is negative: a batch fails because of one of its members.
TORCH_PICKY = """
def forward(self, x):
    if bool((x < 0).any()):
        raise RuntimeError("negative")
    return x * 2
"""


def rows(*values):
    return {"X": np.array([[value, value] for value in values], np.float32)}


def ask(model, *values, **fields):
    return InferRequest(model=model, inputs=rows(*values), **fields)


@contextlib.asynccontextmanager
async def opened(repository, **arguments):
    runtime = await LocalRuntime.open(repository, **arguments)
    try:
        yield runtime
    finally:
        await runtime.close()


@pytest.fixture
def gate(monkeypatch):
    opened_gate = threading.Event()
    monkeypatch.setattr(threading, "test_gate", opened_gate, raising=False)
    monkeypatch.setattr(threading, "test_entered", threading.Event(), raising=False)
    yield opened_gate
    opened_gate.set()


async def entered():
    assert await asyncio.to_thread(threading.test_entered.wait, 30)


async def settle():
    """Let everything that was started reach its await."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_answers_with_the_model_and_its_figures(repository, write_python):
    write_python("double")
    async with opened(repository) as runtime:
        answer = await runtime.infer(ask("double", 1, 2))
    np.testing.assert_array_equal(answer.outputs["Y"], [[2, 2], [4, 4]])
    assert (answer.model, answer.version, answer.batch_size) == ("double", "1", 2)
    assert answer.queue_us >= 0
    assert answer.compute_us >= 0


async def test_a_burst_is_one_batch_and_everyone_gets_its_own_rows(repository, write_python):
    write_python("double")
    events = []
    async with opened(repository, observer=events.append) as runtime:
        answers = await asyncio.gather(*(runtime.infer(ask("double", n, n + 0.5)) for n in range(4)))
        (statistics,) = runtime.statistics()
    for n, answer in enumerate(answers):
        np.testing.assert_array_equal(answer.outputs["Y"][:, 0], [2 * n, 2 * n + 1])
    assert [(event.batch_size, event.requests, event.failed) for event in events] == [(8, 4, 0)]
    assert (statistics.success.count, statistics.inference_count, statistics.execution_count) == (4, 8, 1)
    assert statistics.batch_sizes == {8: 1}


async def test_what_waits_behind_a_busy_instance_runs_together(repository, write_python, gate):
    write_python("gated", GATED)
    async with opened(repository) as runtime:
        first = asyncio.create_task(runtime.infer(ask("gated", 1)))
        await entered()
        others = [asyncio.create_task(runtime.infer(ask("gated", n))) for n in range(5)]
        await settle()
        gate.set()
        answers = await asyncio.gather(first, *others)
    assert [answer.batch_size for answer in answers] == [1, 5, 5, 5, 5, 5]


async def test_a_lone_request_leaves_when_its_delay_is_over(repository, write_python):
    config = PYTHON_CONFIG.replace("dynamic_batching { }", "dynamic_batching { max_queue_delay_microseconds: 2000 }")
    write_python("double", config=config)
    events = []
    async with opened(repository, observer=events.append) as runtime:
        await runtime.infer(ask("double", 1))
    assert [event.reason for event in events] == ["delay_reached"]


async def test_cancelling_a_queued_request_takes_it_out(repository, write_python, gate):
    write_python("gated", GATED)
    events = []
    async with opened(repository, observer=events.append) as runtime:
        first = asyncio.create_task(runtime.infer(ask("gated", 1)))
        await entered()
        second, third = (asyncio.create_task(runtime.infer(ask("gated", n))) for n in (2, 3))
        await settle()
        second.cancel()
        await settle()
        assert second.cancelled()
        gate.set()
        await asyncio.gather(first, third)
        statistics = runtime.statistics()[0]
    assert [event.requests for event in events] == [1, 1]
    assert (statistics.success.count, statistics.fail.count) == (2, 1)


async def test_cancelling_a_running_request_hurts_nobody(repository, write_python, gate):
    write_python("gated", GATED)
    async with opened(repository) as runtime:
        tasks = [asyncio.create_task(runtime.infer(ask("gated", n))) for n in (1, 2)]
        await entered()
        tasks[0].cancel()
        await settle()
        gate.set()
        answer = await tasks[1]
        assert tasks[0].cancelled()
        assert answer.outputs["Y"][0, 0] == 2
        assert (await runtime.infer(ask("gated", 7))).outputs["Y"][0, 0] == 7


async def test_deadline_ends_a_request_queued_or_running(repository, write_python, gate):
    write_python("gated", GATED)
    events = []
    async with opened(repository, observer=events.append) as runtime:
        running = asyncio.create_task(runtime.infer(ask("gated", 1, timeout_us=20_000)))
        await entered()
        with pytest.raises(InferenceError) as queued:
            await runtime.infer(ask("gated", 2, timeout_us=1000))
        with pytest.raises(InferenceError) as ran:
            await running
        gate.set()
        await runtime.infer(ask("gated", 3))
    assert {queued.value.code, ran.value.code} == {ErrorCode.DEADLINE}
    assert sum(event.requests for event in events) == 2


async def test_deadline_that_has_passed_never_runs(repository, write_python):
    write_python("double")
    events = []
    async with opened(repository, observer=events.append) as runtime:
        with pytest.raises(InferenceError) as refused:
            await runtime.infer(ask("double", 1, timeout_us=0))
    assert refused.value.code is ErrorCode.DEADLINE
    assert events == []


async def test_full_queue_refuses_at_once(repository, write_python, gate):
    write_python("gated", GATED)
    options = RuntimeOptions(max_queue_size=2)
    async with opened(repository, options=options) as runtime:
        first = asyncio.create_task(runtime.infer(ask("gated", 1)))
        await entered()
        queued = [asyncio.create_task(runtime.infer(ask("gated", n))) for n in (2, 3)]
        await settle()
        with pytest.raises(InferenceError) as refused:
            await runtime.infer(ask("gated", 4, request_id="r4"))
        gate.set()
        await asyncio.gather(first, *queued)
    assert refused.value.code is ErrorCode.UNAVAILABLE
    assert refused.value.message == "[request id: r4] Exceeds maximum queue size"


async def test_close_finishes_accepted_work_and_refuses_new(repository, write_python, gate):
    write_python("gated", GATED)
    runtime = await LocalRuntime.open(repository)
    running = asyncio.create_task(runtime.infer(ask("gated", 1)))
    await entered()
    queued = asyncio.create_task(runtime.infer(ask("gated", 2)))
    await settle()
    closing = asyncio.create_task(runtime.close())
    await settle()
    assert not runtime.is_ready("gated")
    with pytest.raises(InferenceError) as refused:
        await runtime.infer(ask("gated", 3))
    gate.set()
    await closing
    assert [(await task).outputs["Y"][0, 0] for task in (running, queued)] == [1, 2]
    assert refused.value.code is ErrorCode.UNAVAILABLE
    await runtime.close()


async def test_close_fails_the_rest_when_the_grace_time_is_over(repository, write_python, gate, monkeypatch):
    monkeypatch.setattr("local_runtime.serving.loader._UNLOAD_TIMEOUT_S", 0.001)
    write_python("gated", GATED)
    runtime = await LocalRuntime.open(repository, options=RuntimeOptions(close_grace_us=1000))
    tasks = [asyncio.create_task(runtime.infer(ask("gated", 1)))]
    await entered()
    tasks.append(asyncio.create_task(runtime.infer(ask("gated", 2))))
    await settle()
    await runtime.close()
    errors = await asyncio.gather(*tasks, return_exceptions=True)
    assert [error.code for error in errors] == [ErrorCode.UNAVAILABLE] * 2


async def test_python_error_response_fails_only_its_request(repository, write_python):
    write_python("picky", PICKY)
    async with opened(repository) as runtime:
        good, bad, also_good = await asyncio.gather(
            *(runtime.infer(ask("picky", n)) for n in (1, -1, 2)), return_exceptions=True
        )
    assert bad.code is ErrorCode.INVALID_ARG
    assert bad.message == "negative"
    assert [answer.outputs["Y"][0, 0] for answer in (good, also_good)] == [1, 2]


async def test_bad_member_of_a_torchscript_batch_fails_alone(repository, write_torch):
    write_torch("picky", TORCH_PICKY)
    events = []
    async with opened(repository, observer=events.append) as runtime:
        good, bad, also_good = await asyncio.gather(
            *(runtime.infer(InferRequest(model="picky", inputs={"INPUT__0": rows(n)["X"]})) for n in (1, -1, 2)),
            return_exceptions=True,
        )
    assert bad.code is ErrorCode.INTERNAL
    assert bad.message.startswith("PyTorch execute failure: ")
    assert [answer.outputs["OUTPUT__0"][0, 0] for answer in (good, also_good)] == [2, 4]
    assert [(event.requests, event.failed) for event in events] == [(3, 1)]


async def test_the_member_whose_rows_go_missing_fails_alone(repository, write_torch):
    write_torch("short", "def forward(self, x):\n    return x[x[:, 0] > 0]")
    async with opened(repository) as runtime:
        good, bad, also_good = await asyncio.gather(
            *(runtime.infer(InferRequest(model="short", inputs={"INPUT__0": rows(n)["X"]})) for n in (1, -1, 2)),
            return_exceptions=True,
        )
    text = "model 'short' returned 0 rows in output 'OUTPUT__0' for a batch of 1 rows"
    assert (bad.code, bad.message) == (ErrorCode.INTERNAL, text)
    assert [answer.outputs["OUTPUT__0"][0, 0] for answer in (good, also_good)] == [1, 2]


async def test_too_few_rows_are_the_models_fault_for_every_member(repository, write_torch):
    write_torch("short", "def forward(self, x):\n    return x[1:]")
    async with opened(repository) as runtime:
        errors = await asyncio.gather(
            *(runtime.infer(InferRequest(model="short", inputs={"INPUT__0": rows(n)["X"]})) for n in (1, 2, 3)),
            return_exceptions=True,
        )
    text = "model 'short' returned 0 rows in output 'OUTPUT__0' for a batch of 1 rows"
    assert [(error.code, error.message) for error in errors] == [(ErrorCode.INTERNAL, text)] * 3


async def test_ensemble_chains_models_that_batch_on_their_own(repository, write_python, write_torch, write_config):
    write_python("pre", PICKY)
    write_torch("post", "def forward(self, x):\n    return x + 1")
    write_config("ens", ENSEMBLE)
    events = []
    async with opened(repository, models=["ens"], observer=events.append) as runtime:
        answers = await asyncio.gather(
            *(runtime.infer(InferRequest(model="ens", inputs={"A": rows(n)["X"]})) for n in (1, -1, 2)),
            return_exceptions=True,
        )
        counts = {entry.name: entry for entry in runtime.statistics()}
    assert [answers[n].outputs["C"][0, 0] for n in (0, 2)] == [2, 3]
    assert answers[1].code is ErrorCode.INVALID_ARG
    assert answers[1].message == "in ensemble 'ens', negative"
    assert [(event.model, event.requests) for event in events] == [("pre", 3), ("post", 2)]
    assert (counts["ens"].success.count, counts["ens"].fail.count) == (2, 1)


@pytest.mark.parametrize(
    ("model", "version", "code", "text"),
    [
        ("nope", "", ErrorCode.NOT_FOUND, "Request for unknown model: 'nope' is not found"),
        ("double", "7", ErrorCode.NOT_FOUND, "Request for unknown model: 'double' version 7 is not found"),
        ("double", "abc", ErrorCode.INVALID_ARG, "failed to get model version from specified version string"),
    ],
)
async def test_unknown_model_or_version(repository, write_python, model, version, code, text):
    write_python("double", version="3")
    async with opened(repository) as runtime:
        assert not runtime.is_ready(model, version)
        with pytest.raises(InferenceError) as refused:
            await runtime.infer(ask(model, 1, version=version))
        assert (await runtime.infer(ask("double", 1, version="3"))).version == "3"
    assert refused.value.code is code
    assert refused.value.message.startswith(text)


async def test_metadata_and_completed_config(repository, write_python):
    write_python("double", version="2")
    write_python("double_too", version="10")
    async with opened(repository) as runtime:
        metadata = runtime.model_metadata("double")
        config = runtime.model_config("double")
    assert (metadata.versions, metadata.platform) == (("2",), "python")
    assert [(tensor.name, tensor.datatype, tensor.shape) for tensor in metadata.inputs] == [("X", "FP32", (-1, 2))]
    assert list(config.dynamic_batching.preferred_batch_size) == [8]
    assert config.instance_group[0].name == "double_0"


async def test_observer_that_fails_stops_nothing(repository, write_python):
    write_python("double")

    def observer(_event):
        raise ValueError

    async with opened(repository, observer=observer) as runtime:
        for value in (1, 2):
            assert (await runtime.infer(ask("double", value))).outputs["Y"][0, 0] == 2 * value


async def test_instances_of_a_model_run_at_the_same_time(repository, write_python):
    meet = """
    import threading
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            threading.test_barrier.wait(30)
            return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", r.inputs()[0].as_numpy())]) for r in requests]
    """
    config = PYTHON_CONFIG.replace("count: 1", "count: 2").replace("dynamic_batching { }", "")
    write_python("meet", meet, config)
    threading.test_barrier = threading.Barrier(2)
    try:
        async with opened(repository) as runtime:
            answers = await asyncio.gather(*(runtime.infer(ask("meet", n)) for n in (1, 2)))
    finally:
        del threading.test_barrier
    assert [answer.batch_size for answer in answers] == [1, 1]


# --- decoupled models, business logic, cache --------------------------------------------------------

DECOUPLED_CONFIG = """
backend: "python"
input [ { name: "N" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
model_transaction_policy { decoupled: true }
"""
COUNTS_DOWN = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for n in range(int(request.inputs()[0].as_numpy()[0])):
                if n == 3:
                    error = pb_utils.TritonError("three", pb_utils.TritonError.UNAVAILABLE)
                    sender.send(pb_utils.InferenceResponse(error=error))
                    continue
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([n], np.int32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
ENDLESS = """
import threading
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            while not sender.is_cancelled():
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([1], np.int32))]))
                threading.test_gate.wait(0.001)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            threading.test_entered.set()
"""
CALLS_DOUBLE = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            inner = pb_utils.InferenceRequest(
                model_name="double", requested_output_names=["Y"], inputs=request.inputs()
            ).exec()
            answers.append(pb_utils.InferenceResponse([pb_utils.get_output_tensor_by_name(inner, "Y")]))
        return answers
"""


def count_to(number):
    return InferRequest(model="counts", inputs={"N": np.array([number], np.int32)})


async def test_a_decoupled_model_answers_as_often_as_it_likes(repository, write_python):
    write_python("counts", COUNTS_DOWN, DECOUPLED_CONFIG)
    async with opened(repository) as runtime:
        for number in (0, 1, 5):
            answers = [answer async for answer in runtime.stream(count_to(number))]
            assert [answer.is_final for answer in answers] == [False] * number + [True]
            values = [answer.outputs["Y"].item() if answer.outputs else answer.error for answer in answers[:-1]]
            assert [v for v in values if isinstance(v, int)] == [n for n in range(number) if n != 3]
        assert answers[3].error.code is ErrorCode.UNAVAILABLE
        with pytest.raises(InferenceError) as refused:
            await runtime.infer(count_to(1))
        assert refused.value.code is ErrorCode.UNSUPPORTED


async def test_a_decoupled_model_learns_that_its_caller_has_left(repository, write_python, gate):
    write_python("counts", ENDLESS, DECOUPLED_CONFIG)
    async with opened(repository) as runtime:
        async with contextlib.aclosing(runtime.stream(count_to(1))) as answers:
            async for answer in answers:
                assert not answer.is_final
                break
        await entered()


async def test_a_decoupled_request_has_a_deadline(repository, write_python, gate):
    write_python("counts", ENDLESS, DECOUPLED_CONFIG)
    request = InferRequest(model="counts", inputs={"N": np.array([1], np.int32)}, timeout_us=30_000)
    async with opened(repository) as runtime:
        with pytest.raises(InferenceError) as late:
            async for _ in runtime.stream(request):
                pass
        await entered()
    assert late.value.code is ErrorCode.DEADLINE


async def test_an_ordinary_model_can_be_streamed(repository, write_python):
    write_python("double")
    async with opened(repository) as runtime:
        answers = [answer async for answer in runtime.stream(ask("double", 4))]
    assert [(answer.outputs["Y"][0, 0], answer.is_final) for answer in answers] == [(8, True)]


async def test_a_model_may_ask_another_model(repository, write_python):
    write_python("double")
    write_python("caller", CALLS_DOUBLE)
    async with opened(repository) as runtime:
        answers = await asyncio.gather(*(runtime.infer(ask("caller", n)) for n in (1, 2)))
    assert [answer.outputs["Y"][0, 0] for answer in answers] == [2, 4]


async def test_a_request_accepted_before_the_close_may_still_ask_other_models(repository, write_python, gate):
    write_python("double", GATED)
    write_python("caller", CALLS_DOUBLE)
    runtime = await LocalRuntime.open(repository)
    asked = asyncio.create_task(runtime.infer(ask("caller", 3)))
    await entered()
    second = asyncio.create_task(runtime.infer(ask("caller", 4)))
    await settle()
    closing = asyncio.create_task(runtime.close())
    await settle()
    gate.set()
    assert [(await task).outputs["Y"][0, 0] for task in (asked, second)] == [3, 4]
    await closing


async def test_equal_requests_are_answered_from_the_cache(repository, write_python):
    write_python("double", config=PYTHON_CONFIG + "response_cache { enable: true }")
    write_python("plain")
    async with opened(repository, options=RuntimeOptions(cache_size_bytes=10_000)) as runtime:
        first = await runtime.infer(ask("double", 1, request_id="a"))
        second = await runtime.infer(ask("double", 1, request_id="b"))
        await runtime.infer(ask("double", 2))
        for _ in range(2):
            await runtime.infer(ask("plain", 1))
        cached, plain = (runtime.statistics(name)[0] for name in ("double", "plain"))
    np.testing.assert_array_equal(first.outputs["Y"], second.outputs["Y"])
    assert (cached.success.count, cached.inference_count) == (3, 2)
    assert (cached.cache_hit.count, cached.cache_miss.count) == (1, 2)
    assert (plain.execution_count, plain.cache_miss.count) == (2, 0)


async def test_without_room_for_a_cache_every_request_is_executed(repository, write_python):
    write_python("double", config=PYTHON_CONFIG + "response_cache { enable: true }")
    async with opened(repository) as runtime:
        for _ in range(2):
            await runtime.infer(ask("double", 1))
        assert runtime.statistics("double")[0].execution_count == 2


async def test_an_ensemble_runs_only_the_steps_that_the_wanted_outputs_need(repository, write_python, write_config):
    write_python("left")
    write_python("right")
    write_config(
        "ens",
        """
        platform: "ensemble"
        max_batch_size: 8
        input [ { name: "A" data_type: TYPE_FP32 dims: [ 2 ] } ]
        output [ { name: "L" data_type: TYPE_FP32 dims: [ 2 ] }, { name: "R" data_type: TYPE_FP32 dims: [ 2 ] } ]
        ensemble_scheduling { step [
          { model_name: "left" model_version: -1
            input_map { key: "X" value: "A" } output_map { key: "Y" value: "L" } },
          { model_name: "right" model_version: -1
            input_map { key: "X" value: "A" } output_map { key: "Y" value: "R" } }
        ] }
        """,
    )
    async with opened(repository) as runtime:
        some = await runtime.infer(InferRequest(model="ens", inputs={"A": rows(1)["X"]}, outputs=("R",)))
        counts = {entry.name: entry.execution_count for entry in runtime.statistics()}
        every = await runtime.infer(InferRequest(model="ens", inputs={"A": rows(1)["X"]}))
    assert set(some.outputs) == {"R"}
    assert (counts["left"], counts["right"]) == (0, 1)
    assert set(every.outputs) == {"L", "R"}


async def test_parameters_of_a_models_response_reach_the_caller(repository, write_python):
    code = """
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            return [
                pb_utils.InferenceResponse(
                    [pb_utils.Tensor("Y", r.inputs()[0].as_numpy())],
                    parameters={"from": r.request_id()} if r.request_id() else None,
                )
                for r in requests
            ]
    """
    write_python("tells", code)
    async with opened(repository) as runtime:
        told, silent = await asyncio.gather(
            runtime.infer(ask("tells", 1, request_id="a")), runtime.infer(ask("tells", 2))
        )
    assert (dict(told.parameters), dict(silent.parameters)) == ({"from": "a"}, {})
    assert told.outputs["Y"].tolist() == [[1, 1]]


RAISES_LATE = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([1], np.int32))]))
        raise ValueError("late")
"""
FLOODS = """
import threading
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        sender = requests[0].get_response_sender()
        for n in range(10_000):
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([n], np.int32))]))
        threading.test_entered.set()
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
# Answers from a thread of its own, after `execute` has returned; never ends by itself.
LINGERS = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        self.senders = [request.get_response_sender() for request in requests]
        for sender in self.senders:
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([1], np.int32))]))
"""


async def test_a_decoupled_request_counts_when_it_has_ended_and_as_what_it_was(repository, write_python):
    write_python("counts", COUNTS_DOWN, DECOUPLED_CONFIG)
    write_python("late", RAISES_LATE, DECOUPLED_CONFIG)
    async with opened(repository) as runtime:
        async with contextlib.aclosing(runtime.stream(count_to(2))) as answers:
            await anext(answers)
            assert runtime.statistics("counts")[0].success.count == 0
            assert len([answer async for answer in answers]) == 2
        await until(lambda: runtime.statistics("counts")[0].success.count == 1)
        request = InferRequest(model="late", inputs={"N": np.array([1], np.int32)})
        last = [answer async for answer in runtime.stream(request)][-1]
        late = runtime.statistics("late")[0]
    assert "ValueError: late" in last.error.message
    assert (late.success.count, late.fail.count) == (0, 1)


async def test_a_reader_gets_all_answers_of_a_model_that_is_faster(repository, write_python):
    write_python("counts", COUNTS_DOWN.replace("if n == 3", "if n < 0"), DECOUPLED_CONFIG)
    async with opened(repository) as runtime:
        answers = [answer async for answer in runtime.stream(count_to(20_000))]
    assert [answer.outputs["Y"].item() for answer in answers[:-1]] == list(range(20_000))
    assert answers[-1].error is None


async def test_a_model_that_waits_for_its_caller_is_free_when_that_leaves(repository, write_python, gate, monkeypatch):
    monkeypatch.setattr(decoupled, "_PATIENCE_S", 3600.0)
    write_python("counts", FLOODS, DECOUPLED_CONFIG)
    async with opened(repository) as runtime:
        async with contextlib.aclosing(runtime.stream(count_to(1))) as stream:
            await anext(stream)
        await entered()


async def test_unloading_ends_the_wait_of_a_model_for_its_caller(repository, write_python, gate, monkeypatch):
    monkeypatch.setattr(decoupled, "_PATIENCE_S", 3600.0)
    write_python("counts", FLOODS, DECOUPLED_CONFIG)
    runtime = await LocalRuntime.open(repository, options=RuntimeOptions(close_grace_us=1000))
    stream = runtime.stream(count_to(1))
    await anext(stream)
    await runtime.close()
    await entered()
    assert [answer async for answer in stream][-1].error.code is ErrorCode.UNAVAILABLE


async def test_answers_that_nobody_takes_are_bounded(repository, write_python, gate, monkeypatch):
    monkeypatch.setattr(decoupled, "_PATIENCE_S", 0.01)
    write_python("counts", FLOODS, DECOUPLED_CONFIG)
    async with opened(repository) as runtime:
        stream = runtime.stream(count_to(1))
        await anext(stream)
        await entered()
        await settle()
        rest = [answer async for answer in stream]
    assert len(rest) <= 4097
    assert rest[-1].error.code is ErrorCode.UNAVAILABLE
    assert rest[-1].is_final


async def test_close_ends_a_stream_whose_model_does_not(repository, write_python):
    write_python("counts", LINGERS, DECOUPLED_CONFIG)
    runtime = await LocalRuntime.open(repository, options=RuntimeOptions(close_grace_us=1000))
    stream = runtime.stream(count_to(1))
    await anext(stream)
    closing = asyncio.create_task(runtime.close())
    last = await anext(stream)
    assert last.error.code is ErrorCode.UNAVAILABLE
    assert last.is_final
    await stream.aclose()
    await closing


async def test_a_forgotten_inner_stream_stops_nobody(repository, write_python):
    write_python("counts", COUNTS_DOWN, DECOUPLED_CONFIG)
    code = """
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            inner = pb_utils.InferenceRequest(
                model_name="counts", requested_output_names=["Y"],
                inputs=[pb_utils.Tensor("N", np.array([3], np.int32))],
            ).exec(decoupled=True)
            next(iter(inner))
            loop = [inner]
            loop.append(loop)  # only the garbage collector ends it, on whatever thread that runs
            return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", r.inputs()[0].as_numpy())]) for r in requests]
    """
    write_python("caller", code)
    async with opened(repository) as runtime:
        for number in (1, 2):
            assert (await runtime.infer(ask("caller", number))).outputs["Y"][0, 0] == number
            gc.collect()


SEQUENCE_CONFIG = """
backend: "python"
max_batch_size: 4
input [ { name: "X" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
sequence_batching { control_input [
  { name: "START" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } ] } ] }
"""
SUMS_UP = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        answers = []
        for r in requests:
            start = pb_utils.get_input_tensor_by_name(r, "START").as_numpy()[0, 0]
            before = 0 if start else self.sums[r.correlation_id()]
            self.sums[r.correlation_id()] = total = before + pb_utils.get_input_tensor_by_name(r, "X").as_numpy()
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", total)]))
        return answers
"""


async def test_a_sequence_goes_through_an_ensemble(repository, write_python, write_config):
    write_python("sums", SUMS_UP, SEQUENCE_CONFIG)
    step = """{ model_name: "sums" model_version: -1
      input_map { key: "X" value: "A" } output_map { key: "Y" value: "C" } }"""
    write_config(
        "ens",
        f"""
        platform: "ensemble"
        max_batch_size: 4
        input [ {{ name: "A" data_type: TYPE_FP32 dims: [ 2 ] }} ]
        output [ {{ name: "C" data_type: TYPE_FP32 dims: [ 2 ] }} ]
        ensemble_scheduling {{ step [ {step} ] }}
        """,
    )
    totals = []
    async with opened(repository) as runtime:
        for position in range(3):
            request = InferRequest(
                model="ens",
                inputs={"A": rows(1)["X"]},
                sequence_id="s",
                sequence_start=position == 0,
                sequence_end=position == 2,
            )
            totals.append((await runtime.infer(request)).outputs["C"][0, 0])
    assert totals == [1, 2, 3]


async def test_an_optional_input_of_an_ensemble_may_be_left_out(repository, write_python, write_config):
    code = """
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            answers = []
            for r in requests:
                extra = pb_utils.get_input_tensor_by_name(r, "E")
                y = pb_utils.get_input_tensor_by_name(r, "X").as_numpy()
                answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", y if extra is None else -y)]))
            return answers
    """
    extra = 'input [ { name: "E" data_type: TYPE_FP32 dims: [ 2 ] optional: true } ]'
    write_python("inner", code, PYTHON_CONFIG + extra)
    write_config(
        "ens",
        """
        platform: "ensemble"
        max_batch_size: 8
        input [ { name: "A" data_type: TYPE_FP32 dims: [ 2 ] },
                { name: "B" data_type: TYPE_FP32 dims: [ 2 ] optional: true } ]
        output [ { name: "C" data_type: TYPE_FP32 dims: [ 2 ] } ]
        ensemble_scheduling { step [ { model_name: "inner" model_version: -1
          input_map { key: "X" value: "A" } input_map { key: "E" value: "B" }
          output_map { key: "Y" value: "C" } } ] }
        """,
    )
    a, b = rows(1)["X"], rows(2)["X"]
    async with opened(repository) as runtime:
        without = await runtime.infer(InferRequest(model="ens", inputs={"A": a}))
        given = await runtime.infer(InferRequest(model="ens", inputs={"A": a, "B": b}))
    assert (without.outputs["C"][0, 0], given.outputs["C"][0, 0]) == (1, -1)


SLEEPS_AFTER_FINAL = """
import threading
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            request.get_response_sender().send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        assert threading.test_gate.wait(30)
"""


async def test_a_decoupled_request_ends_with_its_final_answer_not_with_execute(repository, write_python, gate):
    write_python("counts", SLEEPS_AFTER_FINAL, DECOUPLED_CONFIG)
    async with opened(repository) as runtime:
        assert [answer.is_final async for answer in runtime.stream(count_to(1))] == [True]
        gate.set()
        await until(lambda: runtime.statistics("counts")[0].success.count == 1)


async def test_every_decoupled_request_is_counted_once(repository, write_python, gate):
    write_python("counts", ENDLESS, DECOUPLED_CONFIG)
    async with opened(repository) as runtime:
        running = runtime.stream(count_to(1))
        await anext(running)
        queued = asyncio.create_task(anext(runtime.stream(count_to(1))))
        await settle()
        queued.cancel()
        await settle()
        await running.aclose()
        await entered()
        await until(lambda: runtime.statistics("counts")[0].fail.count == 2)
        counts = runtime.statistics("counts")[0]
    assert (counts.success.count, counts.fail.count) == (0, 2)


async def test_an_ensemble_hands_on_an_input_as_a_copy_and_leaves_out_what_was_not_given(
    repository, write_python, write_config
):
    write_python("double")
    write_config(
        "ens",
        """
        platform: "ensemble"
        max_batch_size: 8
        input [ { name: "A" data_type: TYPE_FP32 dims: [ 2 ] },
                { name: "B" data_type: TYPE_FP32 dims: [ 2 ] optional: true } ]
        output [ { name: "C" data_type: TYPE_FP32 dims: [ 2 ] }, { name: "A" data_type: TYPE_FP32 dims: [ 2 ] },
                 { name: "B" data_type: TYPE_FP32 dims: [ 2 ] } ]
        ensemble_scheduling { step [ { model_name: "double" model_version: -1
          input_map { key: "X" value: "A" } output_map { key: "Y" value: "C" } } ] }
        """,
    )
    a = rows(1)["X"]
    async with opened(repository) as runtime:
        answer = await runtime.infer(InferRequest(model="ens", inputs={"A": a}))
    assert set(answer.outputs) == {"A", "C"}
    assert not np.shares_memory(answer.outputs["A"], a)


IMPLICIT_STATE = """
platform: "pytorch_libtorch"
max_batch_size: 4
input [ { name: "X__0" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "Y__0" data_type: TYPE_FP32 dims: [ 2 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
sequence_batching {
  STRATEGY { }
  control_input [ { name: "READY__1" control [ { kind: CONTROL_SEQUENCE_READY fp32_false_true: [ 0, 1 ] } ] } ]
  state [ { input_name: "SUM__2" output_name: "SUM__1" data_type: TYPE_FP32 dims: [ 2 ]
            initial_state { name: "zero" data_type: TYPE_FP32 dims: [ 2 ] zero_data: true } } ]
}
"""


@pytest.mark.parametrize("strategy", ["direct", "oldest"])
async def test_a_torchscript_model_keeps_implicit_state_for_each_sequence(repository, write_torch, strategy):
    folder = write_torch(
        "sums", "def forward(self, x, ready, total):\n    total = total + x * ready\n    return total, total"
    )
    (folder / "config.pbtxt").write_text(IMPLICIT_STATE.replace("STRATEGY", strategy))

    def step(number, value, *, start=False, end=False):
        return InferRequest(
            model="sums",
            inputs={"X__0": np.full((1, 2), value, np.float32)},
            sequence_id=number,
            sequence_start=start,
            sequence_end=end,
        )

    async with opened(repository) as runtime:
        for value in range(4):
            answers = await asyncio.gather(
                *(runtime.infer(step(n, n * 10 + value, start=value == 0, end=value == 3)) for n in (1, 2, 3))
            )
            totals = [answer.outputs["Y__0"].tolist() for answer in answers]
            assert totals == [[[sum(n * 10 + v for v in range(value + 1))] * 2] for n in (1, 2, 3)]
            assert all(set(answer.outputs) == {"Y__0"} for answer in answers)
        again = await runtime.infer(step(1, 5, start=True, end=True))
    assert again.outputs["Y__0"].tolist() == [[5, 5]]
