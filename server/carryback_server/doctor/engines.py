"""Each engine: does it answer, is its vLLM one we know, is our plug-in in it, do its events come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from carryback_vllm.version import check_version

from carryback_server.address import host_and_port
from carryback_server.config import EngineConfig
from carryback_server.doctor.asking import Asker, NoAnswer, connects
from carryback_server.doctor.finding import Finding, fail, ok, skip, warn

PLUGIN = (
    "start it with `carryback engine`, or with kv_connector CarrybackConnector and kv_connector_module_path "
    "carryback_vllm.connector in --kv-transfer-config"
)


@dataclass(frozen=True)
class Seen:
    """An engine as it is seen.

    Attributes:
        view: what a router of our own, on this machine, says of it; as in `GET /admin/engines`.
        theirs: the same from the router that was asked about; None if there is none, or it does not know it.
        config: where it is, for a router of our own.
        headers: with the engine's key.
    """

    view: Mapping[str, Any]
    theirs: Mapping[str, Any] | None
    config: EngineConfig
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """As in a line: role and name."""
        return f"{self.view['role']} {self.view['name']}"

    @property
    def role(self) -> str:
        """`prefill` or `decode`."""
        return str(self.view["role"])

    @property
    def url(self) -> str:
        """Of its OpenAI server."""
        return str(self.view["url"])

    @property
    def about(self) -> Mapping[str, Any]:
        """What it says that it is; empty if nobody heard it."""
        heard: Mapping[str, Any] = self.view["about"] or (self.theirs or {}).get("about") or {}
        return heard

    @property
    def is_heard(self) -> bool:
        """Its events come, here or at the router."""
        return bool(self.view["events"] or (self.theirs or {}).get("events"))


async def health(seen: Seen, asker: Asker) -> Finding:
    """It answers, here and at the router."""
    try:
        reply = await asker.ask(seen.url + "/health", headers=seen.headers)
        problem = "" if reply.status == 200 else f"/health: {reply.problem}"
    except NoAnswer as error:
        problem = str(error)
    if problem:
        fix = "start it, or correct its URL (--prefill, --decode, engines); its port must be open to the routers"
        return fail("health", f"{seen.name} at {seen.url} does not answer: {problem}", fix)
    if seen.theirs is not None and seen.theirs["state"] != "up":
        state = seen.theirs["state"]
        fix = "see the router's log; undrain it with POST /admin/engines/{name}/undrain"
        return fail("health", f"{seen.name} answers here, and is {state} at the router", fix)
    return ok("health", f"{seen.name} at {seen.url} answers")


async def vllm(seen: Seen, asker: Asker) -> Finding:
    """Its vLLM is one that the plug-in knows."""
    version = seen.about.get("vllm", "")
    if not version:
        try:
            reply = await asker.ask(seen.url + "/version", headers=seen.headers)
        except NoAnswer as error:
            return skip("vllm", f"{seen.name}: {error}")
        said = reply.json.get("version") if isinstance(reply.json, dict) else None
        if not isinstance(said, str):
            return skip("vllm", f"{seen.name} does not say its version (/version: {reply.problem})")
        version = said
    try:
        check_version(version)
    except RuntimeError as error:
        return fail("vllm", f"{seen.name} has vLLM {version}", str(error))
    return ok("vllm", f"{seen.name} has vLLM {version}")


async def plugin(seen: Seen, asker: Asker) -> Finding:
    """Our connector is in it."""
    if seen.is_heard:
        version = seen.about.get("carryback", "of before Hello.about")
        return ok("plugin", f"{seen.name} has carryback {version}")
    # It does not publish. A prompt of one token says whether there is a plug-in at all.
    body = {
        "model": (seen.view["models"] or [""])[0],
        "prompt": [0],
        "max_tokens": 1,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False, "hold_s": 0},
    }
    try:
        reply = await asker.ask(seen.url + "/v1/completions", method="POST", body=body, headers=seen.headers)
    except NoAnswer as error:
        return skip("plugin", f"{seen.name}: {error}")
    if reply.status != 200 or not isinstance(reply.json, dict):
        return skip("plugin", f"{seen.name}: {reply.problem}")
    if "carryback_reuse" in (reply.json.get("kv_transfer_params") or {}):
        return ok("plugin", f"{seen.name} has carryback's connector")
    return fail("plugin", f"{seen.name} runs without carryback's connector: it can reuse nothing", PLUGIN)


async def events(seen: Seen, has_key: bool, asker: Asker) -> Finding:
    """What it holds is heard, here and at the router.

    Args:
        has_key: we listen with a `CARRYBACK_EVENTS_KEY`.
    """
    address = str(seen.view["events_address"])
    ours, theirs = bool(seen.view["events"]), (seen.theirs or {}).get("events")
    if ours and theirs in (True, None):
        return ok("events", f"{seen.name} is heard at {address}")
    if ours:
        fix = "CARRYBACK_EVENTS_KEY (events_key) of the router, or the firewall between it and the engine"
        return fail("events", f"{seen.name} is heard from here, and not by the router ({address})", fix)
    problem = await connects(*host_and_port(address), asker.timeout_s)
    if theirs:
        found = f"{seen.name} is heard by the router, and not from here ({problem or 'another key'})"
        return warn("events", found, "run doctor where the router runs, with its CARRYBACK_EVENTS_KEY")
    if problem:
        fix = (
            "carryback_events in the engine's kv_connector_extra_config (carryback engine --events-port), the "
            "events address that the router has (--prefill URL,EVENTS), or the firewall between them"
        )
        return fail("events", f"{seen.name} is not heard: {address}: {problem}", fix)
    key = "our CARRYBACK_EVENTS_KEY" if has_key else "no CARRYBACK_EVENTS_KEY"
    fix = "give engines, routers and doctor the same CARRYBACK_EVENTS_KEY (events_key)"
    return fail("events", f"{seen.name} is not heard: {address} is open, and says nothing with {key}", fix)
