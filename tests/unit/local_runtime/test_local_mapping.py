"""`docs/triton-mapping.md` against the parser: every field of a `config.pbtxt` has a row, and the row is true."""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tritonclient.grpc import model_config_pb2

from local_runtime.__main__ import command_line
from local_runtime.errors import ModelLoadError
from local_runtime.protocol.metrics import render
from local_runtime.repository import parsing
from local_runtime.scheduling.stats import StatsRecorder

PAGE = (Path(__file__).parents[3] / "docs" / "triton-mapping.md").read_text()
TABLE = PAGE.partition("## `config.pbtxt`")[2].partition("\n## ")[0]
FLAGS = PAGE.partition("## Flags of `tritonserver`")[2].partition("\n## ")[0]
METRICS = PAGE.partition("## Metrics")[2]
ROWS = re.findall(r"^\| (`[^|]+) \| (honoured|refused)", TABLE, re.MULTILINE)
WORD = {name.split(".")[-1]: verdict for names, verdict in ROWS for name in re.findall(r"`([a-z_.]+)`", names)}
PARTS = {  # of a message whose own row speaks for all that is in it
    *("num_versions", "versions", "shape", "enable", "control", "kind", "count", "inputs", "batch_size"),
    *("input_name", "output_name", "initial_state", "data_type", "dims", "zero_data", "data_file", "name"),
    *("minimum_slot_utilization", "max_candidate_sequences", "int32_false_true", "fp32_false_true"),
    *("bool_false_true", "random_data", "input_data_file", "string_value"),
}


def fields(descriptor: Any, *path: Any) -> Iterator[tuple[Any, ...]]:
    """Every field, as the way to it, and those below what is honoured."""
    for field in descriptor.fields:
        way = (*path, field)
        yield way
        below = field.message_type
        if below is None or refusal_of(way):
            continue
        yield from (
            fields(below.fields_by_name["value"].message_type if _is_map(field) else below, *way)
            if (not _is_map(field) or below.fields_by_name["value"].message_type)
            else ()
        )


def _is_map(field: Any) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def refusal_of(way: tuple[Any, ...]) -> str:
    """What the parser says of a configuration in which the field is set."""
    message = config = model_config_pb2.ModelConfig()
    *above, last = way
    for field in above:
        part = getattr(message, field.name)
        message = part["1" if _key_is_text(field) else 1] if _is_map(field) else part.add() if _many(field) else part
    part = getattr(message, last.name)
    if _is_map(last):
        _set_map(part, last)
    elif last.message_type is not None:
        part.add() if _many(last) else part.SetInParent()
    elif _many(last):
        part.append(_some(last))
    else:
        setattr(message, last.name, _some(last))
    try:
        parsing._refuse_unhonoured(config, path="")
    except ModelLoadError as error:
        return str(error)
    return ""


def _set_map(part: Any, field: Any) -> None:
    key = "1" if _key_is_text(field) else 1
    value = field.message_type.fields_by_name["value"]
    if value.message_type is None:
        part[key] = _some(value)
    else:
        part[key].SetInParent()


def _key_is_text(field: Any) -> bool:
    return field.message_type.fields_by_name["key"].type == field.TYPE_STRING


def _many(field: Any) -> bool:
    return field.is_repeated


def _some(field: Any) -> Any:
    return {field.TYPE_STRING: "x", field.TYPE_BYTES: b"x", field.TYPE_BOOL: True}.get(field.type, 1)


WAYS = list(fields(model_config_pb2.ModelConfig.DESCRIPTOR))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: ".".join(field.name for field in way))
def test_a_field_has_a_row_that_is_true(way: tuple[Any, ...]):
    name = way[-1].name
    verdict = WORD.get(name) if name not in PARTS or len(way) == 1 else "honoured"
    refusal = refusal_of(way)
    if verdict is None:
        verdict = WORD.get(way[-2].name) if len(way) > 1 else None
    assert verdict == ("refused" if refusal else "honoured"), (name, verdict, refusal)


def test_no_row_names_a_field_that_there_is_not():
    assert {field.name for way in WAYS for field in way} >= WORD.keys()


def test_every_option_of_serve_has_a_row_and_no_other():
    [choices] = [one for one in command_line()._actions if isinstance(one, argparse._SubParsersAction)]
    options = [one.option_strings for one in choices.choices["serve"]._actions if one.dest != "help"]
    rows = re.findall(r"^\|[^|]*\|([^|]*)\|[^|]*\|$", FLAGS, re.MULTILINE)
    told = set(re.findall(r"--[a-z-]+", " ".join(rows[2:])))
    assert [names for names in options if not told & set(names)] == []
    assert told <= {name for names in options for name in names}


def test_every_metric_of_the_runtime_has_a_row():
    made = set(
        re.findall(r"^# TYPE (\w+)", render([StatsRecorder(name="m", version="1").snapshot()], []), re.MULTILINE)
    )
    assert made
    assert made == set(re.findall(r"`(nv_[a-z_]+)`", METRICS))
