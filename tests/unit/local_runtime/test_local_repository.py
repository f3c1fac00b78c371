import errno
import gc
import io
import os
import shutil

import pytest

from local_runtime.errors import ModelLoadError
from local_runtime.repository.reader import (
    ModelSource,
    NoServedVersion,
    Unreadable,
    fingerprint,
    fingerprints,
    is_model_name,
    names,
    read,
    read_model,
)

ENSEMBLE = """
platform: "ensemble"
input [ { name: "A" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "B" data_type: TYPE_FP32 dims: [ 2 ] } ]
ensemble_scheduling { step [
    { model_name: "inner" model_version: -1 input_map { key: "X" value: "A" } output_map { key: "Y" value: "T" } },
    { model_name: "gone" model_version: -1 input_map { key: "X" value: "T" } output_map { key: "Y" value: "B" } } ] }
"""
JSON = (
    '{"backend": "python", "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [7]}], '
    '"output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [7]}]}'
)


@pytest.fixture
def write_versions(write_python):
    """A Python model with those version folders; "policy" is added to its config."""

    def write(*versions, policy=""):
        folder = write_python("m", version=versions[0])
        for version in versions[1:]:
            shutil.copytree(folder / versions[0], folder / version)
        with (folder / "config.pbtxt").open("a") as config:
            config.write(policy)
        return folder

    return write


@pytest.mark.parametrize(
    ("policy", "served"),
    [
        ("", ("10",)),
        ("version_policy { latest { num_versions: 2 } }", ("9", "10")),
        ("version_policy { latest { num_versions: 9 } }", ("2", "9", "10")),
        ("version_policy { all { } }", ("2", "9", "10")),
        ("version_policy { specific { versions: [ 10, 2, 4 ] } }", ("2", "10")),
    ],
)
def test_versions_follow_the_policy_by_number(repository, write_versions, policy, served):
    passed_over = ("notes", "1.5", "0", "011", "-3", "+11", "1e3", "12 ", "٣", str(2**63), "9" * 255)
    folder = write_versions("2", "9", "10", *passed_over, policy=policy)
    source = read(repository)["m"]
    assert (source.folder, source.versions) == (folder, served)
    assert source.file("2") == folder / "2" / "model.py"


@pytest.mark.parametrize(
    "policy", ["version_policy { specific { versions: [ 7 ] } }", "version_policy { latest { num_versions: 0 } }"]
)
def test_policy_without_a_version_is_a_fault_of_its_own(repository, write_versions, policy):
    write_versions("1", policy=policy)
    with pytest.raises(NoServedVersion) as refused:
        read_model(repository, "m")
    assert str(refused.value) == "at least one version must be available under the version policy of model 'm'"


def test_all_folders_with_a_model_in_order(repository, write_python):
    write_python("b")
    write_python("a")
    (write_python("no_config") / "config.pbtxt").unlink()
    (repository / "__pycache__").mkdir()
    (repository / "notes" / "1").mkdir(parents=True)
    (repository / "build.py").write_text("")
    assert names(repository) == ["a", "b", "no_config"]
    assert list(read(repository)) == ["a", "b", "no_config"]


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
    assert found["gone"].reason == "failed to load 'gone', failed to poll from model repository"


def test_what_is_wrong_is_told_in_its_place(repository, write_python, write_config):
    write_python("good")
    write_config("no_file", (repository / "good" / "config.pbtxt").read_text())
    (write_python("no_version") / "1").rename(repository / "no_version" / "one")
    for name, label in (("no_labels", "labels.txt"), ("outside", "../good/config.pbtxt")):
        config = write_python(name) / "config.pbtxt"
        config.write_text(config.read_text().replace('name: "Y"', f'name: "Y" label_filename: "{label}"'))
    (write_python("binary") / "config.pbtxt").write_bytes(b"\xff\xfe")
    (write_python("no_config") / "config.pbtxt").unlink()
    reasons = {name: getattr(entry, "reason", None) for name, entry in read(repository).items()}
    assert reasons.pop("good") is None
    assert reasons.pop("binary").startswith("failed to read binary/config.pbtxt")
    assert reasons == {
        "no_file": "no such file: no_file/1/model.py",
        "no_version": "at least one version must be available under the version policy of model 'no_version'",
        "no_labels": "no such label file: no_labels/labels.txt",
        "outside": (
            "label file path '../good/config.pbtxt' for output 'Y' in model 'outside' is outside model directory"
        ),
        "no_config": "no_config/1/model.py does not tell its inputs and outputs: a config.pbtxt must",
    }


@pytest.mark.parametrize("label", ["loop.txt", "a\\000b"])
def test_labels_at_no_real_path_are_refused(repository, write_python, label):
    folder = write_python("m")
    (folder / "loop.txt").symlink_to("loop.txt")
    config = folder / "config.pbtxt"
    config.write_text(config.read_text().replace('name: "Y"', f'name: "Y" label_filename: "{label}"'))
    with pytest.raises(ModelLoadError, match="label"):
        read_model(repository, "m")


def test_a_config_that_is_too_large_is_refused_unread(repository, write_python):
    config = write_python("m") / "config.pbtxt"
    config.write_text(config.read_text() + "#" * (4 * 2**20))
    with pytest.raises(ModelLoadError, match=r"failed to read m/config\.pbtxt: it is larger than 4194304 bytes"):
        read_model(repository, "m")


@pytest.mark.parametrize("kind", ["folder", "pipe", "loop"])
def test_a_config_that_is_no_file_is_not_waited_for(repository, kind):
    (repository / "m" / "1").mkdir(parents=True)
    make_other(repository / "m" / "config.pbtxt", kind)
    assert names(repository) == []
    with pytest.raises(ModelLoadError, match=r"failed to read m/config\.pbtxt: no such file"):
        read_model(repository, "m")


@pytest.mark.parametrize("kind", ["folder", "pipe", "loop"])
@pytest.mark.parametrize("file", ["model.py", "model.onnx", "model.pt", "model.pt2"])
def test_a_model_that_is_no_file_is_not_waited_for(repository, write_config, kind, file):
    config = f'backend: "{ {"model.py": "python", "model.onnx": "onnxruntime"}.get(file, "pytorch") }"'
    make_other(write_config("m", config) / "1" / file, kind)
    with pytest.raises(ModelLoadError):
        read_model(repository, "m")


def make_other(path, kind):
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path.name)


@pytest.mark.parametrize("unreadable", ["config.pbtxt", "1/model.py", "."])
def test_what_may_not_be_read_is_a_fault_of_its_model_alone(repository, write_python, monkeypatch, unreadable):
    write_python("good")
    folder = write_python("m", code="def auto_complete_config(): ...")
    forbid(monkeypatch, str(folder / unreadable))
    found = read(repository, ["good", "m"], complete_python=lambda _, message: message)
    assert isinstance(found["good"], ModelSource)
    assert isinstance(found["m"], Unreadable)
    assert "good" in names(repository)
    assert "good" in fingerprints(repository)


def forbid(monkeypatch, path):
    """As for a process without the right to read it; tests may run as a user who has every right."""
    refused = PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    def guard(function):
        def guarded(where, *args, **options):
            if str(where) == path:
                raise refused
            return function(where, *args, **options)

        return guarded

    monkeypatch.setattr(os, "scandir", guard(os.scandir))
    monkeypatch.setattr(io, "open", guard(io.open))


def test_folders_that_vanish_meanwhile_are_not_there(repository, write_python, monkeypatch):
    for name in ("a", "b", "c"):
        write_python(name)
    (repository / "b" / "config.pbtxt").unlink()
    real = os.scandir

    def scandir(path):
        if str(path) == str(repository / "b"):
            shutil.rmtree(repository / "b")
            shutil.rmtree(repository / "c")
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert set(names(repository)) <= {"a", "c"}
    assert names(repository) == ["a"]


def test_a_repository_that_cannot_be_listed_is_not_one_without_models(tmp_path):
    assert names(tmp_path / "gone") == []
    with pytest.raises(ModelLoadError, match="failed to list"):
        fingerprints(tmp_path / "gone")


def test_names_lists_the_repository_once(repository, write_python, monkeypatch):
    for name in ("a", "b", "c"):
        write_python(name)
    listed = []
    real = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(str(path)) or real(path))
    assert names(repository) == ["a", "b", "c"]
    assert listed == [str(repository)]


def test_fingerprint_follows_links_but_not_in_circles(write_python, tmp_path):
    folder = write_python("m")
    (folder / "1" / "up").symlink_to("..")
    (folder / "self").symlink_to(".")
    (folder / "2").symlink_to("1")
    (folder / "nowhere").symlink_to("nowhere")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "data").write_text("1")
    (outside / "back").symlink_to(folder)
    (folder / "out").symlink_to(outside)
    before = fingerprint(folder)
    paths = [path for path, _, _ in before]
    links = ["2/", "2/model.py", "2/up/", "config.pbtxt", "out/", "out/back/", "out/data", "self/"]
    assert paths == ["1/", "1/model.py", "1/up/", *links]
    (outside / "data").write_text("22")
    assert fingerprint(folder) != before


def test_every_served_version_must_have_its_file(repository, write_versions):
    folder = write_versions("1", "2", policy="version_policy { all { } }")
    (folder / "1" / "model.py").unlink()
    with pytest.raises(ModelLoadError, match=r"no such file: m/1/model\.py"):
        read_model(repository, "m")


def test_no_such_repository(tmp_path):
    with pytest.raises(ModelLoadError, match="is not a folder"):
        read(tmp_path / "absent")


@pytest.mark.parametrize(
    ("name", "is_name"),
    [
        *((name, False) for name in ("", ".", "..", "../models/m", "m/1", "m/", "/etc", "a\\b", "m\0")),
        *((name, True) for name in ("absent", "loop", "long" * 100)),
    ],
)
def test_name_that_is_no_folder_of_the_repository_is_unknown(repository, write_python, name, is_name):
    write_python("m")
    (repository / "loop").symlink_to("loop")
    assert is_model_name(name) == is_name
    with pytest.raises(ModelLoadError) as refused:
        read_model(repository, name)
    assert str(refused.value) == f"failed to load '{name}', failed to poll from model repository"


def test_config_in_place_of_the_models_own(repository, write_python):
    write_python("m")
    source = read_model(repository, "m", config_json=JSON)
    assert (source.folder, source.config.inputs[0].dims) == (repository / "m", (7,))


def test_a_config_in_place_of_a_broken_one(repository, write_python):
    (write_python("m") / "config.pbtxt").write_text("nonsense")
    assert read_model(repository, "m", config_json=JSON).config.name == "m"


def test_files_make_a_folder_of_their_own_for_as_long_as_it_is_needed(repository):
    source = read_model(repository, "new", config_json=JSON, files={"1/model.py": b"# a", "1/sub/data.bin": b"\0"})
    folder = source.folder
    assert (folder.name, source.versions, source.file("1").read_bytes()) == ("new", ("1",), b"# a")
    assert (folder / "1" / "sub" / "data.bin").read_bytes() == b"\0"
    assert not (repository / "new").exists()
    del source
    gc.collect()
    assert not folder.exists()


def test_files_replace_what_lies_in_the_repository(repository, write_python):
    write_python("m")
    source = read_model(repository, "m", config_json=JSON, files={"3/model.py": b""})
    assert source.versions == ("3",)


def test_files_need_a_config(repository):
    with pytest.raises(ModelLoadError, match="files can only be given together with a config"):
        read_model(repository, "m", files={"1/model.py": b""})


@pytest.mark.parametrize("path", ["../x", "/x", "1/../../../x", "", ".", "1\\..\\x", "1/\0", "1/\ud800"])
def test_files_stay_in_their_folder(repository, path):
    with pytest.raises(ModelLoadError, match="unsafe file path"):
        read_model(repository, "m", config_json=JSON, files={path: b""})


def test_files_that_collide_are_refused(repository):
    with pytest.raises(ModelLoadError, match="cannot write file '1/a/b'"):
        read_model(repository, "m", config_json=JSON, files={"1/a": b"", "1/a/b": b""})


def test_fingerprint_changes_with_the_files_and_nothing_else(write_versions):
    folder = write_versions("1")
    before = fingerprint(folder)
    (folder / "1" / "__pycache__").mkdir()
    (folder / "1" / "__pycache__" / "model.pyc").write_text("cache")
    assert fingerprint(folder) == before
    seen = {before}
    for change in (
        lambda: os.utime(folder / "config.pbtxt", ns=(1, 1)),
        lambda: (folder / "1" / "model.py").write_text("other"),
        (folder / "2").mkdir,
        lambda: (folder / "1" / "more.bin").write_text(""),
        (folder / "1" / "more.bin").unlink,
    ):
        change()
        seen.add(fingerprint(folder))
    # Taking the added file away again leads back to what was before it came.
    assert len(seen) == 5


def test_fingerprint_of_a_source_by_version_and_of_what_they_share(repository, write_versions):
    folder = write_versions("1", "10", policy="version_policy { all { } }")
    before = read_model(repository, "m")
    assert fingerprints(repository) == {"m": before.fingerprint}
    (folder / "10" / "model.py").write_text("# other")
    after = read_model(repository, "m")
    assert after.fingerprint != before.fingerprint
    assert after.version_fingerprint("10") != before.version_fingerprint("10")
    assert after.version_fingerprint("1") == before.version_fingerprint("1")
    assert after.shared_fingerprint == before.shared_fingerprint
    (folder / "labels.txt").write_text("a")
    assert read_model(repository, "m").shared_fingerprint != before.shared_fingerprint
