"""`gateway models plan`: whether a model repository fits on a GPU, and what to change so that it does."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from gateway.cli.check_models import EXIT_USAGE, ExaminationError, examined
from gateway.cli.terminal import say
from gateway.core import memory_plan
from gateway.core.memory_plan import GIB, GPUS, MIB, ROW_FACTOR, MemoryPlan, Model

EXIT_DOES_NOT_FIT = 1

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": MIB, "GIB": GIB}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", re.ASCII)
_BYTES = {"BOOL": 1, "UINT8": 1, "INT8": 1, "FP16": 2, "BF16": 2, "UINT16": 2, "INT16": 2, "FP64": 8}
_BYTES |= {"UINT64": 8, "INT64": 8, "STRING": 64}
# Files that hold weights, and so end up in memory in about their size.
_WEIGHTS = (".onnx", ".data", ".pt", ".pt2", ".pth", ".plan", ".engine", ".safetensors", ".bin", ".gguf", ".npz")
# What --set may change, and how its value is read.
_FIELDS = ("weights", "bits", "instances", "copies", "max_batch_size", "row", "tokens")
_LLM_BITS = 16  # what an LLM is stored in unless it says otherwise


class UsageError(Exception):
    """The command line, or a file that it names, cannot be used; the message says why."""


def size_of(text: str) -> int:
    """Bytes of `440MB`, `24GiB`, `1000` or the name of a GPU (`L4`). Raises UsageError."""
    named = {name.lower().replace(" ", ""): mib * MIB for name, mib in GPUS.items()}
    plain = text.lower().replace(" ", "")
    if plain in named:
        return named[plain]
    found = _SIZE.fullmatch(text.strip())
    if found is None or found.group(2).upper() not in _UNITS:
        raise UsageError(f"not a size: {text!r}; write 440MB, 24GiB, or a GPU of {', '.join(GPUS)}")
    return math.ceil(float(found.group(1)) * _UNITS[found.group(2).upper()])


def models_of(document: Mapping[str, Any], repository: Path, *, length: int) -> list[Model]:
    """What the repository's models need of one GPU, from their config.pbtxt and files.

    Those on the CPU have 0 instances. Free dimensions count as `length`, a row as `ROW_FACTOR` times the bytes of its
    inputs and outputs.
    """
    found = []
    for name, entry in document["models"].items():
        config = entry["configs"].get("config.pbtxt", {}).get("config")
        if config is None or config["platform"] == "ensemble":
            continue
        engine = _engine(repository / name, entry["versions"]) if config["backend"] == "vllm" else {}
        llm = _llm_folder(engine)
        weights = _llm_weights(llm) if engine else _weights(entry)
        if weights == 0 and not engine:  # nothing of it is kept on a GPU
            continue
        found.append(
            Model(
                name=name,
                weight_bytes=weights,
                bits=_LLM_BITS if engine else 32,
                instances=_gpu_instances(config),
                max_batch_size=max(1, config["max_batch_size"]),
                row_bytes=0 if engine else ROW_FACTOR * _row(config, length),
                kv_token_bytes=_kv_token_bytes(llm),
                tokens=int(engine.get("max_model_len", 0)),
            )
        )
    return found


def changed(models: Sequence[Model], settings: Sequence[str], kv: Sequence[str]) -> list[Model]:
    """The models with `NAME.FIELD=VALUE` and `NAME=LAYERS,KV_HEADS,HEAD_DIM[,BYTES]` applied. Raises UsageError.

    A name that is not there is a new model, with one instance. Models without instances are left out.
    """
    by_name = {model.name: model for model in models}
    for setting in settings:
        name, field, value = _setting(setting)
        model = by_name.setdefault(name, Model(name=name, weight_bytes=0))
        amount: Any = size_of(value) if field in ("weights", "row") else _count(value, setting)
        attribute = {"weights": "weight_bytes", "row": "row_bytes"}.get(field, field)
        by_name[name] = replace(model, **{attribute: amount})
    for setting in kv:
        name, _, numbers = setting.partition("=")
        counts = [_count(number, setting) for number in numbers.split(",")]
        if len(counts) not in (3, 4):
            raise UsageError(f"--kv {setting}: write NAME=LAYERS,KV_HEADS,HEAD_DIM or ...,BYTES")
        layers, heads, dim, size = (*counts, 2)[:4]
        model = by_name.setdefault(name, Model(name=name, weight_bytes=0, bits=_LLM_BITS))
        per_token = memory_plan.kv_token_bytes(layers=layers, kv_heads=heads, head_dim=dim, value_bytes=size)
        by_name[name] = replace(model, kv_token_bytes=per_token)
    without = [model.name for model in by_name.values() if model.weight_bytes == 0 and model.instances > 0]
    if without:
        raise UsageError(f"the size of {without[0]} is not known: give --set {without[0]}.weights=SIZE")
    return [model for model in by_name.values() if model.instances > 0]


def plan(
    repository: Annotated[Path | None, typer.Argument(metavar="[REPOSITORY]", help="A model repository.")] = None,
    gpu: Annotated[str, typer.Option(metavar="SIZE", help="Its memory, or its name: 24GiB, L4, H200.")] = "L4",
    length: Annotated[int, typer.Option(min=1, metavar="N", help="For dimensions of any size.")] = 512,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME.FIELD=VALUE", help=f"Instead of what is read; FIELD: {', '.join(_FIELDS)}."
        ),
    ] = None,
    kv: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=LAYERS,KV_HEADS,HEAD_DIM[,BYTES]", help="An LLM's KV cache; then .tokens counts."),
    ] = None,
    runtime: Annotated[str, typer.Option(metavar="SIZE", help="CUDA context and libraries.")] = "512MiB",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Plan the memory of one GPU: 85 % weights, 10 % batching, 5 % runtime. Exit status 1: it does not fit.

    Models whose instances are on the CPU need nothing of it; put one there with `--set NAME.instances=1`.

    Try:

        gateway models plan triton_models --gpu L4

        gateway models plan triton_models --gpu 16GiB --set bert_base.instances=2 --set bert_base.max_batch_size=16

        gateway models plan --gpu H200 --set llm.weights=16GB --kv llm=32,8,128 --set llm.tokens=60000
    """
    try:
        read = [] if repository is None else models_of(examined(repository), repository, length=length)
        models = changed(read, settings or (), kv or ())
        made = memory_plan.plan(models, gpu_bytes=size_of(gpu), runtime_bytes=size_of(runtime))
    except (UsageError, ExaminationError) as error:
        say(str(error), err=True)
        raise typer.Exit(EXIT_USAGE) from error
    if as_json:
        typer.echo(json.dumps(_tree(made), indent=2))
    else:
        _print(made, Console())
    raise typer.Exit(0 if made.fits else EXIT_DOES_NOT_FIT)


def _gpu_instances(config: Mapping[str, Any]) -> int:
    """On each GPU: KIND_AUTO and KIND_MODEL take one where there is one; a group without a count is one instance."""
    groups = config.get("instance_group") or [{}]
    return sum((group.get("count") or 1) for group in groups if group.get("kind") != "KIND_CPU")


def _weights(entry: Mapping[str, Any]) -> int:
    latest = entry["versions"][-1] if entry["versions"] else ""
    return sum(
        size
        for path, size in entry["files"].items()
        if path.startswith(f"{latest}/") and path.endswith(_WEIGHTS) and latest
    )


def _row(config: Mapping[str, Any], length: int) -> int:
    """Bytes of one row's inputs and outputs."""
    return sum(
        math.prod(length if int(dim) < 0 else int(dim) for dim in tensor["dims"])
        * _BYTES.get(tensor["data_type"].removeprefix("TYPE_"), 4)
        for tensor in (*config["input"], *config["output"])
    )


def _engine(folder: Path, versions: Sequence[str]) -> dict[str, Any]:
    """The engine's arguments of a vLLM model. Raises UsageError."""
    return _object(folder / (versions[-1] if versions else "1") / "model.json")


def _llm_folder(engine: Mapping[str, Any]) -> Path | None:
    """The folder of the LLM itself, where it is on this machine."""
    folder = Path(str(engine.get("model", "")))
    return folder if engine.get("model") and folder.is_dir() else None


def _llm_weights(folder: Path | None) -> int:
    return 0 if folder is None else sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _kv_token_bytes(folder: Path | None) -> int:
    """By the config.json of a Hugging Face folder."""
    if folder is None:
        return 0
    config = _object(folder / "config.json")
    try:
        heads = int(config["num_attention_heads"])
        return memory_plan.kv_token_bytes(
            layers=int(config["num_hidden_layers"]),
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{folder}/config.json does not tell its layers and heads: use --kv") from error


def _object(file: Path) -> dict[str, Any]:
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error
    if not isinstance(tree, dict):
        raise UsageError(f"{file} is not a JSON object")
    return tree


def _setting(setting: str) -> tuple[str, str, str]:
    place, _, value = setting.partition("=")
    name, _, field = place.rpartition(".")
    if not name or field not in _FIELDS or not value:
        raise UsageError(f"--set {setting}: write NAME.FIELD=VALUE, FIELD one of {', '.join(_FIELDS)}")
    return name, field, value


def _count(text: str, setting: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise UsageError(f"{setting}: {text!r} is not a whole number")
    return int(text)


def _tree(made: MemoryPlan) -> dict[str, Any]:
    return {
        "fits": made.fits,
        "gpu_bytes": made.gpu_bytes,
        "parts": [asdict(part) | {"fits": part.fits} for part in made.parts],
        "models": [_model_tree(model, made) for model in made.models],
        "suggestions": [
            {"title": one.title, "changes": one.changes, "gpu_bytes": one.gpu_bytes} for one in made.suggestions
        ],
    }


def _model_tree(model: Model, made: MemoryPlan) -> dict[str, Any]:
    alone = memory_plan.fits([model], gpu_bytes=made.gpu_bytes, runtime_bytes=made.runtime_bytes)
    return asdict(model) | {
        "weights_needed": model.weights,
        "batching_needed": model.rows + model.kv_cache,
        "fits_alone": alone,
    }


def _print(made: MemoryPlan, console: Console) -> None:
    table = Table(title="models on the GPU", title_justify="left")
    headings = ("model", "weights", "x", "max batch", "a row", "KV cache", "weights in all", "batching in all", "alone")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("model", "alone") else "right")
    for model in made.models:
        table.add_row(model.name, *_cells(model, made))
    if made.models:
        console.print(table)
    else:
        console.print(
            "No model has instances on the GPU; `--set NAME.instances=1` asks what if one had.", soft_wrap=True
        )
    budget = Table(title=f"of {made.gpu_bytes / GIB:.1f} GiB", title_justify="left")
    for heading in ("part", "needed", "budget", "used", "fits"):
        budget.add_column(heading, justify="left" if heading in ("part", "fits") else "right")
    for part in made.parts:
        used = f"{100 * part.needed / part.budget:.0f} %" if part.budget else "-"
        budget.add_row(part.name, _shown(part.needed), _shown(part.budget), used, "yes" if part.fits else "no")
    console.print(budget)
    for line in _verdict(made):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def _cells(model: Model, made: MemoryPlan) -> Iterator[str]:
    yield _shown(model.weight_bytes)
    yield str(model.instances * model.copies)
    yield str(model.max_batch_size)
    yield _shown(model.row_bytes)
    yield f"{model.tokens} tokens" if model.kv_token_bytes else "-"
    yield _shown(model.weights)
    yield _shown(model.rows + model.kv_cache)
    yield "fits" if _model_tree(model, made)["fits_alone"] else "does not fit"


def _verdict(made: MemoryPlan) -> Iterator[str]:
    if made.fits:
        yield "It fits."
    else:
        yield f"It does not fit: {' and '.join(part.name for part in made.parts if not part.fits)}."
    for model in made.models:
        if model.kv_token_bytes:
            most = memory_plan.tokens_that_fit(model, made.models, gpu_bytes=made.gpu_bytes)
            yield f"{model.name}: {model.kv_token_bytes} bytes a token; {most} tokens of KV cache fit."
    for suggestion in made.suggestions:
        yield f"- {suggestion.title}: {', '.join(suggestion.changes)}"
    if not made.fits and not made.suggestions:
        yield "Nothing of this repository's settings helps: divide the models among several GPUs."


def _shown(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / MIB:.1f} MiB"
