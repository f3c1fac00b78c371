import numpy as np
import pytest

from local_runtime.repository.model_config import ControlInput, ControlKind, SequenceBatching, SequenceState
from local_runtime.scheduling.decisions import Slot
from local_runtime.scheduling.sequence_inputs import SequenceInputs

FILLER = Slot(request=None)


def control(kind, datatype="INT32", false_true=(0, 1)):
    return ControlInput(name=kind.name, kind=kind, datatype=datatype, false_true=false_true)


def corrid(datatype):
    return control(ControlKind.CORRID, datatype, None)


CONTROLS = (control(ControlKind.START), control(ControlKind.READY), control(ControlKind.END), corrid("UINT64"))
STATE = SequenceState(input_name="STATE_IN", output_name="STATE_OUT", datatype="FP32", dims=(2, -1))


def inputs(*, controls=(), states=(), max_batch_size=4, initial_states=None):
    return SequenceInputs(
        config=SequenceBatching(controls=controls, states=states),
        max_batch_size=max_batch_size,
        initial_states=initial_states or {"STATE_IN": np.zeros((1, 2, 1), np.float32)},
    )


def slot(name=7, flags="", request=1):
    return Slot(request=request, correlation_id=name, is_start="S" in flags, is_end="E" in flags)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (slot(42, "S"), [1, 1, 0, 42]),
        (slot(42), [0, 1, 0, 42]),
        (slot(42, "E"), [0, 1, 1, 42]),
        (slot(42, "SE"), [1, 1, 1, 42]),
        (slot(2**64 - 1), [0, 1, 0, 2**64 - 1]),
        (FILLER, [0, 0, 0, 0]),
    ],
)
def test_controls_say_what_the_slot_is(row, expected):
    made = inputs(controls=CONTROLS).inputs_for(row, {"X": np.ones((1, 3), np.int32)})
    assert list(made) == ["X", "START", "READY", "END", "CORRID"]
    assert [made[name].item() for name in ("START", "READY", "END", "CORRID")] == expected


@pytest.mark.parametrize(("max_batch_size", "shape"), [(4, (1, 1)), (1, (1, 1)), (0, (1,))])
def test_controls_have_one_value_for_each_row(max_batch_size, shape):
    made = inputs(controls=CONTROLS, max_batch_size=max_batch_size).inputs_for(slot(), {})
    assert {array.shape for array in made.values()} == {shape}


@pytest.mark.parametrize(
    ("datatype", "false_true", "numpy_type"),
    [("INT32", (3, -5), np.int32), ("FP32", (0.5, -1.5), np.float32), ("BOOL", (1, 0), np.bool_)],
)
def test_controls_carry_the_configured_values(datatype, false_true, numpy_type):
    made = inputs(controls=(control(ControlKind.START, datatype, false_true),))
    for flags, expected in (("", false_true[0]), ("S", false_true[1])):
        start = made.inputs_for(slot(flags=flags), {})["START"]
        assert start.dtype == numpy_type
        assert start.item() == expected


@pytest.mark.parametrize(
    ("datatype", "name", "expected"),
    [
        ("UINT64", 2**63 + 5, 2**63 + 5),
        ("INT64", 2**63 + 5, 5 - 2**63),
        ("UINT32", 2**40 + 7, 7),
        ("INT32", 2**32 - 1, -1),
        ("BYTES", 5, b"5"),
        ("BYTES", "straße", "straße".encode()),
        ("BYTES", "a\0\0", b"a\0\0"),
    ],
)
def test_the_correlation_id_takes_the_type_of_its_input(datatype, name, expected):
    made = inputs(controls=(corrid(datatype),)).inputs_for(slot(name), {})["CORRID"]
    assert made.item() == expected
    assert made.dtype == {"BYTES": np.object_}.get(datatype, np.dtype(datatype.lower()))


def test_a_filler_has_the_empty_string_as_its_id():
    assert inputs(controls=(corrid("BYTES"),)).inputs_for(FILLER, {})["CORRID"].item() == b""


@pytest.mark.parametrize("datatype", ["UINT64", "INT64", "UINT32", "INT32"])
def test_string_ids_of_the_same_beginning_get_different_numbers(datatype):
    made = inputs(controls=(corrid(datatype),))
    numbers = {made.inputs_for(slot(f"user-{number}"), {})["CORRID"].item() for number in range(100)}
    assert len(numbers) == 100


def test_the_number_of_a_string_id_never_changes():
    """Models may store it; the value is the specification: BLAKE2b of the UTF-8, first 8 bytes, little-endian."""
    made = inputs(controls=(corrid("UINT64"),)).inputs_for(slot("user-x"), {})["CORRID"]
    assert made.item() == 1226002671530046060


def test_a_filler_gets_zeros_in_the_shape_of_its_neighbours():
    template = {
        "X": np.full((1, 3), 7, np.float32),
        "TEXT": np.array([[b"a", b"b"]], dtype=object),
        "FLAG": np.ones((1, 1), np.bool_),
    }
    made = inputs().inputs_for(FILLER, template)
    assert made["X"].tolist() == [[0, 0, 0]]
    assert made["X"].dtype == np.float32
    assert made["TEXT"].tolist() == [[b"", b""]]
    assert made["FLAG"].tolist() == [[False]]
    assert template["X"][0, 0] == 7


def test_state_begins_with_zeros_then_is_what_the_model_gave():
    made = inputs(states=(STATE,))
    first = made.inputs_for(slot(flags="S"), {"X": np.zeros((1, 1))})
    assert first["STATE_IN"].dtype == np.float32
    assert first["STATE_IN"].tolist() == [[[0], [0]]]
    state = np.full((1, 2, 3), 5, np.float32)
    assert made.store(slot(flags="S"), {"Y": np.ones(1), "STATE_OUT": state}).keys() == {"Y"}
    state[:] = 9
    assert made.inputs_for(slot(), {})["STATE_IN"].tolist() == [[[5] * 3] * 2]
    assert made.state_output_names == ("STATE_OUT",)


def test_state_begins_with_the_given_value_at_every_start():
    initial = np.full((1, 2, 1), 3, np.float32)
    made = inputs(states=(STATE,), initial_states={"STATE_IN": initial})
    given = made.inputs_for(slot(flags="S"), {})["STATE_IN"]
    assert given.tolist() == initial.tolist()
    given[:] = 8
    made.store(slot(flags="S"), {"STATE_OUT": given})
    assert made.inputs_for(slot(flags="S"), {})["STATE_IN"].tolist() == initial.tolist(), "in spite of the model"


@pytest.mark.parametrize("datatype", ["UINT64", "INT64", "UINT32", "INT32", "BYTES"])
@pytest.mark.parametrize("name", [1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, np.uint64(2**64 - 1), "a", "😀" * 9, "\0"])
def test_every_id_that_a_request_may_have_becomes_a_value(datatype, name):
    made = inputs(controls=(corrid(datatype),)).inputs_for(slot(name), {})["CORRID"]
    assert made.shape == (1, 1)
    if not isinstance(name, str) and datatype != "BYTES":
        bits = 8 * made.itemsize
        assert int(made.item()) % 2**bits == int(name) % 2**bits


def test_sequences_do_not_see_each_others_state():
    made = inputs(states=(STATE,))
    for name in (5, "5"):
        made.inputs_for(slot(name, "S"), {})
    made.store(slot(5), {"STATE_OUT": np.full((1, 2, 1), 1, np.float32)})
    made.store(slot("5"), {"STATE_OUT": np.full((1, 2, 1), 2, np.float32)})
    assert made.inputs_for(slot(5), {})["STATE_IN"].max() == 1
    assert made.inputs_for(slot("5"), {})["STATE_IN"].max() == 2


def test_a_failed_request_leaves_the_state_before_it():
    made = inputs(states=(STATE,))
    made.inputs_for(slot(flags="S"), {})
    made.store(slot(flags="S"), {"STATE_OUT": np.full((1, 2, 1), 4, np.float32)})
    spoilt = made.inputs_for(slot(), {})["STATE_IN"]
    spoilt[:] = np.nan
    assert made.inputs_for(slot(), {})["STATE_IN"].max() == 4


def test_a_failed_start_does_not_bring_back_the_sequence_before():
    made = inputs(states=(STATE,))
    made.store(slot(), {"STATE_OUT": np.full((1, 2, 1), 4, np.float32)})
    made.inputs_for(slot(flags="S"), {})
    assert made.inputs_for(slot(), {})["STATE_IN"].max() == 0


@pytest.mark.parametrize("ending", ["end request", "drop"])
def test_state_is_given_up_with_its_sequence(ending):
    made = inputs(states=(STATE,))
    made.store(slot(flags="S"), {"STATE_OUT": np.ones((1, 2, 1), np.float32)})
    if ending == "drop":
        made.drop(7)
        made.drop(7)
    else:
        assert made.store(slot(flags="E"), {"STATE_OUT": np.ones((1, 2, 1), np.float32)}) == {}
    assert not made._states


def test_a_filler_neither_reads_nor_writes_state():
    made = inputs(states=(STATE,), initial_states={"STATE_IN": np.ones((1, 2, 4), np.float32)})
    assert made.inputs_for(FILLER, {})["STATE_IN"].tolist() == [[[0] * 4] * 2]
    assert made.store(FILLER, {"Y": np.ones(1), "STATE_OUT": np.ones((1, 2, 4))}).keys() == {"Y"}
    assert not made._states
