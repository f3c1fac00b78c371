"""`gateway check REPOSITORY`: what Triton, the local runtime and the gateway make of a model repository.

Triton's parser and rules are in `python -m local_runtime check`, which runs as a process of its own; what the gateway
itself refuses or advises against is here.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer

from gateway.cli.terminal import say

EXIT_FAULTS = 1
EXIT_USAGE = 2
TIMEOUT_S = 120

# Engines that join requests token by token themselves.
LLM_BACKENDS = frozenset({"vllm", "tensorrtllm"})
_RANKS = ("fault", "warning", "note")

BOTH_SCHEDULERS = (
    "dynamic_batching on a stateful model: it would mix the steps of different sequences and lose their order, so a "
    "config has sequence_batching or dynamic_batching, never both; for batches across sequences use "
    "sequence_batching { oldest { } }"
)
LLM_BATCHING = (
    "dynamic_batching on an LLM: the engine joins requests token by token itself; a batch made before it would be held "
    "together until its longest answer ends. Remove dynamic_batching and set max_batch_size: 0"
)
LLM_BATCH_SIZE = "max_batch_size above 0 on an LLM: the engine takes requests one by one. Set max_batch_size: 0"
LLM_NOT_DECOUPLED = (
    "an LLM without model_transaction_policy { decoupled: true } cannot send its answer as it is made; the vLLM "
    "backend does not load"
)
DECOUPLED_CACHE = (
    "response_cache on a decoupled model: a cache holds one answer per request, this model gives any number. Remove "
    "response_cache"
)
QUEUE_POLICY = (
    "with priorities or a queue policy Triton's batcher can miss that an instance is free and wait up to 0.5 s: keep "
    "priorities, queue bounds and timeouts in the gateway, and dynamic_batching without them"
)
_POLICY_FIELDS = ("priority_levels", "default_queue_policy", "priority_queue_policy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing about one file of a repository.

    `severity` is `fault` (Triton or the gateway refuses the model), `warning` (it may fail or disappoint) or `note`.
    `line` counts from 1, 0 where no line is meant.
    """

    model: str
    file: str
    line: int
    severity: str
    reason: str


class ExaminationError(Exception):
    """The repository cannot be examined; the message says why."""


def examined(repository: Path) -> dict[str, Any]:
    """What `python -m local_runtime check` reports: `models` by name (configs, versions, files), `findings`.

    Raises ExaminationError. Blocks for about a second; loads no model.
    """
    command = [sys.executable, "-m", "local_runtime", "check", str(repository)]
    try:
        done = subprocess.run(  # noqa: S603 - our own program
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        document = json.loads(done.stdout) if done.returncode == 0 else None
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ExaminationError(f"the repository could not be examined: {error}") from error
    if not isinstance(document, dict):
        raise ExaminationError(done.stderr.strip().removeprefix("local_runtime: ") or "the examination failed")
    return document


def findings(document: Mapping[str, Any]) -> list[Finding]:
    """All findings of a report, Triton's and the gateway's, by file and line. Pure."""
    found = [_reworded(Finding(**entry)) for entry in document["findings"]]
    for name, model in document["models"].items():
        for file, read in model["configs"].items():
            found += [
                Finding(
                    model=name,
                    file=f"{name}/{file}",
                    line=_line(read["text"], field),
                    severity=severity,
                    reason=reason,
                )
                for severity, field, reason in advice(read["config"] or {})
            ]
    told = {(finding.file, finding.reason): finding for finding in reversed(found)}
    return sorted(told.values(), key=lambda finding: (finding.file, finding.line, _RANKS.index(finding.severity)))


def advice(config: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """What the gateway finds wrong with one configuration: severity, the field that it is about, and the reason."""
    batching = config.get("dynamic_batching")
    is_decoupled = (config.get("model_transaction_policy") or {}).get("decoupled", False)
    if config.get("backend") in LLM_BACKENDS:
        if batching is not None:
            yield "fault", "dynamic_batching", LLM_BATCHING
        elif config.get("max_batch_size", 0) > 0 and config["backend"] == "vllm":
            yield "fault", "max_batch_size", LLM_BATCH_SIZE
        if not is_decoupled:
            yield ("fault" if config["backend"] == "vllm" else "warning"), "backend", LLM_NOT_DECOUPLED
    if batching and any(batching.get(field) for field in _POLICY_FIELDS):
        yield "warning", next(field for field in _POLICY_FIELDS if batching.get(field)), QUEUE_POLICY


def _reworded(finding: Finding) -> Finding:
    """With the gateway's reason in place of Triton's where that says only that it is so."""
    words = finding.reason
    if "scheduling_choice" in words and "sequence_batching" in words and "dynamic_batching" in words:
        words = BOTH_SCHEDULERS
    elif words.startswith("Response Cache") and "decoupled" in words:
        words = DECOUPLED_CACHE
    return Finding(**{**asdict(finding), "reason": words})


def _line(text: str, word: str) -> int:
    for number, line in enumerate(text.splitlines(), start=1):
        if re.search(rf"\b{word}\b", line.partition("#")[0]):
            return number
    return 1


def check_repository(repository: Path, *, strict: bool = False, as_json: bool = False) -> int:
    """Print every finding with its file, line and reason, then one line; the exit status.

    0: no fault (with `strict`: no warning either), 1: there is one, 2: no repository.
    """
    if (repository / "config.pbtxt").is_file():
        say(f"{repository} is one model: give the repository, {repository.resolve().parent}", err=True)
        return EXIT_USAGE
    try:
        document = examined(repository)
    except ExaminationError as error:
        say(str(error), err=True)
        return EXIT_USAGE
    models = sorted(document["models"])
    if not models:
        say(f"{repository} holds no model: no folder in it has a config.pbtxt", err=True)
        return EXIT_USAGE
    found = findings(document)
    refused = {finding.model for finding in found if finding.severity == "fault"}
    if as_json:
        _print_json(models, found, refused)
    else:
        _print(repository, models, found, refused)
    is_bad = bool(refused) or (strict and any(finding.severity == "warning" for finding in found))
    return EXIT_FAULTS if is_bad else 0


def _print_json(models: Sequence[str], found: Sequence[Finding], refused: set[str]) -> None:
    tree = {
        "models": {name: name not in refused for name in models},
        "findings": [asdict(finding) for finding in found],
    }
    typer.echo(json.dumps(tree, indent=2))


def _print(repository: Path, models: Sequence[str], found: Sequence[Finding], refused: set[str]) -> None:
    for finding in found:
        place = f"{repository / finding.file}" + (f":{finding.line}" if finding.line else "")
        say(f"{place}: {finding.severity}: {finding.reason}")
    counts = [sum(finding.severity == rank for finding in found) for rank in _RANKS]
    told = ", ".join(
        f"{count} {rank}{'' if count == 1 else 's'}" for count, rank in zip(counts, _RANKS, strict=True) if count
    )
    good = len(models) - len(refused)
    say(f"{repository}: {good} of {len(models)} models valid" + (f" ({told})" if told else ""))
