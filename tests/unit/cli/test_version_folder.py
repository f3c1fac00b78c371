"""A version's folder on its way into a model repository."""

import pytest

from gateway.cli import version_folder
from gateway.cli.version_folder import FolderRefused, advice, bring_back, place, plan, remove, set_aside


@pytest.fixture
def repository(tmp_path):
    model = tmp_path / "repository" / "m"
    for version in ("1", "3"):
        (model / version).mkdir(parents=True)
        (model / version / "model.py").write_text("x = 1")
    (model / "config.pbtxt").write_text('name: "m"')
    return tmp_path / "repository"


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "build"
    (folder / "weights").mkdir(parents=True)
    (folder / "model.py").write_text("x = 2")
    (folder / "weights" / "w.bin").write_bytes(b"w" * 1000)
    return folder


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("called", "asked", "number"), [("build", None, "4"), ("7", None, "7"), ("3", None, "4"), ("7", "9", "9")]
)
def test_the_number_is_the_one_asked_for_or_the_folders_own_or_the_next(repository, source, called, asked, number):
    source = source.rename(source.with_name(called))
    assert plan(source, [repository], model="m", version=asked).version == number


def test_it_is_copied_whole_and_appears_under_its_number(repository, source):
    (source / "__pycache__").mkdir()
    (source / "__pycache__" / "model.pyc").write_text("")
    (source / "link").symlink_to("weights/w.bin")
    heard = []
    placement = plan(source, [repository], model="m", version=None)
    place(placement, heard.append)
    assert names(repository / "m") == ["1", "3", "4", "config.pbtxt"]
    assert names(repository / "m" / "4") == ["link", "model.py", "weights"]
    assert (repository / "m" / "4" / "weights" / "w.bin").read_bytes() == b"w" * 1000
    assert not (repository / "m" / "4" / "link").is_symlink()
    assert sum(heard) == placement.total_bytes
    remove(placement)
    assert names(repository / "m") == ["1", "3", "config.pbtxt"]


def test_what_waits_has_no_name_that_triton_takes_for_a_version(repository, source):
    seen = []
    place(plan(source, [repository], model="m", version=None), lambda _: seen.extend(names(repository / "m")))
    (waiting,) = set(seen) - {"1", "3", "config.pbtxt"}
    assert waiting.startswith(".")


def test_it_goes_to_every_repository_or_to_none(repository, source, tmp_path):
    second = tmp_path / "second"
    (second / "m").mkdir(parents=True)
    (second / "m" / "config.pbtxt").write_text("")
    placement = plan(source, [repository, second], model="m", version=None)
    place(placement, lambda _: None)
    assert (second / "m" / "4" / "model.py").exists()
    (source / "model.py").unlink()
    (source / "model.py").mkdir()
    (source / "model.py" / "x").write_text("")
    again = plan(source, [repository, second], model="m", version=None)
    (second / "m" / again.version).write_text("")  # in the way

    with pytest.raises(FolderRefused):
        place(again, lambda _: None)
    assert names(repository / "m") == ["1", "3", "4", "config.pbtxt"]


def test_a_folder_that_lies_in_its_place_already_stays(repository):
    placement = plan(repository / "m" / "3", [repository], model="m", version=None)
    assert (placement.version, placement.is_there) == ("3", True)
    place(placement, lambda _: None)
    remove(placement)
    assert names(repository / "m") == ["1", "3", "config.pbtxt"]


@pytest.mark.parametrize(
    ("change", "version", "words"),
    [
        (lambda s: None, "3", "is there already"),
        (lambda s: None, "0", "is not a version"),
        (lambda s: None, "2.tmp", "is not a version"),
        (lambda s: (s / "model.py").unlink(), None, "has no model.py, which version 3 has"),
        (lambda s: (s / "out").symlink_to("/etc/hostname"), None, "a link that leads out of the folder"),
        (lambda s: (s / "gone").symlink_to("nowhere"), None, "not a file"),
    ],
)
def test_refusals(repository, source, change, version, words):
    change(source)
    with pytest.raises(FolderRefused, match=words):
        plan(source, [repository], model="m", version=version)


def test_an_empty_folder_and_an_unknown_model_are_refused(repository, source, tmp_path):
    (tmp_path / "empty").mkdir()
    for folder, model, words in (
        (tmp_path / "empty", "m", "holds no files"),
        (tmp_path / "nowhere", "m", "not a folder"),
        (source, "nobody", "no model with a config.pbtxt"),
        (source, "../m", "not the name of a model"),
    ):
        with pytest.raises(FolderRefused, match=words):
            plan(folder, [repository], model=model, version=None)


def test_a_version_that_was_rolled_back_is_set_aside_and_comes_back(repository):
    (aside,) = set_aside([repository], model="m", version="3")
    assert aside.name.startswith(".")
    assert version_folder.versions(repository / "m") == ["1"]
    assert set_aside([repository], model="m", version="3") == []
    bring_back([repository], model="m", version="3")
    assert sorted(version_folder.versions(repository / "m")) == ["1", "3"]
    bring_back([repository], model="m", version="3")


@pytest.mark.parametrize(
    ("policy", "serves", "is_told"),
    [
        ("", ["3"], False),
        ("version_policy: { latest { num_versions: 1 } }", ["3"], False),
        ("version_policy { latest: { num_versions: 1 } }", ["3"], False),
        ("version_policy { latest { } }", ["3"], False),
        ("# version_policy { all { } }", ["3"], False),
        ("", ["1"], True),
        ("", ["1", "3"], True),
        ("version_policy { all { } }", ["3"], True),
        ("version_policy: { specific { versions: [ 1 ] } }", ["3"], True),
        ("version_policy { latest { num_versions: 2 } }", ["3"], True),
    ],
)
def test_what_a_restart_would_serve_is_told_where_it_differs(repository, policy, serves, is_told):
    (repository / "m" / "config.pbtxt").write_text(f'name: "m"\n{policy}\n')
    told = advice(repository / "m", serves)
    assert bool(told) is is_told
    if is_told:
        assert f"versions: [ {', '.join(serves)} ]" in told
