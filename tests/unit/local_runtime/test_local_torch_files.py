"""Exported programs from the file to answers, with nothing but the file."""

import collections
import logging
import threading
import warnings

import numpy as np
import pytest

from local_runtime.errors import ModelLoadError
from local_runtime.executors.torch_model import TorchModel
from local_runtime.messages import InferRequest
from local_runtime.repository import torch_files
from local_runtime.repository.completion import place
from local_runtime.repository.reader import read_model
from local_runtime.scheduling.validation import RequestChecker


@pytest.fixture
def export(repository):
    def write(forward, *arguments, **keywords):
        import torch  # noqa: PLC0415 - only the tests that need it pay for it

        module = type("Model", (torch.nn.Module,), {"forward": forward})()
        (repository / "m" / "1").mkdir(parents=True, exist_ok=True)
        file = repository / "m" / "1" / "model.pt2"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.export.save(torch.export.export(module, arguments, keywords), file)
        return file

    return write


def ones():
    import torch  # noqa: PLC0415 - as above

    return torch.ones(2)


def names(specs):
    return [spec.name for spec in specs]


def asked(repository, values):
    """The answer to those values (by input), from a repository without a config."""
    source = read_model(repository, "m")
    config = source.config
    model = TorchModel(config=config, file=source.file("1"), placement=place(config, cuda_devices=0)[0])
    arrays = {name: np.full(2, value, np.float32) for name, value in values.items()}
    request = RequestChecker(config).check(InferRequest(model="m", inputs=arrays))
    (outcome,) = model.execute([request]).outcomes
    return {name: array.tolist()[0] for name, array in outcome.items()}


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (lambda s, _: s, {"OUTPUT__0": 8}),
        (lambda s, _: (s,), {"OUTPUT__0": 8}),
        (lambda s, d: (s, d), {"OUTPUT__0": 8, "OUTPUT__1": 2}),
        (lambda s, d: [s, d], {"OUTPUT__0": 8, "OUTPUT__1": 2}),
        (lambda s, d: {"sum": s, "Difference": d}, {"sum": 8, "Difference": 2}),
        (lambda s, d: collections.OrderedDict(z=s, a=d), {"z": 8, "a": 2}),
        (lambda s, d: {"a__0": s, "b__0": d}, {"a__0": 8, "b__0": 2}),
    ],
    ids=["tensor", "tuple of one", "tuple", "list", "dict", "ordered dict", "keys that look like positions"],
)
def test_whatever_forward_returns_is_answered_without_a_config(repository, export, result, expected):
    export(lambda self, Left, right: result(Left + right, Left - right), ones(), right=ones())  # noqa: N803 - names are tested
    config = read_model(repository, "m").config
    assert (names(config.inputs), names(config.outputs)) == (["Left", "right"], list(expected))
    assert asked(repository, {"Left": 5, "right": 3}) == expected


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda self, x: {"s": {"inner": x * 2}}, "'s' is not a tensor that a config can describe"),
        (lambda self, x: {3: x * 2}, "3 is not a tensor that a config can describe"),
        (lambda self, x: (x * 2, None), "'OUTPUT__1' is not a tensor that a config can describe"),
    ],
)
def test_results_that_no_config_can_describe_are_refused(repository, export, forward, reason):
    export(forward, ones())
    with pytest.raises(ModelLoadError, match=f"m/1/model.pt2: {reason}"):
        read_model(repository, "m")


def test_arguments_that_are_no_tensors_are_refused(repository, export):
    export(lambda self, x, pair: x + pair[0], ones(), (ones(), ones()))
    with pytest.raises(ModelLoadError, match="forward takes lists, tuples or dicts of tensors"):
        read_model(repository, "m")


def test_arguments_without_names_of_their_own_are_answered(repository, export):
    export(lambda self, *values: values[0] - values[1], ones(), ones())
    first, second = names(read_model(repository, "m").config.inputs)
    assert asked(repository, {first: 5, second: 3}) == {"OUTPUT__0": 2}


def test_one_file_is_read_at_a_time(export, monkeypatch):
    import torch  # noqa: PLC0415 - as above

    file = export(lambda self, x: x * 2, ones())
    load, alone, overlaps, failures = torch.export.load, threading.Lock(), [], []

    def counted(path):
        overlaps.append(not alone.acquire(blocking=False))
        try:
            return load(path)
        finally:
            if alone.locked():
                alone.release()

    def read():
        try:
            torch_files.load_exported(file)
        except Exception as error:  # noqa: BLE001 - whatever it is, the test is to tell it
            failures.append(error)

    monkeypatch.setattr(torch.export, "load", counted)
    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (failures, overlaps) == ([], [False] * 8)


def test_why_a_file_cannot_be_read_is_raised_and_not_logged(tmp_path, monkeypatch):
    # torch's loggers have handlers of their own, which no fixture sees.
    logged = []
    handler = logging.Handler()
    handler.emit = logged.append
    monkeypatch.setattr(logging.getLogger("torch.export"), "handlers", [handler])
    file = tmp_path / "model.pt2"
    file.write_bytes(b"junk")
    with pytest.raises(RuntimeError, match="failed reading zip archive"):
        torch_files.load_exported(file)
    assert not logged
