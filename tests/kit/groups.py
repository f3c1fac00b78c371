"""Which tests share a process where several run them (`--dist loadgroup`): those that share servers.

xdist's own groups are names that it appends to a test's, which pytest 9.2 does not take from it any more: without a
word each test is a group of its own, and each process starts all servers.
"""

import re
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

_STACK = re.compile(r"\[(up|compose)\b")


def group(name: str) -> str:
    """The group of a test: its file, or the folder and the stack of an end-to-end test; others are for themselves."""
    path = Path(name.partition("::")[0])
    if path.parts[1:2] in (("parity",), ("integration",)):
        return str(path)
    if path.parts[1:2] == ("e2e",):
        stack = _STACK.search(name)
        return f"{path.parent} {stack[1]}" if stack else str(path.parent)
    return name


class Groups(LoadScopeScheduling):
    """Gives one process a whole group."""

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    """Where another distribution is asked for, xdist makes its own."""
    return Groups(config, log) if config.getvalue("dist") == "loadgroup" else None
