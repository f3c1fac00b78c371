"""What a guard makes of figures: whether a canary has broken one of its bounds, in words with numbers.

Nothing is judged before there is enough of it. A percentile is read out of a histogram whose steps grow by a tenth; a
bound is broken only where the whole step lies above it, so that the reading's error breaks none.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from gateway.core.rules.rule import Guard, Rule, Target
from gateway.core.types import ANY
from gateway.core.watching.figures import STEP, Figures, Series, Tally, percentile_us, total

ENOUGH_TIMES: Final = 100
"""Answers for a p99, unless the guard asks for fewer requests: of fewer it would be the slowest alone."""
ENOUGH_COMPARED: Final = 50
"""Comparisons for a ratio, unless the guard asks for fewer requests: shadows see a sample, and of 50 the ratio's
standard error is 0.07 at most."""
_P99: Final = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class Conduct:
    """How a place did. Ratios are 0 to 1; a ratio or a time of nothing is None.

    Attributes:
        requests: those that it answered.
        attempts / failed_attempts: all that went there.
        p99_ms / first_token_p99_ms: of whole answers, of streamed answers' first parts; at most a tenth too high.
        answered / streamed: whole answers, and those with a first part, that the times are of.
        compared: with the rule's shadow.
    """

    requests: int = 0
    attempts: int = 0
    failed_attempts: int = 0
    error_ratio: float | None = None
    violation_ratio: float | None = None
    p99_ms: float | None = None
    first_token_p99_ms: float | None = None
    answered: int = 0
    streamed: int = 0
    compared: int = 0
    disagreement: float | None = None


NOTHING_SEEN: Final = Conduct()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a guard says.

    Attributes:
        breach: the bound that is broken, in words; empty where none is.
        lacks: what has not been seen often enough yet, in words; empty once every bound could be judged.
    """

    breach: str = ""
    lacks: str = ""

    @property
    def is_enough(self) -> bool:
        """Every bound could be judged."""
        return not self.lacks


def conduct(tally: Tally) -> Conduct:
    """The ratios and percentiles of a tally."""
    # A request can fail after an attempt that went well as far as it went; none of it counts twice.
    attempts, failed = max(tally.attempts, tally.requests), max(tally.failed_attempts, tally.errors)
    compared = tally.agreed + tally.disagreed
    return Conduct(
        requests=tally.requests,
        attempts=attempts,
        failed_attempts=failed,
        error_ratio=_ratio(failed, attempts),
        violation_ratio=_ratio(tally.violations, attempts),
        p99_ms=_p99_ms(tally.whole),
        first_token_p99_ms=_p99_ms(tally.first_token),
        answered=sum(tally.whole.values()),
        streamed=sum(tally.first_token.values()),
        compared=compared,
        disagreement=_ratio(tally.disagreed, compared),
    )


def judge(guard: Guard, canary: Tally, baseline: Tally | None = None) -> Verdict:
    """Hold what a canary did against its bounds; the baseline's figures stand beside it in the words alone.

    Below `min_requests` attempts nothing is judged. A p99 needs `ENOUGH_TIMES` answers of its kind and a disagreement
    `ENOUGH_COMPARED` comparisons, or `min_requests` where that is less.
    """
    seen, usual = conduct(canary), conduct(baseline or Tally())
    if seen.attempts < guard.min_requests:
        return Verdict(lacks=f"{seen.attempts} of {guard.min_requests} requests seen")
    bounds = _bounds(guard, seen, usual)
    return Verdict(
        breach="; ".join(bound.breach for bound in bounds if bound.breach and not bound.lack),
        lacks=", ".join(bound.lack for bound in bounds if bound.lack),
    )


def canaries(rule: Rule) -> tuple[Target, ...]:
    """The targets that the rule's guard watches: those with a share, unless they are where the baseline is."""
    baseline = rule.baseline
    found = (target for target in rule.split if target.weight and target.place != baseline.place)
    return tuple({target.place: target for target in found}.values())


def canary_out(rule: Rule, target: Target) -> Rule:
    """The rule with the weight 0 for `target`; the rule as it is where that is the baseline."""
    if target.place == rule.baseline.place:
        return rule
    return replace(
        rule, split=tuple(replace(one, weight=0) if one.place == target.place else one for one in rule.split)
    )


def figures_of(rule: Rule, target: Target, figures: Figures) -> Tally:
    """What became of the rule's requests at one of its targets.

    A target that names no version has whatever version answered there, one with the model `*` whatever model the caller
    named, unless another target of the rule names it.
    """
    return total((series, tally) for series, tally in figures.items() if _target_of(rule, series) == target.place)


def others_of(rule: Rule, target: Target, figures: Figures) -> Tally:
    """What became of them at the other targets of the split."""
    places = {one.place for one in rule.split} - {target.place}
    return total((series, tally) for series, tally in figures.items() if _target_of(rule, series) in places)


def of_rules(figures: Figures, names: Iterable[str]) -> dict[Series, Tally]:
    """Only the requests of the rules of these names."""
    wanted = frozenset(names)
    return {series: tally for series, tally in figures.items() if series.rule in wanted}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bound:
    """One measure against its bound. `count`: how often it was seen, of `enough`; `unit` empty: a ratio."""

    name: str
    value: float | None
    usual: float | None
    most: float
    count: int
    enough: int
    of: str
    unit: str = ""

    @property
    def lack(self) -> str:
        """What is missing before it can be judged; empty for nothing."""
        return f"{self.count} of {self.enough} {self.of} seen" if self.count < self.enough else ""

    @property
    def breach(self) -> str:
        """How it is broken; empty where it is not."""
        if self.value is None or self.value <= self.most:
            return ""
        beside = "" if self.usual is None else f"; the others: {self._said(self.usual)}"
        return f"{self.name} {self._said(self.value)} is above {self._said(self.most)} ({self.count} {self.of}{beside})"

    def _said(self, value: float) -> str:
        return f"{value:.0f} {self.unit}" if self.unit else f"{value:.3g}"


def _bounds(guard: Guard, seen: Conduct, usual: Conduct) -> list[_Bound]:
    """Those that the guard names."""
    least = guard.min_requests
    times, compared = min(least, ENOUGH_TIMES), min(least, ENOUGH_COMPARED)
    named = (
        ("error ratio", guard.max_error_ratio, "error_ratio", ("requests", seen.attempts, least)),
        ("violation ratio", guard.max_violation_ratio, "violation_ratio", ("requests", seen.attempts, least)),
        ("disagreement", guard.max_disagreement, "disagreement", ("comparisons", seen.compared, compared)),
        ("p99 of at least", guard.max_p99_ms, "p99_ms", ("answers", seen.answered, times)),
        (
            *("p99 of the first token of at least", guard.max_first_token_ms, "first_token_p99_ms"),
            ("streamed answers", seen.streamed, times),
        ),
    )
    bounds = []
    for name, most, measure, (of, count, enough) in named:
        if most is not None:
            unit = "ms" if measure.endswith("_ms") else ""
            surely, usually = (_surely(getattr(one, measure), unit) for one in (seen, usual))
            bounds.append(
                _Bound(name=name, value=surely, usual=usually, most=most, count=count, enough=enough, of=of, unit=unit)
            )
    return bounds


def _surely(value: float | None, unit: str) -> float | None:
    """A ratio as it is, of a time the lower end of its step."""
    return value / STEP if unit and value is not None else value


def _target_of(rule: Rule, series: Series) -> object:
    """The place of the rule's target that says most of the series' place; None where none of them leads there."""
    if series.rule != rule.name:
        return None
    fitting = [
        target
        for target in (*rule.split, *rule.fallback)
        if target.backend == series.backend
        and target.model in (ANY, series.model)
        and target.version in ("", series.version)
    ]
    best = max(fitting, key=lambda target: (target.model != ANY, target.version != ""), default=None)
    return best.place if best else None


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _p99_ms(histogram: dict[int, int]) -> float | None:
    found = percentile_us(histogram, _P99)
    return None if found is None else round(found / 1000, 3)
