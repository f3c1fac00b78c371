"""Triton's Python backend in this process: loads `<model>/<version>/model.py` and runs it.

The model sees what it would see in Triton: `triton_python_backend_utils`, the same arguments of
`initialize`, lists of requests in `execute`.
"""

import asyncio
import concurrent.futures
import functools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from local_runtime.errors import ErrorCode, InferenceError, ModelLoadError
from local_runtime.executors.coroutines import CoroutineThread
from local_runtime.executors.faults import raised_by_load, raised_by_run, text_of
from local_runtime.executors.outcomes import compute_between, isolated, together
from local_runtime.executors.own_modules import OwnModules
from local_runtime.executors.services import Services
from local_runtime.executors.shim import context
from local_runtime.executors.shim.context import ModelContext
from local_runtime.executors.shim.errors import inference_error
from local_runtime.executors.shim.requests import ReceivedRequest
from local_runtime.executors.shim.responses import InferenceResponse
from local_runtime.messages import Annotated, Array, Tensors
from local_runtime.repository.completion import Placement, completed, triton_json
from local_runtime.repository.model_config import ModelConfig
from local_runtime.scheduling import collate
from local_runtime.scheduling.execution import Deferred, Executed, Outcome
from local_runtime.scheduling.validation import CheckedRequest, bytes_array, check_outputs, output_specs


class PythonModel:
    """One instance of a `TritonPythonModel`, loaded and initialized.

    Unlike in Triton, where an exception of `execute` fails its whole batch, the members of the batch are then run
    again, each alone, so that only the bad one fails (docs/decisions/0007). Models of sequences and decoupled
    models are not run again: the first keep state, the second may have answered.

    Args:
        config: the model's configuration.
        folder: the model's folder.
        file: the model.py inside the version folder.
        version: name of the version folder.
        placement: which instance this is and where it runs.
        placements: all instances of the model, as the completed config lists them.
        services: what the model may ask of the runtime.
    """

    def __init__(
        self,
        *,
        config: ModelConfig,
        folder: Path,
        file: Path,
        version: str,
        placement: Placement,
        placements: Sequence[Placement],
        services: Services,
    ) -> None:
        self._config = config
        sequence = config.sequence_batching
        self._state_inputs = {state.output_name: state.input_name for state in sequence.states} if sequence else {}
        self._version = int(version)
        self._instance_name = placement.name
        self._file = file
        owner = ModelContext(
            folder=str(file.parent), package=context.new_package(f"{placement.name}_v{version}"), services=services
        )
        context.enter(owner)
        self._coroutines = CoroutineThread(
            name=f"{placement.name}_asyncio", enter=functools.partial(context.enter, owner)
        )
        self._modules = OwnModules(file.parent, owner=owner)
        arguments = {
            "model_config": triton_json(completed(config, placements)),
            "model_instance_kind": placement.kind.value.removeprefix("KIND_"),
            "model_instance_name": placement.name,
            "model_instance_device_id": str(placement.device_id),
            "model_repository": str(folder),
            "model_version": version,
            "model_name": config.name,
        }
        try:
            self._model = _initialized(self._modules.execute(file), arguments)
        except ModelLoadError:
            self._modules.forget()
            raise
        except BaseException as error:
            self._modules.forget()
            raise ModelLoadError(raised_by_load(error, file)) from error

    def execute(self, members: Sequence[CheckedRequest]) -> Executed:
        """One outcome per member, DEFERRED for those of a decoupled model. An error response fails only its own."""
        if self._config.is_decoupled:
            return self._run_decoupled(members)
        if self._config.sequence_batching is None:
            return isolated(members, self._run, model=self._config.name, failure=self._raised)
        return together(members, self._run, failure=self._raised)

    def close(self) -> None:
        """Let the model finalize."""
        self._coroutines.close()
        try:
            if hasattr(self._model, "finalize"):
                self._model.finalize()
        finally:
            self._modules.forget()

    def _run(self, members: Sequence[CheckedRequest]) -> Executed:
        start_ns = time.perf_counter_ns()
        requests = self._requests(members)
        ready_ns = time.perf_counter_ns()
        returned = self._model.execute(requests)
        if asyncio.iscoroutine(returned):
            returned = self._coroutines.run(returned).result()
        ran_ns = time.perf_counter_ns()
        outcomes = self._outcomes(returned, requests, members)
        return Executed(outcomes=outcomes, compute=compute_between(start_ns, ready_ns, ran_ns, time.perf_counter_ns()))

    def _run_decoupled(self, members: Sequence[CheckedRequest]) -> Executed:
        start_ns = time.perf_counter_ns()
        # A slot without a request is filled with one that nobody waits for: it may be answered like any other.
        requests = self._requests(
            [
                msgspec.structs.replace(member, respond=_to_nobody) if member.respond is None else member
                for member in members
            ]
        )
        ready_ns = time.perf_counter_ns()
        try:
            returned = self._model.execute(requests)
            if asyncio.iscoroutine(returned):
                # Not waited for, as in Triton: the next batch may start while this one waits for something.
                self._coroutines.run(returned).add_done_callback(functools.partial(self._ended, requests))
            elif returned is not None:
                _fail(requests, self._failure(self._must_return_none()))
        except BaseException as error:  # noqa: BLE001 - model code may raise anything, SystemExit too
            _fail(requests, self._raised(error))
        ran_ns = time.perf_counter_ns()
        return Executed(
            outcomes=[Deferred.DEFERRED] * len(members),
            compute=compute_between(start_ns, ready_ns, ran_ns, ran_ns),
        )

    def _ended(self, requests: Sequence[ReceivedRequest], ended: "concurrent.futures.Future[Any]") -> None:
        """A decoupled model's coroutine has ended: what it left open because it raised is failed."""
        if ended.cancelled():
            _fail(requests, self._failure("the model was unloaded"))
        elif (error := ended.exception()) is not None:
            _fail(requests, self._raised(error))
        elif ended.result() is not None:
            _fail(requests, self._failure(self._must_return_none()))

    def _must_return_none(self) -> str:
        return (
            f"Python model '{self._instance_name}' is using the decoupled mode and the execute function must "
            "return None."
        )

    def _requests(self, members: Sequence[CheckedRequest]) -> list[ReceivedRequest]:
        return [
            ReceivedRequest(
                member, model_name=self._config.name, model_version=self._version, checked=self._response_outcome
            )
            for member in members
        ]

    def _outcomes(
        self, returned: Any, requests: Sequence[ReceivedRequest], members: Sequence[CheckedRequest]
    ) -> list[Outcome]:
        responses = [None] * len(members) if returned is None else returned
        text = None
        if not isinstance(responses, list):
            text = f"Expected a list in the execute return, found type '{type(responses)}'."
        elif len(responses) != len(members):
            text = (
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:{len(members)}, and "
                f"InferenceResponse(s) size is:{len(responses)}\n"
            )
        if text is not None:
            return [self._failure(text)] * len(members)
        return [
            self._outcome(response, request, member)
            for response, request, member in zip(responses, requests, members, strict=True)
        ]

    def _outcome(self, response: Any, request: ReceivedRequest, member: CheckedRequest) -> Outcome:
        sent = request.sent()
        if response is None:
            # Triton lets the caller wait for ever.
            return self._failure("execute returned None and sent no response for a request") if sent is None else sent
        if sent is not None:
            return self._failure("Unable to send response. Non-decoupled model cannot send more than one response.")
        if not isinstance(response, InferenceResponse):
            return self._failure(
                "Expected an 'InferenceResponse' object in the execute function return list, found type "
                f"'{type(response)}'."
            )
        return self._response_outcome(response, member)

    def _response_outcome(
        self, response: InferenceResponse, member: CheckedRequest
    ) -> Tensors | Annotated | InferenceError:
        error = response.error()
        if error is not None:
            return inference_error(error)
        try:
            outputs = self._checked(response, member)
        except TypeError as fault:
            return self._failure(text_of(fault))
        except InferenceError as fault:
            return fault
        parameters = response.own_parameters()
        return Annotated(outputs=outputs, parameters=parameters) if parameters else outputs

    def _checked(self, response: InferenceResponse, member: CheckedRequest) -> Tensors:
        outputs: dict[str, Array] = {
            tensor.name(): bytes_array(tensor.as_numpy()) for tensor in response.output_tensors()
        }
        wanted = member.outputs
        for name, state in self._state_inputs.items():
            # As in Triton, a Python model that keeps its state itself begins every request with the same one here.
            if name not in outputs and name in wanted:
                outputs[name] = member.inputs[state]
        if self._config.is_decoupled or self._may_leave_out(outputs, member):
            wanted = tuple(name for name in wanted if name in outputs)
        # Copies, as in Triton: the model may keep the memory and work in it while the caller still reads.
        checked = {name: array.copy() for name, array in check_outputs(outputs, self._config, wanted=wanted).items()}
        if self._config.max_batch_size == 0 or self._config.is_decoupled:
            return checked
        (outcome,) = collate.split(checked, rows=[member.rows], model=self._config.name)
        if isinstance(outcome, InferenceError):
            raise outcome
        return outcome

    def _may_leave_out(self, outputs: Tensors, member: CheckedRequest) -> bool:
        """Whether what lacks was left out on purpose, as Triton lets models do: nobody asked for it by name.

        An output under a name that the config does not know is rather a slip, and an answer without any no answer.
        """
        declared = {spec.name for spec in output_specs(self._config)}
        return not member.source.outputs and bool(outputs) and declared >= outputs.keys()

    def _raised(self, error: BaseException) -> InferenceError:
        return self._failure(raised_by_run(error, self._file))

    def _failure(self, text: str) -> InferenceError:
        return InferenceError(
            ErrorCode.INTERNAL,
            f"Failed to process the request(s) for model '{self._instance_name}', message: {text}",
        )


def _initialized(module: ModuleType, arguments: Mapping[str, str]) -> Any:
    model_class = getattr(module, "TritonPythonModel", None)
    if model_class is None:
        file = Path(module.__file__ or "")
        raise ModelLoadError(f"{file.name} of model '{arguments['model_name']}' has no class TritonPythonModel")
    model = model_class()
    if hasattr(model, "initialize"):
        model.initialize(dict(arguments))
    if not callable(getattr(model, "execute", None)):
        raise ModelLoadError(
            f"TritonPythonModel in {Path(module.__file__ or '').name} of model '{arguments['model_name']}' has no "
            "method execute"
        )
    return model


def _fail(requests: Sequence[ReceivedRequest], error: InferenceError) -> None:
    for request in requests:
        request.get_response_sender().fail(error)


def _to_nobody(outcome: Tensors | Annotated | InferenceError | None, is_final: bool) -> None:  # noqa: FBT001 - a Respond
    """Drops the answer."""
