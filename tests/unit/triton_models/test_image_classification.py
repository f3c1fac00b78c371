import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import skimage
import torch
from PIL import Image

from .conftest import Request, rows_of, torchscript

PHOTOS = Path(skimage.__file__).parent / "data"
CATS = range(281, 286)  # tabby, tiger cat, Persian, Siamese, Egyptian


@pytest.fixture
def preprocess(load, repository: Path):
    return load(repository / "image_preprocess/1/model.py", repository / "image_preprocess")


@pytest.fixture(scope="module")
def classifier(repository: Path) -> torch.jit.ScriptModule:
    return torchscript(repository / "image_classifier/1/model.pt")


def file_of(image: Image.Image, kind: str, **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def pixels(preprocess, *files: bytes) -> np.ndarray:
    [response] = preprocess.execute([Request({"IMAGE": rows_of(*files)})])
    return response.array("PIXELS")


def plain(colour, mode: str = "RGB", size=(300, 200)) -> Image.Image:
    return Image.new(mode, size, colour)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_cat_is_a_cat(preprocess, classifier, rows: int):
    array = pixels(preprocess, *[(PHOTOS / "chelsea.png").read_bytes()] * rows)
    assert (array.shape, array.dtype) == ((rows, 3, 224, 224), np.float32)
    with torch.inference_mode(), torch.jit.optimized_execution(False):
        scores = classifier(torch.from_numpy(array)).numpy()
    assert scores.shape == (rows, 1000)
    assert np.allclose(scores.sum(axis=1), 1, atol=1e-5)
    assert set(scores.argmax(axis=1)) <= set(CATS)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_every_format_gives_the_same_scaled_colour(preprocess, kind: str):
    array = pixels(preprocess, file_of(plain((255, 127, 0)), kind))[0]
    assert np.allclose(array.mean(axis=(1, 2)), [1.0, 0.0, -127 / 128], atol=0.04)


@pytest.mark.parametrize(
    ("image", "grey"),
    [
        (plain((9, 9, 9, 0), "RGBA"), 255),
        (plain((0, 0, 0, 128), "RGBA"), 127),
        (plain((0, 0), "LA"), 255),
        (plain(64, "L"), 64),
        (plain(1, "1"), 255),
        (plain(64 * 256, "I;16"), 64),
        (plain((30, 30, 30)).quantize(), 30),
    ],
    ids=["transparent", "half transparent", "grey and alpha", "grey", "bilevel", "16 bits", "palette"],
)
def test_every_mode_becomes_opaque_rgb(preprocess, image: Image.Image, grey: int):
    array = pixels(preprocess, file_of(image, "PNG"))
    assert np.allclose(array, (grey - 127) / 128, atol=0.01)


def test_the_crop_is_the_centre_seven_eighths(preprocess):
    image = plain("black", size=(512, 256))
    image.paste("white", (144, 16, 368, 240))  # the 224 x 224 centre of the 256 x 256 centre
    assert (pixels(preprocess, file_of(image, "PNG")) == 1.0).all()


def test_a_photo_taken_sideways_is_turned_upright(preprocess):
    image = plain("black", size=(400, 400))
    image.paste("white", (0, 0, 400, 200))
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate 90 degrees clockwise to view: the white top ends up right
    array = pixels(preprocess, file_of(image, "JPEG", exif=exif))[0, 0]
    assert array[:, 200:].min() > 0.9
    assert array[:, :24].max() < -0.9


def test_a_large_jpeg_gives_the_same_picture_as_a_lossless_file(preprocess):
    """Large JPEGs are decoded at a reduced size; the difference stays within what JPEG itself does."""
    large = Image.open(PHOTOS / "chelsea.png").convert("RGB").resize((3608, 2400))
    reduced = pixels(preprocess, file_of(large, "JPEG", quality=95))
    assert np.abs(reduced - pixels(preprocess, file_of(large, "PNG", compress_level=1))).mean() < 0.02


def bomb() -> bytes:
    """A PNG of a few bytes whose header announces 60000 x 60000 pixels."""
    chunks = {b"IHDR": struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0), b"IDAT": zlib.compress(b"")}
    body = [
        struct.pack(">I", len(c)) + kind + c + struct.pack(">I", zlib.crc32(kind + c)) for kind, c in chunks.items()
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "IMAGE: not a decodable image"),
        (b"plain text", "IMAGE: not a decodable image"),
        ((PHOTOS / "rocket.jpg").read_bytes()[:5000], "IMAGE: not a decodable image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "IMAGE: not a decodable image"),
        (bomb(), "IMAGE: more than 50000000 pixels"),
        (file_of(plain(0, "1", (8000, 8000)), "PNG"), "IMAGE: more than 50000000 pixels"),
    ],
    ids=["empty", "text", "cut JPEG", "PostScript", "bomb", "too large"],
)
def test_a_bad_image_fails_alone(preprocess, content: bytes, message: str):
    good = Request({"IMAGE": rows_of(file_of(plain("red"), "PNG"))})
    first, bad, last = preprocess.execute([good, Request({"IMAGE": rows_of(content)}), good])
    assert (str(bad.error), bad.error.code) == (message, "INVALID_ARG")
    assert first.array("PIXELS").shape == last.array("PIXELS").shape == (1, 3, 224, 224)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_damaged_files_never_raise(preprocess, kind: str):
    photo = Image.open(PHOTOS / "chelsea.png").convert("RGB").resize((60, 40))
    content = file_of(photo, kind)
    generator = np.random.default_rng(7)
    for _ in range(60):
        damaged = np.frombuffer(content, np.uint8).copy()
        damaged[generator.integers(0, len(damaged), 8)] = generator.integers(0, 256, 8)
        [response] = preprocess.execute([Request({"IMAGE": rows_of(damaged.tobytes())})])
        assert response.error is None or str(response.error).startswith("IMAGE: ")


@pytest.mark.parametrize("size", [(1, 1), (1, 900), (900, 1), (7, 5)])
def test_the_smallest_images_are_served(preprocess, size):
    assert np.isfinite(pixels(preprocess, file_of(plain("blue", size=size), "PNG"))).all()
