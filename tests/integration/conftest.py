"""When all is over, nothing that was written holds a secret (tests/kit/leaks.py)."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def _no_leaks(no_leaks: None) -> None:
    """Looked for at the end of the session."""
