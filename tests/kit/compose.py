"""docker-compose.yml without an engine: its services as processes of this machine.

What an engine would do with the file is done here with what there is: each service has a loopback address of its own
instead of a container's, so that all ports are as written; a name server knows the services' names; volumes and tmpfs
are folders. Command, environment, mounted files, health check, order and stop signal are those of the file, as
`docker-compose config` reads it. Only addresses and folders are put in their places, and the models that Triton's
image has C++ backends for get those of deploy/triton/backends.
"""

import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from gateway.stack import leftovers, triton
from gateway.stack.state import Leftovers
from tests.kit.name_server import name_server
from tests.kit.redis import binary as redis_binary

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docker-compose.yml"
SECRETS = {
    "GATEWAY_DEV_KEY": "gw-compose-key",
    "GATEWAY_ADMIN_TOKEN": "gw-compose-admin-token-0123456789abcdef",
    "GATEWAY_REDIS_PASSWORD": "redis-compose-password",
    "GRAFANA_ADMIN_PASSWORD": "grafana-compose-password",
}
NOT_HERE = {"grafana", "vllm"}  # no binary of the one is packaged here, the other wants a GPU
TOOLS = {"cli"}  # not started, but called
NAME_SERVER, NAME_PORT = "127.0.0.11", 5353
MISSING = "the compose file's tests need {0}: apt-get install {0}"
STARTS_WITHIN_S = 150  # each service, on a machine that does other things too


def config(secrets: Mapping[str, str] = SECRETS, **more: str) -> str:
    """The file as `docker-compose config` understands it with `.env.example` filled in: checked by its schema."""
    assert shutil.which("docker-compose"), MISSING.format("docker-compose")
    example = (ROOT / ".env.example").read_text()
    for name, value in secrets.items():
        example, count = re.subn(rf"(?m)^{name}=$", f"{name}={value}", example)
        assert count == 1, f".env.example does not ask for {name}"
    with tempfile.NamedTemporaryFile("w", suffix=".env") as env_file:
        env_file.write(example)
        env_file.flush()
        done = subprocess.run(
            ["docker-compose", "--env-file", env_file.name, "--file", str(FILE), "config"],
            env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **more},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    return done.stdout


def seconds(text: str) -> float:
    """`90s`, `1m30s` as a number."""
    return sum(float(n) * {"s": 1, "m": 60, "h": 3600}[unit] for n, unit in re.findall(r"([\d.]+)([smh])", text))


def stages(dockerfile: Path) -> dict[str, str]:
    """The stages of a Dockerfile by name, each with those that it stands on."""
    found: dict[str, str] = {}
    for part in re.split(r"(?m)^FROM ", dockerfile.read_text().replace("\\\n", " "))[1:]:
        base, _, name = part.splitlines()[0].partition(" AS ")
        found[name] = found.get(base, "") + part
    return found


@dataclass(kw_only=True)
class Service:
    """One service of the file and what it runs on here."""

    name: str
    written: Mapping[str, Any]
    address: str
    folder: Path
    process: asyncio.subprocess.Process | None = None
    keeper: asyncio.Task[None] | None = None
    is_up: asyncio.Event = field(default_factory=asyncio.Event)
    is_down: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text(errors="replace")[-4000:] if path.exists() else ""


class ComposeStack:
    """All services that can run here."""

    def __init__(self, folder: Path) -> None:
        written = yaml.safe_load(config())["services"]
        net = f"127.{100 + os.getpid() % 100}.{os.getpid() // 100 % 250}"
        self.folder = folder
        self.run_id = f"compose{os.getpid()}"
        self.services = {
            name: Service(name=name, written=what, address=f"{net}.{20 + number}", folder=folder / name)
            for number, (name, what) in enumerate(sorted(written.items()))
            if name not in NOT_HERE | TOOLS
        }
        self.tools = {
            name: Service(name=name, written=written[name], address=f"{net}.9", folder=folder / name) for name in TOOLS
        }
        self.name_server = f"{net}.2"
        self.names: dict[str, list[str]] = {}
        found = triton.locate(ROOT / ".venv-triton")
        assert found is not None, "no real Triton here: run `make setup`"
        self.triton = found

    def url(self, name: str, port: int) -> str:
        return f"http://{self.services[name].address}:{port}"

    def command_line(self, name: str) -> str:
        """What everybody on the machine may see of a service's process; empty once it has ended."""
        process = self.services[name].process
        path = Path(f"/proc/{process.pid}/cmdline") if process else Path()
        return path.read_text() if path.is_file() else ""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["ComposeStack"]:
        """Start all in the file's order, and stop them at the end."""
        async with name_server(self.name_server, NAME_PORT, self.names):
            try:
                async with asyncio.TaskGroup() as starting:
                    for service in self.services.values():
                        starting.create_task(self._start_in_order(service))
                yield self
            finally:
                async with asyncio.TaskGroup() as stopping:
                    for service in self.services.values():
                        stopping.create_task(self._stop_in_order(service))
                leftovers.remove_shared_memory(self.run_id)

    async def stop(self, name: str) -> int | None:
        """Stop a service as the file says; its status, None where it did not run."""
        service = self.services[name]
        self._forget_names(service)
        if service.keeper is not None:
            service.keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await service.keeper  # which tells if a service that ended could not be started again
            service.keeper = None
        if service.process is None:
            return None
        if service.process.returncode is None:
            service.process.send_signal(getattr(signal, service.written.get("stop_signal", "SIGTERM")))
            try:
                async with asyncio.timeout(seconds(service.written.get("stop_grace_period", "10s"))):
                    await service.process.wait()
            except TimeoutError:
                service.process.kill()
        return await service.process.wait()

    async def start(self, name: str) -> None:
        """Start a service, and wait for its health; from then on it is started again whenever it ends by itself."""
        service = self.services[name]
        await self._begin(service)
        if service.written["restart"] == "unless-stopped":
            service.keeper = asyncio.create_task(self._keep(service))

    async def _begin(self, service: Service) -> None:
        command, env = self._command(service), self._environment(service)
        with (service.folder / "log").open("ab") as log:
            service.process = await asyncio.create_subprocess_exec(
                *command, env=env, cwd=ROOT, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log
            )
        for alias in self._aliases(service):
            self.names.setdefault(alias, []).append(service.address)
        async with asyncio.timeout(STARTS_WITHIN_S):
            if service.written.get("restart") == "no":
                assert await service.process.wait() == 0, service.log
                return
            while await self.health(service.name) != 0:
                assert service.process.returncode is None, f"{service.name} ended:\n{service.log}"
                await asyncio.sleep(0.2)

    async def _keep(self, service: Service) -> None:
        """What an engine does by `restart: unless-stopped`."""
        while True:
            await service.process.wait()
            self._forget_names(service)
            if service.name == "triton":  # with a container's first process all others end, and its shared memory
                await asyncio.to_thread(leftovers.end, Leftovers(run_id=self.run_id, processes={}), grace_s=1)
            await self._begin(service)

    def _forget_names(self, service: Service) -> None:
        for alias in self._aliases(service):
            with contextlib.suppress(KeyError, ValueError):
                self.names[alias].remove(service.address)

    async def health(self, name: str) -> int:
        """The exit status of a service's health check, asked once."""
        service = self.services[name]
        kind, *words = service.written["healthcheck"]["test"]
        command = ["sh", "-c", words[0]] if kind == "CMD-SHELL" else words
        process = await asyncio.create_subprocess_exec(
            *self._local(service, command),
            env=self._environment(service),
            cwd=ROOT,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        return await process.wait()

    async def run(self, name: str, *arguments: str) -> tuple[int, str]:
        """`docker compose run NAME ARGUMENTS`: its status and what it wrote."""
        tool = self.tools[name]
        if not tool.folder.exists():
            self._lay_out(tool)
        process = await asyncio.create_subprocess_exec(
            *self._local(tool, [*tool.written["entrypoint"], *arguments]),
            env=self._environment(tool),
            cwd=ROOT,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        written, _ = await process.communicate()
        return process.returncode or 0, written.decode()

    async def _start_in_order(self, service: Service) -> None:
        for before in service.written.get("depends_on", ()):
            await self.services[before].is_up.wait()
        self._lay_out(service)
        await self.start(service.name)
        service.is_up.set()

    async def _stop_in_order(self, service: Service) -> None:
        for after in self.services.values():
            if service.name in after.written.get("depends_on", ()):
                await after.is_down.wait()
        await self.stop(service.name)
        service.is_down.set()

    def _aliases(self, service: Service) -> list[str]:
        """The names under which others find the service."""
        networks = service.written.get("networks") or {}
        more = (alias for network in networks.values() for alias in (network or {}).get("aliases", ()))
        return sorted({service.name, *more})

    def _lay_out(self, service: Service) -> None:
        """Its folders, and its mounted files as they are in the container but for addresses and folders."""
        service.folder.mkdir(parents=True)
        for source, target in self._mounts(service):
            local = self._places(service)[target]
            if not source.startswith("/"):
                local.mkdir(parents=True, exist_ok=True)
                continue
            path = Path(source)
            for file in [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file()]:
                copy = local / file.relative_to(path) if path.is_dir() else local
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_text(self._file(service, file))
        for target in service.written.get("tmpfs", ()):
            self._places(service)[target].mkdir(parents=True)
        if service.name == "triton":
            extra = ROOT / "deploy" / "triton" / "backends"
            triton.assemble_backends(self.triton, extra=extra, target=service.folder / "backends")

    def _mounts(self, service: Service) -> list[tuple[str, str]]:
        """(name of a volume or path on this machine, path in the container)."""
        return [(mount.split(":")[0], mount.split(":")[1]) for mount in service.written.get("volumes", ())]

    def _places(self, service: Service) -> dict[str, Path]:
        """Where the container's writable and mounted paths are here."""
        places = {path: service.folder / "tmpfs" / path.strip("/") for path in service.written.get("tmpfs", ())}
        for source, target in self._mounts(service):
            is_file = source.startswith("/")
            places[target] = service.folder / target.strip("/") if is_file else self.folder / "volumes" / source
        if service.name == "models":  # in the image
            places["triton_models"] = ROOT / "triton_models"
        return places

    def _file(self, service: Service, file: Path) -> str:
        text = file.read_text()
        if NAME_SERVER in text:  # it asks the name server itself
            return self._text(service, text.replace(NAME_SERVER, f"{self.name_server}:{NAME_PORT}"), with_names=False)
        document = yaml.safe_load(text) if file.suffix in (".yml", ".yaml") else None
        if isinstance(document, dict) and "scrape_configs" in document:
            for job in document["scrape_configs"]:
                job.pop("dns_sd_configs", None)  # asks the system's name server, which is not ours
            text = yaml.safe_dump(document)
        return self._text(service, text)

    def _text(self, service: Service, text: str, *, with_names: bool = True) -> str:
        """A text of the container with this machine's addresses and folders."""
        text = re.sub(r"(?<![\d.])(127\.0\.0\.1|0\.0\.0\.0)(?![\d.])", service.address, text)
        places = self._places(service)
        paths = "|".join(sorted(map(re.escape, places), key=len, reverse=True))
        if paths:  # only where one begins, and ends or goes on with a folder of its own
            text = re.sub(rf"(?<![\w./-])({paths})(?=[/\s;\"']|$)", lambda found: str(places[found[1]]), text)
        if with_names:
            addresses = {alias: s.address for s in self.services.values() for alias in self._aliases(s)}
            names = "|".join(sorted(map(re.escape, addresses), key=len, reverse=True))
            text = re.sub(rf"(?<![\w.-])({names})(?=:\d)", lambda found: addresses[found[1]], text)
        return text

    def _local(self, service: Service, words: Sequence[str]) -> list[str]:
        """A command with this machine's programs, addresses and folders."""
        program, *rest = (self._text(service, word) for word in words)
        path = self._environment(service)["PATH"]
        if program == "tritonserver":
            backends = triton.backend_directory(service.folder / "backends")
            program = str(self.triton.folder / "bin" / "tritonserver")
            prefix = f"{leftovers.SHM_PREFIX}_{self.run_id}_"
            rest += [f"--backend-directory={backends}", f"--cache-directory={self.triton.folder / 'caches'}"]
            rest += [
                f"--backend-config={name},shm-region-prefix-name={prefix}"
                for name in ("python", "pytorch", "onnxruntime")
            ]
        if program == "nginx":  # as root it would give its own process away to a user who may not look into our folders
            rest[rest.index("-g") + 1] += " user root;"
        found = shutil.which(program, path=path)
        assert found, MISSING.format(program)
        return [found, *rest]

    def _command(self, service: Service) -> list[str]:
        written = service.written
        image = written.get("command") or _command_of_image(written["build"])
        return self._local(service, [*written.get("entrypoint", ()), *image])

    def _environment(self, service: Service) -> dict[str, str]:
        """What the file gives it, and what a process of this machine needs."""
        tmp = self._places(service)["/tmp"]  # noqa: S108 - a path in the container
        path = f"{Path(sys.executable).parent}:{Path(redis_binary()).parent}:{os.environ['PATH']}:/usr/sbin"
        given = {
            name: self._text(service, str(value)) for name, value in service.written.get("environment", {}).items()
        }
        env = {
            "PATH": path,
            "HOME": str(tmp),
            "TMPDIR": str(tmp),
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
            **given,
        }
        if service.name != "triton":
            return env
        return {**triton.environment(self.triton, env), leftovers.MARK: self.run_id}  # its stubs are found by it


def _command_of_image(build: Mapping[str, Any]) -> list[str]:
    """The CMD of a stage of a Dockerfile."""
    stage = stages(ROOT / build["dockerfile"])[build["target"]]
    return yaml.safe_load(re.findall(r"(?m)^CMD (\[.*\])$", stage)[-1])
