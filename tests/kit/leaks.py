"""No secret in anything that the suite's servers wrote: when all is over, every file in pytest's folder is read.

Looked for are the secrets that the kit hands out, those that `gateway up` made for itself, and whatever has the form of
a key made at run time or of a client token. A test that writes a secret into a file of its own on purpose says so
by the file's name (`HOLDERS`).
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tests.kit import compose, serving

HANDED_OUT: Final = (serving.KEY, serving.ADMIN_TOKEN, *compose.SECRETS.values())
FORMS: Final = (
    re.compile(rb"gw_[a-z2-7]{13}_[A-Za-z0-9_-]{43}"),
    re.compile(rb"gwt_[A-Za-z0-9_-]{40,}\.[A-Za-z0-9_-]{43}"),
)
"""Of a key made at run time (`core.keys`), and of a client token (`core.client_tokens`)."""
HOLDERS: Final = ("stack.json", "dev-key", "admin-token", "*.holds-secrets")
"""Files that are there to hold a secret: what `gateway up` keeps for its commands, readable by its user alone."""
MOST_BYTES: Final = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Leak:
    """Where a secret stands; which one is told by its first letters."""

    file: Path
    begins: str
    around: str

    def __str__(self) -> str:
        return f"{self.file}: {self.begins}...: {self.around}"


def leaks(folder: Path, secrets: Iterable[str] = ()) -> list[Leak]:
    """Every file below `folder` that holds one of the secrets, or something of their forms."""
    wanted = [one.encode() for one in {*secrets, *HANDED_OUT, *_made_by_stacks(folder)}]
    any_of = re.compile(b"|".join([re.escape(one) for one in wanted] + [form.pattern for form in FORMS]))
    found = []
    for file in _written(folder):
        content = file.read_bytes()
        if match := any_of.search(content):
            around = content[max(0, match.start() - 120) : match.start()].decode(errors="replace").rpartition("\n")[2]
            found.append(Leak(file, match[0][:8].decode(), around))
    return found


def _written(folder: Path) -> Iterator[Path]:
    for file in folder.rglob("*"):
        if file.is_symlink() or not file.is_file() or any(file.match(name) for name in HOLDERS):
            continue
        if file.stat().st_size <= MOST_BYTES:
            yield file


def _made_by_stacks(folder: Path) -> Iterator[str]:
    for name in ("dev-key", "admin-token"):
        yield from (file.read_text().strip() for file in folder.rglob(name) if file.is_file())


@pytest.fixture(scope="session")
def no_leaks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing that was written in the session holds a secret."""
    yield
    found = leaks(tmp_path_factory.getbasetemp())
    assert not found, "secrets were written: " + "; ".join(map(str, found))
