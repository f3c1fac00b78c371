"""`quick_value`: a dataclass like any other value's, but for what the type checker alone refuses."""

from dataclasses import field, replace

import pytest

from gateway.core.values import quick_value


@quick_value
class Point:
    """Somewhere."""

    x: int
    y: int = 0
    note: str = field(default="", compare=False)


def test_equal_values_are_one_key_and_what_is_not_compared_does_not_count():
    assert {Point(x=1): "a"}[Point(x=1, note="b")] == "a"
    assert Point(x=1) != Point(x=2)
    assert replace(Point(x=1), y=2) == Point(x=1, y=2)


def test_it_has_no_room_for_other_fields_and_takes_no_positions():
    assert not hasattr(Point(x=1), "__dict__")
    with pytest.raises(TypeError):
        Point(1)
