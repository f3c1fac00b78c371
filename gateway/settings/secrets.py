"""What the environment holds, by itself or in files: all of it that configurations name is read here.

Docker and Kubernetes mount secrets as files, which no process listing and no `docker inspect` shows: where `NAME` is
not set, `NAME_FILE` may name the file that holds it.
"""

import os
from pathlib import Path
from typing import Final

from gateway.settings.faults import ConfigError

FILE: Final = "_FILE"
MOST_BYTES: Final = 64 * 1024  # no secret is as long; a folder's archive that was named by mistake is


def from_environment(name: str) -> str:
    """The variable's value, else what its file holds, without the line's end; empty where neither is set.

    Raises `ConfigError` for a file that cannot be read, and where both are set: one of them is a mistake.
    """
    value, path = os.environ.get(name, ""), os.environ.get(name + FILE, "")
    if not path:
        return value
    if value:
        raise ConfigError(f"{name} and {name}{FILE} are both set: leave one out")
    try:
        with Path(path).open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        text = content.decode()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name}{FILE}: the file that it names cannot be read ({type(error).__name__})") from error
    if len(content) > MOST_BYTES:
        raise ConfigError(f"{name}{FILE}: the file that it names is too long for a secret")
    return text.removesuffix("\n").removesuffix("\r")
