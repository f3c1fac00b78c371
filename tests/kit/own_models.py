"""The models of `triton_models/` on a server of `tests.kit.servers`."""

import contextlib
import shutil
from collections.abc import Iterator

import numpy as np
from tritonclient import grpc as client

from tests.kit.servers import Server, copy_model
from triton_models import build


@contextlib.contextmanager
def loaded(server: Server, model: str, *steps: str) -> Iterator[client.InferenceServerClient]:
    """A client of the server, with `model` and the steps that it is made of loaded, out of a built repository."""
    assert build.main([]) == 0
    shutil.rmtree(build.REPOSITORY / "__pycache__", ignore_errors=True)  # Triton would take it for a model
    for name in (*steps, model):
        if not (server.repository / name).exists():
            copy_model(server, build.REPOSITORY / name)
    with client.InferenceServerClient(server.grpc) as asked:
        asked.load_model(model)
        yield asked
        asked.unload_model(model)


def ask(
    asked: client.InferenceServerClient, model: str, content: bytes, *, shape: tuple[int, ...]
) -> client.InferResult:
    """What a model of images says of a file."""
    image = client.InferInput("IMAGE", list(shape), "BYTES")
    image.set_data_from_numpy(np.array([content], object).reshape(shape))
    return asked.infer(model, [image], client_timeout=60)
