"""What all engines must have in common."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from carryback_server.alike import NEEDS, Need
from carryback_server.doctor.engines import Seen
from carryback_server.doctor.finding import Finding, fail, ok, skip, warn

# Of needs whose checks have other names than their facts.
_CHECKS = {
    "vllm": "vllm-same",
    "tensor_parallel_size": "tensor-parallel",
    "pipeline_parallel_size": "pipeline",
}


def agreements(seens: Sequence[Seen]) -> list[Finding]:
    """All of these checks."""
    found = [agree(need, seens) for need in NEEDS]
    return [*found, max_model_len(seens), lease(seens)]


def agree(need: Need, seens: Sequence[Seen]) -> Finding:
    """One fact is the same everywhere, or fits: without it, nothing can be read."""
    check = _CHECKS.get(need.fact, need.fact.replace("_", "-"))
    values = _values(seens, need.fact)
    if not all(need.is_met(one.about, other.about) for one, other in combinations(seens, 2)):
        fix = f"give all engines the same ({need.set_by})"
        return fail(check, f"the {need.name} differs: {_told(values)}; {need.outcome}", fix)
    if not values:
        return skip(check, "no engine says it" if seens else "no engines")
    if len(values) > 1:
        return ok(check, f"the {need.name}s fit: {_told(values)}")
    [value] = values
    if need.fact == "key" and not value:
        fix = "CARRYBACK_KEY, one secret at all engines (openssl rand -hex 32)"
        return warn(check, "the engines have no key: who reaches one can read others' KV", fix)
    return ok(check, f"the same {need.name}{_of(seens, need.fact)}: {value or 'not set'}")


def max_model_len(seens: Sequence[Seen]) -> Finding:
    """Prompts that one engine takes are not refused by the next."""
    values = _values(seens, "max_model_len")
    if len(values) > 1:
        found = f"the longest prompt differs: {_told(values)}; long ones fail at some engines"
        return fail("max-model-len", found, "give all engines the same --max-model-len")
    if not values:
        return skip("max-model-len", "no engine says it")
    return ok("max-model-len", f"the same{_of(seens, 'max_model_len')}: {next(iter(values))} tokens")


def lease(seens: Sequence[Seen]) -> Finding:
    """A decode engine counts on the prefill engine's lease, and knows only its own setting."""
    values = _values(seens, "lease_s")
    if len(values) > 1:
        found = f"the lease differs: {_told(values)}; reads of a prompt's KV may come too late"
        fix = "the same kv_lease_duration in all engines' kv_connector_extra_config (prefill_lease_s)"
        return fail("lease", found, fix)
    if not values:
        return skip("lease", "no engine says it")
    return ok("lease", f"the same{_of(seens, 'lease_s')}: {next(iter(values))} s")


def _values(seens: Sequence[Seen], fact: str) -> dict[object, list[str]]:
    """The engines by what they say."""
    values: dict[object, list[str]] = {}
    for seen in seens:
        if fact in seen.about:
            values.setdefault(seen.about[fact], []).append(seen.name)
    return values


def _told(values: dict[object, list[str]]) -> str:
    return ", ".join(f"{value or 'none'} at {' and '.join(names)}" for value, names in values.items())


def _of(seens: Sequence[Seen], fact: str) -> str:
    """How many say so, if not all."""
    count = sum(fact in seen.about for seen in seens)
    return "" if count == len(seens) else f" at the {count} of {len(seens)} engines that say it"
