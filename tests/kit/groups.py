"""Which tests share a process where several run them (`--dist loadgroup`): those that share servers."""

from collections.abc import Sequence
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """The tests of a file stay together, and those of a folder whose files share a stack."""
    for item in items:
        path = Path(item.nodeid.partition("::")[0])
        if path.parts[1:2] in (("parity",), ("integration",)):
            item.add_marker(pytest.mark.xdist_group(str(path)))
        elif path.parts[1:2] == ("e2e",):
            item.add_marker(pytest.mark.xdist_group(str(path.parent)))
