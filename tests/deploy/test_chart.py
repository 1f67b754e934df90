"""The Helm chart: what it renders is what Kubernetes, carryback's own commands and an operator expect."""

from __future__ import annotations

import base64
import http.server
import json
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import helm_python
import kubernetes_validate
import pytest
import yaml
from carryback_server.cli import app
from carryback_server.config import RouterSettings, ServeConfig, load
from carryback_server.profiles import PROFILES
from router_process import free_ports
from typer.testing import CliRunner

from .conftest import CASES, CHART, MODEL, POD_IP, TENANT, Manifest, Release, render, values_file

OLDEST, NEWEST = "1.27", "1.37"
PORTS = {"router": [8000, 8001], "prefill": [8100, 8101, 8102], "decode": [8200, 8201, 8202], "redis": [6379]}
SECRETS = ["CARRYBACK_KEY", "CARRYBACK_EVENTS_KEY", "VLLM_API_KEY", "CARRYBACK_STATE_KEY", "REDIS_PASSWORD"]

Become = Callable[[Mapping[str, str]], None]


def engines(release: Release) -> Iterator[str]:
    """Those parts that are one engine."""
    return (part for part in release.pods if part in ("prefill", "decode"))


def router_file(release: Release, folder: Path) -> Path:
    """The router's settings, as a file."""
    file = folder / "router.yaml"
    (config,) = release.all("ConfigMap")
    file.write_text(config["data"]["router.yaml"])
    return file


# -- Kubernetes

_valid: set[str] = set()


def check(manifests: list[Manifest], version: str) -> None:
    """Each against the schema of its kind; unknown fields are refused.

    A ServiceMonitor is none of Kubernetes' own kinds.
    """
    for manifest in manifests:
        text = version + json.dumps(manifest)
        if manifest["kind"] != "ServiceMonitor" and text not in _valid:
            kubernetes_validate.validate(manifest, version, strict=True)
            _valid.add(text)


def test_kubernetes_knows_all_of_it(release: Release) -> None:
    check(release.manifests, NEWEST)


def test_the_oldest_kubernetes_that_the_chart_asks_for_knows_all_of_it(everything: Release) -> None:
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"] == f">={OLDEST}.0-0"
    check(everything.manifests, OLDEST)


def test_helm_has_nothing_to_complain_of() -> None:
    for values in CASES.values():
        report = helm_python.lint(CHART, values, strict=True)
        assert report["errors"] == []
        assert [each for each in report["messages"] if each["error"] != "icon is recommended"] == []


def test_names_are_unique_and_in_the_release_s_namespace(release: Release) -> None:
    names = [(each["kind"], each["metadata"]["name"]) for each in release.manifests]
    assert len(names) == len(set(names))
    assert {each["metadata"]["namespace"] for each in release.manifests} == {"models"}


def test_a_service_monitor_selects_the_service_whose_port_it_names(everything: Release) -> None:
    monitors = everything.all("ServiceMonitor")
    assert len(monitors) == 2
    found = set()
    for monitor in monitors:
        assert monitor["metadata"]["labels"]["release"] == "prometheus"
        (endpoint,) = monitor["spec"]["endpoints"]
        assert (endpoint["path"], endpoint["interval"]) == ("/metrics", "15s")
        for service in everything.all("Service"):
            if selects(monitor["spec"]["selector"], service["metadata"]["labels"]):
                assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
                found.add(service["metadata"]["name"])
    assert found == {"llm-admin", "llm-prefill", "llm-decode"}


# -- carryback's own commands


def test_the_engines_command_lines_are_right(release: Release, clean_environ: Become) -> None:
    for part in engines(release):
        words, environ = release.words(part), release.environ(part)
        clean_environ(environ)
        assert words[:2] == ["carryback", "engine"]
        cut = words.index("--")
        result = CliRunner().invoke(app, [*words[1:cut], "--dry-run", *words[cut:]])
        assert result.exit_code == 0, result.output
        printed = re.sub(r"\\\n\s*", "", result.output)
        http, events, side_channel = PORTS[part]
        assert f"--{part} http://{POD_IP}:{http}\n" in result.output  # what the router is to be told
        assert f"VLLM_NIXL_SIDE_CHANNEL_HOST={POD_IP} " in printed
        assert f"VLLM_NIXL_SIDE_CHANNEL_PORT={side_channel} " in printed
        assert f'"carryback_events": "tcp://{POD_IP}:{events}"' in printed
        assert [port["containerPort"] for port in release.container(part)["ports"]] == PORTS[part]
        assert "<" not in result.output  # a secret


def test_an_engine_has_as_many_gpus_as_ranks(release: Release, clean_environ: Become) -> None:
    for part in engines(release):
        words = release.words(part)
        gpus = int(release.container(part)["resources"].get("limits", {}).get("nvidia.com/gpu", 0))
        ranks = [word for word in words if word.startswith("--tensor-parallel-size")]
        if "--profile=trainium" in words:
            assert ranks == ["--tensor-parallel-size=8"]  # its devices have several cores each
        else:
            assert ranks == ([f"--tensor-parallel-size={gpus}"] if gpus else [])


def test_vllm_knows_the_options_that_the_chart_gives_it(everything: Release) -> None:
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    known = (Path(spec.origin).parent / "engine/arg_utils.py").read_text()
    words = everything.words("prefill")
    options = {word.partition("=")[0] for word in words[words.index("--") + 1 :] if word.startswith("--")}
    assert options == {"--shutdown-timeout", "--tensor-parallel-size", "--gpu-memory-utilization"}
    assert [option for option in options if f'"{option}"' not in known] == []


def test_large_numbers_stay_whole(tmp_path: Path) -> None:
    # Helm reads every number as a float.
    release = render({**CASES["default"], "router": {"config": {"max_body_bytes": 134_217_728}}})
    assert "max_body_bytes: 134217728\n" in router_file(release, tmp_path).read_text()


def test_what_engines_and_routers_must_be_told_alike_reaches_both(
    everything: Release, tmp_path: Path, clean_environ: Become
) -> None:
    clean_environ(everything.environ("decode"))
    words = everything.words("decode")
    cut = words.index("--")
    result = CliRunner().invoke(app, [*words[1:cut], "--dry-run", *words[cut:]])
    assert '"decoder_kv_blocks_ttl": 300' in result.output
    settings = load(RouterSettings, router_file(everything, tmp_path))
    assert (settings.hold_s, settings.kv_recompute_threshold) == (300, "auto")


def test_the_router_s_settings_are_right(release: Release, tmp_path: Path, clean_environ: Become) -> None:
    if "router" not in release.pods:
        return
    words = release.words("router")
    environ = release.environ("router")
    if environ.get("CARRYBACK_STATE") == "<url>":  # all of it is the operator's secret
        environ["CARRYBACK_STATE"] = "redis://redis:6379/0"
    clean_environ(environ)
    assert words[:4] == ["carryback", "router", "--config", "/etc/carryback/router.yaml"]
    assert words[4] == "--workers"
    settings = load(RouterSettings, router_file(release, tmp_path), workers=int(words[5]))
    assert [settings.port, settings.admin_port] == PORTS["router"]
    assert [port["containerPort"] for port in release.container("router")["ports"]] == PORTS["router"]
    assert settings.events_key is not None
    assert settings.events_key.get_secret_value() == "<CARRYBACK_EVENTS_KEY>"
    assert settings.engine_api_key == "<VLLM_API_KEY>"
    assert settings.state_key is not None  # or operators could not change the engines
    assert settings.state_key.get_secret_value() == "<CARRYBACK_STATE_KEY>" * 2
    (deployment,) = [
        each for each in release.all("Deployment") if each["metadata"]["name"].endswith("-router")
    ]
    assert settings.is_shared or deployment["spec"]["replicas"] == 1

    for engine in settings.engines:
        if engine.url.startswith("http://10."):
            continue  # the operator's own
        assert engine.dns
        name = re.match(r"http://([^.]+)\.models\.svc:(\d+)$", engine.url)
        assert name is not None
        service = release.one("Service", name[1])
        assert service["spec"]["clusterIP"] == "None"  # so that DNS has each pod's address
        assert "publishNotReadyAddresses" not in service["spec"]  # nor those of pods that drain
        assert int(name[2]) == PORTS[engine.role][0]
        assert engine.events == f"tcp://{name[1]}.models.svc:{PORTS[engine.role][1]}"


def test_a_router_starts_with_its_settings_and_drains(tmp_path: Path, clean_environ: Become) -> None:
    values = {**CASES["default"], "router": {"replicas": 1}, "redis": {"enabled": False}}
    release = render({**values, "tenants": {"list": [TENANT]}})
    config = yaml.safe_load(release.all("ConfigMap")[0]["data"]["router.yaml"])
    (secret,) = [each for each in release.all("Secret") if "stringData" in each]
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text(secret["stringData"]["tenants.yaml"])
    mounts = {each["name"]: each["mountPath"] for each in release.container("router")["volumeMounts"]}
    assert config["tenants_file"] == f"{mounts['tenants']}/tenants.yaml"
    port, admin_port = free_ports(2)
    config |= {"tenants_file": str(tenants), "port": port, "admin_port": admin_port, "shutdown_wait_s": 0}
    file = tmp_path / "router.yaml"
    file.write_text(yaml.safe_dump(config))
    clean_environ(release.environ("router"))

    def status(path: str) -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    process = subprocess.Popen([sys.executable, "-m", "carryback_server", "router", "--config", str(file)])
    try:
        limit = time.monotonic() + 60
        while status("/health") != 200:
            assert process.poll() is None
            assert time.monotonic() < limit
            time.sleep(0.05)
        # Its engines' names are in no DNS here.
        assert [status(path) for path in ("/health", "/ready", "/v1/models")] == [200, 503, 401]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def test_a_pair_of_engines_in_one_pod_is_started_right(tmp_path: Path, clean_environ: Become) -> None:
    release = render(CASES["nvlink"])
    assert list(release.pods) == ["pair"]
    words = release.words("pair")
    clean_environ(release.environ("pair"))
    file = router_file(release, tmp_path)
    words = [word.replace("/etc/carryback/router.yaml", str(file)) for word in words]
    result = CliRunner().invoke(app, [*words[1:], "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "CUDA_VISIBLE_DEVICES=0" in result.output
    assert "CUDA_VISIBLE_DEVICES=1" in result.output
    assert release.container("pair")["resources"]["limits"]["nvidia.com/gpu"] == 2
    settings = load(ServeConfig, file)
    assert [settings.port, settings.admin_port] == PORTS["router"]


def test_helm_test_runs_the_doctor(everything: Release, clean_environ: Become) -> None:
    (pod,) = everything.all("Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    words = everything.words("doctor")
    assert "--router=http://llm.models.svc:80" in words
    everything.one("Service", "llm")
    assert "--admin-url=http://llm-admin.models.svc:8001" in words
    everything.one("Service", "llm-admin")
    clean_environ(everything.environ("doctor") | {"CARRYBACK_STATE": "memory"})
    # Nobody is there, and that is what it says.
    words = [re.sub(r"http://\S+", "http://127.0.0.1:9", word) for word in words]
    result = CliRunner().invoke(app, words[1:])
    assert result.exit_code == 1, result.output
    assert "FAIL" in result.output
    assert "<" not in result.output


def test_no_setting_is_taken_from_a_service_s_name(release: Release) -> None:
    # For a Service named carryback, Kubernetes would set CARRYBACK_PORT=tcp://...
    assert all(pod["spec"]["enableServiceLinks"] is False for pod in release.pods.values())


# -- secrets


def test_secrets_are_in_secrets_alone() -> None:
    release = render({**CASES["default"], "tenants": {"list": [TENANT]}})
    (keys,) = [each for each in release.all("Secret") if "data" in each]
    assert list(keys["data"]) == SECRETS
    values = [base64.b64decode(value).decode() for value in keys["data"].values()]
    assert all(re.fullmatch("[A-Za-z0-9]{48}", value) for value in values)
    assert len(set(values)) == len(values)
    rest = json.dumps([each for each in release.manifests if each["kind"] != "Secret"]) + release.notes
    assert [value for value in [*values, TENANT["keys"][0]] if value in rest] == []


def test_every_secret_that_pods_name_is_there(release: Release) -> None:
    made = {each["metadata"]["name"]: each for each in release.all("Secret")}
    for part in release.pods:
        for each in release.container(part).get("env", []):
            if reference := each.get("valueFrom", {}).get("secretKeyRef"):
                if reference["name"] in ("hugging-face", "state"):
                    continue  # the operator's own
                assert reference["key"] in made[reference["name"]]["data"]


def test_no_secret_is_on_a_command_line(release: Release) -> None:
    for part in release.pods:
        assert "<" not in " ".join(release.words(part)), part


def test_the_engines_key_is_kept_from_routers(release: Release) -> None:
    for part in release.pods:
        has_it = "<CARRYBACK_KEY>" in release.environ(part).values()
        assert has_it == (part in ("prefill", "decode", "pair"))


class _Cluster(http.server.BaseHTTPRequestHandler):
    """As much of a Kubernetes API as it takes to look up one Secret, with the keys of the last release."""

    answers: ClassVar[dict[str, Any]] = {
        "/api/v1": {
            "kind": "APIResourceList",
            "groupVersion": "v1",
            "resources": [{"name": "secrets", "kind": "Secret", "namespaced": True, "verbs": ["get"]}],
        },
        "/api/v1/namespaces/models/secrets/llm-carryback-keys": {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "llm-carryback-keys", "namespace": "models"},
            "data": {name: base64.b64encode(f"old {name}".encode()).decode() for name in SECRETS[:3]},
        },
    }

    def do_GET(self) -> None:
        body = json.dumps(self.answers.get(self.path.partition("?")[0])).encode()
        self.send_response(200 if body != b"null" else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_keys_stay_the_same_in_upgrades() -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Cluster) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        kubeconfig = {
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "users": [{"name": "u", "user": {}}],
            "current-context": "c",
        }
        with helm_python.Config(kubeconfig_content=json.dumps(kubeconfig), namespace="models") as cluster:
            chart = helm_python.Chart.load(CHART)
            rendered = cluster.render(chart, CASES["default"], name="llm", namespace="models")
        server.shutdown()
    kept = yaml.safe_load(rendered["carryback/templates/secret.yaml"])["data"]
    assert list(kept) == SECRETS
    assert [base64.b64decode(kept[name]).decode() for name in SECRETS[:3]] == [
        f"old {name}" for name in SECRETS[:3]
    ]
    assert len(base64.b64decode(kept["REDIS_PASSWORD"])) == 48  # which the last release did not have


def test_an_operator_s_own_secrets_are_used() -> None:
    values = {"secrets": {"existingSecret": "mine"}, "tenants": {"existingSecret": "theirs"}}
    release = render({**CASES["default"], **values})
    assert release.all("Secret") == []
    named = {
        each["valueFrom"]["secretKeyRef"]["name"]
        for part in release.pods
        for each in release.container(part)["env"]
        if "secretKeyRef" in each.get("valueFrom", {})
    }
    assert named == {"mine"}
    assert {"name": "tenants", "secret": {"secretName": "theirs"}} in release.pods["router"]["spec"][
        "volumes"
    ]


# -- networks


def selects(selector: Manifest | None, labels: Mapping[str, str]) -> bool:
    """Whether a label selector takes these labels."""
    wanted = (selector or {}).get("matchLabels", {})
    return all(labels.get(name) == value for name, value in wanted.items())


def may_reach(release: Release, source: Mapping[str, str], namespace: str, part: str, port: int) -> bool:
    """Whether the policies let a pod with these labels reach a part's port."""
    target = release.pods[part]["metadata"]["labels"]
    policies = [
        each["spec"]
        for each in release.all("NetworkPolicy")
        if selects(each["spec"]["podSelector"], target) and "Ingress" in each["spec"]["policyTypes"]
    ]
    if not policies:
        return True
    for rule in (rule for policy in policies for rule in policy["ingress"]):
        if "ports" in rule and port not in [each["port"] for each in rule["ports"]]:
            continue
        if "from" not in rule:
            return True
        for peer in rule["from"]:
            is_here = namespace == "models"
            if "namespaceSelector" in peer:
                is_here = selects(peer["namespaceSelector"], {"kubernetes.io/metadata.name": namespace})
            if is_here and selects(peer.get("podSelector"), source):
                return True
    return False


def test_who_reaches_what(everything: Release) -> None:
    labels = {part: pod["metadata"]["labels"] for part, pod in everything.pods.items()}
    (doctor,) = everything.all("Pod")
    labels["doctor"] = doctor["metadata"]["labels"]
    sources = {
        **{part: (labels[part], "models") for part in labels},
        "agent": ({"role": "agent"}, "models"),
        "stranger": ({}, "models"),
        "stranger elsewhere": ({"role": "agent"}, "default"),
        "prometheus": ({}, "monitoring"),
    }
    reached = {
        source: {
            port
            for part, ports in PORTS.items()
            for port in [*ports, 40_000]
            if may_reach(everything, pod, namespace, part, port)
        }
        for source, (pod, namespace) in sources.items()
    }
    all_of_engines = {*PORTS["prefill"], *PORTS["decode"], 40_000}  # UCX's ports are any
    assert reached == {
        "router": {8100, 8101, 8200, 8201, 6379},
        "prefill": all_of_engines,
        "decode": all_of_engines,
        "redis": set(),
        "doctor": {8000, 8001, 6379, *all_of_engines},
        "agent": {8000},
        "stranger": set(),
        "stranger elsewhere": set(),
        "prometheus": {8001, 8100, 8200},
    }


def test_without_clients_named_everybody_reaches_the_client_port_and_nothing_else() -> None:
    release = render(CASES["default"])
    for namespace in ("models", "default"):
        found = {
            port
            for part, ports in PORTS.items()
            for port in ports
            if may_reach(release, {}, namespace, part, port)
        }
        assert found == {8000}


def test_services_lead_to_open_ports_of_their_pods(release: Release) -> None:
    for service in release.all("Service"):
        parts = [
            part
            for part, pod in release.pods.items()
            if selects({"matchLabels": service["spec"]["selector"]}, pod["metadata"]["labels"])
        ]
        assert len(parts) == 1, service["metadata"]["name"]
        names = {port["name"]: port["containerPort"] for port in release.container(parts[0])["ports"]}
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in names
            if port["name"] != "http" or parts[0] not in ("router", "pair"):
                assert port["port"] == names[port["targetPort"]]


def test_workloads_select_their_own_pods_alone(everything: Release) -> None:
    for kind in ("Deployment", "StatefulSet", "PodDisruptionBudget"):
        for workload in everything.all(kind):
            part = workload["metadata"]["labels"]["app.kubernetes.io/component"]
            found = [
                other
                for other, pod in everything.pods.items()
                if selects(workload["spec"]["selector"], pod["metadata"]["labels"])
            ]
            assert found == [part]


# -- life and death


def test_nothing_is_killed_before_it_has_drained(release: Release, tmp_path: Path) -> None:
    for part in engines(release):
        spec, container = release.pods[part]["spec"], release.container(part)
        command = container["lifecycle"]["preStop"]["exec"]["command"]
        assert command[0] == "sleep"
        (option,) = [word for word in release.words(part) if word.startswith("--shutdown-timeout=")]
        needs = int(command[1]) + int(option.partition("=")[2])
        assert spec["terminationGracePeriodSeconds"] > needs
        # Routers resolve every 10 s what DNS may remember for 30.
        assert int(command[1]) >= 10 + 30
    for part in ("router", "pair"):
        if part in release.pods:
            settings = load(RouterSettings, router_file(release, tmp_path))
            grace = release.pods[part]["spec"]["terminationGracePeriodSeconds"]
            assert grace > settings.shutdown_wait_s + settings.shutdown_timeout_s


def test_an_engine_has_an_hour_to_load_its_model(everything: Release) -> None:
    probe = everything.container("prefill")["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 3600


def test_a_new_version_of_the_chart_alone_restarts_nothing(tmp_path: Path) -> None:
    newer = tmp_path / "carryback"
    shutil.copytree(CHART, newer)
    about = newer / "Chart.yaml"
    about.write_text(about.read_text().replace("\nversion: 0.1.0", "\nversion: 0.2.0"))
    assert render(CASES["everything"], newer).pods == render(CASES["everything"]).pods
    assert render(CASES["nvlink"], newer).pods == render(CASES["nvlink"]).pods


def test_new_settings_restart_routers_and_leave_engines_alone() -> None:
    before = render(CASES["default"])
    after = render({**CASES["default"], "router": {"config": {"pin_budget": 0.3}}})
    assert before.pods["router"] != after.pods["router"]
    assert before.pods["decode"] == after.pods["decode"]


def test_pods_run_without_rights(release: Release) -> None:
    for part, pod in release.pods.items():
        container = release.container(part)["securityContext"]
        assert container["allowPrivilegeEscalation"] is False
        assert container["readOnlyRootFilesystem"] is True
        assert container["capabilities"]["drop"] == ["ALL"]
        assert pod["spec"]["automountServiceAccountToken"] is False
        # Root has none of its rights but the one to lock memory.
        is_root = pod["spec"]["securityContext"]["runAsUser"] == 0
        assert container["capabilities"].get("add", []) == (["IPC_LOCK"] if is_root else [])
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is not is_root


@pytest.mark.parametrize("profile", ["infiniband", "efa"])
def test_engines_get_the_devices_that_their_profile_needs(profile: str) -> None:
    release = render(values_file(profile))
    assert any(each.kind == "memlock" for each in PROFILES[profile].needs)
    for part in engines(release):
        container = release.container(part)
        limits, requests = container["resources"]["limits"], container["resources"]["requests"]
        assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
        assert limits["nvidia.com/gpu"] == 2
        if profile == "efa":
            assert limits["vpc.amazonaws.com/efa"] == "4"
            assert limits["hugepages-2Mi"] == requests["hugepages-2Mi"]
            assert "/opt/amazon/efa/lib" in release.environ(part)["LD_LIBRARY_PATH"]
        else:
            assert any(name.startswith("rdma/") for name in limits)


# -- mistakes

MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({}, "model.name is missing"),
    ({"modle": MODEL}, "additional properties 'modle' not allowed"),
    ({"model": MODEL, "prefill": {"replicas": "two"}}, "at '/prefill/replicas': got string, want integer"),
    ({"model": MODEL, "prefill": {"gpus": -1}}, "at '/prefill/gpus': minimum: got -1, want 0"),
    ({"model": MODEL, "decode": {"replica": 2}}, "at '/decode': additional properties 'replica' not allowed"),
    ({"model": MODEL, "profile": "nvlnk"}, "at '/profile': value must be one of"),
    ({"model": MODEL, "redis": {"enabled": False}}, "several routers share their state in Redis"),
    ({"model": MODEL, "redis": {"url": "redis://r:6379"}}, "only one of redis.enabled"),
    ({"model": MODEL, "redis": {"enabled": False, "url": "redis://:pw@r:6379"}}, "at '/redis/url'"),
    ({"model": MODEL, "decode": {"enabled": False}}, "the router has no decode engine"),
    ({"model": MODEL, "pair": {"enabled": True}}, "pair.enabled is a router and two engines in one pod"),
    ({"model": MODEL, "engines": {"ipcLock": True}}, "engines.ipcLock has no effect"),
    ({"model": MODEL, "router": {"config": {"port": 80}}}, "router.config.port is set by the chart"),
    ({"model": MODEL, "router": {"config": {"events_key": "x"}}}, "router.config.events_key is set by"),
    (
        {"model": MODEL, "tenants": {"list": [{"name": "a", "keys": ["plain"]}]}},
        "at '/tenants/list/0/keys/0'",
    ),
    ({"model": MODEL, "tenants": {"list": [TENANT], "existingSecret": "x"}}, "only one of tenants.list"),
    ({"model": MODEL, "externalEngines": [{"role": "decode"}]}, "missing properties 'url', 'events'"),
]


@pytest.mark.parametrize(("values", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_mistakes_are_refused_with_the_setting_s_name(values: dict[str, Any], message: str) -> None:
    def install() -> None:
        helm_python.Chart.load(CHART).validate_schema(values)
        render(values)

    with pytest.raises(helm_python.HelmError) as refused:
        install()
    assert message in str(refused.value)


def test_an_operator_is_warned_of_what_is_open(everything: Release) -> None:
    assert "WARNING" not in render({**CASES["default"], "tenants": {"list": [TENANT]}}).notes
    assert "no tenants are set" in render(CASES["default"]).notes
    assert "engines.hostNetwork is true" in everything.notes
    assert "networkPolicy.enabled is false" in render(CASES["router alone"]).notes
    unequal = render({**CASES["default"], "prefill": {"gpus": 2}})
    assert "prefill.gpus and decode.gpus differ" in unequal.notes


# -- the chart's own words


def leaves(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value, by its path."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{path}{name}.")
        else:
            yield path + name, value


def test_the_readme_has_every_value_and_its_default() -> None:
    described = {
        found[1]: found[2] or ""
        for found in re.finditer(
            r"^\| `([\w.]+)` \|(?: `(.*?)`)? \|", (CHART / "README.md").read_text(), re.M
        )
    }
    defaults = dict(leaves(yaml.safe_load((CHART / "values.yaml").read_text())))
    shown = {path: "" if value == "" else json.dumps(value).strip('"') for path, value in defaults.items()}
    assert described == shown
