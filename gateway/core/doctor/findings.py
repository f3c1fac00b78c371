"""What is said of one thing that is wrong, and the bounds that several symptoms share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

ENOUGH: Final = 30
"""Requests or batches in the window below which their means say nothing: the usual size from which a mean is taken to
be near normal; three a second over the ten seconds that are looked at."""

WAITING_SHARE: Final = 0.5
"""Of the time at a server. NVIDIA's Kubernetes example for Triton scales out at a ratio of queue to compute of 1
(`1000m` of `triton:queue_compute:ratio`), which is this share: from here on waiting takes as long as the work.

Measured with Triton 2.51, one instance, batches of 8 and 20 ms: with callers for one batch that runs and one that is
ready it was 0.45 to 0.47, and 0.57 at most; with callers for four batches 0.74."""

HELD_SHARE: Final = 1 / 3
"""Of the time at a server, by a delay: it makes requests half as long again. Measured with Triton 2.51, one caller,
batches of 20 ms: a delay of a tenth of that, as is advised here, 0.05 to 0.1, of a quarter 0.2, of the whole 0.49."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        symptom: its name in docs/doctor.md.
        subject: the model, task, backend or limit that has it.
        severity: `error` (requests fail, or the model does not load) or `warning` (time or capacity is lost).
        seen: what is observed, in a sentence.
        cause: why.
        change: what to do about it, in a sentence.
        lines: what to write, and `where` (a file, or a section of the configuration); empty where nothing is.
        numbers: the figures that it rests on, by name with their unit.
    """

    symptom: str
    subject: str
    severity: Literal["error", "warning"]
    seen: str
    cause: str
    change: str
    where: str = ""
    lines: tuple[str, ...] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)
