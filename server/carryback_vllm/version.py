"""Which vLLM this plug-in works with. It reaches into vLLM's scheduler, so it says so early."""

from __future__ import annotations

# As docs/upgrades.md says, from runs.
SUPPORTED = ((0, 30), (0, 31), (0, 32), (0, 33))


def check_version(version: str) -> None:
    """Refuse a vLLM that this plug-in was not written for.

    Args:
        version: vLLM's version, e.g. `0.32.0` or `0.32.0+cpu`.

    Raises:
        RuntimeError: names both versions and what to do.
    """
    try:
        major, minor = (int(part) for part in version.split(".")[:2])
    except ValueError:
        major = minor = -1
    if (major, minor) not in SUPPORTED:
        wanted = " or ".join(f"{a}.{b}" for a, b in SUPPORTED)
        raise RuntimeError(
            f"carryback works with vLLM {wanted}, and this is vLLM {version}. Install one of those "
            "(pip install 'carryback[gpu]'), or a carryback that names this version in its changelog."
        )
