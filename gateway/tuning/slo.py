"""What latency is good enough, and for how many of the requests. Pure."""

import re
from dataclasses import dataclass
from typing import Final

from gateway.tuning.report import ClassReport

_FORM: Final = re.compile(r"(?:p(?P<share>\d{1,2}(?:\.\d{1,3})?)=)?(?P<number>\d+(?:\.\d+)?)(?P<unit>ms|s)")
_MS: Final = {"ms": 1.0, "s": 1000.0}
_ROUNDING: Final = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """So many of a hundred requests have a right answer within so many milliseconds."""

    ms: float
    percent: float = 99.0

    def __str__(self) -> str:
        return f"p{self.percent:g}={self.ms:g}ms"

    def is_held(self, report: ClassReport) -> bool:
        """Whether it held for a class whose `slo_ms` is this one's: errors and what was never answered are late too."""
        return self.share(report) * 100 >= self.percent - _ROUNDING

    def share(self, report: ClassReport) -> float:
        """Of the requests that were due, how many had a right answer in time, 0 to 1; 0 where none was due."""
        return report.goodput / report.offered if report.offered else 0.0


def parse_slo(text: str) -> Slo:
    """`50ms`, `1.5s`, `p99=100ms`, `p99.9=2s`; without a percentile it is p99. Raises ValueError."""
    found = _FORM.fullmatch(text.strip().lower())
    if not found or not float(found["number"]):
        raise ValueError(f"'{text}': write an SLO as 50ms, p95=100ms or p99.9=2s")
    return Slo(ms=float(found["number"]) * _MS[found["unit"]], percent=float(found["share"] or 99.0))
