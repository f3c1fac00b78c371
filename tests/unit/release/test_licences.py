"""Licences are read as the metadata mean them, and what is not allowed is named."""

from importlib.metadata import Distribution

import pytest

from release import licences
from release.licences import Allowance, Licence, Read, faults, is_allowed, licence
from release.packages import closure, declared


class Installed(Distribution):
    """A distribution of which there are only metadata."""

    def __init__(self, *lines: str, name: str = "some") -> None:
        self._lines = [f"Name: {name}", "Version: 1.0", *lines]

    def read_text(self, filename: str) -> str | None:
        return "\n".join(["Metadata-Version: 2.4", *self._lines]) if filename == "METADATA" else None

    def locate_file(self, path):
        raise NotImplementedError


BSD = "Classifier: License :: OSI Approved :: BSD License"
MIT = "Classifier: License :: OSI Approved :: MIT License"


@pytest.mark.parametrize(
    ("lines", "expression"),
    [
        (["License-Expression: MIT"], "MIT"),
        (["License-Expression: mpl-2.0 AND (Apache-2.0 OR MIT)", "License: MIT"], "MPL-2.0 AND (Apache-2.0 OR MIT)"),
        (["License: Apache 2.0", MIT], "Apache-2.0"),
        (["License: BSD-3-Clause", BSD], "BSD-3-Clause"),
        ([MIT], "MIT"),
        (["License: Copyright 2026\n        All of it.", MIT], "MIT"),  # the licence's whole text
        ([BSD], None),  # which of them?
        ([BSD, MIT], None),  # both, or either?
        (["License: BSD"], None),
        (["License: our own", MIT], None),  # two stories
        (["License-Expression: Friendly-1.0", MIT], None),
        ([], None),
    ],
)
def test_a_licence_is_read_out_of_metadata(lines, expression):
    assert licence(Installed(*lines)).expression == expression


def test_what_was_read_in_the_files_holds_while_the_metadata_say_the_same(monkeypatch):
    said = "License :: OSI Approved :: BSD License"
    monkeypatch.setattr(licences, "READ", {"some": Read(said=said, licence="BSD-3-Clause", where="LICENSE")})
    assert licence(Installed(BSD)).expression == "BSD-3-Clause"
    assert licence(Installed(BSD, MIT)).expression is None


@pytest.mark.parametrize(
    ("expression", "allowed"),
    [
        ("MIT", True),
        ("MIT AND BSD-3-Clause", True),
        ("GPL-3.0-only", False),
        ("GPL-3.0-only OR MIT", True),
        ("GPL-3.0-only AND MIT", False),
        ("MIT AND (GPL-2.0-only OR Apache-2.0)", True),
        ("(MIT OR Apache-2.0) AND LGPL-3.0-only", False),
        ("Apache-2.0 WITH LLVM-exception", True),
        ("GPL-3.0-only WITH GCC-exception-3.1", False),
    ],
)
def test_of_and_all_have_to_be_allowed_of_or_one(expression, allowed):
    assert is_allowed(expression) is allowed


def one(name, expression):
    return Licence(name=name, version="1.0", expression=expression, source="", said="words")


def test_a_package_that_may_not_be_used_is_named(monkeypatch):
    monkeypatch.setattr(licences, "EXCEPTIONS", {"mild": Allowance(licence="MPL-2.0", reason="by file")})
    found = [one("good", "MIT"), one("bad", "AGPL-3.0-only"), one("silent", None), one("mild", "MIT AND MPL-2.0")]
    assert faults(found) == [
        "bad 1.0: AGPL-3.0-only is not in the allow list",
        "silent 1.0: no licence that can be told (words)",
    ]
    assert faults([one("other", "MPL-2.0"), one("mild", "MPL-2.0")]) == [
        "other 1.0: MPL-2.0 is not in the allow list"  # an exception is one package's
    ]


def test_an_exception_that_nothing_needs_is_told(monkeypatch):
    monkeypatch.setattr(licences, "EXCEPTIONS", {"mild": Allowance(licence="MPL-2.0", reason="by file")})
    assert faults([one("mild", "MIT")]) == faults([]) == ["mild: its exception is of no use any more"]


def test_everything_that_the_gateway_runs_with_may_be_used():
    found = [licence(each) for each in closure(declared())]
    assert faults(found) == []
    needed = {each.name for each in found}
    assert set(licences.READ) <= needed
    assert all(allowed.reason for allowed in licences.EXCEPTIONS.values())
