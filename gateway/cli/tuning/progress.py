"""How far it is, for those who see no bar: what a log or a pipe keeps."""

import time
from collections.abc import Callable
from typing import Final

from gateway.cli.terminal import say

EVERY_S: Final = 10.0


class Lines:
    """Words on stderr, a line in ten seconds at most; what comes between is left out."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told_at = clock()

    def tell(self, words: str) -> None:
        """If it is time."""
        if (now := self._clock()) - self._told_at >= EVERY_S:
            self._told_at = now
            say(words, err=True)
