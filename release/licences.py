"""The licences of what the gateway runs with, and whether each may be used.

A licence is what the package's metadata say: `License-Expression` (PEP 639), else `License` where that is a licence's
name, else its one classifier. Where these say too little, `READ` has what the files in the package say. What may be
used without a thought is in `ALLOWED`; each other use is an entry of `EXCEPTIONS` with its reason.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution
from typing import Any, Final

from license_expression import ExpressionError, LicenseSymbol, get_spdx_licensing
from packaging.utils import canonicalize_name

_SPDX: Final = get_spdx_licensing()

# Identifiers of https://spdx.org/licenses/ that ask for no more than their text and notices be kept.
ALLOWED: Final = frozenset(
    {
        "0BSD",
        "Apache-2.0",
        "Apache-2.0 WITH LLVM-exception",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "BSL-1.0",
        "CC0-1.0",
        "ISC",
        "MIT",
        "MIT-0",
        "MIT-CMU",
        "PSF-2.0",
        "Zlib",
    }
)

# Free words of metadata, in lower case, and trove classifiers that mean one licence.
_WORDS: Final = {
    "apache 2.0": "Apache-2.0",
    "mit license": "MIT",
    "isc license": "ISC",
    "3-clause bsd license": "BSD-3-Clause",
    "license :: osi approved :: apache software license": "Apache-2.0",
    "license :: osi approved :: mit license": "MIT",
    "license :: osi approved :: isc license (iscl)": "ISC",
    "license :: osi approved :: mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "license :: osi approved :: python software foundation license": "PSF-2.0",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A licence that was read in a package's own files: it holds while the metadata say what they said then."""

    said: str  # the metadata, as `said` gives them
    licence: str  # an SPDX expression
    where: str  # the file, and what it says


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """A licence that a package may have though `ALLOWED` lacks it."""

    licence: str  # one SPDX identifier
    reason: str


_BSD: Final = "License :: OSI Approved :: BSD License"

READ: Final[Mapping[str, Read]] = {
    "docutils": Read(
        said="License :: Public Domain; License :: OSI Approved :: BSD License; "
        "License :: OSI Approved :: GNU General Public License (GPL)",
        licence="LicenseRef-Docutils AND BSD-2-Clause AND BSD-3-Clause",
        where="COPYING.rst: public domain but for some files; the one under the GPL, for Emacs, is not in the wheel",
    ),
    "itsdangerous": Read(said=_BSD, licence="BSD-3-Clause", where="LICENSE.txt: three clauses"),
    "jinja2": Read(said=_BSD, licence="BSD-3-Clause", where="LICENSE.txt: three clauses"),
    "mpmath": Read(said="BSD", licence="BSD-3-Clause", where="LICENSE: three clauses"),
    "sympy": Read(said="BSD", licence="BSD-3-Clause", where="LICENSE: three clauses"),
    "tinycss2": Read(said=_BSD, licence="BSD-3-Clause", where="LICENSE: three clauses"),
    "webencodings": Read(said=_BSD, licence="BSD-3-Clause", where="LICENSE: three clauses"),
}

_MPL: Final = "used as it is: the MPL binds its own files alone, whose source is on PyPI"

EXCEPTIONS: Final[Mapping[str, Allowance]] = {
    "bidict": Allowance(licence="MPL-2.0", reason=_MPL),
    "certifi": Allowance(licence="MPL-2.0", reason=_MPL),
    "docutils": Allowance(licence="LicenseRef-Docutils", reason="a dedication to the public domain"),
    "orjson": Allowance(licence="MPL-2.0", reason=_MPL),
    "tqdm": Allowance(licence="MPL-2.0", reason=_MPL),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Licence:
    """The licence of one package."""

    name: str
    version: str
    expression: str | None  # an SPDX expression; None where nobody can tell
    source: str  # where it was read
    said: str  # what the metadata say, for whoever has to find out


def licence(one: Distribution) -> Licence:
    """What the package is under."""
    expression, source = _declared(one)
    words = said(one)
    name = canonicalize_name(one.name)
    if expression is None and name in READ and READ[name].said == words:
        expression, source = READ[name].licence, READ[name].where
    return Licence(name=name, version=one.version, expression=expression, source=source, said=words)


def _fields(one: Distribution) -> tuple[str | None, str, list[str]]:
    """`License-Expression`, `License` where it is no more than a line, the classifiers about licences."""
    metadata: Any = one.metadata  # its type has no `get`
    text = str(metadata.get("License") or "").strip()
    classifiers = [line for line in metadata.get_all("Classifier", []) if line.startswith("License :: ")]
    return metadata.get("License-Expression"), "" if "\n" in text else text, classifiers


def said(one: Distribution) -> str:
    """What the metadata say of the licence, in their own words."""
    expression, text, classifiers = _fields(one)
    return expression or text or "; ".join(classifiers)


def _declared(one: Distribution) -> tuple[str | None, str]:
    expression, text, classifiers = _fields(one)
    if expression:
        return _spdx(expression), "License-Expression"
    if text and (known := _spdx(_WORDS.get(text.lower(), text))):
        return known, "License"
    if not text and len(classifiers) == 1 and (name := _WORDS.get(classifiers[0].lower())):
        return name, "classifier"
    return None, ""


def _spdx(text: str) -> str | None:
    """The expression in SPDX's spelling, if it is one."""
    try:
        return str(_SPDX.parse(text, validate=True, strict=True))
    except ExpressionError:
        return None


def faults(licences: Iterable[Licence]) -> list[str]:
    """A line for each package whose licence is not known or not allowed, and for each entry here that has no use."""
    found = list(licences)
    lines = []
    for one in found:
        if one.expression is None:
            lines.append(f"{one.name} {one.version}: no licence that can be told ({one.said or 'nothing is said'})")
        elif not is_allowed(one.expression, also=_also(one.name)):
            lines.append(f"{one.name} {one.version}: {one.expression} is not in the allow list")
    used = {one.name: one.expression or "" for one in found}
    lines += [f"{name}: its exception is of no use any more" for name in EXCEPTIONS if not _is_used(name, used)]
    return lines


def _is_used(name: str, used: Mapping[str, str]) -> bool:
    return name in used and EXCEPTIONS[name].licence in used[name]


def _also(name: str) -> frozenset[str]:
    return frozenset({EXCEPTIONS[name].licence}) if name in EXCEPTIONS else frozenset()


def is_allowed(expression: str, *, also: frozenset[str] = frozenset()) -> bool:
    """Whether a use under `expression` is allowed: of AND all parts have to be, of OR one."""
    return _holds(_SPDX.parse(expression), ALLOWED | also)


def _holds(part: Any, allowed: frozenset[str]) -> bool:
    if isinstance(part, LicenseSymbol) or not part.args:
        return str(part) in allowed
    choose = all if isinstance(part, _SPDX.AND) else any
    return choose(_holds(each, allowed) for each in part.args)


def table(licences: Iterable[Licence]) -> str:
    """The list as a Markdown table, exceptions with their reasons."""
    rows = ["| package | version | licence (SPDX) | read in | exception |", "|---|---|---|---|---|"]
    for one in licences:
        reason = EXCEPTIONS[one.name].reason if one.name in EXCEPTIONS else ""
        rows.append(f"| {one.name} | {one.version} | {one.expression} | {one.source} | {reason} |")
    return "\n".join(rows) + "\n"
