"""What deploy/kubernetes is scaled by, and what Prometheus is told to ask: it exists, and both autoscalers agree."""

import re
import subprocess

import pytest
import yaml

from tests.kit.kubernetes import FOLDER, INSTALLATIONS, NAME, NAMESPACE, ROOT, Installation
from tests.kit.prometheus import DASHBOARDS, JOBS, RULES

TOLD = "".join((ROOT / "docs" / name).read_text() for name in ("metrics.md", "local-runtime.md"))
TARGETS = {"gateway": "Deployment", "triton": "Deployment", "llm": "StatefulSet"}
METRICS = {
    "gateway": {"gateway_requests_in_flight"},
    "triton": {"nv_inference_queue_duration_us", "nv_inference_request_success"},
    "llm": {"gateway_engine_requests"},
}


@pytest.fixture
def keda(tmp_path):
    return Installation(tmp_path, *INSTALLATIONS["cpu with keda"])


@pytest.fixture
def hpa(tmp_path):
    return Installation(tmp_path, *INSTALLATIONS["gpu with all"])


def _metrics(query):
    return set(re.findall(r"\b(?:gateway|nv)_[a-z_]+", query))


def _is_told(metric):
    """The manual of metrics or the local runtime's names it, also as `nv_inference_{request,queue}_duration_us`."""
    words = re.sub(r"(\w+)\{([a-z_,]+)\}(\w+)", lambda m: " ".join(m[1] + w + m[3] for w in m[2].split(",")), TOLD)
    return re.search(rf"\b{metric}\b", words) is not None


def _triggers(made):
    return {name: one["spec"]["triggers"][0] for name, one in made.of("ScaledObject").items()}


def _squeezed(query):
    return re.sub(r"\s+", "", query)


def test_keda_scales_by_metrics_that_there_are(keda):
    triggers = _triggers(keda)
    assert {name: _metrics(trigger["metadata"]["query"]) for name, trigger in triggers.items()} == METRICS
    assert all(_is_told(metric) for metrics in METRICS.values() for metric in metrics)
    for trigger in triggers.values():
        assert set(re.findall(r'namespace="([^"]+)"', trigger["metadata"]["query"])) == {NAMESPACE}
        assert trigger["type"] == "prometheus"
        assert float(trigger["metadata"]["threshold"]) > 0


def test_a_metric_that_nobody_has_is_noticed():
    assert not _is_told("gateway_requests_in_flights")
    assert not _is_told("nv_inference_wait_duration_us")


def test_the_adapter_has_the_same_figures_and_the_same_thresholds(keda, hpa):
    rules = yaml.safe_load((FOLDER / "components" / "hpa" / "adapter-rules.yaml").read_text())["rules"]["external"]
    given = {rule["name"]["as"]: rule for rule in rules}
    for name, scaler in hpa.of("HorizontalPodAutoscaler").items():
        trigger, wanted = _triggers(keda)[name], keda.of("ScaledObject")[name]["spec"]
        external = scaler["spec"]["metrics"][0]["external"]
        rule = given[external["metric"]["name"]]
        query = rule["metricsQuery"].replace("<<.LabelMatchers>>", f'namespace="{NAMESPACE}"')
        assert _squeezed(query) == _squeezed(trigger["metadata"]["query"])
        assert _metrics(rule["seriesQuery"]) <= METRICS[name]
        target = external["target"]
        assert target == {
            "type": trigger["metricType"],
            trigger["metricType"][0].lower() + trigger["metricType"][1:]: trigger["metadata"]["threshold"],
        }
        bounds = (scaler["spec"]["minReplicas"], scaler["spec"]["maxReplicas"])
        assert bounds == (wanted["minReplicaCount"], wanted["maxReplicaCount"])
        assert scaler["spec"]["behavior"] == wanted["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]


def test_what_is_scaled_is_there_and_has_no_number_of_its_own(keda, hpa):
    for made, kind in ((keda, "ScaledObject"), (hpa, "HorizontalPodAutoscaler")):
        assert {name: one["spec"]["scaleTargetRef"]["kind"] for name, one in made.of(kind).items()} == TARGETS
        for name, of in TARGETS.items():
            assert made.of(kind)[name]["spec"]["scaleTargetRef"]["name"] == name
            assert "replicas" not in made.of(of)[name]["spec"]


def test_the_gateway_knows_every_llm_server_that_there_may_be(keda):
    most = keda.of("ScaledObject")["llm"]["spec"]["maxReplicaCount"]
    named = keda.environment("gateway")["GATEWAY_LLM_URL"].split(",")
    assert named == [f"http://llm-{number}.llm:8000/v1" for number in range(most)]
    assert keda.environment("gateway")["GATEWAY_VLLM_URL"].split(",") == named


def test_waiting_on_purpose_adds_no_triton(keda):
    configs = [path.read_text() for path in (ROOT / "triton_models").glob("*/config.pbtxt")]
    delays = [int(us) for text in configs for us in re.findall(r"max_queue_delay_microseconds:\s*(\d+)", text)]
    assert float(_triggers(keda)["triton"]["metadata"]["threshold"]) > max(delays)


def test_prometheus_asks_ports_that_there_are(keda):
    let_in = {(to, port) for of, to, port in keda.flows("ingress") if of == "namespace monitoring"}
    asked = set()
    for name, one in keda.of("PodMonitor").items():
        part = one["spec"]["selector"]["matchLabels"][NAME]
        asked |= {(part, keda.ports(part)[end["port"]]) for end in one["spec"]["podMetricsEndpoints"]}
        assert name == part
        assert one["spec"]["jobLabel"] == NAME  # so that alerts find it by the name of docker-compose.yml's Prometheus
    for one in keda.of("ServiceMonitor").values():
        wanted = one["spec"]["selector"]["matchLabels"]
        found = [s for s in keda.of("Service").values() if s["metadata"].get("labels") == wanted]
        ports = {port["name"]: port["port"] for service in found for port in service["spec"]["ports"]}
        asked |= {(wanted[NAME], ports[end["port"]]) for end in one["spec"]["endpoints"]}
    assert asked == let_in == {("gateway", 8081), ("triton", 8002), ("llm", 8000)}


def test_the_jobs_that_alerts_ask_for_are_those_of_the_operator(keda):
    """It names a pod's job by `jobLabel`, else by namespace and monitor; a service's by the service."""
    jobs = set(keda.of("ServiceMonitor"))
    for name, one in keda.of("PodMonitor").items():
        labels = keda.pods()[one["spec"]["selector"]["matchLabels"][NAME]]["metadata"]["labels"]
        jobs.add(labels.get(one["spec"].get("jobLabel"), f"{NAMESPACE}/{name}"))
    assert {"gateway"} <= JOBS <= jobs


def test_rules_and_dashboards_are_put_into_the_cluster_as_the_manual_says(tmp_path):
    script = re.search(r"```\n([^`]*PrometheusRule[^`]*)```", MANUALS[FOLDER / "README.md"])[1]
    fake = f'kubectl() {{ case "$*" in *apply*) cat > {tmp_path}/$rules.yaml;; *) printf "%s " "$@";; esac; }}\n'
    done = subprocess.run(
        ["bash", "-euc", fake + script], cwd=FOLDER, capture_output=True, text=True, check=True, timeout=60
    )
    made = [yaml.safe_load(path.read_text()) for path in tmp_path.iterdir()]
    shipped = [yaml.safe_load((RULES / name).read_text()) for name in ("alerts.yml", "recording.yml")]
    assert sorted((one["spec"] for one in made), key=str) == sorted(shipped, key=str)
    assert {one["kind"] for one in made} == {"PrometheusRule"}
    assert len({one["metadata"]["name"] for one in made}) == len(made)
    assert (FOLDER / re.search(r"--from-file=(\S+)", done.stdout)[1]).resolve() == DASHBOARDS[0].parent


MANUALS = {path: path.read_text() for path in (FOLDER / "README.md", ROOT / "docs" / "scaling.md")}


@pytest.mark.parametrize("path", MANUALS, ids=lambda path: path.name)
def test_the_manuals_name_what_there_is(path):
    text = MANUALS[path]
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (path.parent / link).exists(), link
    for metric in _metrics(text):
        assert _is_told(metric), metric
    read = (ROOT / "deploy" / "gateway.yaml").read_text() + (ROOT / "gateway/cli/admin_client.py").read_text()
    assert set(re.findall(r"GATEWAY_[A-Z_]+", text)) <= set(re.findall(r"GATEWAY_[A-Z_]+", read))
    for named in set(re.findall(r"\b(?:components|overlays)/[a-z-]+", text)) - {"overlays/mine"}:
        assert (FOLDER / named).is_dir(), named


def test_the_manual_has_a_word_on_every_component():
    told = set(re.findall(r"components/([a-z-]+)", MANUALS[FOLDER / "README.md"]))
    assert {path.name for path in (FOLDER / "components").iterdir()} - {"llm", "scaled"} == told
    assert {name for _, names in INSTALLATIONS.values() for name in names} | {"redis", "llm-vllm"} == told


def test_an_overlay_of_your_own_is_made_as_the_manual_says(tmp_path):
    example = re.search(r"```yaml\n(apiVersion: kustomize.*?)```", MANUALS[FOLDER / "README.md"], re.DOTALL)[1]
    wanted = yaml.safe_load(example)
    start, *components = (name.removeprefix("../../") for name in wanted["resources"] + wanted["components"])
    names = [name.removeprefix("components/") for name in components]
    made = Installation(tmp_path, start, names, images=wanted["images"])
    images = {container["image"] for _, container in made.containers() if "gateway" in container["image"]}
    assert all(image.startswith("registry.example.com/") for image in images)
    assert made.of("ScaledObject")
