import os
from pathlib import Path

import numpy as np
import pytest

from local_runtime.errors import ModelLoadError
from local_runtime.repository.parsing import parse
from local_runtime.repository.side_files import initial_states, read_labels

CONFIG = """backend: "python" max_batch_size: %d
    input [ { name: "X" data_type: TYPE_INT32 dims: [ 1 ] } ]
    output [ { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] label_filename: "labels.txt" },
             { name: "Z" data_type: TYPE_INT32 dims: [ 1 ] } ]
    sequence_batching { state [ %s ] }"""


def config(state="", max_batch_size=4):
    return parse(CONFIG % (max_batch_size, state), folder_name="m")


def state(kind="FP32", dims="2, -1", initial=""):
    return f'{{ input_name: "S" output_name: "T" data_type: TYPE_{kind} dims: [ {dims} ] {initial} }}'


def from_file(file="s.bin", kind="FP32"):
    given = f'initial_state {{ name: "s" data_type: TYPE_{kind} dims: [ 2 ] data_file: "{file}" }}'
    return config(state(kind, "-1", given))


def written(folder, content):
    (folder / "initial_state").mkdir()
    (folder / "initial_state" / "s.bin").write_bytes(content)
    return folder


@pytest.mark.parametrize(("max_batch_size", "rows"), [(4, (1,)), (0, ())])
@pytest.mark.parametrize(("kind", "value"), [("FP32", 0), ("BOOL", False), ("BF16", 0), ("STRING", b"")])
def test_states_begin_with_zeros_with_one_for_a_free_dimension(tmp_path, max_batch_size, rows, kind, value):
    made = initial_states(config(state(kind), max_batch_size), tmp_path)
    assert made["S"].shape == (*rows, 2, 1)
    assert set(made["S"].ravel().tolist()) == {value}


def test_the_initial_shape_may_be_configured(tmp_path):
    given = 'initial_state { name: "s" data_type: TYPE_STRING dims: [ 0, 3 ] zero_data: true }'
    assert initial_states(config(state("STRING", "-1, 3", given)), tmp_path)["S"].shape == (1, 0, 3)


def test_a_model_without_sequences_has_no_states(tmp_path):
    text = CONFIG.split("sequence_batching", maxsplit=1)[0] % 4
    assert initial_states(parse(text, folder_name="m"), tmp_path) == {}


def test_states_begin_with_the_values_of_a_file(tmp_path, monkeypatch):
    folder = written(tmp_path, np.array([3, 4], "<f4").tobytes())
    made = initial_states(from_file(), folder)["S"]
    assert made.tolist() == [[3, 4]]
    made[:] = 5  # its own memory, to be written
    monkeypatch.chdir(folder)
    Path("below").mkdir()
    monkeypatch.chdir("below")
    assert initial_states(from_file(), Path(".."))["S"].tolist() == [[3, 4]], "the repository's own path may have dots"


@pytest.mark.parametrize(
    ("file", "kind", "content", "reason"),
    [
        ("s.bin", "FP32", b"1234", "initial state 's.bin' of 'S' must hold 8 bytes of FP32, got 4"),
        ("s.bin", "STRING", b"12345678", "must hold .* bytes of BYTES"),
        ("gone", "FP32", b"", "failed to read initial state 'gone'"),
        ("../initial_state/s.bin", "FP32", b"12345678", "lies outside of the model's folder"),
        ("/etc/hostname", "FP32", b"", "lies outside of the model's folder"),
        ("a\\000b", "FP32", b"", "failed to read initial state"),
    ],
)
def test_a_file_that_is_not_the_state_is_refused(tmp_path, file, kind, content, reason):
    with pytest.raises(ModelLoadError, match=reason):
        initial_states(from_file(file, kind), written(tmp_path, content))


def test_a_pipe_is_not_waited_for(tmp_path):
    (tmp_path / "initial_state").mkdir()
    os.mkfifo(tmp_path / "initial_state" / "s.bin")
    with pytest.raises(ModelLoadError, match="no such file"):
        initial_states(from_file(), tmp_path)


def test_a_state_that_fits_nowhere_is_refused(tmp_path):
    with pytest.raises(ModelLoadError, match=r"state 'S' of shape \[\d+, \d+\] does not fit into memory"):
        initial_states(config(state(dims="1000000000000, 1000000000000")), tmp_path)


def test_labels_are_the_lines_of_the_file(tmp_path):
    (tmp_path / "labels.txt").write_text("cat\nDüsseldorf\n", encoding="utf-8")
    assert read_labels(config(), tmp_path) == {"Y": ("cat", "Düsseldorf")}


@pytest.mark.parametrize("content", [b"\xff\xfe", None])
def test_labels_that_cannot_be_read_are_told(tmp_path, content):
    if content is not None:
        (tmp_path / "labels.txt").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"failed to read label file m/labels\.txt"):
        read_labels(config(), tmp_path)
