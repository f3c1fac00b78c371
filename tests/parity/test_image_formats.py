"""Every kind of image file through `image_preprocess` on both servers: what it shows, or why it is refused."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tritonclient import grpc as client
from tritonclient.utils import InferenceServerException

from tests.kit import images
from tests.kit.own_models import ask, loaded
from tests.kit.servers import TARGETS, Server

MODEL = "image_preprocess"


@pytest.fixture(scope="module", params=TARGETS)
def asked(request: pytest.FixtureRequest, serving: Callable[[str], Server]) -> Iterator[client.InferenceServerClient]:
    with loaded(serving(request.param), MODEL) as asked:
        yield asked


def shown(asked: client.InferenceServerClient, content: bytes) -> np.ndarray:
    """The centre of a file of 256 x 256 pixels, in levels of 0 to 255: FP32 [224, 224, 3]."""
    [pixels] = ask(asked, MODEL, content, shape=(1, 1)).as_numpy("PIXELS")
    return pixels.transpose(1, 2, 0) * 128 + 127


@pytest.mark.parametrize("kind", images.SAMPLES)
def test_a_file_shows_what_a_viewer_shows(asked: client.InferenceServerClient, kind: str):
    sample = images.SAMPLES[kind]()
    expected = sample.shown[images.CROP, images.CROP].astype(np.float32)
    assert np.ptp(expected) > 60, "a file that shows nothing proves nothing"
    assert np.abs(shown(asked, sample.content) - expected).mean() <= sample.within + 1e-3


@pytest.mark.parametrize("kind", images.REFUSED)
def test_a_file_that_is_none_or_too_much_is_refused_and_the_next_one_served(
    asked: client.InferenceServerClient, kind: str
):
    make, message = images.REFUSED[kind]
    with pytest.raises(InferenceServerException) as refused:
        ask(asked, MODEL, make(), shape=(1, 1))
    assert message in refused.value.message()
    assert refused.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert shown(asked, images.SAMPLES["PNG"]().content).shape == (224, 224, 3)
