"""What a scheduler hands to an instance and what it gets back. The instances themselves are in `executors`."""

import enum
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import msgspec

from local_runtime.errors import InferenceError
from local_runtime.messages import Annotated, Tensors
from local_runtime.scheduling.stats import Compute
from local_runtime.scheduling.validation import CheckedRequest


class Deferred(enum.Enum):
    """The outcome of a decoupled request: its answers go through `CheckedRequest.respond`, now or later."""

    DEFERRED = "deferred"


Outcome: TypeAlias = Tensors | Annotated | InferenceError | Deferred


class Executed(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one batch: one outcome for each member, in order, and where the time went."""

    outcomes: Sequence[Outcome]
    compute: Compute


Done: TypeAlias = Callable[[Executed], None]


class Instance(Protocol):
    """Something that runs one batch at a time."""

    def submit(self, members: Sequence[CheckedRequest], done: Done) -> None:
        """Run the batch; call `done` exactly once, from any thread."""
