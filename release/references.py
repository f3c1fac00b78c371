"""The reference pages, out of the code: what follows the mark in each is written by `make docs`.

    python -m release.references

`docs/configuration.md` is the settings' schema, `docs/api.md` the OpenAPI documents of both planes, `docs/commands.md`
the commands with their options. `tests/unit/release/test_references.py` holds the pages to what the code says now.
"""

import argparse
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final

import typer.main

from gateway.__main__ import app as commands_app
from gateway.admin.access.roles import needed
from gateway.admin.document import EVERYWHERE
from gateway.core.errors import GatewayError
from gateway.settings import Settings
from local_runtime.__main__ import command_line
from release.documents import control_plane, data_plane
from release.packages import ROOT

MARK: Final = "<!-- What follows is made of the code by `make docs`. -->"
Schema = Mapping[str, Any]


def main() -> int:
    """Write all pages anew; returns the exit status."""
    for name, make in PAGES.items():
        page = ROOT / "docs" / name
        page.write_text(renewed(page.read_text(), make()))
        print(page.relative_to(ROOT))  # noqa: T201 - a command
    return 0


def renewed(page: str, made: str) -> str:
    """A page with its made part anew."""
    before, mark, _ = page.partition(MARK)
    if not mark:
        raise ValueError("the page has no mark")
    return f"{before}{MARK}\n\n{made.strip()}\n"


def row(*cells: str) -> str:
    """A row of a table."""
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


# --- the configuration ----------------------------------------------------------------------------


def configuration() -> str:
    """Every setting of a configuration file, section by section."""
    schema = Settings.model_json_schema()
    lines = [*_table(schema, schema)]
    for name, field in schema["properties"].items():
        for path, section in _sections(name, field, schema):
            lines += ["", f"## `{path}`", "", _sentence(section), "", *_table(section, schema)]
    return "\n".join(lines)


def _sections(path: str, field: Schema, schema: Schema) -> Iterator[tuple[str, Schema]]:
    """The sections at a field and below it, each with its path."""
    for found, at in _objects(path, field, schema):
        yield at, found
        for name, below in found["properties"].items():
            yield from _sections(f"{at}.{name}", below, schema)


def _objects(path: str, field: Schema, schema: Schema) -> Iterator[tuple[Schema, str]]:
    for one in field.get("anyOf", [field]):
        if "$ref" in one:
            yield _resolved(one, schema), path
        elif "items" in one:
            yield from _objects(f"{path}[]", one["items"], schema)
        elif isinstance(one.get("additionalProperties"), dict):
            values = one["additionalProperties"]
            for option in values.get("oneOf", [values]):
                if "$ref" in option:
                    found = _resolved(option, schema)
                    kind = found["properties"].get("kind", {}).get("const")
                    yield found, f"{path}.NAME" + (f" (kind: {kind})" if kind else "")


def _table(section: Schema, schema: Schema) -> list[str]:
    required = section.get("required", ())
    rows = [
        row(f"`{name}`", _type(field, schema), "needed" if name in required else _default(field), told(name, field))
        for name, field in section["properties"].items()
    ]
    return ["| setting | is | default | |", "|---|---|---|---|", *rows]


def told(name: str, field: Schema) -> str:
    """What a setting is for."""
    if name == "kind":
        return "which kind of backend it is"
    return str(field.get("description", ""))


def _type(field: Schema, schema: Schema) -> str:
    if "anyOf" in field:
        return " or ".join(_type(one, schema) for one in field["anyOf"] if one.get("type") != "null")
    if "$ref" in field:
        return "a section" if "properties" in _resolved(field, schema) else _type(_resolved(field, schema), schema)
    if choices := field.get("enum", [field["const"]] if "const" in field else []):
        return ", ".join(f"`{one}`" for one in choices)
    if field.get("type") == "array":
        return f"list of: {_type(field['items'], schema)}"
    return _plain(field)


def _plain(field: Schema) -> str:
    if field.get("type") == "object":
        values = field.get("additionalProperties")
        return "sections by name" if isinstance(values, dict) and {"$ref", "oneOf"} & values.keys() else "mapping"
    word = {"integer": "whole number", "number": "number", "boolean": "true or false"}.get(
        field.get("type", ""), "text"
    )
    return f"{word}{_bounds(field)}"


def _bounds(field: Schema) -> str:
    low, over = field.get("minimum"), field.get("exclusiveMinimum")
    most = field.get("maximum")
    words = [f"from {low:.15g}"] if low is not None else [f"above {over:.15g}"] if over is not None else []
    words += [f"to {most:.15g}"] if most is not None else []
    return " ".join(["", *words])


def _default(field: Schema) -> str:
    value = field.get("default")
    if value is None or value in ([], {}):
        return ""
    words = {True: "true", False: "false"}.get(value, value) if isinstance(value, bool) else value
    return ", ".join(f"`{one}`" for one in words) if isinstance(words, list) else f"`{words}`" if words != "" else ""


def _sentence(section: Schema) -> str:
    return str(section.get("description", "")).split("\n\n")[0].replace("\n", " ")


# --- the API --------------------------------------------------------------------------------------


def api() -> str:
    """Every call of both planes."""
    return "\n".join(
        [
            *_plane("Data plane", data_plane(), lambda _, path: "no key" if "/health" in path else "a key"),
            *("", *_plane("Control plane", control_plane(), _least_role, everywhere=EVERYWHERE)),
        ]
    )


def _plane(
    title: str, document: Schema, needs: Callable[[str, str], str], everywhere: Collection[type[GatewayError]] = ()
) -> Iterator[str]:
    """`everywhere`: what any call may be refused by; where it is told, calls tell what else they are refused by."""
    calls = list(_each_call(document))
    yield from (f"## {title}", "")
    if everywhere:
        by = ", ".join(f"{error.status} `{error.code}`" for error in sorted(everywhere, key=lambda one: one.status))
        yield from (f"Any call under `/admin/v1` may be refused by {by}; what else refuses one is told with it.", "")
    yield from _calls(document, needs, {error.code for error in everywhere})
    headers = {one["name"]: one for _, _, call in calls for one in call.get("parameters", ()) if one["in"] == "header"}
    yield from (f"### Headers of the {title.lower()}", "", "| header | is | |", "|---|---|---|")
    for name, one in headers.items():
        yield row(f"`{name}`", _kind(one["schema"], document), one.get("description", ""))
    yield from ("", f"### Errors of the {title.lower()}", "", "| status | codes |", "|---|---|")
    told: dict[str, dict[str, None]] = {}
    for status, codes in (refusal for _, _, call in calls for refusal in _refusals(call)):
        told.setdefault(status, {}).update(dict.fromkeys(codes))
    for status in sorted(told):
        yield row(status, ", ".join(f"[`{code}`](errors.md)" for code in told[status]))
    for name, schema in document["components"]["schemas"].items():
        if schema.get("properties"):
            about = _sentence(schema)
            yield from ("", f"### {name} ({title.lower()})", "", *((about, "") if about else ()))
            yield from _field_table(schema, document)


def _refusals(call: Schema) -> Iterator[tuple[str, list[str]]]:
    """The answers of a call that are errors with a code: each tells its codes as its description."""
    for status, answer in sorted(call["responses"].items()):
        if status >= "400" and status.isdigit() and " " not in answer["description"].replace(", ", ""):
            yield status, answer["description"].split(", ")


def _field_table(schema: Schema, document: Schema) -> Iterator[str]:
    required = schema.get("required", ())
    yield from ("| field | is | |", "|---|---|---|")
    for name, field in schema["properties"].items():
        default = _default(field)
        ends = "" if name in required else f" (default: {default})" if default else " (may be left out)"
        yield row(f"`{name}`", f"{_kind(field, document)}{ends}", field.get("description", ""))


def _kind(field: Schema, document: Schema) -> str:
    """The type of a field, objects by the name of their table."""
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        found = _resolved(field, document)
        return name if found.get("properties") else _kind(found, document)
    if options := field.get("anyOf", field.get("oneOf")):
        return " or ".join(dict.fromkeys(_kind(one, document) for one in options))
    if choices := field.get("enum", [field["const"]] if "const" in field else []):
        return ", ".join(f"`{one}`" for one in choices)
    if "array" in field.get("type", ""):
        many = f"list of: {_kind(field['items'], document)}" if field.get("items") else "list"
        return f"{many} or null" if "null" in field["type"] else many
    return _one_kind(field, document)


def _one_kind(field: Schema, document: Schema) -> str:
    kind = field.get("type", "anything")
    if kind == "object" and isinstance(values := field.get("additionalProperties"), dict) and values:
        return f"by name: {_kind(values, document)}"
    if kind in ("object", "anything", "null"):
        return str(kind)
    return f"{_plain(field)}{_length(field)}"


def _length(field: Schema) -> str:
    return f" of at most {field['maxLength']} characters" if "maxLength" in field else ""


def _least_role(method: str, path: str) -> str:
    return "nothing" if "/health" in path else f"the role {needed(method, path)}"


def _each_call(document: Schema) -> Iterator[tuple[str, str, Schema]]:
    """Path, method and call, a path's own parameters among the call's."""
    for path, item in document["paths"].items():
        for method, call in item.items():
            if method != "parameters":
                both = [_resolved(one, document) for one in (*item.get("parameters", ()), *call.get("parameters", ()))]
                yield path, method.upper(), {**call, "parameters": both}


def _calls(document: Schema, needs: Callable[[str, str], str], everywhere: Collection[str]) -> Iterator[str]:
    for path, method, call in _each_call(document):
        yield from (f"### `{method} {path}`", "", f"{_words(call)} Needs {needs(method, path)}.", "")
        parameters = call["parameters"]
        if names := [f"`{one['name']}`" for one in parameters if one["in"] == "header"]:
            yield f"- headers {', '.join(names)}"
        for one in parameters:
            if one["in"] in ("query", "path") and (one["in"] == "query" or one.get("description")):
                words = f"- `{one['name']}` in the {one['in']}: {_kind(one['schema'], document)}"
                default = _default(one["schema"])
                about = one.get("description", "")
                needed_or_default = " (needed)" if one.get("required") else f" (default: {default})" if default else ""
                yield words + needed_or_default + (f"; {about}" if about else "")
        if body := call.get("requestBody"):
            yield "- takes " + ", ".join(_content(body["content"], document))
        told = {status: one for status, one in call["responses"].items() if not everywhere or status < "400"}
        yield f"- gives {'; '.join(_answers(told, document))}"
        if everywhere and (others := list(_others(call, () if "/health" in path else everywhere))):
            yield f"- is refused by {'; '.join(others)}"
        yield ""


def _others(call: Schema, everywhere: Collection[str]) -> Iterator[str]:
    for status, codes in _refusals(call):
        if others := [f"`{code}`" for code in codes if code not in everywhere]:
            yield f"{status} {', '.join(others)}"


def _words(call: Schema) -> str:
    text = " ".join((call.get("description") or call.get("summary") or "").split())
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "?")) or not text else f"{text}."


def _answers(responses: Schema, document: Schema) -> Iterator[str]:
    for status, answer in sorted(responses.items()):
        found = _resolved(answer, document)
        content = list(_content(found.get("content", {}), document))
        yield f"{status}" + (f" {', '.join(content)}" if content and status < "300" else "")


def _content(content: Schema, document: Schema) -> Iterator[str]:
    for kind, one in content.items():
        fields = _fields(one.get("schema", {}), document)
        yield f"`{kind}`" + (f" ({', '.join(fields)})" if fields else "")


def _fields(schema: Schema, document: Schema) -> list[str]:
    """The fields of a body, or the name of their table; of one that may be left out, too."""
    schema = next((one for one in schema.get("anyOf", ()) if one.get("type") != "null"), schema)
    if "$ref" in schema and _resolved(schema, document).get("properties"):
        return [schema["$ref"].rpartition("/")[2]]
    found = _resolved(schema, document)
    required = found.get("required", ())
    return [f"`{name}`" + ("" if name in required else "?") for name in found.get("properties", {})]


def _resolved(one: Schema, document: Schema) -> Schema:
    """What it refers to, in the same document; itself where it refers to nothing."""
    while "$ref" in one:
        found: Any = document
        for part in one["$ref"].removeprefix("#/").split("/"):
            found = found[part.replace("~1", "/")]
        one = found
    return one


# --- the commands ---------------------------------------------------------------------------------


def commands() -> str:
    """Every command of `gateway` and of the local runtime, with its options."""
    lines: list[str] = []
    for words, command in all_commands():
        lines += [f"## `{words}`", "", " ".join((command.help or "").split("Try:")[0].split()), ""]
        if examples := examples_of(command):
            lines += ["```bash", *examples, "```", ""]
        options = [one for one in command.params if not one.hidden and one.name != "help"]
        if options:
            lines += ["| option | |", "|---|---|", *map(_option, options), ""]
    for name, one in runtime_commands():
        lines += [f"## `python -m local_runtime {name}`", "", "| option | |", "|---|---|"]
        lines += [row(_flags(action), _help(action)) for action in one._actions if action.dest != "help"]  # noqa: SLF001 - argparse tells them in no other way
        lines.append("")
    return "\n".join(lines)


def all_commands(group: Any = None, words: str = "gateway") -> Iterator[tuple[str, Any]]:
    """Each command with its words, groups left out."""
    group = group or typer.main.get_command(commands_app)
    for name, one in group.commands.items():
        if one.hidden:
            continue
        if hasattr(one, "commands"):
            yield from all_commands(one, f"{words} {name}")
        else:
            yield f"{words} {name}", one


def examples_of(command: Any) -> list[str]:
    """The lines below `Try:` in what `--help` prints."""
    text = f"{command.help or ''}\n\n{command.epilog or ''}".partition("Try:")[2]
    return [" ".join(part.split()) for part in text.split("\n\n") if part.strip()]


def _option(one: Any) -> str:
    if one.param_type_name == "argument":
        name = one.metavar or one.name.upper()
        return row(f"`{name}`", one.help or "")
    value = "" if one.is_flag else f" {one.metavar or 'VALUE'}"
    default = one.default if one.default not in (None, "", False, ()) and not callable(one.default) else None
    ends = [f"default: {default}"] if isinstance(default, int | float | str) and not one.is_flag else []
    ends += ["needed"] if one.required else []
    flags = ", ".join(f"`{flag}{value}`" for flag in (*one.opts, *one.secondary_opts))
    return row(flags, f"{one.help or ''}{' (' + ', '.join(ends) + ')' if ends else ''}")


def runtime_commands() -> list[tuple[str, argparse.ArgumentParser]]:
    """The local runtime's."""
    [choices] = [one for one in command_line()._actions if isinstance(one, argparse._SubParsersAction)]  # noqa: SLF001 - the same
    return list(choices.choices.items())


def _flags(action: argparse.Action) -> str:
    value = f" {action.metavar or action.dest.upper()}" if action.nargs != 0 and not action.choices else ""
    value = " " + "|".join(map(str, action.choices)) if action.choices else value
    return ", ".join(f"`{flag}{value}`" for flag in action.option_strings) or f"`{action.metavar or action.dest}`"


def _help(action: argparse.Action) -> str:
    return (action.help or "") % {"default": action.default}


PAGES: Final[Mapping[str, Callable[[], str]]] = {
    "configuration.md": configuration,
    "api.md": api,
    "commands.md": commands,
}

if __name__ == "__main__":
    raise SystemExit(main())
