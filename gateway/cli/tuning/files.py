"""The files that `gateway load` and `gateway simulate` write beside what they show."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gateway.cli.admin_client import EXIT_USAGE, Failure
from gateway.tuning import rendering
from gateway.tuning.report import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Where each goes; None is not written."""

    csv: Path | None
    html: Path | None

    def check(self) -> None:
        """Before anything is run: raises Failure where a folder is missing."""
        for path in (self.csv, self.html):
            if path is not None and not path.parent.is_dir():
                raise Failure(f"{path}: there is no such folder", EXIT_USAGE)

    def write(self, reports: Sequence[Report]) -> None:
        """Write those that are wanted. Raises Failure."""
        for path, text in ((self.csv, rendering.csv_text), (self.html, lambda *given: rendering.html_text(given))):
            if path is not None and reports:
                try:
                    path.write_text(text(*reports), encoding="utf-8")
                except OSError as error:
                    raise Failure(f"{path}: {error.strerror}", EXIT_USAGE) from error
