import pytest

from gateway.core.models import ModelFacts, TensorFacts, rows, why_wrong
from gateway.core.types import Tensor

FACTS = ModelFacts(
    name="m",
    outputs={"Y": TensorFacts(datatype="FP32", shape=(-1, 2)), "N": TensorFacts(datatype="INT32", shape=(-1, -1, 3))},
    max_batch_size=8,
)


def tensor(name: str = "Y", datatype: str = "FP32", shape: tuple[int, ...] = (4, 2)) -> Tensor:
    return Tensor(name=name, datatype=datatype, shape=shape, data=b"")


@pytest.mark.parametrize(
    "outputs",
    [[], [tensor()], [tensor(), tensor("N", "INT32", (4, 0, 3))]],
)
def test_what_fits_is_right(outputs):
    assert why_wrong(FACTS, outputs, 4) is None


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (tensor("Z"), "output 'Z' is not one of the model's: Y, N"),
        (tensor(datatype="FP64"), "output 'Y' is FP64, the model declares FP32"),
        (tensor(shape=(4, 3)), "output 'Y' has the shape [4, 3], the model declares [-1, 2]"),
        (tensor(shape=(4,)), "output 'Y' has the shape [4], the model declares [-1, 2]"),
        (tensor(shape=()), "output 'Y' has the shape [], the model declares [-1, 2]"),
        (tensor(shape=(3, 2)), "output 'Y' has 3 rows for 4 of the request"),
    ],
)
def test_what_does_not_fit_is_named(output, text):
    assert why_wrong(FACTS, [output], 4) == text


def test_without_batches_or_for_a_decoupled_model_rows_are_free():
    assert why_wrong(FACTS, [tensor(shape=(3, 2))], None) is None
    decoupled = ModelFacts(name="m", outputs=FACTS.outputs, max_batch_size=8, is_decoupled=True)
    assert why_wrong(decoupled, [tensor(shape=(3, 2))], 4) is None


@pytest.mark.parametrize(
    ("max_batch_size", "inputs", "expected"),
    [(8, [tensor(shape=(5, 2))], 5), (0, [tensor(shape=(5, 2))], None), (8, [], None), (8, [tensor(shape=())], None)],
)
def test_rows_are_the_first_dimension_of_a_model_that_batches(max_batch_size, inputs, expected):
    assert rows(ModelFacts(name="m", max_batch_size=max_batch_size), inputs) == expected
