"""docker-compose.yml, the Dockerfiles and what they mount, held against each other and against what they promise.

tests/e2e/test_compose.py runs the services.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from gateway.settings import load_settings
from tests.kit.compose import SECRETS, seconds, stages

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docker-compose.yml").read_text()
COMPOSE = yaml.safe_load(TEXT)
SERVICES = COMPOSE["services"]
CONFIG = (ROOT / "deploy" / "gateway.yaml").read_text()
EXAMPLE = (ROOT / ".env.example").read_text()
NGINX = (ROOT / "deploy" / "docker" / "nginx.conf").read_text()
DOCKERFILES = sorted((ROOT / "deploy" / "docker").glob("*.Dockerfile"))
ONE_SHOT = {name for name, service in SERVICES.items() if service["restart"] == "no"}


def image(service: dict) -> str:
    """The text of the Dockerfile's stage that a service is built of."""
    return stages(ROOT / service["build"]["dockerfile"])[service["build"].get("target", "")]


def binds(service: dict) -> list[str]:
    return [volume for volume in service.get("volumes", ()) if volume.startswith("./")]


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_may_do_no_more_than_it_must(name):
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "/tmp" in service["tmpfs"]  # noqa: S108 - a path in the container
    assert not service.keys() & {"privileged", "cap_add", "pid", "ipc"}
    assert service["pids_limit"]
    assert service["deploy"]["resources"]["limits"].keys() == {"cpus", "memory"}
    assert service["logging"]["options"]["max-size"]
    user = str(service.get("user") or re.findall(r"(?m)^USER (\S+)$", image(service))[-1])
    assert re.fullmatch(r"[1-9]\d*(:\d+)?", user), "a number, and not root's"


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_tells_its_health_and_waits_for_that_of_others(name):
    service = SERVICES[name]
    assert ("healthcheck" in service) != (name in ONE_SHOT)
    for needed, how in service.get("depends_on", {}).items():
        wanted = "service_completed_successfully" if needed in ONE_SHOT else "service_healthy"
        assert how == {"condition": wanted}


@pytest.mark.parametrize("name", SERVICES)
def test_what_a_service_mounts_is_there(name):
    for volume in SERVICES[name].get("volumes", ()):
        source, *rest = volume.split(":")
        if volume in binds(SERVICES[name]):
            assert (ROOT / source).exists()
            assert rest[-1] == "ro"
        else:
            assert source in COMPOSE["volumes"] or source.startswith("${VLLM_MODELS")


@pytest.mark.parametrize("name", SERVICES)
def test_an_image_is_pinned_or_our_own(name):
    given = SERVICES[name]["image"]
    if given.startswith("hybrid-inference-gateway"):
        assert SERVICES[name]["build"]["dockerfile"]
    else:
        assert re.search(r":v?\d+\.\d+\.\d+(-\w+)?$", given)


def test_only_the_api_is_open_to_others():
    ports = {port: name for name, service in SERVICES.items() for port in service.get("ports", ())}
    open_ports = [port for port in ports if not port.startswith("127.0.0.1:")]
    assert open_ports == ["${GATEWAY_PORT:-8080}:8080"]
    assert COMPOSE["networks"]["engines"] == {"internal": True}
    for name in ("redis", "triton", "llm", "vllm"):
        assert SERVICES[name]["networks"] == ["engines"]


def test_no_secret_stands_in_the_file_and_the_example_asks_for_all():
    for name in SECRETS:
        assert f"${{{name}:?copy .env.example to .env and set {name}}}" in TEXT
        assert re.search(rf"^{name}=$", EXAMPLE, re.MULTILINE)
    for service in SERVICES.values():
        for name, value in (service.get("environment") or {}).items():
            if re.search(r"KEY|TOKEN|PASSWORD|AUTH", name):
                assert re.fullmatch(r"\$\{[A-Z_]+:[?-].*\}", value), name
    assert ".env" in (ROOT / ".gitignore").read_text().splitlines()
    assert ".env" in (ROOT / ".dockerignore").read_text().splitlines()


HOSTED = {
    backend.api_key_env
    for backend in load_settings(ROOT / "deploy" / "gateway.yaml").backends.values()
    if getattr(backend, "api_key_env", None)
}


def test_each_plane_has_the_secrets_that_it_needs_and_no_others():
    gateway, admin = (SERVICES[name]["environment"].keys() for name in ("gateway-1", "admin"))
    assert gateway >= HOSTED
    assert not admin & HOSTED
    assert "GATEWAY_ADMIN_TOKEN" in admin - gateway
    for name, service in SERVICES.items():
        if name not in ("gateway-1", "gateway-2", "admin", "cli", "redis", "grafana"):
            assert not [one for one in service.get("environment") or {} if re.search(r"KEY|TOKEN|PASSWORD|AUTH", one)]


def test_the_example_tells_every_variable_with_its_default():
    asked = dict(re.findall(r"\$\{([A-Z_]+)(?::[-?])?([^}]*)\}", TEXT))
    told = dict(re.findall(r"(?m)^(?:# )?([A-Z_]+)=(.*)$", EXAMPLE))
    assert told.keys() - {"COMPOSE_PROFILES"} == asked.keys()
    for name in asked.keys() - SECRETS.keys() - {"GATEWAY_VLLM_ENABLED"}:  # which stands there as the profile wants it
        assert told[name] == asked[name], name


def test_every_variable_of_the_gateway_is_one_that_its_configuration_reads():
    given = {name for name in SERVICES["gateway-1"]["environment"] if name.startswith("GATEWAY_")}
    assert given <= set(re.findall(r"GATEWAY_[A-Z_]+", CONFIG))
    assert SERVICES["gateway-1"] == SERVICES["gateway-2"]


def test_prometheus_asks_every_service_that_always_runs_by_its_name():
    """A name stays when its container ends, and is then seen to be down; an address that is looked up vanishes."""
    asked = {
        target
        for job in yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
        for where in job["static_configs"]
        for target in where["targets"]
    }
    assert asked == {"gateway-1:8081", "gateway-2:8081", "triton:8002", "llm:8085"}
    assert {target.partition(":")[0] for target in asked} <= {n for n, s in SERVICES.items() if "profiles" not in s}


@pytest.mark.parametrize("manual", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_manuals_name_services_that_there_are(manual):
    commands = re.findall(r"docker[ -]compose (?:exec|stop|start|logs|run|up)((?: [\w./$\":=-]+)+)", manual.read_text())
    for words in (command.split() for command in commands):
        named = [word for word in words if not re.match(r"-|[\"$]", word)]
        assert not named or named[0] in SERVICES, words


def test_triton_loads_the_models_that_the_rules_name():
    loaded = {part.removeprefix("--load-model=") for part in SERVICES["triton"]["command"] if "load-model" in part}
    rules = yaml.safe_load(CONFIG)["rules"]
    named = {target["model"] for rule in rules for target in rule["split"] if target["backend"] == "triton"}
    assert loaded == named - {"*"}


def test_a_stop_waits_for_the_drain_and_the_front_for_the_longest_task():
    drain_s = float(SERVICES["gateway-1"]["environment"]["GATEWAY_DRAIN_S"])
    killed_after_s = 5  # what gateway/serve.py adds before it kills a worker
    for name in ("gateway-1", "gateway-2", "front"):
        assert seconds(SERVICES[name]["stop_grace_period"]) > drain_s + killed_after_s
    exit_s = next(part.split("=")[1] for part in SERVICES["triton"]["command"] if "exit-timeout" in part)
    assert seconds(SERVICES["triton"]["stop_grace_period"]) > float(exit_s)
    longest = max(task.timeout_ms for task in load_settings(ROOT / "deploy" / "gateway.yaml").tasks.values()) / 1000
    assert seconds(re.search(r"proxy_read_timeout (\w+);", NGINX)[1]) > longest


def test_make_image_builds_what_the_services_run():
    done = subprocess.run(["make", "-n", "image"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    built = {tuple(words) for words in re.findall(r"-f (\S+) --target (\S+) -t (\S+)", done.stdout)}
    asked = set()
    for service in SERVICES.values():
        if "build" in service:
            image = service["image"].replace("${GATEWAY_VERSION:-local}", version)
            asked.add((service["build"]["dockerfile"], service["build"]["target"], image))
    assert built == asked


def test_redis_has_the_user_of_the_manual():
    line = re.search(r"(?m)^user gateway on >CHANGE-ME (.*)$", (ROOT / "docs" / "redis.md").read_text())[1]
    assert f"user gateway on #$digest {line}\n" in (ROOT / "deploy" / "docker" / "redis.sh").read_text()


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_the_linter_finds_nothing(dockerfile):
    linter = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([linter, "--no-color", dockerfile], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_stands_on_a_pinned_base_and_ends_without_root_and_build_tools(dockerfile):
    own = stages(dockerfile)
    for base in re.findall(r"(?m)^FROM (\S+)", dockerfile.read_text()):
        assert base in own or re.search(r":\d+\.\d+[.\w-]*$", base)
    targets = {s["build"].get("target", "") for s in SERVICES.values() if "build" in s}
    for name in own.keys() & targets:
        assert re.search(r"(?m)^HEALTHCHECK ", own[name])
        assert re.findall(r"(?m)^USER (\S+)$", own[name])[-1].isdigit()
        if dockerfile.name == "gateway.Dockerfile":
            assert not re.search(r"pip install|gcc|build-essential", own[name])


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_what_an_image_copies_is_there_and_let_in(dockerfile):
    let_in = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for line in re.findall(r"(?m)^COPY (?!--from)(.*)$", dockerfile.read_text()):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists()
            assert any(source == one or (one.endswith("/") and source.startswith(one)) for one in let_in), source
