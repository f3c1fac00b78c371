"""docker-compose.yml against the files and names that it leans on (no engine runs it here)."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES = COMPOSE["services"]
CONFIG = (ROOT / "deploy" / "gateway.yaml").read_text()


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_an_image_a_health_and_real_files(name):
    service = SERVICES[name]
    assert service.get("image") or service["build"]["dockerfile"]
    if "build" in service:
        assert (ROOT / service["build"]["dockerfile"]).is_file()
    assert "healthcheck" in service or service["restart"] == "no"
    for needed in service.get("depends_on", ()):
        assert needed in SERVICES
    for volume in service.get("volumes", ()):
        assert volume.split(":")[0] in COMPOSE["volumes"]


def test_every_variable_of_the_gateway_is_one_that_its_configuration_reads():
    given = {name for name in SERVICES["gateway"]["environment"] if name.startswith("GATEWAY_")}
    read = set(re.findall(r"GATEWAY_[A-Z_]+", CONFIG))
    assert given <= read


def test_triton_loads_the_models_that_the_rules_name():
    loaded = {part.removeprefix("--load-model=") for part in SERVICES["triton"]["command"] if "load-model" in part}
    rules = yaml.safe_load(CONFIG)["rules"]
    named = {target["model"] for rule in rules for target in rule["split"] if target["backend"] == "triton"}
    assert loaded == named - {"*"}


def test_no_secret_stands_in_the_file():
    example = (ROOT / ".env.example").read_text()
    for name in ("GATEWAY_DEV_KEY", "GATEWAY_ADMIN_TOKEN"):
        assert f"${{{name}:?" in (ROOT / "docker-compose.yml").read_text()
        assert re.search(rf"^{name}=$", example, re.MULTILINE)
