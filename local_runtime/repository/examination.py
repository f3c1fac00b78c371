"""What Triton and this runtime would make of a repository, without loading a model. Blocking.

Triton's own parser and rules decide (`parsing`). What only this runtime cannot do is told apart: such a model is valid
and served by Triton alone. Nothing is imported that reads a model's file, and no model's code runs.
"""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from local_runtime.errors import ModelLoadError
from local_runtime.repository import completion, parsing, reader
from local_runtime.repository.config_words import MODEL_FILES

CONFIG = "config.pbtxt"
# The file in the version folder by backend, where it is not one of ours (the backends' own documentation).
_FILES: Mapping[str, str] = MappingProxyType(
    {
        "onnxruntime": "model.onnx",
        "python": "model.py",
        "tensorrt": "model.plan",
        "openvino": "model.xml",
        "dali": "model.dali",
        "vllm": "model.json",
    }
)
# `platform` in place of `backend` (core `src/model_config_utils.cc`, AutoCompleteBackendFields).
_PLATFORMS: Mapping[str, str] = MappingProxyType(
    {"onnxruntime_onnx": "onnxruntime", "tensorrt_plan": "tensorrt", "pytorch_libtorch": "pytorch"}
)
_ONLY_HERE = "not supported by the local runtime"
_FIELD = re.compile(r"^'([a-z_.]+)' is not supported by the local runtime")
_BACKEND = re.compile(r"^backend or platform '.*' is not supported by the local runtime")
_LEFT_OUT = (
    "no '{name}' is given: only a server that completes configs loads it, the embedded stack's Triton runs with "
    "--disable-auto-complete-config"
)
_STRANGER = (
    "no model: a Triton that loads every folder (no --model-control-mode=explicit) fails over it, and does not start "
    "without --exit-on-error=false"
)
_NO_CONFIG = (
    "no config.pbtxt: only a server that completes configs loads it, the embedded stack's Triton runs with "
    "--disable-auto-complete-config"
)
# Where Triton's words do not name the field that they are about.
_PHRASES: Mapping[str, str] = MappingProxyType(
    {"preferred": "preferred_batch_size", "response cache": "response_cache"}
)
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NOT_CODE = re.compile(r"#[^\n]*")


class Severity(StrEnum):
    """What a finding means: Triton refuses the model; it may fail or disappoint; Triton alone serves it."""

    FAULT = "fault"
    WARNING = "warning"
    NOTE = "note"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing about one file; `line` counts from 1, 0 where no line is meant."""

    model: str
    file: str
    line: int
    severity: Severity
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One config of a model as it was read; `file` lies below the model's folder, `message` is None if none can be."""

    file: str
    text: str
    message: Any | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """One model: its config.pbtxt and the variants in configs/, version folders, files and findings.

    `files` are those of the version folders by path below the model's folder, with their sizes in bytes.
    """

    name: str
    configs: tuple[Config, ...]
    versions: tuple[str, ...]
    files: Mapping[str, int]
    findings: tuple[Finding, ...]


def examine(repository: Path) -> tuple[list[Examined], list[Finding]]:
    """Every model of the repository by name, and what is to be said of the repository itself.

    Raises ModelLoadError where there is no such folder.
    """
    if not repository.is_dir():
        raise ModelLoadError(f"model repository {repository} is not a folder")
    names = reader.names(repository)
    models = [_examined(repository / name, frozenset(names)) for name in names]
    return models, list(_strangers(repository, frozenset(names)))


def report(repository: Path) -> str:
    """The examination as JSON.

    `models` by name: `configs` by file (`config` in Triton's JSON or null, `text`), `versions`, `files`; then
    `findings`, those of the repository last.
    """
    models, about = examine(repository)
    found = [finding for model in models for finding in model.findings] + about
    return json.dumps(
        {
            "models": {
                model.name: {
                    "configs": {config.file: _told(config) for config in model.configs},
                    "versions": model.versions,
                    "files": dict(model.files),
                }
                for model in models
            },
            "findings": [dataclasses.asdict(finding) for finding in found],
        }
    )


def _told(config: Config) -> dict[str, Any]:
    tree = None if config.message is None else json.loads(completion.triton_json(config.message))
    return {"config": tree, "text": config.text}


def line_of(text: str, words: str) -> int:
    """The line of a config where the first field, tensor or value that `words` mention stands; 1 if none does.

    What is quoted is looked for before other words, and of these the longest names first.
    """
    code = _NOT_CODE.sub("", text)
    known = [field for phrase, field in _PHRASES.items() if phrase in words.lower()]
    quoted = [part.rpartition(".")[2] for part in re.findall(r"'([^']+)'", words)]
    joined = ["_".join(pair) for size in (3, 2) for pair in _runs(words.lower().split(), size)]
    for word in (*known, *quoted, *joined):
        if not _WORD.fullmatch(word):
            continue
        found = re.search(rf"\b{re.escape(word)}\b", code)
        if found:
            return code.count("\n", 0, found.start()) + 1
    return 1


def _runs(words: list[str], size: int) -> Iterator[list[str]]:
    return (words[start : start + size] for start in range(len(words) - size + 1))


def _strangers(repository: Path, there: frozenset[str]) -> Iterator[Finding]:
    for entry in sorted(repository.iterdir()):
        if entry.is_dir() and entry.name not in there:
            yield Finding(model="", file=f"{entry.name}/", line=0, severity=Severity.NOTE, reason=_STRANGER)


def _examined(folder: Path, there: frozenset[str]) -> Examined:
    name = folder.name
    versions, files = _versions(folder)
    configs: list[Config] = []
    findings: list[Finding] = []
    if not (folder / CONFIG).is_file():
        findings.append(_finding(f"{name}/", Severity.WARNING, _NO_CONFIG))
    for path in (folder / CONFIG, *sorted((folder / "configs").glob("*.pbtxt"))):
        if path.is_file():
            config, faults = _read(path, folder)
            configs.append(config)
            findings += faults or _about_config(config, name, there)
    if configs and configs[0].file == CONFIG and configs[0].message is not None:
        findings += _about_files(folder, configs[0].message, versions, files)
    return Examined(name=name, configs=tuple(configs), versions=versions, files=files, findings=tuple(findings))


def _finding(file: str, severity: Severity, reason: str, *, line: int = 0) -> Finding:
    return Finding(model=file.partition("/")[0], file=file, line=line, severity=severity, reason=reason)


def _read(path: Path, folder: Path) -> tuple[Config, list[Finding]]:
    """The config, and why Triton's parser does not take it."""
    below = path.relative_to(folder).as_posix()
    file = f"{folder.name}/{below}"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        config = Config(file=below, text="", message=None)
        return config, [_finding(file, Severity.FAULT, f"cannot be read: {error}")]
    try:
        message = text_format.Parse(text, model_config_pb2.ModelConfig())
    except text_format.ParseError as error:
        config = Config(file=below, text=text, message=None)
        return config, [_finding(file, Severity.FAULT, _reason(error), line=error.GetLine() or 1)]
    return Config(file=below, text=text, message=message), []


def _about_config(config: Config, model: str, there: frozenset[str]) -> Iterator[Finding]:
    """What Triton's rules say of a config, and the steps of an ensemble whose model the repository lacks."""
    message: Any = config.message
    absent = sorted({step.model_name for step in message.ensemble_scheduling.step} - there - {""})
    lacking = [(Severity.FAULT, f"the ensemble calls '{name}', which is not in the repository") for name in absent]
    for severity, reason in (*_judged(message, model), *lacking):
        yield _finding(f"{model}/{config.file}", severity, reason, line=line_of(config.text, reason))


def _reason(error: text_format.ParseError) -> str:
    """The parser's text without the place, which the finding holds."""
    return re.sub(r"^\d+:\d+ : (?:'.*?': )?", "", str(error), flags=re.DOTALL)[:1000]


def _versions(folder: Path) -> tuple[tuple[str, ...], dict[str, int]]:
    entries = reader.fingerprint(folder)
    files = {path: size for path, size, _ in entries if path.partition("/")[0].isdecimal() and not path.endswith("/")}
    versions = {path.removesuffix("/") for path, _, _ in entries if re.fullmatch(r"[1-9][0-9]*/", path)}
    return tuple(sorted(versions, key=int)), files


def _judged(message: Any, name: str) -> Iterator[tuple[Severity, str]]:
    """What parser and rules say of a config. What only this runtime lacks is put aside, and the rest judged again."""
    own = model_config_pb2.ModelConfig()
    own.CopyFrom(message)
    yield from _left_out(own)
    for _ in range(50):  # more fields than a ModelConfig has at its top
        try:
            parsing.parse_message(own, folder_name=name)
        except ModelLoadError as error:
            reason = str(error)
        else:
            return
        if _ONLY_HERE not in reason:
            yield Severity.FAULT, reason
            return
        reason_here = reason.partition(", supported are")[0]
        yield Severity.NOTE, f"valid for Triton, not served by the local runtime: {reason_here}"
        if not _put_aside(own, reason):
            return


def _left_out(own: Any) -> Iterator[tuple[Severity, str]]:
    """Tensors that a completing server fills in; a stand-in takes their place for the other rules."""
    for name in ("input", "output"):
        field = getattr(own, name)
        if not field and own.platform != "ensemble":
            yield Severity.WARNING, _LEFT_OUT.format(name=name)
            field.add(name=f"{name} of the model itself", data_type=model_config_pb2.TYPE_FP32).dims.append(-1)


def _put_aside(own: Any, reason: str) -> bool:
    """Take out of the message what this runtime does not do; False where that cannot be told."""
    if _BACKEND.match(reason):
        own.platform = ""
        own.backend = "python"  # takes what any backend may take
        return True
    found = _FIELD.match(reason)
    return found is not None and _cleared(own, found.group(1).split("."))


def _cleared(message: Any, path: list[str]) -> bool:
    field = message.DESCRIPTOR.fields_by_name.get(path[0])
    if field is None:
        return False
    if len(path) == 1:
        message.ClearField(path[0])
        return True
    value = getattr(message, path[0])
    children = value.values() if hasattr(value, "values") else [value] if hasattr(value, "ListFields") else value
    return all(_cleared(child, path[1:]) for child in children)


def _about_files(folder: Path, message: Any, versions: tuple[str, ...], files: Mapping[str, int]) -> Iterator[Finding]:
    """Warnings: a repository is often checked where its weights are not."""
    backend = message.backend or _PLATFORMS.get(message.platform, message.platform)
    wanted = message.default_model_filename or _FILES.get(backend, "")
    names = [wanted] if wanted else [name for name, owner in MODEL_FILES.items() if owner == backend]
    absent = [] if versions else [("", "no version folder: Triton does not load it before there is one")]
    for version in versions:
        if names and not any(f"{version}/{name}" in files for name in names):
            reason = f"no {' or '.join(names)} here: Triton does not load it before it is there"
            absent.append((f"{version}/", reason))
    absent += [
        (output.label_filename, f"the labels of '{output.name}' are not there")
        for output in message.output
        if output.label_filename and not (folder / output.label_filename).is_file()
    ]
    for path, reason in absent:
        yield _finding(f"{folder.name}/{path}", Severity.WARNING, reason)
