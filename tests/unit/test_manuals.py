"""Every page against the project: links lead somewhere, and what a snippet shows is what the project takes."""

import ast
import importlib.util
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import typer.main
import yaml

from gateway.__main__ import app
from gateway.admin.access.roles import PREFIX, ROWS
from gateway.api.app import PATHS
from gateway.api.oip import openapi as openapi_oip
from gateway.settings import ConfigError, load_settings
from gateway.tuning.load.traffic_file import read as read_traffic
from gateway.tuning.simulation.world import parse_world
from gateway.wiring import check
from tests.kit.manuals import ROOT, Block, blocks, broken, commands, links, name_of, pages, spans
from tests.kit.tls import Authority

PAGES = pages()
SHIPPED = ROOT / "deploy" / "gateway.yaml"
TASKS = yaml.safe_load(SHIPPED.read_text())["tasks"]
MAKEFILE = (ROOT / "Makefile").read_text()
every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


def at(page: Path, block: Block) -> str:
    return f"{name_of(page)}:{block.line}"


# --- links ----------------------------------------------------------------------------------------


@every_page
def test_every_link_leads_somewhere(page):
    relative = [link for link in links(page.read_text()) if not re.match(r"[a-z]+:", link)]
    assert {link: why for link in relative if (why := broken(page, link))} == {}


def test_every_page_of_docs_is_in_the_index():
    index = ROOT / "docs" / "README.md"
    told = {(index.parent / link.partition("#")[0]).resolve() for link in links(index.read_text())}
    assert {name_of(page) for page in sorted((ROOT / "docs").glob("*.md")) if page not in told} == {"docs/README.md"}


# --- commands -------------------------------------------------------------------------------------


def fault_of_gateway(words: Sequence[str], *, is_whole: bool) -> str:
    """What is wrong with the words behind `gateway`; `is_whole`: arguments that it needs have to be there."""
    command, rest, name = typer.main.get_command(app), list(words), "gateway"
    while hasattr(command, "commands"):
        if not rest:
            return f"{name} needs a command" if is_whole else ""
        if rest[0] in ("--help", "--version", "--install-completion"):
            return ""
        if rest[0] not in command.commands:
            return f"{name} has no command {rest[0]}"
        name, command = f"{name} {rest[0]}", command.commands[rest[0]]
        rest = rest[1:]
    context = command.make_context(name, [], resilient_parsing=True)
    context.resilient_parsing = False  # or its parser would keep faults to itself
    try:
        given, left, _ = command.make_parser(context).parse_args(args=rest)
    except Exception as error:  # noqa: BLE001  # of Typer's own parser, which is private: each has a message
        is_cut_short = not is_whole and "requires an argument" in error.format_message()
        return "" if is_cut_short else f"{name}: {error.format_message()}"
    if left:
        return f"{name} takes no {left}"
    missing = [p.name for p in command.params if p.required and not isinstance(given.get(p.name), str | tuple | list)]
    return f"{name} needs {missing}" if is_whole and missing else ""


def fault_of_make(words: Sequence[str], *, is_whole: bool) -> str:
    """What is wrong with the words behind `make`."""
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    for word in words:
        name, is_variable, value = word.partition("=")
        if not is_variable and name not in targets:
            return f"make has no target {name}"
        if is_variable and f"$({name})" not in MAKEFILE and f"$(if $({name})" not in MAKEFILE:
            return f"the Makefile does not look at {name}"
        if name == "ARGS" and words[0] in ("up", "down") and value:
            return fault_of_gateway([words[0], *value.split()], is_whole=is_whole)
    return ""


def fault_of(words: Sequence[str], *, is_whole: bool = True) -> str:
    """What is wrong with a command of this project; empty for all others."""
    if words[:1] in (["gateway"], [".venv/bin/gateway"]):
        return fault_of_gateway(words[1:], is_whole=is_whole)
    if words[:1] == ["make"]:
        return fault_of_make(words[1:], is_whole=is_whole)
    if words[1:2] == ["-m"] and "python" in words[0]:
        return "" if importlib.util.find_spec(words[2]) or words[2] == "pip" else f"there is no module {words[2]}"
    return ""


@every_page
def test_every_command_of_a_snippet_exists(page):
    faults = {
        f"{at(page, block)}: {' '.join(words)}": why
        for block in blocks(page.read_text())
        for words in commands(block)
        if (why := fault_of(words))
    }
    assert faults == {}


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name != "decisions"], ids=name_of)
def test_every_command_in_the_text_exists(page):
    """Those may be cut short: `gateway rules apply` tells what to type, not all of it. Decisions tell of their time."""
    faults = {}
    for span in spans(page.read_text()):
        if re.match(r"(\.venv/bin/)?(gateway|make) [a-z]", span):
            whole = re.split(r" \.\.\.|[|&;]", span)[0]
            for words in commands(Block(info="bash", text=whole, line=0)):
                faults |= {span: why} if (why := fault_of(words, is_whole=False)) else {}
    assert faults == {}


def test_what_is_wrong_with_a_command_is_found():
    assert "no command" in fault_of(["gateway", "rule", "get"])
    assert "No such option" in fault_of(["gateway", "rules", "get", "--jsno"])
    assert "needs" in fault_of(["gateway", "rules", "apply"])
    assert "needs a command" in fault_of(["gateway", "backends"])
    assert "requires an argument" in fault_of(["gateway", "up", "--workers"])
    assert "no target" in fault_of(["make", "upp"])
    assert "does not look at" in fault_of(["make", "up", "DETACHED=1"])
    assert "No such option" in fault_of(["make", "up", "ARGS=--port auto"])
    assert "no module" in fault_of(["python", "-m", "local_runtimes"])
    assert fault_of(["gateway", "rules", "apply", "FILE", "--yes"]) == ""


# --- calls ----------------------------------------------------------------------------------------

DATA = {(method, path) for method, path, _, _ in PATHS} | {
    ("GET", path) for path in ("/healthz/live", "/healthz/ready", "/openapi.json")
}
MODELS = {
    (method.upper(), path) for path, item in openapi_oip.paths().items() for method in item if method != "parameters"
}
ADMIN = {(row.method, PREFIX + row.path) for row in ROWS} | {("GET", "/healthz/live"), ("GET", "/healthz/ready")}
BY_PORT = {
    "8080": DATA | MODELS,
    "8090": ADMIN,
    "8081": {("GET", "/metrics")},
    "8100": MODELS | {("GET", "/metrics")},  # the local runtime
    "8000": MODELS,  # Triton itself
}


def calls(block: Block) -> Iterator[tuple[str, str, str]]:
    """Method, port and path of each `curl` to the documented ports."""
    for words in commands(block):
        if "curl" not in words:
            continue
        named = re.search(r" -[a-zA-Z]*X (\w+)", f" {' '.join(words)}")
        has_body = any(re.match(r"-d$|--data|-F$|--json", word) for word in words)
        for word in words:
            url = re.match(r"(?:http://)?(?:localhost|127\.0\.0\.1):(\d+)(/[^?]*)", word)
            if url:
                yield named[1] if named else "POST" if has_body else "GET", url[1], url[2]


def exists(method: str, port: str, path: str) -> bool:
    """A part that is a variable of the shell or a placeholder stands for any; a task has to be one of the shipped."""
    task = re.match(r"/v1/tasks/([a-z][\w-]*)", path)
    if task and task[1] not in TASKS:
        return False
    for known, template in BY_PORT.get(port, ()):
        pattern = re.sub(r"\\{\w+(:path)?\\}", lambda m: ".+" if m[1] else "[^/]+", re.escape(template))
        if known == method and re.fullmatch(pattern, path):
            return True
    return False


@every_page
def test_every_call_of_a_snippet_is_one_that_is_answered(page):
    made = [(at(page, block), *call) for block in blocks(page.read_text()) for call in calls(block)]
    assert [call for call in made if not exists(*call[1:])] == []


def test_a_call_of_no_route_is_found():
    calling = (
        "curl -s localhost:8080/v1/task/ocr -F image=@a.png\ncurl localhost:8080/v1/infer\ncurl localhost:8081/metrics"
    )
    found = [exists(*call) for call in calls(Block(info="bash", text=calling, line=1))]
    assert found == [False, False, True]


# --- data and programs ----------------------------------------------------------------------------


@every_page
def test_every_document_of_json_is_one(page):
    for block in blocks(page.read_text(), "json"):
        assert isinstance(json.loads(block.text), dict | list), at(page, block)


@every_page
def test_every_program_compiles(page):
    for block in blocks(page.read_text(), "python"):
        ast.parse(block.text, filename=at(page, block))


def configured(document: object, folder: Path) -> None:
    """Read a snippet as `gateway check` reads a file: what it says takes the place of the shipped file's sections."""
    whole = yaml.safe_load(SHIPPED.read_text())
    for section, value in document.items():
        is_named = section in ("backends", "tasks")  # these are added to those that are there
        whole[section] = {**whole[section], **value} if is_named else value
    whole["prices"] = str(SHIPPED.parent / "prices.yaml")
    file = folder / "gateway.yaml"
    file.write_text(yaml.safe_dump(whole).replace("../triton_models", str(ROOT / "triton_models")))
    check(load_settings(file))


def with_files(text: str, folder: Path) -> None:
    """Certificates and keys, where a snippet names them: they are read when it is."""
    authority = Authority(folder)
    signed = authority.sign("localhost")
    of = {"ca_file": authority.cert, "cert_file": signed.cert, "key_file": signed.key}
    for field, name in re.findall(r"\b(ca_file|cert_file|key_file): ([\w./-]+)", text):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(of[field].read_bytes())


def understood(document: object, folder: Path) -> None:
    """Give a document to what reads such documents in the project; raises where it is refused, or is nobody's."""
    if isinstance(document, list):
        document = {"rules": document}
    if "traffic" in document and "models" in document:
        parse_world(document, folder=folder)
    elif "classes" in document:
        file = folder / "traffic.yaml"
        file.write_text(yaml.safe_dump(document))
        read_traffic(file, url="http://localhost:8080", key="", environ=os.environ)
    elif document.get("kind") == "Kustomization":
        pass  # tests/unit/deploy/test_kubernetes_scaling.py builds it
    else:
        configured(document, folder)


@every_page
def test_every_yaml_is_read_by_who_reads_it(page, tmp_path, monkeypatch):
    """A snippet marked `yaml fragment` is a part of a document, which only has to be YAML."""
    for block in blocks(page.read_text(), "yaml"):
        document = yaml.safe_load(block.text)
        for name in re.findall(r"_env: (\w+)", block.text):
            monkeypatch.setenv(name, "a-secret-that-is-long-enough-for-all-of-them")
        if "_file: " in block.text:
            with_files(block.text, tmp_path)
        if block.info != "yaml fragment":
            try:
                understood(document, tmp_path)
            except Exception as error:
                error.add_note(at(page, block))
                raise


def test_a_document_that_nobody_reads_is_found(tmp_path):
    for wrong in ({"rule": []}, {"rules": [{"name": "a", "split": [{"backend": "tritn", "model": "m"}]}]}):
        with pytest.raises(ConfigError):
            understood(wrong, tmp_path)
