"""`image_embedding` on both servers: pictures that look alike are near."""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import skimage
from PIL import Image, ImageOps

from tests.kit.images import file_of
from tests.kit.own_models import ask, loaded
from tests.kit.servers import TARGETS, Server

PHOTOS = Path(skimage.__file__).parent / "data"


def test_a_mirrored_cat_is_nearer_to_the_cat_than_a_rocket(serving: Callable[[str], Server]):
    cat = (PHOTOS / "chelsea.png").read_bytes()
    mirrored = file_of(ImageOps.mirror(Image.open(io.BytesIO(cat)).convert("RGB")), "JPEG", quality=80)
    rocket = (PHOTOS / "rocket.jpg").read_bytes()
    vectors = {}
    for target in TARGETS:
        with loaded(serving(target), "image_embedding", "image_preprocess", "image_features") as asked:
            files = (cat, mirrored, rocket)
            found = [ask(asked, "image_embedding", file, shape=(1, 1)).as_numpy("EMBEDDING")[0] for file in files]
        vectors[target] = np.stack(found)
        assert vectors[target].shape == (3, 1280)
        assert np.linalg.norm(vectors[target], axis=1) == pytest.approx(1, abs=1e-5)
        alike, other = vectors[target][1:] @ vectors[target][0]
        assert alike > 0.85
        assert other < 0.5
    np.testing.assert_allclose(*vectors.values(), rtol=0, atol=1e-4)
