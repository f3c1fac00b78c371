"""What `auto_complete_config` gets and gives back."""

import json
from collections.abc import Mapping
from typing import Any

_INPUT_PROPERTIES = ("name", "data_type", "dims", "optional")
_OUTPUT_PROPERTIES = ("name", "data_type", "dims")


class ModelConfig:
    """A configuration that a model may complete, never contradict: that is a ValueError, with Triton's text.

    Args:
        model_config: the configuration in Triton's JSON.
    """

    def __init__(self, model_config: str) -> None:
        self._config: dict[str, Any] = json.loads(model_config)
        self._function = f"in auto-complete-config function for model '{self._config['name']}'"

    def as_dict(self) -> dict[str, Any]:
        """The configuration as it is now, to read."""
        return self._config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """May raise what the file says, not lower it."""
        configured = self._config["max_batch_size"]
        if configured > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {configured}, but {self._function} "
                f"specified max_batch_size {max_batch_size}"
            )
        self._config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Batch dynamically, unless the file says so already; it must not name another scheduler."""
        for scheduler in ("sequence_batching", "ensemble_scheduling"):
            if scheduler in self._config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{scheduler}', but auto-complete-config function "
                    f"for model '{self._config['name']}' tries to set scheduling_choice as 'dynamic_batching'"
                )
        self._config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, transaction_policy_dict: Mapping[str, Any]) -> None:
        """Say whether the model is decoupled: `{"decoupled": True}`; the file must not say otherwise."""
        if any(name != "decoupled" for name in transaction_policy_dict):
            raise ValueError(
                "model transaction property in auto-complete-config function for model "
                f"'{self._config['name']}' contains property other than 'decoupled'."
            )
        policy = self._config.setdefault("model_transaction_policy", {})
        for decoupled in transaction_policy_dict.values():
            if policy.setdefault("decoupled", decoupled) != decoupled:
                raise ValueError(
                    f"trying to change decoupled property in auto-complete-config for model '{self._config['name']}', "
                    f"which is already set to '{policy['decoupled']}'."
                )

    def add_input(self, input: Mapping[str, Any]) -> None:  # noqa: A002 - Triton's name
        """Add an input (name, data_type, dims, perhaps optional) or complete the one of that name."""
        self._add("input", input, _INPUT_PROPERTIES)

    def add_output(self, output: Mapping[str, Any]) -> None:
        """Add an output (name, data_type, dims) or complete the one of that name."""
        self._add("output", output, _OUTPUT_PROPERTIES)

    def _add(self, what: str, tensor: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
        self._check_properties(what, tensor, allowed)
        for known in self._config[what]:
            if known["name"] == tensor["name"]:
                self._check_agreement(what, known, tensor)
                known.update(tensor)
                return
        self._config[what].append(dict(tensor))

    def _check_properties(self, what: str, tensor: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
        named = f"{what} '{tensor['name']}'" if "name" in tensor else what
        if any(name not in allowed for name in tensor):
            listed = "', '".join(allowed[:-1])
            raise ValueError(f"{named} {self._function} contains property other than '{listed}' and '{allowed[-1]}'.")
        for name in ("name", "data_type", "dims"):
            if name not in tensor:
                raise ValueError(f"{named} {self._function} is missing '{name}' property.")

    def _check_agreement(self, what: str, known: Mapping[str, Any], tensor: Mapping[str, Any]) -> None:
        model, name = self._config["name"], tensor["name"]
        if known["data_type"] not in ("TYPE_INVALID", tensor["data_type"]):
            raise ValueError(
                f"unable to load model '{model}', configuration expects datatype {known['data_type']} for {what} "
                f"'{name}', model provides {tensor['data_type']}"
            )
        for word in ("dims", "optional"):
            if known.get(word) and word in tensor and known[word] != tensor[word]:
                raise ValueError(
                    f"model '{model}', tensor '{name}': the model expects {word} {tensor[word]} but the model "
                    f"configuration specifies {word} {known[word]}"
                )
