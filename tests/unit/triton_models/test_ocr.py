"""The parts of `ocr` that are not networks."""

import importlib
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from PIL import Image
from scipy import ndimage

from tests.kit import images
from triton_models import build

from .conftest import Request

RANDOM = np.random.default_rng(5)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch):
    """`module(model, name)` is a module beside a model's file."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def load(model: str, name: str):
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.syspath_prepend(str(build.REPOSITORY / model / "1"))
        return importlib.import_module(name)

    return load


def rectangle(centre, size, degrees: float) -> np.ndarray:
    """Corners clockwise from the top left of a rectangle turned by so much."""
    angle = np.radians(degrees)
    turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    return np.array([(-1, -1), (1, -1), (1, 1), (-1, 1)]) * np.array(size) / 2 @ turn + centre


def test_the_decoder_of_images_is_one_file():
    link = build.REPOSITORY / "ocr_preprocess/1/image_files.py"
    assert link.read_bytes() == (build.REPOSITORY / "image_preprocess/1/image_files.py").read_bytes()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_a_picture_knows_how_large_its_file_is_upright(module, kind: str):
    exif = Image.Exif()
    exif[0x0112] = 6
    options = {"tiffinfo": {0x0112: 6}} if kind == "TIFF" else {"exif": exif}
    content = images.file_of(Image.new("RGB", (1200, 800)), kind, **options)
    image, size = module("ocr_preprocess", "image_files").picture(content, max_pixels=10**6, side=400, of=max)
    assert size == (800, 1200)
    assert image.size == ((400, 600) if kind == "JPEG" else size)  # JPEG by halves, down to 400 at most


@pytest.mark.parametrize("density", [0.05, 0.3, 0.5, 0.7])
@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (40, 1), (37, 53)])
def test_connected_parts_are_those_of_scipy(module, density: float, shape: tuple[int, int]):
    boxes = module("ocr_lines", "text_boxes")
    for _ in range(20):
        mask = RANDOM.random(shape) < density
        runs = boxes._runs(mask)
        labels = boxes._labels(runs, shape[1])
        expected, count = ndimage.label(mask, np.ones((3, 3)))
        assert len(set(labels)) == count
        assert int((runs.ends - runs.starts).sum()) == int(mask.sum())
        pairs = set(zip(labels.tolist(), expected[runs.rows, runs.starts].tolist(), strict=True))
        assert len(pairs) == count


@pytest.mark.parametrize("degrees", [0, 7, -30, 44])
def test_the_smallest_box_is_the_rectangle_that_the_points_are_from(module, degrees: float):
    boxes = module("ocr_lines", "text_boxes")
    corners = rectangle((50, 60), (40, 12), degrees)
    shares = RANDOM.random((200, 2))
    inside = corners[0] + shares[:, :1] * (corners[1] - corners[0]) + shares[:, 1:] * (corners[3] - corners[0])
    np.testing.assert_allclose(boxes.smallest_box(np.concatenate([inside, corners])), corners, atol=1e-6)


@pytest.mark.parametrize(
    "points", [[(3, 4)], [(3, 4), (9, 4)], [(1, 1), (5, 5), (9, 9)]], ids=["one", "two", "in a row"]
)
def test_the_smallest_box_of_hardly_any_points_has_no_area(module, points):
    box = module("ocr_lines", "text_boxes").smallest_box(np.array(points, float))
    across, down = box[1] - box[0], box[3] - box[0]
    assert abs(across[0] * down[1] - across[1] * down[0]) < 1e-9


@pytest.mark.parametrize("degrees", [0, 20, -35])
def test_lines_in_a_map_are_found_and_grown(module, degrees: float):
    """A line of 120 x 20 grows by 1.6 * 2400 / 280 = 13.7 on each side."""
    boxes = module("ocr_lines", "text_boxes")
    y, x = np.mgrid[0:240, 0:320]
    angle = np.radians(degrees)
    along = (x - 160) * np.cos(angle) + (y - 120) * np.sin(angle)
    across = -(x - 160) * np.sin(angle) + (y - 120) * np.cos(angle)
    likely = np.where((abs(along) <= 60) & (abs(across) <= 10), 0.9, 0.05).astype(np.float32)
    likely[5:7, 5:7] = 0.9  # a speck
    likely[200:230, 20:60] = 0.35  # unsure
    [box] = boxes.text_boxes(likely)
    np.testing.assert_allclose(box, rectangle((160, 120), (120 + 27.4, 20 + 27.4), degrees), atol=3)


def test_a_map_without_text_has_no_boxes(module):
    assert module("ocr_lines", "text_boxes").text_boxes(np.zeros((64, 96), np.float32)) == []


@pytest.mark.parametrize("quarter", range(4))
@pytest.mark.parametrize("tilt", [0, 6])
def test_rows_are_read_the_way_they_are_written(module, quarter: int, tilt: float):
    rows_of = module("ocr_text", "reading_order").rows_of
    cells = [
        rectangle((100 + 150 * column, 50 + 60 * row + 5 * column), (120, 30), 0)
        for row in range(3)
        for column in range(2)
    ]
    angle = np.radians(90 * quarter + tilt)
    turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    shuffled = RANDOM.permutation(6)
    rows = rows_of(np.array(cells)[shuffled] @ turn)
    assert [[int(shuffled[index]) for index in row] for row in rows] == [[0, 1], [2, 3], [4, 5]]


def test_no_lines_are_no_rows(module):
    assert module("ocr_text", "reading_order").rows_of(np.zeros((0, 4, 2))) == []


@pytest.fixture
def reader(load, repository: Path):
    return load(repository / "ocr_text/1/model.py", repository / "ocr_text")


def places(reader, *texts: str) -> np.ndarray:
    """Characters at twelve places; `_` is nothing."""
    known = [*reader._characters]
    return np.array([[0 if c == "_" else known.index(c) for c in text.ljust(12, "_")] for text in texts])


def test_a_character_that_lasts_is_one_and_an_unsure_line_is_left_out(reader):
    boxes = np.array([rectangle((50, 20 + 40 * row), (80, 30), 0) for row in range(4)], np.float32)
    characters = places(reader, "aa_ab__b c", "xx", "____", "nose")
    confidences = np.full(characters.shape, 0.9, np.float32)
    confidences[1] = 0.3
    tensors = {"CHARACTERS": characters, "CONFIDENCES": confidences, "TURNED": np.array([False, False, False, True])}
    [response] = reader.execute([Request({**tensors, "BOXES": boxes})])
    assert response.array("TEXT").tolist() == [b"aabb c", b"nose"]
    np.testing.assert_allclose(response.array("SCORE"), [0.9, 0.9], rtol=1e-6)
    assert response.array("ROW").tolist() == [0, 1]
    np.testing.assert_array_equal(response.array("BOX"), [boxes[0], np.roll(boxes[3], -2, axis=0)])


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"MAX_LINES": "1"}, "IMAGE: more than 1 lines of text"),
        ({"MAX_COLUMNS": "200"}, "IMAGE: too much text, 2 lines"),
    ],
    ids=["lines", "columns"],
)
def test_more_text_than_anybody_waits_for_is_refused(load, repository: Path, limits, message: str):
    model = load(repository / "ocr_lines/1/model.py", repository / "ocr_lines", **limits)
    likely = np.zeros((1, 1, 160, 320), np.float32)
    likely[0, 0, 30:50, 40:200] = likely[0, 0, 100:120, 40:200] = 0.9
    tensors = {"MAP": likely, "UPRIGHT": np.zeros((160, 320, 3), np.uint8), "SCALE": np.ones(2, np.float32)}
    [response] = model.execute([Request(tensors)])
    assert (response.error.code, str(response.error)[: len(message)]) == ("INVALID_ARG", message)


def test_the_recogniser_turns_what_the_classifier_is_sure_of_and_the_rest_as_their_page(repository: Path):
    file = repository / "ocr_recogniser/1/model.onnx"
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    lines = RANDOM.integers(0, 256, (3, 48, 320, 3), np.uint8)
    widths = np.array([320, 200, 90])

    def run(pixels, turned):
        orientations = np.array([(1 - p, p) for p in turned], np.float32)
        return session.run(None, {"PIXELS": pixels, "WIDTHS": widths, "ORIENTATIONS": orientations})

    on_its_head = lines.copy()
    for line, turned, width in zip(lines, on_its_head, widths, strict=True):
        line[:, width:] = turned[:, width:] = 127  # padding stays where it is
        turned[:, :width] = line[:, :width][::-1, ::-1]
    upright = run(lines, (0.1, 0.6, 0.2))
    turned = run(on_its_head, (0.95, 0.6, 0.92))
    mixed = run(on_its_head, (0.95, 0.6, 0.05))
    assert [found[2].tolist() for found in (upright, turned, mixed)] == [[False] * 3, [True] * 3, [True, True, False]]
    for ours, theirs in zip(upright[:2], turned[:2], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
