"""The Helm chart, rendered by Helm's own library, and what Kubernetes would make of it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm/carryback"
POD_IP = "127.0.0.1"

Manifest = dict[str, Any]


class _UniqueKeys(yaml.CSafeLoader):
    """YAML whose mappings have each key once; others would be read differently by different readers."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key is there twice: {sorted(keys)}, {node.start_mark}"
        return super().construct_mapping(node, deep)


@dataclass
class Release:
    """What the chart renders to.

    Attributes:
        manifests: in no particular order.
        notes: what the operator is told.
    """

    manifests: list[Manifest]
    notes: str

    def all(self, kind: str) -> list[Manifest]:
        """The manifests of a kind."""
        return [each for each in self.manifests if each["kind"] == kind]

    def one(self, kind: str, name: str) -> Manifest:
        """The manifest with that name."""
        found = [each for each in self.all(kind) if each["metadata"]["name"] == name]
        assert len(found) == 1, f"{len(found)} of {kind} {name}"
        return found[0]

    @property
    def pods(self) -> dict[str, Manifest]:
        """The pods' templates by their part: router, prefill, decode, redis, pair."""
        workloads = [*self.all("Deployment"), *self.all("StatefulSet")]
        templates = [each["spec"]["template"] for each in workloads]
        return {each["metadata"]["labels"]["app.kubernetes.io/component"]: each for each in templates}

    def container(self, part: str) -> Manifest:
        """The only container of a part's pods."""
        pod = self.pods[part] if part in self.pods else self.one("Pod", f"llm-{part}")
        (found,) = pod["spec"]["containers"]
        assert isinstance(found, dict)
        return found

    def environ(self, part: str) -> dict[str, str]:
        """A container's environment as its process sees it; `<KEY>` stands for a secret."""
        seen: dict[str, str] = {}
        for each in self.container(part).get("env", []):
            source = each.get("valueFrom", {})
            if "secretKeyRef" in source:
                seen[each["name"]] = f"<{source['secretKeyRef']['key']}>"
            elif "fieldRef" in source:
                assert source["fieldRef"]["fieldPath"] == "status.podIP"
                seen[each["name"]] = POD_IP
            else:
                seen[each["name"]] = expand(each["value"], seen)
        return seen

    def words(self, part: str) -> list[str]:
        """A container's command line as its process sees it."""
        container = self.container(part)
        environ = self.environ(part)
        return [expand(word, environ) for word in [*container["command"], *container.get("args", [])]]


def expand(text: str, environ: Mapping[str, str]) -> str:
    """`$(NAME)` replaced as Kubernetes does."""
    return re.sub(r"\$\((\w+)\)", lambda found: environ.get(found[1], found[0]), text)


def render(values: Mapping[str, Any], chart: Path = CHART) -> Release:
    """The chart, as `helm install llm -n models` would render it.

    Raises:
        helm_python.HelmError: it would refuse to.
    """
    rendered = helm_python.Chart.load(chart).render(dict(values), name="llm", namespace="models")
    manifests, notes = [], ""
    for name, text in rendered.items():
        if name.endswith("NOTES.txt"):
            notes = text
        else:
            manifests += [each for each in yaml.load_all(text, _UniqueKeys) if each]
    return Release(manifests, notes)


def values_file(name: str) -> dict[str, Any]:
    """Values that the chart has as an example."""
    loaded = yaml.load((CHART / f"values-{name}.yaml").read_text(), _UniqueKeys)
    assert isinstance(loaded, dict)
    return loaded


MODEL = {"name": "Qwen/Qwen3-8B"}
TENANT = {"name": "acme", "keys": ["sha256:" + "0" * 64], "requests_per_minute": 60}
CASES: dict[str, dict[str, Any]] = {
    "default": {"model": MODEL},
    "nvlink": values_file("nvlink"),
    "infiniband": values_file("infiniband"),
    "efa": values_file("efa"),
    "external redis": {"model": MODEL, "redis": {"enabled": False, "url": "rediss://redis.example:6380/1"}},
    "redis in a secret": {
        "model": MODEL,
        "redis": {"enabled": False, "existingSecret": {"name": "state", "key": "url"}},
    },
    "ipv6": {"model": MODEL, "bindAddress": "::"},
    "cpu": {
        "profile": "cpu",
        "model": {"name": "/models/tiny", "servedName": "tiny", "cache": {"existingClaim": "models"}},
        "prefill": {"gpus": 0, "args": ["--max-model-len", "4096"]},
        "decode": {"gpus": 0},
    },
    "trainium": {
        "profile": "trainium",
        "model": MODEL,
        "engines": {"gpuResource": "aws.amazon.com/neuron", "args": ["--tensor-parallel-size=8"]},
    },
    "router alone": {
        "router": {"replicas": 1, "podDisruptionBudget": {"enabled": False}},
        "prefill": {"enabled": False},
        "decode": {"enabled": False},
        "redis": {"enabled": False},
        "networkPolicy": {"enabled": False},
        "serviceAccount": {"create": False},
        "externalEngines": [
            {"role": "prefill", "url": "http://10.0.0.1:8100", "events": "tcp://10.0.0.1:8101"},
            {"role": "decode", "url": "http://10.0.0.2:8200", "events": "tcp://10.0.0.2:8201"},
        ],
    },
    "everything": {
        "fullnameOverride": "llm",
        "imagePullSecrets": [{"name": "registry"}],
        "images": {"router": {"tag": "1.2.3"}, "engine": {"repository": "registry.example/engine"}},
        "model": {
            "name": "Qwen/Qwen3-32B",
            "servedName": "qwen",
            "token": {"existingSecret": "hugging-face"},
            "cache": {"claim": {"size": "200Gi", "storageClass": "fast"}},
        },
        "router": {
            "workers": 2,
            "config": {
                "hold_s": 300,
                "kv_recompute_threshold": "auto",
                "pin_budget": 0.4,
                "log_format": "json",
            },
            "autoscaling": {"enabled": True},
            "service": {"type": "LoadBalancer", "port": 80, "annotations": {"a/b": "c"}},
            "env": [{"name": "TZ", "value": "UTC"}],
            "podAnnotations": {"a/b": "c"},
            "nodeSelector": {"pool": "cpu"},
            "tolerations": [{"key": "a", "operator": "Exists"}],
            "affinity": {"nodeAffinity": {}},
        },
        "tenants": {"list": [TENANT, {"name": "guests", "anonymous": True}]},
        "engines": {
            "hostNetwork": True,
            "runtimeClassName": "nvidia",
            "podAnnotations": {"a/b": "c"},
            "env": [{"name": "UCX_LOG_LEVEL", "value": "info"}],
            "args": ["--gpu-memory-utilization", "0.85"],
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        },
        "prefill": {"replicas": 3, "gpus": 2, "resources": {"requests": {"cpu": "8"}}},
        "decode": {
            "replicas": 4,
            "gpus": 2,
            "topologySpreadConstraints": [
                {
                    "maxSkew": 1,
                    "topologyKey": "rack",
                    "whenUnsatisfiable": "DoNotSchedule",
                    "labelSelector": {"matchLabels": {"a": "b"}},
                }
            ],
        },
        "networkPolicy": {"clients": [{"podSelector": {"matchLabels": {"role": "agent"}}}]},
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "serviceAccount": {"annotations": {"a/b": "c"}},
    },
}


@pytest.fixture(scope="session", params=CASES, ids=lambda name: name.replace(" ", "-"))
def release(request: pytest.FixtureRequest) -> Release:
    """Each of `CASES`."""
    return render(CASES[request.param])


@pytest.fixture(scope="session")
def everything() -> Release:
    """The chart with all its parts."""
    return render(CASES["everything"])


@pytest.fixture
def clean_environ(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, str]], None]:
    """Sets the environment to a container's."""

    def become(environ: Mapping[str, str]) -> None:
        for name, value in environ.items():
            # What stands for it would be too short for one.
            monkeypatch.setenv(name, value * 2 if name == "CARRYBACK_STATE_KEY" else value)

    for name in list(os.environ):
        if name.startswith(("CARRYBACK_", "VLLM_")):
            monkeypatch.delenv(name)
    return become
