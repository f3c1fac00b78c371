import pytest

from local_runtime.errors import ModelLoadError
from local_runtime.repository.reader import ModelSource, Unreadable, read

ENSEMBLE = """
platform: "ensemble"
input [ { name: "A" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "B" data_type: TYPE_FP32 dims: [ 2 ] } ]
ensemble_scheduling { step [ { model_name: "inner" model_version: -1 }, { model_name: "gone" model_version: -1 } ] }
"""


def test_highest_version_by_number(repository, write_python):
    folder = write_python("m", version="9")
    for version in ("10", "2", "notes", "1.5"):
        (folder / version).mkdir()
    (folder / "10" / "model.py").write_text("")
    source = read(repository)["m"]
    assert isinstance(source, ModelSource)
    assert (source.version, source.file) == ("10", folder / "10" / "model.py")


def test_all_folders_with_a_config_in_order(repository, write_python):
    write_python("b")
    write_python("a")
    (repository / "__pycache__").mkdir()
    (repository / "build.py").write_text("")
    assert list(read(repository)) == ["a", "b"]


def test_named_ensemble_brings_its_models(repository, write_python, write_config):
    write_python("inner")
    write_python("other")
    write_config("ens", ENSEMBLE)
    found = read(repository, ["ens"])
    assert [(name, type(source)) for name, source in found.items()] == [
        ("ens", ModelSource),
        ("gone", Unreadable),
        ("inner", ModelSource),
    ]
    assert found["gone"].reason.startswith("failed to read gone/config.pbtxt")


def test_what_is_wrong_is_told_in_its_place(repository, write_python, write_config):
    write_python("good")
    write_config("no_file", (repository / "good" / "config.pbtxt").read_text())
    (write_python("no_version") / "1").rename(repository / "no_version" / "one")
    labels = write_python("no_labels") / "config.pbtxt"
    labels.write_text(labels.read_text().replace('name: "Y"', 'name: "Y" label_filename: "labels.txt"'))
    (write_python("binary") / "config.pbtxt").write_bytes(b"\xff\xfe")
    reasons = {name: getattr(entry, "reason", None) for name, entry in read(repository).items()}
    assert reasons.pop("good") is None
    assert reasons.pop("binary").startswith("failed to read binary/config.pbtxt")
    assert reasons == {
        "no_file": "no such file: no_file/1/model.py",
        "no_version": "at least one version must be available under the version policy of model 'no_version'",
        "no_labels": "no such label file: no_labels/labels.txt",
    }


def test_no_such_repository(tmp_path):
    with pytest.raises(ModelLoadError, match="is not a folder"):
        read(tmp_path / "absent")
