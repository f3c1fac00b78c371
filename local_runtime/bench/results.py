"""What was measured, and what follows from it: no I/O, no drawing."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from local_runtime.bench.load import Measured
from local_runtime.bench.variants import Kind, Variant


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Medians by variant and concurrency. There is one naive variant, measured at every concurrency."""

    model: str
    variants: Sequence[Variant]
    concurrencies: Sequence[int]
    measured: Mapping[tuple[Variant, int], Measured]

    @property
    def naive(self) -> Variant:
        """The one that all are compared with."""
        return next(variant for variant in self.variants if variant.kind is Kind.NAIVE)

    def of(self, kind: Kind) -> list[Variant]:
        """The variants of that kind."""
        return [variant for variant in self.variants if variant.kind is kind]

    def relative(self, variant: Variant, concurrency: int) -> float:
        """Its throughput as a multiple of naive's."""
        return self.measured[variant, concurrency].qps / self.measured[self.naive, concurrency].qps

    def best_static(self, concurrency: int) -> Variant:
        """The swept setting of the highest throughput there."""
        return max(self.of(Kind.STATIC), key=lambda variant: self.measured[variant, concurrency].qps)

    def overall(self, variant: Variant) -> float:
        """Geometric mean of `relative` over all concurrencies."""
        ratios = [math.log(self.relative(variant, concurrency)) for concurrency in self.concurrencies]
        return math.exp(sum(ratios) / len(ratios))

    def best(self) -> Variant:
        """The best setting over all concurrencies together."""
        return max(self.variants, key=self.overall)

    def as_json(self) -> dict[str, Any]:
        """All of it, for programs."""
        return {
            "model": self.model,
            "best": self.best().name,
            "results": [
                {
                    "variant": variant.name,
                    **dataclasses.asdict(variant),
                    "concurrency": concurrency,
                    **dataclasses.asdict(self.measured[variant, concurrency]),
                    "relative_to_naive": self.relative(variant, concurrency),
                }
                for concurrency in self.concurrencies
                for variant in self.variants
            ],
        }
