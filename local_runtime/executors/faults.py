"""What the code of a Python model raised, as Triton writes it: type and text, then where."""

import traceback
from collections.abc import Iterable
from pathlib import Path


def raised_by_run(error: BaseException, file: Path) -> str:
    """All frames from the model's file inwards, the innermost first."""
    frames = traceback.extract_tb(error.__traceback__)
    first = next((index for index, frame in enumerate(frames) if frame.filename == str(file)), 0)
    return _written(error, reversed(frames[first:]))


def raised_by_load(error: BaseException, file: Path) -> str:
    """The innermost frame that lies in the model's folder, if any: code that cannot be compiled tells its own place."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(file.parent.parent)]
    return _written(error, own[-1:]).rstrip()


def _written(error: BaseException, frames: Iterable[traceback.FrameSummary]) -> str:
    where = "".join(f"  {frame.filename}({frame.lineno}): {frame.name}\n" for frame in frames)
    text = f"{type(error).__name__}: {error}"
    return f"{text}\n\nAt:\n{where}" if where else text
