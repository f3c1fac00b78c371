import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from local_runtime.errors import ErrorCode
from local_runtime.scheduling.collate import concatenate, split


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_split_undoes_concatenate(rows):
    members = [
        {"X": np.full((count, 2), number), "S": np.full((count, 1), b"%d" % number, dtype=object)}
        for number, count in enumerate(rows)
    ]
    batch = concatenate(members)
    assert batch["X"].shape == (sum(rows), 2)
    for member, outcome in zip(members, split(batch, rows=rows, model="m"), strict=True):
        for name, array in member.items():
            np.testing.assert_array_equal(outcome[name], array)


def test_a_batch_never_shares_memory_with_its_members():
    array = np.zeros((1, 2))
    concatenate([{"X": array}])["X"][:] = 1
    assert not array.any()


@pytest.mark.parametrize("returned", [np.zeros((2, 2)), np.zeros((4, 2)), np.zeros(())])
def test_wrong_row_count_is_the_models_fault_for_every_member(returned):
    outcomes = split({"Y": returned}, rows=[1, 2], model="m")
    assert [outcome.code for outcome in outcomes] == [ErrorCode.INTERNAL] * 2
    assert "model 'm' returned" in outcomes[0].message


def test_inputs_that_no_member_has_are_not_in_the_batch():
    assert list(concatenate([{"X": np.zeros((1, 2))}, {"X": np.zeros((2, 2))}])) == ["X"]
