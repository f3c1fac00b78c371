"""What the calls of Triton's model repository extension ask. Pure.

Source: `protocol/extension_model_repository.md`. A body may be left out. All raise INVALID_ARG naming what is wrong.
"""

import base64
import binascii
from typing import Any

from local_runtime.errors import invalid
from local_runtime.protocol.json_text import parse
from local_runtime.protocol.oip_tensors import Malformed, refusing


def read_index(body: bytes) -> bool:
    """Whether only models that are ready are asked for."""
    return _flag(_document(body), "ready")


def read_load(body: bytes) -> tuple[str | None, dict[str, bytes]]:
    """The model configuration (JSON) that the load brings along, and files by their path in the model's folder."""
    config: str | None = None
    files: dict[str, bytes] = {}
    with refusing():
        for name, value in _object(_document(body), "parameters").items():
            if not isinstance(value, str):
                raise Malformed(f"parameter '{name:.100}' must be a string")
            if name == "config":
                config = value
            elif name.startswith("file:"):
                files[name.removeprefix("file:")] = _from_base64(name, value)
            else:
                raise Malformed(f"unrecognized load parameter '{name:.100}'")
    return config, files


def read_unload(body: bytes) -> bool:
    """Whether the models that an ensemble is made of go with it."""
    return _flag(_object(_document(body), "parameters"), "unload_dependents")


def _document(body: bytes) -> dict[str, Any]:
    return parse(body) if body.strip() else {}


def _flag(document: dict[str, Any], member: str) -> bool:
    value = document.get(member, False)
    if not isinstance(value, bool):
        raise invalid(f"Unable to parse '{member}': must be true or false")
    return value


def _from_base64(name: str, value: str) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error as error:
        raise Malformed(f"parameter '{name:.100}' is not base64: {error}") from error


def _object(document: dict[str, Any], member: str) -> dict[str, Any]:
    value = document.get(member, {})
    if not isinstance(value, dict):
        raise invalid(f"Unable to parse '{member}': must be an object")
    return value
