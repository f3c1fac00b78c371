"""`ocr` on both servers: the same lines, and the right ones."""

import io
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import skimage
from PIL import Image, ImageDraw, ImageFont
from tritonclient import grpc as client
from tritonclient.utils import InferenceServerException

from gateway.core.tensors import from_numpy
from gateway.core.types import Tensors
from gateway.tasks.ocr import Ocr
from tests.kit.images import file_of
from tests.kit.own_models import ask, loaded
from tests.kit.servers import TARGETS, Server

STEPS = ("ocr_preprocess", "ocr_detector", "ocr_lines", "ocr_classifier", "ocr_recogniser", "ocr_text")
LINES = ("Invoice 2024 for repairs", "Total due 1,284.50 EUR", "Thank you very much")
SIZE = (700, 300)


def page(*, turned: int = 0, exif: int = 1) -> bytes:
    """The lines below each other, the page turned (degrees, counter-clockwise); an EXIF orientation that says so."""
    image = Image.new("RGB", SIZE, "white")
    font = ImageFont.load_default(size=40)
    for number, line in enumerate(LINES):
        ImageDraw.Draw(image).text((40, 30 + 80 * number), line, fill=(10, 10, 10), font=font)
    described = Image.Exif()
    described[0x0112] = exif
    return file_of(image.rotate(turned, expand=True, fillcolor="white"), "JPEG", quality=95, exif=described)


def table() -> bytes:
    """Two columns far apart: rows are read across."""
    image = Image.new("RGB", SIZE, "white")
    font = ImageFont.load_default(size=36)
    for number, (left, right) in enumerate((("Apples", "12.50"), ("Bread", "3.20"), ("Coffee", "8.75"))):
        ImageDraw.Draw(image).text((40, 40 + 80 * number), left, fill="black", font=font)
        ImageDraw.Draw(image).text((520, 43 + 80 * number), right, fill="black", font=font)
    return file_of(image, "PNG")


@pytest.fixture(scope="module", params=TARGETS)
def asked(request: pytest.FixtureRequest, serving: Callable[[str], Server]) -> Iterator[client.InferenceServerClient]:
    with loaded(serving(request.param), "ocr", *STEPS) as asked:
        yield asked


def answer(asked: client.InferenceServerClient, content: bytes) -> Mapping[str, object]:
    """What the task answers."""
    result = ask(asked, "ocr", content, shape=(1,))
    outputs = tuple(from_numpy(name, result.as_numpy(name)) for name in ("TEXT", "SCORE", "BOX", "ROW"))
    return Ocr().answer(Tensors(outputs=outputs, version="1"), content).output


@pytest.mark.parametrize(
    ("turned", "exif"),
    [(0, 1), (90, 1), (180, 1), (270, 1), (8, 1), (90, 6)],
    ids=["upright", "left", "head", "right", "tilted", "EXIF"],
)
def test_a_page_is_read_however_it_lies(asked: client.InferenceServerClient, turned: int, exif: int):
    output = answer(asked, page(turned=turned, exif=exif))
    # The networks know Chinese first, and do not always see the space between two words.
    assert str(output["text"]).replace(" ", "") == "\n".join(LINES).replace(" ", "")
    assert min(line["score"] for line in output["lines"]) > 0.85


def test_boxes_are_where_the_lines_are(asked: client.InferenceServerClient):
    boxes = np.array([line["box"] for line in answer(asked, page())["lines"]])
    upside_down = np.array([line["box"] for line in answer(asked, page(turned=180))["lines"]])
    for number, box in enumerate(boxes):
        (left, top), (right, bottom) = box[0], box[2]
        assert left == pytest.approx(40, abs=12)
        assert top == pytest.approx(38 + 80 * number, abs=14)
        assert bottom == pytest.approx(72 + 80 * number, abs=14)
        assert 380 < right < 560
    # The first corner is the text's own top left.
    np.testing.assert_allclose(upside_down, np.array(SIZE) - boxes, atol=6)


def test_boxes_are_in_pixels_of_a_file_that_is_read_smaller(asked: client.InferenceServerClient):
    small = Image.open(io.BytesIO(page()))
    large = file_of(small.resize((SIZE[0] * 6, SIZE[1] * 6), Image.Resampling.BICUBIC), "JPEG", quality=95)
    boxes = np.array([line["box"] for line in answer(asked, large)["lines"]])
    np.testing.assert_allclose(boxes / 6, [line["box"] for line in answer(asked, page())["lines"]], atol=6)


def test_lines_side_by_side_are_one_row(asked: client.InferenceServerClient):
    assert answer(asked, table())["text"] == "Apples 12.50\nBread 3.20\nCoffee 8.75"


def test_a_scanned_page_is_read(asked: client.InferenceServerClient):
    text = str(answer(asked, (Path(skimage.__file__).parent / "data/page.png").read_bytes())["text"])
    for words in ("Let us first determine markers of the coins", "either object or background"):
        assert words.replace(" ", "") in text.replace(" ", "")


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
@pytest.mark.parametrize("size", [(1, 1), (1, 900), (60000, 1), (2000, 3), (300, 200)])
def test_an_image_without_text_has_no_lines(asked: client.InferenceServerClient, size: tuple[int, int], kind: str):
    assert answer(asked, file_of(Image.new("RGB", size, "white"), kind)) == {"text": "", "lines": []}


def test_a_strip_of_text_is_read(asked: client.InferenceServerClient):
    strip = Image.new("RGB", (600, 40), "white")
    ImageDraw.Draw(strip).text((4, 2), "A strip of text alone", fill="black", font=ImageFont.load_default(size=30))
    assert str(answer(asked, file_of(strip, "PNG"))["text"]).replace(" ", "") == "Astripoftextalone"


def test_what_is_no_image_is_refused_by_its_name(asked: client.InferenceServerClient):
    with pytest.raises(InferenceServerException) as refused:
        ask(asked, "ocr", b"plain text", shape=(1,))
    assert refused.value.message().endswith("IMAGE: not a decodable image")
    assert refused.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_both_servers_say_the_same(serving: Callable[[str], Server]):
    answers = []
    for target in TARGETS:
        with loaded(serving(target), "ocr", *STEPS) as asked:
            answers.append([answer(asked, content) for content in (page(turned=8), table())])
    for triton, local in zip(*answers, strict=True):
        assert triton["text"] == local["text"]
        for ours, theirs in zip(triton["lines"], local["lines"], strict=True):
            assert ours["score"] == pytest.approx(theirs["score"], abs=0.02)
            np.testing.assert_allclose(ours["box"], theirs["box"], atol=1)
