"""What is read of a stack at one instant, before anything is made of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One line of a metrics page."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """All that was read at one instant (seconds of a clock that only goes forward).

    `models`, `backends`, `requests`, `overview`: the control plane's; `samples`: the gateway's page; `servers`: pages
    of model servers by address. What could not be read is empty.
    """

    at_s: float
    models: Sequence[Document] = ()
    backends: Sequence[Document] = ()
    requests: Sequence[Document] = ()
    overview: Document = field(default_factory=dict)
    samples: Sequence[Sample] = ()
    servers: Mapping[str, Sequence[Sample]] = field(default_factory=dict)
