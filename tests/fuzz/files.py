"""Files that callers upload: pictures of six formats, forms, `data:` URLs."""

import asyncio
import base64
import importlib.util
import io
import struct
import warnings
import zlib
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from PIL import Image

from gateway.api.body import form, gathered
from gateway.core.errors import GatewayError, InvalidInput
from gateway.tasks.files import file_of, media_type
from tests.fuzz.making import DRAWN, NASTY, mutated
from tests.fuzz.target import Target

_FILE = Path(__file__).parents[2] / "triton_models/image_preprocess/1/image_files.py"
MAX_PIXELS = 4_000_000


def _loaded() -> Any:
    """The models' own decoder, which Triton loads by its path."""
    spec = importlib.util.spec_from_file_location("fuzzed_image_files", _FILE)
    if spec is None or spec.loader is None:
        raise RuntimeError(f"{_FILE} is missing")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


IMAGES = _loaded()


def _pictures() -> list[bytes]:
    """Small pictures in every format that is taken, and in the modes that those have."""
    found = []
    noise = Image.effect_noise((23, 17), 60)
    for kind, modes, options in (
        ("JPEG", ("RGB", "L", "CMYK"), {}),
        ("JPEG", ("RGB",), {"progressive": True}),
        ("PNG", ("RGB", "RGBA", "P", "L", "LA", "1", "I;16"), {}),
        ("GIF", ("P", "L"), {}),
        ("WEBP", ("RGB", "RGBA"), {}),
        ("WEBP", ("RGB",), {"lossless": True}),
        ("BMP", ("RGB", "L", "1", "P"), {}),
        ("TIFF", ("RGB", "L", "1", "I;16", "F", "RGBA"), {}),
        ("TIFF", ("RGB",), {"compression": "tiff_lzw"}),
        ("TIFF", ("RGB",), {"compression": "tiff_deflate"}),
        ("TIFF", ("RGB",), {"compression": "jpeg"}),
        ("TIFF", ("1",), {"compression": "group4"}),
    ):
        for mode in modes:
            out = io.BytesIO()
            noise.convert("I;16" if mode == "I;16" else mode).save(out, kind, **options)
            found.append(out.getvalue())
    frames = io.BytesIO()
    noise.convert("P").save(frames, "GIF", save_all=True, append_images=[noise.convert("P")] * 3)
    return [*found, frames.getvalue(), *_bombs()]


def _bombs() -> list[bytes]:
    """Files of a few bytes that say that they are, or unpack to, pictures of gigabytes."""
    return [
        _png(60_000, 60_000, zlib.compress(b"")),
        _png(2000, 2000, zlib.compress(b"\0" * 30_000_000)),  # more pixels than its size has
        _png(2**31 - 1, 1, zlib.compress(b"\0")),
        b"GIF89a" + struct.pack("<HH", 65535, 65535) + b"\x80\0\0" + b"\0" * 6 + b"," + struct.pack("<HHHH", 0, 0,
        65535, 65535) + b"\0\x08\0;",
        b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, 50_000, -50_000, 1, 24, 0, 0, 0, 0, 0, 0),
        b"\xff\xd8\xff\xc0\x00\x11\x08\xff\xff\xff\xff\x03\x01\x22\x00\x02\x11\x01\x03\x11\x01\xff\xd9",
        b"II*\0\x08\0\0\0" + struct.pack("<H", 3) + b"".join(struct.pack("<HHII", tag, 4, 1, 2**31) for tag in (256,
        257, 322)) + b"\0" * 4,
    ]  # fmt: skip


def _png(width: int, height: int, data: bytes) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return len(content).to_bytes(4, "big") + kind + content + zlib.crc32(kind + content).to_bytes(4, "big")

    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + b"\x08\x02\0\0\0"
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


PIECES = [
    b"IDAT",
    b"iCCP",
    b"zTXt",
    b"eXIf",
    b"acTL",
    b"fcTL",
    b"\xff\xda",
    b"\xff\xe1\x00\x10Exif\0\0",
    b"MM\0*",
    b"VP8X",
    b"ALPH",
    b",",
    b"!\xff",
]


def _picture(content: bytes) -> None:
    media_type(content)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of what it reads anyway
            found = IMAGES.picture(content, max_pixels=MAX_PIXELS, side=256)
    except IMAGES.InvalidImageError as error:
        str(error).encode()
        return
    assert found.image.mode == "RGB"
    assert found.image.width * found.image.height <= MAX_PIXELS


# --- forms ----------------------------------------------------------------------------------------

FIELDS = st.sampled_from(["image", "file", "text", "labels", "top_k", "audio"]) | DRAWN
PART_HEADS = (
    'Content-Disposition: form-data; name="{name}"',
    'Content-Disposition: form-data; name="{name}"; filename="{file}"\r\nContent-Type: image/png',
    "Content-Disposition: form-data; name=\"{name}\"; filename*=UTF-8''{file}",
    'content-disposition: FORM-DATA; name={name}; filename="\\"{file}"',
    "Content-Disposition: attachment",
    'Content-Type: text/plain; charset=utf-7\r\nContent-Disposition: form-data; name="{name}"',
    'Content-Transfer-Encoding: base64\r\nContent-Disposition: form-data; name="{name}"',
    "X: y",
)


@st.composite
def _forms(draw: st.DrawFn) -> tuple[str, bytes]:
    boundary = draw(st.sampled_from(["b", "----x", "a" * 70, "a b", 'q"uote', ""]))
    body = b""
    for _ in range(draw(st.integers(0, 5))):
        head = draw(st.sampled_from(PART_HEADS)).format(name=draw(FIELDS), file=draw(st.sampled_from(NASTY)))
        content = draw(st.binary(max_size=30) | st.sampled_from([b"hi", b"\xff\xfe", b"--b", b"\r\n--b\r\n", b"\0"]))
        body += f"--{boundary}\r\n{head}\r\n\r\n".encode("utf-8", "surrogatepass") + content + b"\r\n"
    body += f"--{boundary}--\r\n".encode()
    kind = draw(
        st.sampled_from(
            [
                "multipart/form-data; boundary={b}",
                'multipart/form-data; boundary="{b}"; charset=utf-7',
                "multipart/form-data",
            ]
        )
    )
    return kind.replace("{b}", boundary), draw(
        st.just(body) | mutated([body], [b"\r\n", b"--", b"\r", b"\n", b"\0", b": ", b'"', b";"])
    )


def _form(given: tuple[str, bytes]) -> None:
    kind, body = given
    try:
        fields = gathered(asyncio.run(form({"content-type": kind}, body)))
    except GatewayError as error:
        str(error).encode()
        return
    for value in fields.values():
        if isinstance(value, bytes):
            assert value in body


def _data_url(text: str) -> None:
    try:
        found = file_of(text, field="input.image")
    except InvalidInput as error:
        str(error).encode()
        return
    assert base64.b64decode(text.partition(",")[2] if text.startswith("data:") else text) == found


URLS = [
    b"data:image/png;base64,iVBORw0KGgo=",
    b"iVBORw0KGgo=",
    b"http://127.0.0.1:1/x.png",
    b"file:///etc/passwd",
    b"data:,x",
    b"data:;base64",
]

TARGETS = (
    Target(
        name="pictures",
        about="mutated pictures of six formats, and bombs: a picture within the bound, or the declared error",
        inputs=mutated(_pictures(), PIECES),
        check=_picture,
    ),
    Target(
        name="forms",
        about="multipart bodies: whole parts, or the declared error",
        inputs=_forms(),
        check=_form,
        is_slow=True,
    ),
    Target(
        name="data-urls",
        about="files as text: the very bytes, or the declared error; no address is opened",
        inputs=mutated(URLS, [b",", b";", b"=", b"%", b"\xff"]).map(lambda raw: raw.decode("latin-1")) | DRAWN,
        check=_data_url,
    ),
)
