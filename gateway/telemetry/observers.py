"""Several observers as one."""

from collections.abc import Sequence

from gateway.core.watching.record import RequestRecord
from gateway.ports import Observer


class Observers:
    """Tells each of `observers` in turn."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def began(self, task: str) -> None:
        """A request entered the walk."""
        for observer in self._observers:
            observer.began(task)

    def ended(self, record: RequestRecord) -> None:
        """It left it."""
        for observer in self._observers:
            observer.ended(record)

    def refused(self, record: RequestRecord) -> None:
        """A request was refused at the door."""
        for observer in self._observers:
            observer.refused(record)
