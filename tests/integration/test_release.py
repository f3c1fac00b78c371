"""`make release`: what it writes, and that the wheel runs by itself, in an environment of its dependencies alone."""

import json
import re
import subprocess
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from release import __main__ as command
from release.packages import ROOT, closure, declared, version

REASON = "made by a test."
ASK = """
import importlib, json, pkgutil
from importlib import resources
import gateway, local_runtime

lacking = {}
for package in (gateway, local_runtime):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            lacking[module.name] = error.name

import asyncio
import httpx
from fastapi import FastAPI
from gateway.admin.access.door import LOGIN_PAGE
from gateway.console.mount import console
from gateway.console.tables import Table
from gateway.stores.redis_script import load_script

async def login():
    app = FastAPI()
    async with console(app), httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://console") as client:
        return (await client.get(LOGIN_PAGE)).text

scripts = [file.name.removesuffix(".lua") for file in (resources.files("gateway.stores") / "lua").iterdir()]
for name in scripts:
    load_script(name)
told = {"at": gateway.__file__, "lacking": lacking, "scripts": scripts, "table": str(Table.component.path)}
print(json.dumps({**told, "login": asyncio.run(login())}))
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    work = tmp_path_factory.mktemp("release")
    (work / "out").mkdir()
    (work / "out" / "of-before.whl").touch()
    command.make(work / "out", work, [REASON])
    return work


@pytest.fixture(scope="module")
def installed(made):
    """Runs a program of the environment, in a folder without a checkout."""
    folder = made / "elsewhere"
    folder.mkdir()

    def run(program, *args):
        environ = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "COLUMNS": "100"}
        path = made / "environment" / "bin" / program
        return subprocess.run(
            [path, *args], cwd=folder, env=environ, capture_output=True, text=True, timeout=60, check=False
        )

    return run


def wheel_of(made):
    return next((made / "out").glob("*.whl"))


def document(made):
    return json.loads(next((made / "out").glob("*.cdx.json")).read_text())


def test_the_files_and_their_digests(made):
    stem = f"hybrid-inference-gateway-{version()}"
    assert {path.name for path in (made / "out").iterdir()} == {
        f"hybrid_inference_gateway-{version()}-py3-none-any.whl",
        f"hybrid_inference_gateway-{version()}.tar.gz",
        *(f"{stem}{end}" for end in (".cdx.json", "-licences.md", "-constraints.txt", "-notes.md")),
        "SHA256SUMS",
    }
    told = re.findall(r"^\| `(\S+)` \|", (ROOT / "docs" / "releasing.md").read_text(), re.MULTILINE)
    assert {name.replace("X.Y.Z", version()) for name in told} == {path.name for path in (made / "out").iterdir()}
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=made / "out", check=True)
    assert REASON in (made / "out" / f"{stem}-notes.md").read_text()


def test_the_wheel_holds_the_two_packages_whole_and_nothing_else(made):
    with zipfile.ZipFile(wheel_of(made)) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    files = [path for name in ("gateway", "local_runtime") for path in (ROOT / name).rglob("*")]
    assert names == {str(path.relative_to(ROOT)) for path in files if path.is_file() and path.suffix != ".pyc"}
    assert {Path(name).suffix for name in names} == {".py", ".lua", ".css", ".html", ".js", ".svg"}


def test_the_wheels_metadata(made):
    with zipfile.ZipFile(wheel_of(made)) as wheel:
        told = {name.partition(".dist-info/")[2]: name for name in wheel.namelist() if ".dist-info/" in name}
        metadata = Parser().parsestr(wheel.read(told["METADATA"]).decode())
        assert "gateway = gateway.__main__:main" in wheel.read(told["entry_points.txt"]).decode()
    assert (metadata["Name"], metadata["Version"]) == ("hybrid-inference-gateway", version())
    assert metadata["Requires-Python"] == ">=3.11"
    assert {"onnx", "otel", "stack", "tuning"} <= set(metadata.get_all("Provides-Extra"))


def test_no_clock_is_in_the_wheel(made):
    # So the same commit makes the same bytes: every entry has the commit's time.
    with zipfile.ZipFile(wheel_of(made)) as wheel:
        assert len({entry.date_time for entry in wheel.infolist()}) == 1
    assert document(made)["metadata"]["properties"] == [{"name": "cdx:reproducible", "value": "true"}]


def test_the_sbom_is_of_what_the_gateway_runs_with(made):
    sbom = document(made)
    assert (sbom["bomFormat"], sbom["specVersion"]) == ("CycloneDX", "1.6")  # the tool has held it against the schema
    about = sbom["metadata"]["component"]
    assert (about["name"], about["version"]) == ("hybrid-inference-gateway", version())
    assert {(one["name"], one["version"]) for one in sbom["components"]} == {
        (one.name, one.version) for one in closure(declared())
    }
    assert all(one["purl"].startswith("pkg:pypi/") for one in sbom["components"])
    needed = next(one["dependsOn"] for one in sbom["dependencies"] if one["ref"] == about["bom-ref"])
    assert {"fastapi", "torch", "onnxruntime", "opentelemetry-sdk"} <= {ref.partition("==")[0] for ref in needed}
    assert not re.search(rf"file:|{re.escape(str(ROOT))}|{re.escape(str(made))}", json.dumps(sbom))


def test_the_licence_list_names_every_package(made):
    rows = next((made / "out").glob("*-licences.md")).read_text().splitlines()[2:]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == sorted(
        re.sub(r"[-_.]+", "-", one.name).lower() for one in closure(declared())
    )


def test_the_installed_command(installed):
    assert installed("gateway", "--version").stdout == f"{version()}\n"
    shown = installed("gateway", "--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "doctor" in shown.stdout
    checked = installed("gateway", "check", str(ROOT / "deploy" / "gateway.yaml"))
    assert checked.stdout.startswith(f"{ROOT / 'deploy' / 'gateway.yaml'}: good (")


def test_every_module_and_every_file_comes_from_the_wheel(installed, made):
    done = installed("python", "-c", ASK)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    site = next((made / "environment" / "lib").glob("python*/site-packages"))
    assert told["lacking"] == {"local_runtime.ray_serve": "ray"}  # an extra that the image `gateway` does not have
    assert told["at"] == str(site / "gateway" / "__init__.py")
    assert Path(told["table"]) == site / "gateway" / "console" / "table.js"
    assert "<form" in told["login"]
    assert set(told["scripts"]) == {path.stem for path in (ROOT / "gateway" / "stores" / "lua").glob("*.lua")}


@pytest.mark.parametrize(
    ("args", "status", "said"),
    [
        (["gateway", "up"], 1, "needs the project's checkout"),
        (["gateway", "up", "--detach"], 1, "needs the project's checkout"),
        (["python", "-m", "gateway.stack.environments"], 1, "a checkout of the project"),
        (["gateway", "serve"], 78, "comes with the project's checkout"),
    ],
)
def test_what_needs_the_checkout_says_so(installed, args, status, said):
    done = installed(*args)
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == status
