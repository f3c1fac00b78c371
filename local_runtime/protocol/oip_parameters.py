"""What the parameters of a request mean, the same over gRPC and HTTP. Pure.

Triton's reserved names: `protocol/extension_sequence.md`, `extension_schedule_policy.md`, `extension_parameters.md`.
"""

from collections.abc import Mapping
from typing import Any

from local_runtime.protocol.oip_tensors import Malformed

FINAL_RESPONSE = "triton_final_response"
WANTS_EMPTY_FINAL = "triton_enable_empty_final_response"

MAX_PARAMETERS = 1024  # of a request: each costs more than a thousand values of a tensor

_RESERVED = frozenset({"headers", "binary_data_output"})
_RESERVED_PREFIX = "triton_"
_MAX_UINT64 = 2**64 - 1
_MAX_INT64 = 2**63 - 1
_NUMBER_FIELDS = {"priority": "priority", "timeout": "queue_timeout_us"}
_FLAG_FIELDS = ("sequence_start", "sequence_end")


def request_fields(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `InferRequest` by name: priority, timeout, sequence, and the caller's own parameters.

    Reserved names that mean nothing to the runtime are left out. Raises Malformed naming the parameter.
    """
    if not parameters:
        return {}
    if len(parameters) > MAX_PARAMETERS:
        raise Malformed(f"the request has more than {MAX_PARAMETERS} parameters")
    fields: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for name, value in parameters.items():
        if name == "sequence_id":
            fields[name] = _sequence_id(value)
        elif name in _NUMBER_FIELDS:
            fields[_NUMBER_FIELDS[name]] = _unsigned(name, value)
        elif name in _FLAG_FIELDS:
            fields[name] = flag(name, value)
        elif name not in _RESERVED and not name.startswith(_RESERVED_PREFIX):
            own[name] = _own(name, value)
    if own:
        fields["parameters"] = own
    return fields


def flag(name: str, value: Any) -> bool:
    """A parameter that is true or false; Malformed otherwise."""
    if not isinstance(value, bool):
        raise Malformed(f"parameter '{name}' must be true or false, not {value!r:.40}")
    return value


def _unsigned(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_UINT64:
        raise Malformed(f"parameter '{name}' must be an unsigned 64-bit integer, not {value!r:.40}")
    return value


def _sequence_id(value: Any) -> int | str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_UINT64:
        raise Malformed(f"parameter 'sequence_id' must be an unsigned 64-bit integer or a string, not {value!r:.40}")
    return value


def _own(name: str, value: Any) -> str | int | float | bool:
    if not isinstance(value, (str, int, float)):
        raise Malformed(f"parameter '{name}' must be a string, a number or a boolean")
    return value


def put_parameters(target: Any, parameters: Mapping[str, str | int | float | bool]) -> None:
    """The parameters as `InferParameter`s of a message: `target` is its map of them."""
    for name, value in parameters.items():
        parameter = target[name]
        if isinstance(value, bool):
            parameter.bool_param = value
        elif isinstance(value, str):
            parameter.string_param = value
        elif isinstance(value, float):
            parameter.double_param = value
        elif value > _MAX_INT64:
            parameter.uint64_param = value
        else:
            parameter.int64_param = value
