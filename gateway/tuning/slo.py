"""What latency is good enough, and for how many of the requests: said by an option, held or not by a report. Pure."""

import re
from dataclasses import dataclass
from typing import Final

from gateway.tuning.report import ClassReport, Report

PERCENT: Final = 99.0  # where nobody says another
_FORM: Final = re.compile(r"(?:p(?P<share>\d{1,2}(?:\.\d{1,3})?)=)?(?P<number>\d{1,12}(?:\.\d{1,9})?)(?P<unit>ms|s)")
_MS: Final = {"ms": 1.0, "s": 1000.0}
_ROUNDING: Final = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """So many of a hundred requests have a right answer within so many milliseconds."""

    ms: float
    percent: float = PERCENT

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
    return Slo(ms=float(found["number"]) * _MS[found["unit"]], percent=float(found["share"] or PERCENT))


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a class held its own SLO: `share` of its `sent` requests had a right answer in time."""

    name: str
    slo: Slo
    is_held: bool
    share: float
    sent: int

    def __str__(self) -> str:
        word = "held" if self.is_held else "not held"
        return (
            f"SLO {self.slo} {word}: {self.name}: {self.share * 100:.2f} % of {self.sent:,} had a right answer "
            "within it"
        )


def verdicts(report: Report, *, percent: float = PERCENT) -> tuple[Verdict, ...]:
    """On each class of a report that has an `slo_ms`, at that percentile."""
    slos = [(one, Slo(ms=one.slo_ms, percent=percent)) for one in report.classes or (report.whole,) if one.slo_ms]
    return tuple(
        Verdict(name=one.name, slo=slo, is_held=slo.is_held(one), share=slo.share(one), sent=one.sent)
        for one, slo in slos
    )
