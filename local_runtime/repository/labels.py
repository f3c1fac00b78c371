"""Names of classes (`label_filename`), for answers that ask for the best classes of an output. Blocking."""

from collections.abc import Mapping
from pathlib import Path

from local_runtime.errors import ModelLoadError
from local_runtime.repository.model_config import ModelConfig


def read_labels(config: ModelConfig, folder: Path) -> Mapping[str, tuple[str, ...]]:
    """The labels of every output that has a file of them, by output, in the order of its lines.

    The file is known to exist inside the model's folder. Raises ModelLoadError if it is not UTF-8 text.
    """
    labels: dict[str, tuple[str, ...]] = {}
    for spec in config.outputs:
        if not spec.label_filename:
            continue
        try:
            labels[spec.name] = tuple((folder / spec.label_filename).read_text(encoding="utf-8").splitlines())
        except (OSError, UnicodeDecodeError) as error:
            raise ModelLoadError(f"failed to read label file {config.name}/{spec.label_filename}: {error}") from error
    return labels
