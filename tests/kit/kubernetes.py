"""deploy/kubernetes as it may be put together, each component at least once, and questions about what comes of it."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.kit.kustomize import Object, render

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
NAMESPACE = "hybrid-inference"
NAME = "app.kubernetes.io/name"
Flow = tuple[str, str, int]
"""From a part or a foreign place, to another, and the port."""
INSTALLATIONS = {
    "cpu": ("overlays/cpu", ()),
    "gpu": ("overlays/gpu", ()),
    "cpu with keda": ("overlays/cpu", ("monitoring", "keda")),
    "gpu with all": ("overlays/gpu", ("monitoring", "traces", "hpa", "ingress", "hosted")),
    "external redis": ("base", ("llm-llamacpp", "redis-external")),
}


class Installation:
    """What one choice makes, and questions about it."""

    def __init__(self, folder: Path, start: str, components: Sequence[str], **more: Any) -> None:
        wanted = {
            "namespace": NAMESPACE,
            "resources": [str(FOLDER / start)],
            "components": [str(FOLDER / "components" / name) for name in components],
            **more,
        }
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(wanted))
        self.objects = render(folder)

    def of(self, kind: str) -> dict[str, Object]:
        return {one["metadata"]["name"]: one for one in self.objects if one["kind"] == kind}

    def pods(self) -> dict[str, Object]:
        """The pod template of each part, by its label."""
        parts = (one for kind in ("Deployment", "StatefulSet", "Job") for one in self.of(kind).values())
        templates = (one["spec"]["template"] for one in parts)
        return {template["metadata"]["labels"][NAME]: template for template in templates}

    def containers(self) -> Iterator[tuple[str, Object]]:
        for part, pod in self.pods().items():
            for one in itertools.chain(pod["spec"].get("initContainers", ()), pod["spec"]["containers"]):
                yield part, one

    def containers_of(self, part: str) -> dict[str, Object]:
        return {one["name"]: one for owner, one in self.containers() if owner == part}

    def ports(self, part: str) -> dict[str, int]:
        containers = self.pods()[part]["spec"]["containers"]
        return {port["name"]: port["containerPort"] for one in containers for port in one.get("ports", ())}

    def environment(self, part: str) -> dict[str, str]:
        """What its container is given, without the Secret."""
        container = self.pods()[part]["spec"]["containers"][0]
        maps = (of["configMapRef"]["name"] for of in container.get("envFrom", ()) if "configMapRef" in of)
        given = {k: v for name in maps for k, v in self.of("ConfigMap")[name]["data"].items()}
        return given | {one["name"]: one["value"] for one in container.get("env", ())}

    def flows(self, direction: str) -> set[Flow]:
        """What the policies let out ("egress"), or in ("ingress"). A port's name is that of the part it leads to."""
        found = set()
        for policy in self.of("NetworkPolicy").values():
            spec = policy["spec"]
            for rule in spec.get(direction, ()):
                peers = rule.get("to" if direction == "egress" else "from", ({},))
                for own, peer in itertools.product(self._chosen(spec["podSelector"]), peers):
                    for other in self._places(peer):
                        ends = (own, other) if direction == "egress" else (other, own)
                        found |= {(*ends, self._number(ends[1], port["port"])) for port in rule["ports"]}
        return found

    def _number(self, part: str, port: int | str) -> int:
        return self.ports(part)[port] if isinstance(port, str) else port

    def _places(self, peer: Mapping[str, Any]) -> list[str]:
        if "podSelector" in peer:
            return self._chosen(peer["podSelector"])
        if "namespaceSelector" in peer:
            return [f"namespace {peer['namespaceSelector']['matchLabels']['kubernetes.io/metadata.name']}"]
        return [peer["ipBlock"]["cidr"]] if "ipBlock" in peer else ["anywhere"]

    def _chosen(self, selector: Mapping[str, Any]) -> list[str]:
        names = set(self.pods())
        for wanted in selector.get("matchExpressions", ()):
            assert (wanted["key"], wanted["operator"]) == (NAME, "In")
            names &= set(wanted["values"])
        if "matchLabels" in selector:
            names &= {selector["matchLabels"][NAME]}
        return sorted(names)
