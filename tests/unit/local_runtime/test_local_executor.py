import asyncio
import sys
import threading
import types

import pytest

from local_runtime.errors import ErrorCode, ModelLoadError
from local_runtime.executors import models
from local_runtime.executors.instance import Instance
from local_runtime.repository.completion import place
from local_runtime.repository.parsing import parse
from local_runtime.scheduling.execution import Executed
from local_runtime.scheduling.stats import Compute


class Stub:
    """A model that answers with the name of the thread that runs it."""

    def __init__(self, error=None):
        self.error = error
        self.is_closed = False

    def execute(self, members):
        if self.error is not None:
            raise self.error
        return Executed(outcomes=[threading.current_thread().name] * len(members), compute=Compute(infer_us=7))

    def close(self):
        self.is_closed = True
        if self.error is not None:
            raise self.error


def instance_of(model, *, threads=1):
    return Instance(name="m_0_0", load=lambda *, threads: model, threads=threads)


def run_one(instance):
    done = threading.Event()
    results = []
    instance.submit([None, None], lambda executed: (results.append(executed), done.set()))
    assert done.wait(30)
    return results[0]


def test_instance_loads_runs_and_closes_in_its_own_thread():
    stub = Stub()
    loaded = []

    def load(*, threads):
        loaded.append((threading.current_thread().name, threads))
        return stub

    instance = Instance(name="m_0_0", load=load, threads=3)
    instance.start().result(30)
    executed = run_one(instance)
    instance.stop().result(30)
    assert (loaded, executed.outcomes, stub.is_closed) == ([("m_0_0", 3)], ["m_0_0", "m_0_0"], True)
    assert executed.compute == Compute(infer_us=7)


def test_whoever_gives_up_a_load_can_still_stop_it():
    stub, may_load = Stub(), threading.Event()

    def load(*, threads):
        assert may_load.wait(30)
        return stub

    instance = Instance(name="m_0_0", load=load, threads=1)
    loaded = instance.start()
    assert not loaded.cancel()
    ended = instance.stop()
    assert not ended.cancel()
    may_load.set()
    ended.result(30)
    assert stub.is_closed


async def test_a_load_that_an_event_loop_gives_up_can_still_be_stopped():
    stub, may_load = Stub(), threading.Event()
    instance = Instance(name="m_0_0", load=lambda *, threads: (may_load.wait(30), stub)[1], threads=1)
    loading = asyncio.wrap_future(instance.start())
    loading.cancel()
    await asyncio.wait([loading])
    may_load.set()
    await asyncio.wait_for(asyncio.wrap_future(instance.stop()), 30)
    assert stub.is_closed


def test_batches_already_submitted_run_before_the_instance_stops():
    instance = instance_of(Stub())
    results = []
    for _ in range(3):
        instance.submit([None], results.append)
    ended = instance.stop()
    instance.start().result(30)
    ended.result(30)
    assert len(results) == 3


class Mute(Exception):
    """Its text cannot be had."""

    def __str__(self):
        raise SystemExit


@pytest.mark.parametrize("error", [KeyError("x"), SystemExit(3), KeyboardInterrupt(), Mute()])
def test_instance_survives_a_model_that_breaks_every_promise(error):
    instance = instance_of(Stub(error))
    instance.start().result(30)
    for _ in range(2):
        assert [outcome.code for outcome in run_one(instance).outcomes] == [ErrorCode.INTERNAL] * 2
    instance.stop().result(30)


def test_instance_survives_a_scheduler_that_is_gone():
    instance = instance_of(Stub())
    instance.start().result(30)

    def closed(executed):
        raise RuntimeError("event loop is closed")

    instance.submit([None], closed)
    assert len(run_one(instance).outcomes) == 2
    instance.stop().result(30)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyError("x"), "KeyError: 'x'"),
        (SystemExit(2), "SystemExit: 2"),
        (Mute(), r"Mute: <str\(\) of Mute failed>"),
        (ValueError("bad \udcff"), r"ValueError: bad \?"),
    ],
)
def test_failed_load_is_one_kind_of_error(error, text):
    def load(*, threads):
        raise error

    instance = Instance(name="m_0_0", load=load, threads=1)
    with pytest.raises(ModelLoadError, match=text):
        instance.start().result(30)
    instance.stop().result(30)


def test_an_instance_bounds_the_threads_of_torch(monkeypatch):
    bounds = []
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(set_num_threads=bounds.append))
    instance = instance_of(Stub(), threads=5)
    instance.start().result(30)
    instance.stop().result(30)
    assert bounds == [5]


@pytest.mark.parametrize(
    ("backend", "file", "reason"),
    [
        ('backend: "python"', "model.py", "has no class TritonPythonModel"),
        ('platform: "pytorch_libtorch"', "model.pt", "failed to load model 'm'"),
        ('platform: "onnxruntime_onnx"', "model.onnx", "failed to load model 'm'"),
        ('platform: "onnxruntime_onnx"', "absent.onnx", "no such file: 1/absent.onnx"),
    ],
)
def test_each_backend_is_run_by_its_own_executor(tmp_path, backend, file, reason):
    config = parse(
        f"""{backend}
        input [ {{ name: "INPUT__0" data_type: TYPE_FP32 dims: [ 1 ] }} ]
        output [ {{ name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 1 ] }} ]
        instance_group [ {{ kind: KIND_CPU }} ]""",
        folder_name="m",
    )
    folder = tmp_path / "m" / "1"
    folder.mkdir(parents=True)
    if not file.startswith("absent"):
        (folder / file).write_text("# nothing\n")
    placements = place(config, cuda_devices=0)
    with pytest.raises(ModelLoadError, match=reason):
        models.load_model(
            config=config,
            folder=folder.parent,
            file=folder / file,
            version="1",
            placement=placements[0],
            placements=placements,
            services=None,
            threads=1,
        )
