"""README.md and README.ko.md say the same: a change of one that the other lacks is found."""

import re

from tests.kit.manuals import ROOT, blocks, headings, links, spans

ENGLISH, KOREAN = ((ROOT / name).read_text() for name in ("README.md", "README.ko.md"))


def test_each_names_the_other_at_its_top():
    assert links(ENGLISH)[0] == "README.ko.md"
    assert links(KOREAN)[0] == "README.md"


def test_they_have_the_same_snippets_and_links():
    assert [block.info for block in blocks(KOREAN)] == [block.info for block in blocks(ENGLISH)]
    assert [block.text for block in blocks(KOREAN)] == [block.text for block in blocks(ENGLISH)]
    assert links(KOREAN)[1:] == links(ENGLISH)[1:]


def test_they_have_the_same_shape():
    """Headings by their level, rows of tables, points of lists; and what is code in the text, in whatever order."""

    def shape(text: str) -> list[object]:
        marks = [re.match(r"#+", heading)[0] for heading in headings(text)]
        return [marks, len(re.findall(r"^\| ", text, re.MULTILINE)), len(re.findall(r"^- ", text, re.MULTILINE))]

    assert shape(KOREAN) == shape(ENGLISH)
    assert sorted(spans(KOREAN)) == sorted(spans(ENGLISH))
