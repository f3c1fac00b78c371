"""A release's notes: its part of CHANGELOG.md."""

import re
from dataclasses import dataclass

_HEADING = re.compile(r"^## \[([^\]]+)\](?: - (\d{4}-\d{2}-\d{2}))?[ \t]*$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """What the CHANGELOG says of one version."""

    version: str
    date: str | None  # YYYY-MM-DD
    text: str


def sections(changelog: str) -> list[Section]:
    """All versions of the CHANGELOG, in its order (the newest first), without the heading lines themselves."""
    hits = list(_HEADING.finditer(changelog))
    ends = [hit.start() for hit in hits[1:]] + [len(changelog)]
    return [
        Section(version=hit[1], date=hit[2], text=changelog[hit.end() : end].strip())
        for hit, end in zip(hits, ends, strict=False)  # without headings there is an end all the same
    ]


def of_version(changelog: str, version: str) -> Section | None:
    """What is said of a version; None where it has no heading with a date: `## [1.2.0] - 2026-11-30`."""
    return next((one for one in sections(changelog) if one.version == version and one.date), None)


def of_draft(changelog: str) -> Section:
    """What is said of the next version: the part `[Unreleased]`, empty where there is none."""
    empty = Section(version="Unreleased", date=None, text="")
    return next((one for one in sections(changelog) if one.version == "Unreleased"), empty)
