"""Export a model of yours to ONNX and put it into a Triton model repository, with its recipe's config.pbtxt.

The weights come from a file or folder on this machine; nothing is fetched. Each export is run by onnxruntime on
several shapes and compared with the torch model before anything is written to the repository.
"""

import argparse
import contextlib
import logging
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

RECIPES = Path(__file__).resolve().parents[1] / "deploy" / "recipes"
EXAMPLES = """examples:
  python -m triton_models.export bert --from ~/models/bert-base-uncased --to triton_models/bert_base
  python -m triton_models.export bert --from ~/models/bert-base-uncased --to triton_models/bert_base --gpu
  python -m triton_models.export resnet50 --from ~/models/resnet50.pth --to triton_models/resnet50
  python -m triton_models.export clip --from ~/models/clip-vit-base-patch32 --to triton_models/clip_image
  python -m triton_models.export whisper --from ~/models/whisper-base --to triton_models/whisper
  python -m triton_models.export bert --from ~/models/my-new-bert --to triton_models/bert_base --version 2

bert, clip and whisper take a Hugging Face folder (config.json, model.safetensors); resnet50 takes one, too, or a state
dict with torchvision's names. whisper makes three models: NAME, NAME_encoder and NAME_decoder.
"""
ONNX_PACKAGES = "python -m pip install onnx onnxscript"
ONNX_DATATYPES = {"tensor(float)": "TYPE_FP32", "tensor(int64)": "TYPE_INT64"}
# Of the greatest value: exports of float32 networks differ by 1e-6 to 1e-4 of it, a broken one by about 1.
TOLERANCE = 1e-3
# Protobuf ends at 2 GiB: weights of more than this go to a file beside model.onnx.
ONE_FILE_BYTES = 1_800_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor as an ONNX file tells it: `dims` without the batch, -1 for free ones, `data_type` in Triton's words."""

    name: str
    data_type: str
    dims: tuple[int, ...]


def exported(item: Any, folder: Path) -> list[Tensor]:
    """Write `item` (an Exportable) as `folder/model.onnx` and prove it; the tensors of the file.

    Raises ExportError where the packages are missing, torch cannot export, or the file answers differently.
    """
    import torch  # noqa: PLC0415 - takes seconds; --help needs none of it

    from triton_models.exportable import ExportError  # noqa: PLC0415 - imports torch

    try:
        import onnxruntime  # noqa: PLC0415 - optional, the message says how to get it
        import onnxscript  # noqa: F401, PLC0415 - torch.onnx needs it
    except ImportError as error:
        raise ExportError(f"{error.name} is not installed: {ONNX_PACKAGES} onnxruntime") from error
    size = sum(tensor.numel() * tensor.element_size() for tensor in item.module.state_dict().values())
    file = folder / "model.onnx"
    rows = torch.export.Dim("rows")
    free = {
        name: {0: rows} | {axis: torch.export.Dim(label) for axis, label in item.lengths.get(name, {}).items()}
        for name in item.inputs
    }
    with _quiet():
        try:
            torch.onnx.export(
                item.module,
                item.examples[0],
                str(file),
                input_names=list(item.inputs),
                output_names=list(item.outputs),
                dynamic_shapes=tuple(free.values()),
                external_data=size > ONE_FILE_BYTES,
                dynamo=True,
                verbose=False,
            )
        except Exception as error:  # whatever torch says of a network that it cannot export
            raise ExportError(f"torch cannot export {item.recipe}: {str(error).splitlines()[0]}") from error
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    for example in item.examples:
        _prove(item, session, example)
    return [_tensor(entry) for entry in (*session.get_inputs(), *session.get_outputs())]


def _prove(item: Any, session: Any, example: Sequence[Any]) -> None:
    """Raises ExportError where the session and the torch model disagree; infinite values have to be the same."""
    import torch  # noqa: PLC0415 - as above

    from triton_models.exportable import ExportError  # noqa: PLC0415 - as above

    with torch.inference_mode():
        expected = item.module(*example)
    wanted = [tensor.numpy() for tensor in (expected if isinstance(expected, tuple) else (expected,))]
    given = {name: tensor.numpy() for name, tensor in zip(item.inputs, example, strict=True)}
    answers = session.run(list(item.outputs), given)
    for name, want, got in zip(item.outputs, wanted, answers, strict=True):
        scale = float(np.abs(want[np.isfinite(want)]).max(initial=0.0))
        if got.shape != want.shape or not np.allclose(got, want, rtol=0, atol=TOLERANCE * scale):
            shapes = ", ".join(str(list(tensor.shape)) for tensor in example)
            raise ExportError(
                f"the ONNX file of {item.recipe} answers '{name}' otherwise than the torch model for inputs of the "
                f"shapes {shapes}; nothing was written"
            )


def _tensor(entry: Any) -> Tensor:
    dims = tuple(dim if isinstance(dim, int) else -1 for dim in entry.shape[1:])
    return Tensor(name=entry.name, data_type=ONNX_DATATYPES.get(entry.type, entry.type), dims=dims)


def configured(text: str, *, name: str, tensors: Sequence[Tensor], parameters: Mapping[str, str]) -> str:
    """A recipe's config.pbtxt for a model of that name, those tensors and parameters; comments stay.

    Raises ValueError where the recipe has not exactly these tensors and datatypes.
    """
    text = re.sub(r'^name: ".*"', f'name: "{name}"', text, flags=re.MULTILINE)
    for tensor in tensors:
        dims = ", ".join(map(str, tensor.dims))
        text, found = re.subn(
            rf'(name: "{tensor.name}" data_type: {tensor.data_type} dims:) \[[^\]]*\]', rf"\1 [ {dims} ]", text
        )
        if found != 1:
            raise ValueError(f"the recipe has no {tensor.data_type} tensor '{tensor.name}'")
    for key, value in parameters.items():
        line = f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}'
        text, found = re.subn(rf'^parameters {{ key: "{key}" .*$', line, text, flags=re.MULTILINE)
        text += "" if found else f"{line}\n"
    return text


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the advice that torch and its exporter give to those who write networks."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def export(kind: str, source: Path, target: Path, *, version: int, gpu: bool, console: Console) -> list[Path]:
    """Make the models of that kind in the repository `target.parent`; their version folders.

    What is there stays as it is: a config.pbtxt of an earlier version, and every version. Raises ExportError.
    """
    from triton_models import exportable  # noqa: PLC0415 - imports torch

    if not target.parent.is_dir():
        raise exportable.ExportError(f"{target.parent} is no folder: make the model repository first")
    if not source.exists():
        raise exportable.ExportError(f"{source} does not exist")
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    # Not inside the repository, where a Triton that reads along would take it for a model; beside it, so that a
    # rename is all that is left to do.
    with (
        Progress(*columns, console=console, transient=True) as progress,
        tempfile.TemporaryDirectory(dir=target.parent.resolve().parent, prefix=".export-") as beside,
    ):
        step = progress.add_task(f"reading {source}", total=None)
        staged: dict[str, Path] = {}
        shapes: dict[str, Tensor] = {}
        for item in exportable.KINDS[kind](source):
            name = target.name + item.recipe.removeprefix("whisper") if kind == "whisper" else target.name
            _refuse_existing(target.parent / name / str(version))
            progress.update(step, description=f"{name}: exporting to ONNX, then comparing with torch")
            staged[name] = Path(beside) / name
            staged[name].mkdir()
            tensors = exported(item, staged[name])
            shapes |= {tensor.name: tensor for tensor in tensors}
            _stage_config(item.recipe, staged[name], name=name, tensors=tensors, parameters={}, gpu=gpu)
        if kind == "whisper":
            _refuse_existing(target / str(version))
            staged[target.name] = _stage_loop(Path(beside), target.name, source, shapes)
        return [_placed(folder, target.parent / name, version) for name, folder in staged.items()]


def _stage_config(
    recipe: str, folder: Path, *, name: str, tensors: Sequence[Tensor], parameters: Mapping[str, str], gpu: bool = False
) -> None:
    text = _recipe_text(recipe, gpu=gpu)
    (folder / "config.pbtxt").write_text(configured(text, name=name, tensors=tensors, parameters=parameters))


def _recipe_text(recipe: str, *, gpu: bool) -> str:
    """The config of the recipe; for GPUs its own variant, or all instances on GPUs."""
    variant = RECIPES / recipe / "configs" / "gpu.pbtxt"
    if gpu and variant.is_file():
        return variant.read_text()
    text = (RECIPES / recipe / "config.pbtxt").read_text()
    return re.sub(r"kind: KIND_(AUTO|CPU)", "kind: KIND_GPU", text) if gpu else text


def _stage_loop(beside: Path, name: str, source: Path, shapes: Mapping[str, Tensor]) -> Path:
    """The Python model that calls Whisper's two networks."""
    from triton_models import exportable  # noqa: PLC0415 - as above

    folder = beside / name
    folder.mkdir()
    shutil.copyfile(RECIPES / "whisper" / "1" / "model.py", folder / "model.py")
    parameters = {"ENCODER": f"{name}_encoder", "DECODER": f"{name}_decoder", **exportable.whisper_parameters(source)}
    _stage_config("whisper", folder, name=name, tensors=[shapes["input_features"]], parameters=parameters)
    return folder


def _refuse_existing(folder: Path) -> None:
    from triton_models.exportable import ExportError  # noqa: PLC0415 - as above

    if folder.exists():
        raise ExportError(f"{folder} exists: remove it, or give another --version")


def _placed(staged: Path, model: Path, version: int) -> Path:
    """The version first, the config last: a folder without one is no model yet."""
    config = staged / "config.pbtxt"
    text = config.read_text()
    config.unlink()
    model.mkdir(exist_ok=True)
    folder = model / str(version)
    staged.rename(folder)
    if not (model / "config.pbtxt").exists():
        (folder / "config.pbtxt").write_text(text)
        (folder / "config.pbtxt").rename(model / "config.pbtxt")
    return folder


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {text!r}")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the answer is the exit status: 0 done, 1 refused, 2 usage."""
    parser = argparse.ArgumentParser(
        prog="python -m triton_models.export",
        description=__doc__.partition("\n")[0],
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kind", choices=("bert", "resnet50", "clip", "whisper"))
    parser.add_argument("--from", dest="source", type=Path, required=True, metavar="PATH", help="your weights")
    parser.add_argument("--to", type=Path, required=True, metavar="REPOSITORY/NAME", help="the model's folder")
    parser.add_argument("--version", type=_positive, default=1, metavar="N", help="its version folder (1)")
    parser.add_argument("--gpu", action="store_true", help="with instances on GPUs")
    options = parser.parse_args(arguments)
    console = Console(stderr=True, highlight=False)

    from triton_models.exportable import ExportError  # noqa: PLC0415 - as above

    try:
        made = export(
            options.kind,
            options.source.expanduser(),
            options.to.expanduser(),
            version=options.version,
            gpu=options.gpu,
            console=console,
        )
    except (ExportError, OSError) as error:
        console.print(f"not exported: {error}", soft_wrap=True, markup=False)
        return 1
    finally:
        # Triton takes every folder of the repository for a model and would refuse to start because of this one.
        shutil.rmtree(Path(__file__).resolve().parent / "__pycache__", ignore_errors=True)
    for folder in made:
        console.print(f"exported: {folder}", soft_wrap=True, markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
