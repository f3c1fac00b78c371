"""What is attacked, and how: inputs from a strategy, a check that raises, bounds of each input, the count of all."""

import contextlib
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

HANG_S = 30.0
"""For one input: hundreds of times what the slowest takes, so that a busy machine is no failure."""
GROWTH_BYTES = 1024 * 1024 * 1024
"""What the process may grow by in a target: the largest picture that is decoded takes a fifth of that."""


class Hang(BaseException):
    """One input took `HANG_S`. No `Exception`: what is attacked catches those."""


class Grown(AssertionError):
    """The process grew by more than `GROWTH_BYTES`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One thing that reads what others write.

    Args:
        about: what has to hold, in a few words.
        inputs: what it is given.
        check: raises where that does not hold.
        is_slow: an input takes milliseconds: a tenth of the examples is tried.
    """

    name: str
    about: str
    inputs: st.SearchStrategy[Any]
    check: Callable[[Any], None]
    is_slow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What came of one target."""

    name: str
    tried: int
    seconds: float
    slowest_s: float
    grown_bytes: int
    failure: BaseException | None

    def line(self) -> str:
        told = "ok" if self.failure is None else f"FAILED: {type(self.failure).__name__}"
        return (
            f"{self.name:24} {self.tried:9,} inputs {self.seconds:8.1f} s, slowest {self.slowest_s * 1e3:7.1f} ms, "
            f"memory +{self.grown_bytes / 2**20:.0f} MiB: {told}"
        )


def attack(target: Target, *, examples: int, seed_number: int) -> Report:
    """Try so many inputs, the same ones for the same seed; a failure is shrunk and told."""
    tried, slowest_s, before = 0, 0.0, peak_bytes()

    def once(value: Any) -> None:
        nonlocal tried, slowest_s
        tried += 1
        began = time.perf_counter()
        with bounded(HANG_S):
            target.check(value)
        slowest_s = max(slowest_s, time.perf_counter() - began)

    phases = [Phase.explicit, Phase.generate, Phase.shrink]
    asked = settings(
        max_examples=max(1, examples // 10 if target.is_slow else examples),
        database=None,
        deadline=None,
        phases=phases,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    failure: BaseException | None = None
    began = time.perf_counter()
    try:
        seed(f"{seed_number}:{target.name}")(asked(given(target.inputs)(once)))()
        grown = peak_bytes() - before
        if grown > GROWTH_BYTES:
            failure = Grown(f"{target.name}: grew by {grown:,} bytes")
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is what was looked for
        failure = error
    return Report(
        name=target.name,
        tried=tried,
        seconds=time.perf_counter() - began,
        slowest_s=slowest_s,
        grown_bytes=peak_bytes() - before,
        failure=failure,
    )


@contextlib.contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """Raise `Hang` in what takes longer."""

    def rung(*_: object) -> None:
        raise Hang(f"took {seconds:g} s")

    before = signal.signal(signal.SIGALRM, rung)
    remaining, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, remaining)  # a test's own time goes on
        signal.signal(signal.SIGALRM, before)


def peak_bytes() -> int:
    """The most that this process has held in memory so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
