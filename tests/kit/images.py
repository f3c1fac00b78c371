"""Image files of every kind that people upload, and what a viewer shows of each.

All show the same picture, or what can be left of it; the expected pixels come from the picture by arithmetic, not from
a decoder.
"""

import io
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image

SIDE = 256
CROP = slice(16, 240)  # the centre 7/8 of it: 224 pixels, so that nothing is resized
EXACT, LOSSY = 0.0, 4.0  # mean difference in grey levels of 255


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A file, and what it shows: UINT8 [256, 256, 3], up to a mean difference of `within`."""

    content: bytes
    shown: np.ndarray
    within: float = EXACT


def photo() -> np.ndarray:
    """Smooth colours that differ in each corner: UINT8 [256, 256, 3]."""
    y, x = np.mgrid[0:SIDE, 0:SIDE]
    waves = 20 * np.sin(x / 17.0) * np.cos(y / 23.0)
    planes = [40 + 0.5 * x + waves, 220 - 0.6 * y + waves, 30 + 0.4 * x + 0.4 * y - waves]
    return np.clip(np.stack(planes, axis=2), 0, 255).round().astype(np.uint8)


PHOTO = photo()
GREY = PHOTO[:, :, 0]
ALPHA = (np.mgrid[0:SIDE, 0:SIDE][1]).astype(np.uint8)


def file_of(image: Image.Image, kind: str, **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def png_of(pixels: bytes, *, bits: int, colour: int, size: tuple[int, int] = (SIDE, SIDE), extra: bytes = b"") -> bytes:
    """A PNG written by hand: rows of `pixels` each after a filter byte of 0, `extra` chunks before them."""
    header = struct.pack(">IIBBBBB", *size, bits, colour, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + extra
        + chunk(b"IDAT", zlib.compress(pixels))
        + chunk(b"IEND", b"")
    )


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def on_white(pixels: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    share = alpha[:, :, None] / 255
    return np.round(pixels * share + 255 * (1 - share)).astype(np.uint8)


def grey(levels: np.ndarray) -> np.ndarray:
    return np.repeat(levels[:, :, None], 3, axis=2)


def oriented(orientation: int) -> Sample:
    """A JPEG whose pixels lie as its EXIF says, so that a viewer shows the photo upright."""
    stored = {
        1: PHOTO,
        2: PHOTO[:, ::-1],
        3: PHOTO[::-1, ::-1],
        4: PHOTO[::-1],
        5: PHOTO.transpose(1, 0, 2),
        6: np.rot90(PHOTO, 1),
        7: np.rot90(PHOTO, 2).transpose(1, 0, 2),
        8: np.rot90(PHOTO, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = file_of(Image.fromarray(np.ascontiguousarray(stored)), "JPEG", quality=95, exif=exif)
    return Sample(content=content, shown=PHOTO, within=LOSSY)


def _rgb(kind: str, within: float = EXACT, **options: object) -> Sample:
    return Sample(content=file_of(Image.fromarray(PHOTO), kind, **options), shown=PHOTO, within=within)


def _rgba(kind: str, **options: object) -> Sample:
    image = Image.fromarray(np.dstack([PHOTO, ALPHA]))
    return Sample(content=file_of(image, kind, **options), shown=on_white(PHOTO, ALPHA), within=0.6)


def _grey(kind: str, within: float = EXACT, **options: object) -> Sample:
    return Sample(content=file_of(Image.fromarray(GREY), kind, **options), shown=grey(GREY), within=within)


def _bilevel(kind: str) -> Sample:
    mask = GREY > 128
    return Sample(content=file_of(Image.fromarray(mask), kind), shown=grey(mask.astype(np.uint8) * 255))


def _palette(kind: str, *, clear: bool = False) -> Sample:
    """Blocks of few colours; where `clear`, the first colour is transparent."""
    indices = (np.mgrid[0:SIDE, 0:SIDE].sum(axis=0) // 64).astype(np.uint8)
    colours = np.array(
        [(200, 10, 10), (10, 200, 10), (10, 10, 200), (90, 90, 0), (0, 90, 90), (9, 9, 9), (70, 0, 70), (1, 2, 3)]
    )
    image = Image.fromarray(indices)
    image.putpalette(colours.astype(np.uint8).tobytes())
    shown = colours[indices].astype(np.uint8)
    if clear:
        shown[indices == 0] = 255
    return Sample(content=file_of(image, kind, **({"transparency": 0} if clear else {})), shown=shown)


def _grey_16(kind: str) -> Sample:
    deep = GREY.astype(np.uint16) * 256 + 77
    return Sample(content=file_of(Image.fromarray(deep), kind), shown=grey(GREY))


def _grey_16_clear() -> Sample:
    """16 bits of grey, of which one is transparent."""
    deep = np.full((SIDE, SIDE), 0x1234, ">u2")
    deep[:100] = 0x4321
    pixels = b"".join(b"\0" + row.tobytes() for row in deep)
    content = png_of(pixels, bits=16, colour=0, extra=chunk(b"tRNS", b"\x12\x34"))
    return Sample(content=content, shown=grey(np.where(deep == 0x1234, 255, 0x43).astype(np.uint8)))


def _rgb_16() -> Sample:
    deep = (PHOTO.astype(np.uint16) * 256 + 99).astype(">u2")
    return Sample(content=png_of(b"".join(b"\0" + row.tobytes() for row in deep), bits=16, colour=2), shown=PHOTO)


def _frames(kind: str, **options: object) -> Sample:
    """An animation, or pages: only the first one counts."""
    first = Image.fromarray(PHOTO)
    others = [Image.new("RGB", first.size, colour) for colour in ("red", "blue")]
    content = file_of(first, kind, save_all=True, append_images=others, **options)
    return Sample(content=content, shown=PHOTO, within=LOSSY if kind != "TIFF" else EXACT)


def _gif_frames(count: int) -> Sample:
    sample = _palette("GIF")
    first = Image.open(io.BytesIO(sample.content))
    others = [Image.new("P", first.size, index % 7) for index in range(count)]
    return Sample(
        content=file_of(first, "GIF", save_all=True, append_images=others, optimize=False), shown=sample.shown
    )


def _cmyk(kind: str, within: float, **options: object) -> Sample:
    """Without black: cyan, magenta and yellow are what red, green and blue lack."""
    ink = np.dstack([255 - PHOTO, np.zeros((SIDE, SIDE), np.uint8)])
    image = Image.frombytes("CMYK", (SIDE, SIDE), ink.tobytes())
    return Sample(content=file_of(image, kind, **options), shown=PHOTO, within=within)


def _broken_exif() -> Sample:
    return _rgb("JPEG", LOSSY, quality=95, exif=b"Exif\0\0" + b"II*\0" + b"\xff" * 40)


def _turned_tiff() -> Sample:
    stored = Image.fromarray(np.ascontiguousarray(np.rot90(PHOTO, 1)))
    return Sample(content=file_of(stored, "TIFF", tiffinfo={0x0112: 6}), shown=PHOTO)


SAMPLES: dict[str, Callable[[], Sample]] = {
    "JPEG": lambda: _rgb("JPEG", LOSSY, quality=95),
    "JPEG progressive": lambda: _rgb("JPEG", LOSSY, quality=95, progressive=True),
    "JPEG grey": lambda: _grey("JPEG", LOSSY, quality=95),
    "JPEG CMYK": lambda: _cmyk("JPEG", LOSSY, quality=95),
    "JPEG broken EXIF": _broken_exif,
    "JPEG of many pictures (MPO)": lambda: _frames("MPO", quality=95),
    **{f"JPEG orientation {number}": (lambda number=number: oriented(number)) for number in range(1, 9)},
    "PNG": lambda: _rgb("PNG"),
    "PNG alpha": lambda: _rgba("PNG"),
    "PNG grey and alpha": lambda: Sample(
        content=file_of(Image.fromarray(np.dstack([GREY, ALPHA]), "LA"), "PNG"),
        shown=on_white(grey(GREY), ALPHA),
        within=0.6,
    ),
    "PNG palette": lambda: _palette("PNG"),
    "PNG palette, transparent": lambda: _palette("PNG", clear=True),
    "PNG 16 bits": lambda: _grey_16("PNG"),
    "PNG 16 bits, transparent": _grey_16_clear,
    "PNG 16 bits in colour": _rgb_16,
    "PNG grey": lambda: _grey("PNG"),
    "PNG bilevel": lambda: _bilevel("PNG"),
    "PNG animated": lambda: _frames("PNG"),
    "WebP": lambda: _rgb("WEBP", LOSSY, quality=95),
    "WebP lossless": lambda: _rgb("WEBP", lossless=True),
    "WebP alpha": lambda: _rgba("WEBP", lossless=True, exact=True),
    "WebP animated": lambda: _frames("WEBP", quality=95),
    "GIF": lambda: _palette("GIF"),
    "GIF transparent": lambda: _palette("GIF", clear=True),
    "GIF of 3000 frames": lambda: _gif_frames(3000),
    "BMP": lambda: _rgb("BMP"),
    "BMP grey": lambda: _grey("BMP"),
    "BMP bilevel": lambda: _bilevel("BMP"),
    "TIFF": lambda: _rgb("TIFF"),
    "TIFF deflate": lambda: _rgb("TIFF", compression="tiff_adobe_deflate"),
    "TIFF alpha": lambda: _rgba("TIFF"),
    "TIFF 16 bits": lambda: _grey_16("TIFF"),
    "TIFF CMYK": lambda: _cmyk("TIFF", 1.0),
    "TIFF turned": _turned_tiff,
    "TIFF pages": lambda: _frames("TIFF"),
}


# --- files that are refused ---------------------------------------------------------------------


def _png_bomb() -> bytes:
    """A few bytes whose header announces 60000 x 60000 pixels."""
    return png_of(b"", bits=8, colour=2, size=(60000, 60000))


def _text_bomb(kind: bytes, before: bytes) -> bytes:
    """256 MB of zeros in a compressed chunk of a picture of one pixel."""
    zeros = zlib.compressobj(9)
    packed = b"".join(zeros.compress(bytes(2**20)) for _ in range(256)) + zeros.flush()
    return png_of(b"\0\0\0\0", bits=8, colour=2, size=(1, 1), extra=chunk(kind, before + packed))


def _webp_bomb() -> bytes:
    """A lossless WebP of one colour and 16383 x 16383 pixels, by its header: the pixels are of a small one."""
    content = bytearray(file_of(Image.new("RGB", (2, 2), "red"), "WEBP", lossless=True))
    at = content.index(b"VP8L") + 9
    bits = int.from_bytes(content[at : at + 4], "little") & ~0xFFFFFFF
    content[at : at + 4] = (bits | 16382 | 16382 << 14).to_bytes(4, "little")
    return bytes(content)


def _animated_bomb() -> bytes:
    """An animated WebP whose frames are small and whose canvas has 9000 x 9000 pixels."""
    content = bytearray(_frames("WEBP").content)
    assert content[12:16] == b"VP8X"
    content[24:30] = (9000 - 1).to_bytes(3, "little") * 2
    return bytes(content)


def _tile_bomb() -> bytes:
    """A TIFF of 16 x 16 pixels in one tile of 65520 x 65520."""
    tags = [
        *((256, 3, 1, 16), (257, 3, 1, 16), (258, 3, 1, 8), (259, 3, 1, 8), (262, 3, 1, 1), (277, 3, 1, 1)),
        *((322, 3, 1, 65520), (323, 3, 1, 65520), (324, 4, 1, 8), (325, 4, 1, 8)),
    ]
    packed = zlib.compress(bytes(8)).ljust(16, b"\0")
    directory = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", *tag) for tag in tags) + bytes(4)
    return struct.pack("<2sHI", b"II", 42, 8 + len(packed)) + packed + directory


def _many_scans() -> bytes:
    """A progressive JPEG with one of its scans a thousand times."""
    content = file_of(Image.fromarray(PHOTO), "JPEG", progressive=True)
    last = content.rindex(b"\xff\xda")
    return content[:last] + content[last:-2] * 1000 + content[-2:]


def _cut(kind: str) -> bytes:
    content = file_of(Image.fromarray(PHOTO), kind)
    return content[: len(content) // 2]


def _empty_gif() -> bytes:
    return b"GIF89a" + bytes(7) + b"\x2c" + bytes(8) + b"\0\x02\x02\x4c\x01\x00;"


UNREADABLE = "IMAGE: not a decodable image"
TOO_LARGE = "IMAGE: more than 50000000 pixels"
REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "nothing": (lambda: b"", UNREADABLE),
    "text": (lambda: b"plain text", UNREADABLE),
    "SVG": (lambda: b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>', UNREADABLE),
    "PNG of 3.6 gigapixels": (_png_bomb, TOO_LARGE),
    "WebP of 268 megapixels": (_webp_bomb, TOO_LARGE),
    "animated WebP of 81 megapixels": (_animated_bomb, TOO_LARGE),
    "TIFF with a tile of 4 gigapixels": (_tile_bomb, TOO_LARGE),
    "PNG text bomb": (lambda: _text_bomb(b"zTXt", b"Comment\0\0"), UNREADABLE),
    "PNG profile bomb": (lambda: _text_bomb(b"iCCP", b"icc\0\0"), UNREADABLE),
    "JPEG of a thousand scans": (_many_scans, "IMAGE: a JPEG of more than 100 scans"),
    "GIF without pixels": (_empty_gif, "IMAGE: "),
    "PNG without pixels": (lambda: png_of(b"", bits=8, colour=2, size=(0, 0)), "IMAGE: "),
    **{
        f"half a {kind}": ((lambda kind=kind: _cut(kind)), UNREADABLE)
        for kind in ("JPEG", "PNG", "WEBP", "TIFF", "BMP")
    },
}
