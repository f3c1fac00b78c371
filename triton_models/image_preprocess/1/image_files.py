"""Image files to upright RGB pictures. Shared by the models that read images: each has this file, or a link to it."""

import io
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from PIL import ExifTags, Image

# Only formats whose decoders run inside Pillow; others, such as EPS, start programs.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
WHITE_16 = 65535

# Each scan of a progressive JPEG goes over the whole picture, however short it is. Encoders write about ten.
MAX_SCANS = 100
SCAN = b"\xff\xda"  # the marker of one; compressed pixels never contain it

TILE_WIDTH, TILE_LENGTH = 322, 323  # tags of TIFF

# EXIF's orientations, by what makes a picture upright.
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
SIDEWAYS = (5, 6, 7, 8)


class InvalidImageError(ValueError):
    """The bytes are not an image that can be served; the message is meant for the caller."""


class Picture(NamedTuple):
    """An upright RGB image, and how large (width, height) it is in the file: it may have been decoded smaller."""

    image: Image.Image
    size: tuple[int, int]


def picture(content: bytes, *, max_pixels: int, side: int, of: Callable[[tuple[int, int]], int] = min) -> Picture:
    """Decode the first frame of an image file, turn it upright and show it on white.

    A JPEG decodes 2, 4 or 8 times smaller at a fraction of the cost: it does as far as its shorter side (`of` min) or
    its longer one (max) stays `side` or more.

    Raises `InvalidImageError` for anything that is not an image of at most `max_pixels` pixels.
    """
    _check_scans(content)
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            size = image.size
            _check_size(*size, max_pixels)
            _check_tiles(image, max_pixels)
            factor = max(1, of(size) // side)
            image.draft("RGB", (max(1, size[0] // factor), max(1, size[1] // factor)))
            # First of all: some formats say how they are turned behind the pixels, and TIFF is turned by this.
            image.load()
            orientation = _orientation(image)
            upright = image.transpose(TURNS[orientation]) if orientation in TURNS else image
            return Picture(_on_white(upright), size[::-1] if orientation in SIDEWAYS else size)
    except InvalidImageError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_large(max_pixels) from error
    # Decoders raise nearly anything for foreign bytes, and only this request may fail.
    except Exception as error:
        raise InvalidImageError("IMAGE: not a decodable image") from error


def _too_large(max_pixels: int) -> InvalidImageError:
    return InvalidImageError(f"IMAGE: more than {max_pixels} pixels")


def _check_size(width: int, height: int, max_pixels: int) -> None:
    """Refuse by the size in the file's header, before anything is decoded."""
    if width * height > max_pixels:
        raise _too_large(max_pixels)
    if width * height < 1:
        raise InvalidImageError("IMAGE: has no pixels")


def _check_scans(content: bytes) -> None:
    if content.startswith(b"\xff\xd8") and content.count(SCAN) > MAX_SCANS:
        raise InvalidImageError(f"IMAGE: a JPEG of more than {MAX_SCANS} scans")


def _check_tiles(image: Image.Image, max_pixels: int) -> None:
    """A TIFF is decoded tile by tile, and a tile may be larger than the whole picture."""
    tags = getattr(image, "tag_v2", {})
    if int(tags.get(TILE_WIDTH, 1)) * int(tags.get(TILE_LENGTH, 1)) > max_pixels:
        raise _too_large(max_pixels)


def _orientation(image: Image.Image) -> int:
    """EXIF's orientation, 1 (upright) where it cannot be read: a broken block of EXIF breaks no picture."""
    try:
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # noqa: BLE001 - the parser raises nearly anything for foreign bytes
        return 1


def _on_white(image: Image.Image) -> Image.Image:
    """Convert any mode to RGB, transparent parts shown on white."""
    if image.mode == "F" or image.mode.startswith("I"):
        return _from_16_bits(image)
    if not image.has_transparency_data:
        return image.convert("RGB")
    layer = image.convert("LA").convert("RGBA") if image.mode == "La" else image.convert("RGBA")
    white = Image.new("RGB", layer.size, "white")
    white.paste(layer, mask=layer.getchannel("A"))
    return white


def _from_16_bits(image: Image.Image) -> Image.Image:
    """Grey of 16 bits, which comes as integers of 16 or 32: the upper half of each (`convert` would clip it)."""
    grey = np.asarray(image)
    # What is beyond them, or broken, has no agreed white.
    if image.mode == "F" or grey.min() < 0 or grey.max() > WHITE_16:
        raise InvalidImageError("IMAGE: more than 16 bits a pixel are not supported")
    upper = (grey >> 8).astype(np.uint8)
    clear = image.info.get("transparency")
    if isinstance(clear, int):
        upper[grey == clear] = 255
    return Image.fromarray(upper).convert("RGB")
