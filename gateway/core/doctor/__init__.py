"""What `gateway doctor` makes of what it saw: `Facts` -> `Finding`s. Pure; one file for each group of symptoms.

`facts` are the values, `reading` makes them of documents and samples, `batching`, `waiting` and `capacity` judge them.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from gateway.core.doctor import batching, capacity, waiting
from gateway.core.doctor.facts import Facts
from gateway.core.doctor.findings import Finding

SYMPTOMS: Final[tuple[Callable[[Facts], Iterator[Finding]], ...]] = (
    batching.single_batches,
    waiting.late_by_queue,
    batching.stateful_batched,
    batching.llm_batched,
    waiting.interactive_behind_batch,
    batching.instances_against_batches,
    batching.preferred_never_reached,
    waiting.timeout_below_delay,
    capacity.hot_replica,
    capacity.refused_below_capacity,
    capacity.gpu_memory,
)
"""Each symptom that is looked for, in the order in which they are told."""


def examine(facts: Facts) -> Sequence[Finding]:
    """All findings, errors first; none where nothing is wrong.

    What is wrong with a file that several backends share is told once.
    """
    found = [finding for symptom in SYMPTOMS for finding in symptom(facts)]
    told: dict[tuple[str, ...], Finding] = {}
    for one in found:
        told.setdefault((one.symptom, one.where, one.cause) if one.where else (one.symptom, one.subject), one)
    return sorted(told.values(), key=lambda finding: finding.severity != "error")
