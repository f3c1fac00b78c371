"""The audit of what is installed: each fault is found and named, and what is well is not."""

import base64
import hashlib

import pytest
from packaging.version import Version

from release import audit

PINS = {"good": Version("1.0"), "torch": Version("2.0")}


def install(site, name, version, content=b"x = 1\n"):
    """A package as pip leaves it."""
    (site / name).mkdir(parents=True)
    (site / name / "__init__.py").write_bytes(content)
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    record = f"{name}/__init__.py,sha256={digest},{len(content)}\n{info.name}/RECORD,,\n"
    (info / "RECORD").write_text(record)
    return site / name / "__init__.py"


def told(site):
    return list(audit.faults(site, PINS))


def test_what_is_pinned_and_untouched_is_well(tmp_path):
    install(tmp_path, "good", "1.0")
    install(tmp_path, "torch", "2.0+cpu")
    install(tmp_path, "pip", "99")
    assert told(tmp_path) == []


def test_each_fault_is_named(tmp_path):
    changed = install(tmp_path, "good", "1.0")
    install(tmp_path, "torch", "2.1")
    gone = install(tmp_path, "stranger", "3")
    changed.write_text("x = 2\n")
    gone.unlink()
    assert told(tmp_path) == [
        "good 1.0: good/__init__.py is not the file that was installed",
        "stranger 3: is pinned nowhere",
        "stranger 3: stranger/__init__.py is missing",
        "torch 2.1: pinned is 2.0",
    ]


def test_every_line_of_the_requirements_is_a_pin(tmp_path, monkeypatch):
    for files in audit.ENVIRONMENTS.values():
        assert len(audit.pinned(*files)) > 5
    monkeypatch.setattr(audit, "REQUIREMENTS", tmp_path)
    for line in ("good>=1", "good==1.*"):
        (tmp_path / "r.txt").write_text(f"# pins\n{line}  # why\n")
        with pytest.raises(ValueError, match=r"requirements/r\.txt: .* is no pin"):
            audit.pinned("r.txt")
