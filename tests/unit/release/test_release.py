"""What a release is said to be: its version everywhere, its notes, what it depends on."""

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import gateway
from release import __main__ as command
from release.notes import of_draft, of_version, sections
from release.packages import EXTRAS, ReleaseError, closure, declared, pins, version

ROOT = Path(__file__).parents[3]
CHANGELOG = """# Changelog

## [Unreleased]

### Added
- New.

## [1.2.0] - 2026-11-30

### Fixed
- Old.

## [1.1.0]
- Older.
"""


def test_the_version_is_the_same_everywhere():
    assert gateway.__version__ == version()


def test_a_versions_notes_are_its_part_of_the_changelog():
    assert of_version(CHANGELOG, "1.2.0").text == "### Fixed\n- Old."
    assert of_version(CHANGELOG, "1.2.0").date == "2026-11-30"
    assert of_version(CHANGELOG, "1.1.0") is None  # without a date it is not released
    assert of_version(CHANGELOG, "1.2") is None
    assert of_draft(CHANGELOG).text == "### Added\n- New."
    assert of_draft("# Changelog\n").text == ""


def test_the_changelogs_headings_are_read():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert [one.version for one in sections(text)] == re.findall(r"^## \[(.*?)\]", text, re.MULTILINE)


@pytest.mark.parametrize("is_released", [True, False])
def test_what_is_no_release_says_so_in_its_notes(is_released, tmp_path, monkeypatch):
    heading = f"## [{version()}] - 2026-11-30" if is_released else "## [Unreleased]"
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n{heading}\n- New.\n")
    (tmp_path / "LICENSE").touch()
    said = {"tag": f"v{version()}" if is_released else "", "status": "" if is_released else " M gateway/serve.py"}
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr(command, "_git", lambda *args: said[args[0]])
    reasons = command.reasons_for_a_draft()
    notes = command.release_notes(reasons)
    assert notes.endswith("- New.\n")
    assert (notes.startswith(f"# {version()} - 2026-11-30\n"), reasons == []) == (is_released, is_released)
    assert len(reasons) == (0 if is_released else 3)
    assert all(f"A draft, not a release: {reason}" in notes for reason in reasons)


def test_without_a_repository_or_a_licence_it_is_a_draft(tmp_path, monkeypatch):
    (tmp_path / "CHANGELOG.md").write_text(f"## [{version()}] - 2026-11-30\n")
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr(command, "_git", lambda *_: None)
    assert len(command.reasons_for_a_draft()) == 3


def test_the_extras_are_the_images():
    dockerfile = (ROOT / "deploy" / "docker" / "gateway.Dockerfile").read_text()
    assert tuple(re.search(r'"\.\[([a-z,]+)\]"\n\nFROM environment', dockerfile)[1].split(",")) == EXTRAS


def test_what_the_gateway_runs_with_is_what_ci_and_the_images_install():
    packages = closure(declared())
    names = {one.name.lower() for one in packages}
    assert {"fastapi", "torch", "h11", "onnxruntime", "opentelemetry-proto", "cryptography"} <= names
    assert not {"pytest", "build", "mypy", "cyclonedx-bom", "transformers"} & names
    pinned = set((ROOT / "requirements" / "constraints.txt").read_text().splitlines())
    assert {line for line in pins(packages).splitlines() if not line.startswith("setuptools==")} <= pinned


@pytest.mark.parametrize("wanted", ["no-such-package>=1", "typer>=1000"])
def test_what_is_not_installed_is_told(wanted):
    with pytest.raises(ReleaseError, match="make setup"):
        closure([Requirement(wanted)])
