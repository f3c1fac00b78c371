"""Texts of errors as every client can take them. Pure."""

from typing import Final
from urllib.parse import quote_from_bytes

MAX_TEXT_BYTES: Final = 4 * 1024
# gRPC sends a status' text in the trailers, with three bytes for each that is not printable ASCII. Its clients may
# refuse trailers above 8 KiB (`grpc.max_metadata_size`), and then see another error than the one that was sent.
_MAX_QUOTED_BYTES: Final = 7 * 1024
_MAX_UNPRINTABLE_BYTES: Final = 2 * 1024
_AS_THEY_ARE: Final = " !\"#$&'()*+,/:;<=>?@[\\]^`{|}"
_CUT: Final = b" ... "


def safe_text(text: object) -> str:
    """The text of an error, valid Unicode and at most `MAX_TEXT_BYTES` long as UTF-8; never raises.

    Models make errors of anything: what is no text becomes one, half a surrogate pair its escape. The middle of a long
    text is left out, since what it is about stands at its start and what is wrong at its end.
    """
    try:
        plain = text if isinstance(text, str) else str(text)
        data = plain.encode("utf-8", "backslashreplace")
    except Exception:  # noqa: BLE001 - the text may be an object of a model, which raises what it likes
        return f"an error of type {type(text).__name__} that has no text"
    data = _cut(data, MAX_TEXT_BYTES)
    if len(data) > _MAX_UNPRINTABLE_BYTES and len(quote_from_bytes(data, safe=_AS_THEY_ARE)) > _MAX_QUOTED_BYTES:
        data = _cut(data, _MAX_UNPRINTABLE_BYTES)
    return data.decode("utf-8", "ignore")  # a letter may be cut in two


def _cut(data: bytes, most: int) -> bytes:
    if len(data) <= most:
        return data
    half = (most - len(_CUT)) // 2
    return data[:half] + _CUT + data[-half:]
