"""What NIXL moves KV over, and how fast."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from carryback_server.address import is_ours, resolved
from carryback_server.bench.engine_metrics import Reads
from carryback_server.doctor.engines import Seen
from carryback_server.doctor.finding import Finding, fail, ok, skip, warn
from carryback_server.doctor.probe import probe
from carryback_server.profiles import Profile

# How UCX says what it took to another process: `reader intra-node cfg#1 rma_am(tcp/lo)  am(tcp/lo cma/memory)`.
_LANES = re.compile(r"(intra|inter)-node cfg#\d+ (.+)")
_TRANSPORT = re.compile(r"\b([a-z]\w*)/[\w:.]+")
_TROUBLE = re.compile(r"UCX +(?:WARN|ERROR) +(.+)")
# What needs no network hardware, and is slow for it.
_SLOW = {"tcp", "self", "cma", "sysv", "posix", "mm"}


def expected(profile: Profile | None) -> str:
    """The transport that KV goes over in a profile: the first that its `UCX_TLS` names; empty if any will do."""
    return profile.env.get("UCX_TLS", "").partition(",")[0] if profile is not None else ""


def backend(name: str, seens: Sequence[Seen], profile: Profile | None) -> Finding:
    """NIXL's backend is the same everywhere, and the profile's."""
    said = {tuple(seen.about["backends"]): seen.name for seen in seens if "backends" in seen.about}
    if not said:
        return skip("backend", "no engine says it")
    words = ", ".join(f"{'+'.join(each)} at {engine}" for each, engine in said.items())
    fix = "the same backends in all engines' kv_connector_extra_config (carryback engine --kv-backend"
    if len(said) > 1:
        return fail("backend", f"NIXL's backends differ: {words}", f"{fix})")
    [found] = said
    if profile is not None and set(found) != set(profile.backends):
        return fail(
            "backend",
            f"NIXL uses {'+'.join(found)}, and profile {name} is for {'+'.join(profile.backends)}",
            f"{fix} {profile.backends[0]}, or --profile {name})",
        )
    return ok("backend", f"NIXL uses {'+'.join(found)}")


async def transport(
    name: str,
    profile: Profile | None,
    *,
    variables: Mapping[str, str],
    backends: Sequence[str],
    device: str,
    whose: str,
    timeout_s: float,
) -> Finding:
    """What UCX takes on this machine, by a read between two processes.

    Args:
        name: of the profile.
        variables: of UCX, as the engine has them.
        backends: NIXL's.
        device: where the KV is, `cpu` or `cuda`.
        whose: the variables are, in words.
    """
    want = expected(profile)
    if "UCX" not in backends:
        return skip("transport", f"only UCX says what it takes, and NIXL uses {'+'.join(backends)}")
    tls = variables.get("UCX_TLS", "")
    if want and tls and not _names(tls.split(","), want):
        return _wrong(name, want, f"{whose} may use {tls} only (UCX_TLS)", profile)
    env = dict(variables)
    if want:
        # On one machine UCX would rather take shared memory than the network.
        env["UCX_TLS"] = ",".join([want, "cuda_copy", "tcp"] if device == "cuda" else [want, "tcp"])
    probed = await probe("transfer", "--backend", "UCX", "--device", device, env=env, timeout_s=timeout_s)
    lanes = _LANES.findall(probed.text)
    trouble = _TROUBLE.search(probed.text)
    if probed.is_late:
        found = f"reading from another process over NIXL was {probed.facts['error']}"
        return warn("transport", found, "--probe-timeout-s, if this machine is busy")
    if "error" in probed.facts:
        found = (
            f"NIXL cannot read from another process here: {trouble[1] if trouble else probed.facts['error']}"
        )
        return fail("transport", found, _fix(profile))
    rate = probed.facts["bytes"] / probed.facts["seconds"] / 1e9
    how = f"UCX takes {_words(lanes)} on this machine, {rate:.2g} GB/s ({whose})"
    return _judge(name, want, lanes, how, device, profile)


def logged(name: str, profile: Profile | None, file: Path) -> Finding:
    """What UCX took, by an engine's own log (`UCX_LOG_LEVEL=info` in its environment)."""
    try:
        text = file.read_text(errors="replace")
    except OSError as error:
        return fail("transport", f"{file}: {error.strerror}", "--engine-log")
    lanes = _LANES.findall(text)
    if not lanes:
        found = f"{file} does not say what UCX took"
        return skip("transport", f"{found}; start the engine with UCX_LOG_LEVEL=info, and let it read once")
    device = "cuda" if profile is not None and profile.kv_buffer_device == "cuda" else "cpu"
    between = "machines" if any(where == "inter" for where, _ in lanes) else "processes of one machine"
    how = f"UCX took {_words(lanes)} between {between}, by {file}"
    return _judge(name, expected(profile), lanes, how, device, profile)


def bandwidth(reads: Reads | None, role: str) -> Finding:
    """How fast the engines read, by their own count."""
    if reads is None or not reads.count or not reads.seconds:
        return skip("bandwidth", f"the {role} engine counted no read")
    rate = reads.bytes / reads.seconds / 1e9
    found = f"the {role} engine read {size(reads.bytes)} in {reads.seconds * 1e3:.1f} ms: {rate:.2g} GB/s"
    return ok("bandwidth", found)


def size(count: float) -> str:
    """Bytes, in words."""
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


def is_here(seen: Seen) -> bool:
    """Whether an engine runs on this machine, by its address."""
    host = str(seen.about.get("side_channel_host", ""))
    try:
        return bool(host) and all(map(is_ours, resolved(host)))
    except OSError:
        return False


def _judge(
    name: str, want: str, lanes: list[tuple[str, str]], how: str, device: str, profile: Profile | None
) -> Finding:
    took = _transports(lanes)
    if want and not _names(took, want):
        return _wrong(name, want, how, profile)
    if not want and device == "cuda" and set(took) <= _SLOW:
        return warn("transport", f"{how}: no GPU or network hardware is used", "--profile, and its UCX_TLS")
    return ok("transport", how)


def _wrong(name: str, want: str, how: str, profile: Profile | None) -> Finding:
    return fail("transport", f"{how}, and profile {name} is for {want}", _fix(profile))


def _fix(profile: Profile | None) -> str:
    tls = profile.env.get("UCX_TLS") if profile is not None else None
    wanted = f"UCX_TLS={tls}" if tls else "UCX_TLS"
    return f"{wanted} and UCX_NET_DEVICES in the engines' environment (carryback engine --profile), and the devices"


def _names(transports: Sequence[str], want: str) -> bool:
    """`rc` stands for `rc_mlx5` and `rc_verbs`."""
    return any(each == want or each.startswith(f"{want}_") for each in transports)


def _transports(lanes: list[tuple[str, str]]) -> list[str]:
    return list(dict.fromkeys(_TRANSPORT.findall(" ".join(text for _, text in lanes))))


def _words(lanes: list[tuple[str, str]]) -> str:
    return " + ".join(_transports(lanes)) or "nothing that it names"
