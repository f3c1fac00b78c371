"""`python -m gateway.stack.healthy URL`: exit 0 when the URL answers 200. The images have no curl."""

import sys
import urllib.request
from http import HTTPStatus

_TIMEOUT_S = 4


def main() -> int:
    """Ask once."""
    with urllib.request.urlopen(sys.argv[1], timeout=_TIMEOUT_S) as answer:  # noqa: S310 - the address is in compose
        return 0 if answer.status == HTTPStatus.OK else 1


if __name__ == "__main__":
    raise SystemExit(main())
