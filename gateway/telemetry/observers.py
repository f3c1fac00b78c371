"""Several observers as one."""

from collections.abc import Sequence

from gateway.core.errors import GatewayError
from gateway.core.types import RequestRecord
from gateway.ports import Observer


class Observers:
    """Tells each of `observers` in turn."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def began(self, task: str) -> None:
        """A request entered the walk."""
        for observer in self._observers:
            observer.began(task)

    def ended(self, record: RequestRecord, error: GatewayError | None) -> None:
        """It left it."""
        for observer in self._observers:
            observer.ended(record, error)

    def refused(self, record: RequestRecord, error: GatewayError) -> None:
        """A request was refused at the door."""
        for observer in self._observers:
            observer.refused(record, error)
