"""deploy/kubernetes: valid, and every name, port, path and variable in it exists (no cluster runs it here)."""

import re
from urllib.parse import urlsplit

import kubernetes_validate
import pytest
import typer.main
import yaml

from gateway.__main__ import app as cli
from gateway.admin.access.door import OPEN
from gateway.backends.triton import addresses
from gateway.serve import KILL_AFTER_S, operations
from gateway.settings import load_settings
from gateway.stack import llm_server
from gateway.telemetry.page import Page
from tests.kit.kubernetes import FOLDER, INSTALLATIONS, NAME, NAMESPACE, ROOT, Installation

KUBERNETES = ("1.31.0", "1.37.0")  # the oldest and the newest that manifests are held against
CLIENTS = ("gateway", "admin")
OF_OTHERS = {"ScaledObject", "PodMonitor", "ServiceMonitor"}  # whose schemas are not Kubernetes' own
CONFIG = (ROOT / "deploy" / "gateway.yaml").read_text()
SECRETS = (FOLDER / "secrets.env.example").read_text()
OPS = {route.path for route in operations(Page(ROOT), ("127.0.0.1", 1), None).routes}
PROBES = {
    ("gateway", "ops"): OPS,
    ("admin", "http"): set(OPEN),
    ("triton", "http"): {"/v2/health/live", "/v2/health/ready"},
    ("llm", "http"): {"/health"},
}


@pytest.fixture(scope="module", params=INSTALLATIONS)
def made(request, tmp_path_factory):
    return Installation(tmp_path_factory.mktemp("made"), *INSTALLATIONS[request.param])


@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_takes_every_object(made, version):
    kinds = {one["kind"] for one in made.objects}
    assert {"Deployment", "StatefulSet", "NetworkPolicy", "PodDisruptionBudget"} <= kinds
    for one in made.objects:
        assert one["kind"] == "Namespace" or one["metadata"]["namespace"] == NAMESPACE
        if one["kind"] not in OF_OTHERS:
            kubernetes_validate.validate(one, version, strict=True)


def test_a_field_that_kubernetes_lacks_is_found(made):
    one = made.of("Deployment")["gateway"] | {"specs": {}}
    with pytest.raises(kubernetes_validate.ValidationError, match="specs"):
        kubernetes_validate.validate(one, KUBERNETES[-1], strict=True)


def test_every_pod_is_as_restricted_as_its_namespace_wants(made):
    assert made.of("Namespace")[NAMESPACE]["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for pod in made.pods().values():
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        assert pod["spec"]["securityContext"]["runAsUser"] > 0
        assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["spec"]["automountServiceAccountToken"] is False
    for part, container in made.containers():
        wanted = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
        assert container["securityContext"] == wanted, part
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
        assert "memory" in container["resources"]["limits"]


def test_each_plane_has_the_secrets_that_it_needs_and_no_others(made):
    """Both read one Secret; what is the other's is put out of their environments."""
    hosted = set(re.findall(r"GATEWAY_(?:OPENAI|ANTHROPIC|GEMINI|DEEPSEEK)_KEY", SECRETS))
    for part, foreign in (("gateway", {"GATEWAY_ADMIN_TOKEN"}), ("admin", hosted)):
        given = made.containers_of(part)[part]["env"]
        assert foreign == {one["name"] for one in given if one.get("value") == ""}, part
    assert hosted == {
        one.api_key_env
        for one in load_settings(ROOT / "deploy" / "gateway.yaml").backends.values()
        if getattr(one, "api_key_env", None)
    }


def test_every_image_is_pinned_or_our_own(made):
    for part, container in made.containers():
        image = container["image"]
        assert image.startswith("hybrid-inference-gateway") or re.search(r":v?\d+\.\d+\.\d+(-\w+)?$", image), part


def test_no_service_can_change_what_the_configuration_reads(made):
    # A Service `gateway` would set GATEWAY_PORT=tcp://10.0.0.1:8080 in every pod of its namespace.
    assert all(pod["spec"]["enableServiceLinks"] is False for pod in made.pods().values())


def test_volumes_maps_and_secrets_are_there(made):
    claims, maps = made.of("PersistentVolumeClaim"), made.of("ConfigMap")
    templates = {
        t["metadata"]["name"]
        for s in made.of("StatefulSet").values()
        for t in s["spec"].get("volumeClaimTemplates", ())
    }
    for pod in made.pods().values():
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", ())}
        for volume in volumes.values():
            assert volume.get("persistentVolumeClaim", {"claimName": "models"})["claimName"] in claims
            assert volume.get("configMap", {"name": "gateway-config"})["name"] in maps
        for container in [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]:
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes.keys() | templates
            for source in container.get("envFrom", ()):
                assert source.get("configMapRef", {"name": "gateway-environment"})["name"] in maps
                assert f"generic {source.get('secretRef', {'name': 'gateway-secrets'})['name']} " in SECRETS


def test_services_budgets_and_spreads_choose_pods_that_exist(made):
    parts = made.pods()
    for service in made.of("Service").values():
        ports = made.ports(service["spec"]["selector"][NAME])
        for port in service["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]
    for name, budget in made.of("PodDisruptionBudget").items():
        assert budget["spec"]["selector"]["matchLabels"][NAME] == name
        assert name in parts
    for name, pod in parts.items():
        for spread in pod["spec"].get("topologySpreadConstraints", ()):
            assert spread["labelSelector"]["matchLabels"][NAME] == name
    for stateful in made.of("StatefulSet").values():
        assert stateful["spec"]["serviceName"] in made.of("Service")
    for ingress in made.of("Ingress").values():
        for rule in ingress["spec"]["rules"]:
            to = rule["http"]["paths"][0]["backend"]["service"]
            ports = made.of("Service")[to["name"]]["spec"]["ports"]
            assert to["port"]["name"] in {port["name"] for port in ports}


def test_probes_ask_paths_that_exist(made):
    asked = set()
    for part, container in made.containers():
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            if get := container.get(kind, {}).get("httpGet"):
                assert get["path"] in PROBES[part, get["port"]]
                assert get["port"] in made.ports(part)
                asked.add((part, kind))
    assert {(part, kind) for part, _ in PROBES for kind in ("livenessProbe", "readinessProbe")} <= asked


def test_every_variable_is_one_that_is_read(made):
    read = set(re.findall(r"GATEWAY_[A-Z_]+", CONFIG))
    assert set(re.findall(r"^(?:# )?(GATEWAY_[A-Z_]+)=", SECRETS, re.MULTILINE)) <= read
    assert {name for name in made.environment("gateway") if name.startswith("GATEWAY_")} <= read
    for_commands = {"GATEWAY_ADMIN_URL"}
    assert {name for name in made.environment("admin") if name.startswith("GATEWAY_")} <= read | for_commands
    assert for_commands <= set(re.findall(r"GATEWAY_[A-Z_]+", (ROOT / "gateway/cli/admin_client.py").read_text()))


def _settings(made, part, folder, monkeypatch):
    """What a part reads of its mounted configuration and its environment."""
    for name in set(re.findall(r"GATEWAY_[A-Z_]+", CONFIG)):
        monkeypatch.delenv(name, raising=False)
    for name, value in made.environment(part).items():
        monkeypatch.setenv(name, value)
    for name, text in made.of("ConfigMap")["gateway-config"]["data"].items():
        (folder / name).write_text(text)
    return load_settings(folder / "gateway.yaml")


def test_its_configuration_is_good_and_leads_to_its_own_services(made, tmp_path, monkeypatch):
    settings = _settings(made, "gateway", tmp_path, monkeypatch)
    server = settings.server
    assert made.ports("gateway") == {"http": server.port, "ops": server.ops_port}
    assert made.ports("admin") == {"http": server.admin_port}
    assert {server.host, server.ops_host, server.admin_host} == {"0.0.0.0"}  # noqa: S104 - in a pod of its own
    llms = [b for b in (settings.backends["llm"], settings.backends["vllm"]) if b.enabled]
    assert len(llms) == 1
    leads_to = {(urlsplit(url).hostname, urlsplit(url).port) for url in llms[0].base_urls}
    leads_to |= {(one.host, one.port) for one in addresses.parse(settings.backends["triton"].url)}
    if "redis" in made.pods():
        leads_to |= {(urlsplit(settings.redis.url).hostname, urlsplit(settings.redis.url).port)}
    else:
        assert "GATEWAY_REDIS_URL=" in SECRETS
    services = {(name, port["port"]): one for name, one in made.of("Service").items() for port in one["spec"]["ports"]}
    for host, port in leads_to:
        pod, _, service = host.rpartition(".")
        assert (service, port) in services
        assert services[service, port]["spec"]["clusterIP"] == "None"  # its name has a record for each pod
        assert not pod or re.fullmatch(rf"{next(iter(made.of('StatefulSet').keys() & {service}))}-\d", pod)
    mounts = {mount["name"]: mount["mountPath"] for _, c in made.containers() for mount in c.get("volumeMounts", ())}
    assert str(settings.backends["triton"].repository).startswith(mounts["models"] + "/")


def test_commands_are_those_that_there_are(made):
    commands = typer.main.get_command(cli).commands
    for part, container in made.containers():
        command = container["command"]
        if command[:3] == ["python", "-m", "gateway"]:
            options = {option for param in commands[command[3]].params for option in param.opts}
            assert {word for word in command[4:] if word.startswith("--")} <= options, part
            assert {"name": "config", "mountPath": "/etc/gateway", "readOnly": True} in container["volumeMounts"]
        elif command[:3] == ["python", "-m", "gateway.stack.llm_server"]:
            assert llm_server.arguments([*command[3:], "--model", __file__]).port == made.ports("llm")["http"]
    assert [part for part, c in made.containers() if c["command"][:3] == ["python", "-m", "gateway"]] == [
        "gateway",
        "admin",
    ]


def test_triton_loads_the_models_that_the_rules_name(made):
    command = made.containers_of("triton")["triton"]["command"]
    loaded = {part.removeprefix("--load-model=") for part in command if "load-model" in part}
    rules = yaml.safe_load(CONFIG)["rules"]
    named = {target["model"] for rule in rules for target in rule["split"] if target["backend"] == "triton"}
    assert loaded == named - {"*"}
    assert "--model-control-mode=explicit" in command


def _sleep_s(made, part):
    return int(made.containers_of(part)[part]["lifecycle"]["preStop"]["exec"]["command"][1])


def test_no_stream_is_cut_by_a_rollout(made, tmp_path, monkeypatch):
    settings = _settings(made, "gateway", tmp_path, monkeypatch)
    drain_s = settings.server.drain_timeout_s
    assert drain_s * 1000 >= max(task.timeout_ms for task in settings.tasks.values())
    grace_s = made.pods()["gateway"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > _sleep_s(made, "gateway") + drain_s + 2 * KILL_AFTER_S  # workers, then their runtime
    rolling = made.of("Deployment")["gateway"]["spec"]["strategy"]["rollingUpdate"]
    assert rolling["maxUnavailable"] == 0
    if made.of("Ingress"):
        notes = made.of("Ingress")["gateway"]["metadata"]["annotations"]
        assert int(notes["nginx.ingress.kubernetes.io/proxy-body-size"].removesuffix("m")) << 20 == (
            settings.server.max_body_bytes
        )
        assert int(notes["nginx.ingress.kubernetes.io/proxy-read-timeout"]) > drain_s


def test_no_gateway_looks_for_a_triton_that_stops(made):
    sleep_s = _sleep_s(made, "triton")
    assert sleep_s > addresses.REFRESH_S + addresses.RESOLVE_TIMEOUT_S
    exit_s = next(
        int(word.split("=")[1])
        for word in made.containers_of("triton")["triton"]["command"]
        if word.startswith("--exit-timeout-secs")
    )
    assert made.pods()["triton"]["spec"]["terminationGracePeriodSeconds"] > sleep_s + exit_s


def test_a_pod_that_still_waits_for_the_repository_can_be_deleted_at_once(made):
    """The first process of a container heeds no signal that it has no handler for: the grace would pass, 640 s."""
    waits = [one for pod in made.pods().values() for one in pod["spec"].get("initContainers", ())]
    assert len(waits) == 2
    for one in waits:
        shell, option, script = one["command"]
        assert (shell, option, script.partition(";")[0]) == ("sh", "-c", "trap 'exit 143' TERM")


def test_the_control_plane_stops_within_its_grace(made, tmp_path, monkeypatch):
    settings = _settings(made, "admin", tmp_path, monkeypatch)
    assert made.pods()["admin"]["spec"]["terminationGracePeriodSeconds"] > settings.server.drain_timeout_s
    assert made.of("Deployment")["admin"]["spec"]["replicas"] == 1


def test_exactly_the_flows_that_exist_are_open(made):
    inner = {("gateway", "triton", 8001), ("admin", "triton", 8001), ("gateway", "llm", 8000)}
    outer = {(part, "0.0.0.0/0", 443) for part in CLIENTS} if "to-the-internet" in made.of("NetworkPolicy") else set()
    if "redis" in made.pods():
        inner |= {(part, "redis", 6379) for part in CLIENTS}
    else:
        outer |= {(part, "10.0.0.0/8", port) for part in CLIENTS for port in (6379, 26379)}
    if "to-collector" in made.of("NetworkPolicy"):
        outer |= {("gateway", "namespace monitoring", 4318)}
    names = {(part, "namespace kube-system", 53) for part in CLIENTS}
    assert made.flows("egress") == inner | outer | names
    monitored = (
        {("namespace monitoring", part, port) for part, port in (("gateway", 8081), ("triton", 8002), ("llm", 8000))}
        if made.of("PodMonitor")
        else set()
    )
    insiders = {("namespace ingress-nginx", "admin", 8090)} if made.of("Ingress") else set()
    assert made.flows("ingress") == inner | {("anywhere", "gateway", 8080)} | monitored | insiders
    assert made.of("NetworkPolicy")["default-deny"]["spec"] == {
        "podSelector": {}, "policyTypes": ["Ingress", "Egress"],
    }  # fmt: skip


def test_no_secret_stands_in_the_files():
    assert re.search(r"^GATEWAY_ADMIN_TOKEN=$", SECRETS, re.MULTILINE)
    for path in FOLDER.rglob("*.yaml"):
        assert not re.search(r"(KEY|TOKEN|PASSWORD)\w*=\S", path.read_text()), path


def test_every_file_is_used():
    listed = {FOLDER / "components" / "hpa" / "adapter-rules.yaml"}  # the adapter's own, not the cluster's
    for kustomization in FOLDER.rglob("kustomization.yaml"):
        wanted = yaml.safe_load(kustomization.read_text())
        named = [*wanted.get("resources", ()), *(patch["path"] for patch in wanted.get("patches", ()))]
        listed |= {kustomization, *((kustomization.parent / name).resolve() for name in named)}
    assert set(FOLDER.rglob("*.yaml")) <= listed
