"""The project's pages as tests read them: links, anchors, snippets, and the commands and calls in these."""

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
AT_THE_TOP = ("README.md", "README.ko.md", "CONTRIBUTING.md", "SECURITY.md")
_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE)
_SPAN = re.compile(r"(`+)(.+?)\1", re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
_SHELLS = ("", "bash", "console")
_BETWEEN = frozenset("|&;()<>")  # what no word of a command holds, unquoted


def pages() -> list[Path]:
    """Every page for people, but the CHANGELOG, which tells of what was."""
    folders = ("docs", "deploy", "examples")
    return sorted(
        [path for name in AT_THE_TOP if (path := ROOT / name).exists()]
        + [path for name in folders for path in (ROOT / name).rglob("*.md")]
    )


def name_of(page: Path) -> str:
    """A page as people name it."""
    return str(page.relative_to(ROOT))


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced snippet. `info` is what stands behind the fence (`yaml fragment`); `line` is that of its fence."""

    info: str
    text: str
    line: int

    @property
    def language(self) -> str:
        return self.info.partition(" ")[0]


def blocks(text: str, *languages: str) -> list[Block]:
    """The snippets of a page, in order; of these languages alone, where some are named."""
    found = [
        Block(
            info=match["info"].strip(),
            text=re.sub(rf"^{match['indent']}", "", match["text"], flags=re.MULTILINE),
            line=text.count("\n", 0, match.start()) + 1,
        )
        for match in _FENCE.finditer(text)
    ]
    return [block for block in found if not languages or block.language in languages]


def spans(text: str) -> list[str]:
    """What stands between backticks within the text of a page."""
    return [match[2] for match in _SPAN.finditer(_FENCE.sub("", text))]


def links(text: str) -> list[str]:
    """Where a page's links lead; what looks like one inside a snippet is none."""
    return _LINK.findall(_SPAN.sub("", _FENCE.sub("", text)))


def headings(text: str) -> list[str]:
    """The headings of a page with their marks, in order."""
    return [match[0].strip() for match in _HEADING.finditer(_FENCE.sub("", text))]


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives a page's headings: lower case, words and hyphens, numbered where they repeat."""
    seen: Counter[str] = Counter()
    found = set()
    for match in _HEADING.finditer(_FENCE.sub("", text)):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", match[1]).lower()
        slug = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def broken(page: Path, target: str) -> str:
    """Why a relative link of a page leads nowhere; empty where it does lead somewhere."""
    file, _, anchor = target.partition("#")
    to = (page.parent / file).resolve() if file else page
    if not to.exists():
        return "there is no such file"
    if not to.is_relative_to(ROOT):
        return "it leads out of the project"
    if anchor and anchor not in anchors(to.read_text()):
        return "there is no such heading"
    return ""


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each simple command in a shell snippet; pipes, lists, substitutions, redirections are taken apart.

    Of a session (`$ command`, then what it prints) only what is typed. A snippet without a language may be anything:
    what cannot be read as words is left out then.
    """
    if block.language not in _SHELLS:
        return
    text = block.text
    if re.search(r"^\$ ", text, re.MULTILINE):
        text = "\n".join(line[2:] for line in text.splitlines() if line.startswith("$ "))
    for line in _whole_lines(text):
        try:
            words = _words(line)
        except ValueError:
            if block.language == "":
                continue
            raise
        yield from words


def _whole_lines(text: str) -> Iterator[str]:
    """Lines, those that go on put together: by a backslash, or by a quote that is still open."""
    held = ""
    for line in text.replace("\\\n", " ").splitlines():
        held = f"{held}\n{line}" if held else line
        if not _is_open(held):
            yield held
            held = ""
    if held:
        yield held


def _is_open(text: str) -> bool:
    try:
        _words(text)
    except ValueError:
        return True
    return False


def _words(line: str) -> list[list[str]]:
    # What a substitution runs is a command of its own, also within double quotes.
    found = _simple(re.sub(r"\$\([^()]*\)", "SUBSTITUTED", line))
    for match in re.findall(r"\$\(([^()]*)\)", line):
        found += _simple(match)
    return found


def _simple(line: str) -> list[list[str]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="".join(_BETWEEN))
    lexer.whitespace_split = True
    lexer.commenters = "#"
    found: list[list[str]] = [[]]
    is_target = False
    for word in lexer:
        if word and set(word) <= _BETWEEN:
            is_target = set(word) <= {"<", ">", "&"} and word not in ("&", "&&")
            if not is_target:
                found.append([])
        elif is_target:
            is_target = False  # the file of a redirection
        else:
            found[-1].append(word)
    return [_without_prefix(words) for words in found if words]


def _without_prefix(words: Sequence[str]) -> list[str]:
    """A command without the variables that are set for it, and without what runs it elsewhere (`... -- gateway`)."""
    if "--" in words and "gateway" in words[words.index("--") + 1 : words.index("--") + 2]:
        words = words[words.index("--") + 1 :]
    start = next((i for i, word in enumerate(words) if not re.match(r"[A-Za-z_]\w*=", word)), len(words))
    return list(words[start:])
