"""A small, fixed share of `make fuzz`: each target with a few inputs, the same ones every time."""

import warnings

import pytest
from hypothesis import strategies as st

from tests.fuzz import TARGETS
from tests.fuzz.target import Grown, Hang, Target, attack, bounded

EXAMPLES = 25


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_nothing_but_the_declared_error(target):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        report = attack(target, examples=EXAMPLES, seed_number=11)
    if report.failure is not None:
        raise report.failure
    assert report.tried >= EXAMPLES // 20


def test_a_target_that_fails_is_told_with_its_input():
    def check(number):
        assert number < 100

    report = attack(Target(name="x", about="", inputs=st.integers(0, 1000), check=check), examples=200, seed_number=1)
    assert isinstance(report.failure, AssertionError)
    assert "FAILED: AssertionError" in report.line()
    again = attack(Target(name="x", about="", inputs=st.integers(0, 1000), check=check), examples=200, seed_number=1)
    assert again.tried == report.tried  # by its seed


def test_a_hang_is_ended():
    def check(_):
        while True:
            pass

    with pytest.raises(Hang):
        attack_once(check)


def attack_once(check):
    with bounded(0.05):
        check(None)


def test_a_grown_process_is_a_failure(monkeypatch):
    sizes = iter([0, 10 * 2**30, 10 * 2**30])
    monkeypatch.setattr("tests.fuzz.target.peak_bytes", lambda: next(sizes))
    report = attack(Target(name="x", about="", inputs=st.just(1), check=lambda _: None), examples=1, seed_number=1)
    assert isinstance(report.failure, Grown)
