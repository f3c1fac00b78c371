"""The two models that the bench can make by itself, as a model repository in a folder."""

import enum
import warnings
from pathlib import Path

NAME = "seed"


class Builtin(enum.StrEnum):
    """`cnn`: 224x224 images through three convolutions. `mlp`: 128-512-512-10."""

    CNN = "cnn"
    MLP = "mlp"


_CONFIG = """name: "{name}"
platform: "pytorch_libtorch"
max_batch_size: {max_batch_size}
input [ {{ name: "INPUT__0" data_type: TYPE_FP32 dims: [ {dims} ] }} ]
output [ {{ name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 10 ] }} ]
"""
_DIMS = {Builtin.CNN: "3, 224, 224", Builtin.MLP: "128"}


def build(builtin: Builtin, repository: Path, *, max_batch_size: int) -> None:
    """Write the model into the repository, named `seed`, with weights drawn from a fixed seed."""
    import torch  # noqa: PLC0415 - only here, so that the command line answers at once

    torch.manual_seed(0)
    folder = repository / NAME / "1"
    folder.mkdir(parents=True)
    config = _CONFIG.format(name=NAME, max_batch_size=max_batch_size, dims=_DIMS[builtin])
    (folder.parent / "config.pbtxt").write_text(config)
    nn = torch.nn
    if builtin is Builtin.CNN:
        network = nn.Sequential(
            *(nn.Conv2d(3, 16, 7, stride=4, padding=3), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()),
            *(nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
        )
    else:
        network = nn.Sequential(
            *(nn.Linear(128, 512), nn.ReLU()),
            *(nn.Linear(512, 512), nn.ReLU()),
            nn.Linear(512, 10),
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PyTorch advises torch.export
        torch.jit.script(network.eval()).save(folder / "model.pt")  # type: ignore[no-untyped-call] # torch has no type
