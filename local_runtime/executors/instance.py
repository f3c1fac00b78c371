"""Instances: one thread each, that loads a model, runs its batches one after the other, and unloads it.

Everything slow or foreign happens in that thread (import torch, load, execute), so the event loop never waits
for a model, and a model object is only ever touched by the thread that made it.
"""

import concurrent.futures
import logging
import queue
import sys
import threading
import time
from collections.abc import Sequence
from typing import Protocol

import threadpoolctl

from local_runtime.errors import ErrorCode, InferenceError, ModelLoadError
from local_runtime.executors.faults import named, raised
from local_runtime.scheduling.execution import Done, Executed
from local_runtime.scheduling.stats import Compute
from local_runtime.scheduling.validation import CheckedRequest

_log = logging.getLogger(__name__)


class Model(Protocol):
    """A loaded model, whatever its backend. Used from one thread only."""

    def execute(self, members: Sequence[CheckedRequest]) -> Executed:
        """One outcome per member, in order; one member's fault stays with it where the backend can tell."""

    def close(self) -> None:
        """Give up what the model holds."""


class Load(Protocol):
    """Makes the model, in the instance's thread; ModelLoadError says why it cannot."""

    def __call__(self, *, threads: int) -> Model:
        """The model, using so many CPU threads."""


class Instance:
    """One thread with one loaded copy of a model.

    Args:
        name: Triton's instance name, also the thread's.
        load: makes the model; called in the thread.
        threads: CPU threads that this instance may use, so that instances do not fight.
    """

    def __init__(self, *, name: str, load: Load, threads: int) -> None:
        self.name = name
        self._load = load
        self._threads = threads
        # Of queue.Queue, Condition, Lock and eventfd none hands over more batches per second when many are waiting
        # (200,000 on one core, 48,000 with one request in flight; eventfd has 75,000 there, on Linux alone).
        self._jobs: queue.SimpleQueue[tuple[Sequence[CheckedRequest], Done] | None] = queue.SimpleQueue()
        # A daemon: a model that never returns must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._loaded: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        # Whoever waits may leave, but loading and unloading go on: from now on neither can be cancelled.
        self._loaded.set_running_or_notify_cancel()
        self._ended.set_running_or_notify_cancel()

    def start(self) -> concurrent.futures.Future[None]:
        """Begin to load; the future ends when the model can run, or with ModelLoadError. It cannot be cancelled."""
        self._thread.start()
        return self._loaded

    def submit(self, members: Sequence[CheckedRequest], done: Done) -> None:
        """Run the batch; `done` is called in this instance's thread, always exactly once."""
        self._jobs.put((members, done))

    def stop(self) -> concurrent.futures.Future[None]:
        """Unload after the batches already submitted; the future ends when that is done. It cannot be cancelled."""
        self._jobs.put(None)
        return self._ended

    def _run(self) -> None:
        try:
            model = self._load_bounded()
        except BaseException as error:  # noqa: BLE001 - a model's own code may raise anything, SystemExit too
            self._loaded.set_exception(_load_error(error))
            self._ended.set_result(None)
            return
        self._loaded.set_result(None)
        self._serve(model)
        try:
            model.close()
        except BaseException as error:  # noqa: BLE001 - model code again; the instance ends in any case
            _log.error("model failed to unload", extra={"instance": self.name, "error": raised(error)})
        self._ended.set_result(None)

    def _serve(self, model: Model) -> None:
        while (job := self._jobs.get()) is not None:
            members, done = job
            executed = _executed(model, members)
            try:
                done(executed)
            except Exception:  # noqa: BLE001 - whoever waited is gone (a closed loop); the next batch may have one
                _log.exception("outcome of a batch could not be delivered", extra={"instance": self.name})
            # An idle instance holds no request's tensors.
            del job, members, done, executed

    def _load_bounded(self) -> Model:
        model = self._load(threads=self._threads)
        # A model that uses torch has imported it by now; half of it may stand there while another thread does.
        set_num_threads = getattr(sys.modules.get("torch"), "set_num_threads", None)
        if set_num_threads is not None:
            # OpenMP keeps this number per thread, so each instance has its own share.
            set_num_threads(self._threads)
        # numpy's library has one pool for the whole process: with more than one thread, instances that calculate at
        # the same time wait for each other (a small batch took 24 ms instead of 0.3 ms on a busy machine).
        threadpoolctl.threadpool_limits(limits=1, user_api="blas")
        return model


def _load_error(error: BaseException) -> ModelLoadError:
    if isinstance(error, ModelLoadError):
        return error
    load_error = ModelLoadError(named(error))
    load_error.__cause__ = error
    return load_error


def _executed(model: Model, members: Sequence[CheckedRequest]) -> Executed:
    start_ns = time.perf_counter_ns()
    try:
        return model.execute(members)
    except BaseException as error:  # noqa: BLE001 - the boundary: whatever happens, every member gets an outcome
        _log.error("model failed outside its own error handling", extra={"error": raised(error)})
        failure = InferenceError(ErrorCode.INTERNAL, named(error))
        infer_us = (time.perf_counter_ns() - start_ns) // 1000
        return Executed(outcomes=[failure] * len(members), compute=Compute(infer_us=infer_us))
