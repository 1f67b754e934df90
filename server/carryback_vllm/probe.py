"""What this machine's vLLM, NIXL and UCX are, and what NIXL moves KV over, as JSON on standard output.

`carryback doctor` runs it as a process of its own, since what it loads takes seconds, may hang, and may crash:

- `python -m carryback_vllm.probe versions`
- `python -m carryback_vllm.probe transfer --backend UCX --device cpu`: two NIXL agents, one of which reads
  from the other. UCX says on standard output which transports it took.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from importlib import metadata
from multiprocessing.connection import Connection
from typing import Any

TRANSFER_BYTES = 64 * 1024 * 1024
TRANSFER_S = 60.0

_NIXL = ("nixl", "nixl-cu12", "nixl-cu13")


def versions() -> dict[str, Any]:
    """Versions, by name; for what is missing or does not work, `<name>_error` says why."""
    found: dict[str, Any] = {}
    for name, ask in (("plugin", _plugin), ("torch", _torch), ("nixl", _nixl), ("ucx", _ucx)):
        try:
            found[name] = ask()
        except Exception as error:  # noqa: BLE001 -- whatever goes wrong in what it loads
            found[f"{name}_error"] = f"{type(error).__name__}: {error}"
    return found


def _plugin() -> str:
    return importlib.import_module("carryback_vllm.connector").CarrybackConnector.__module__


def _torch() -> dict[str, Any]:
    torch = importlib.import_module("torch")
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0,
    }


def _nixl() -> str:
    return _api().__name__


def _api() -> Any:
    """NIXL's Python interface, whatever its package is named."""
    for name in ("nixl._api", "nixl_cu13._api", "nixl_cu12._api"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise ModuleNotFoundError(f"none of {', '.join(_NIXL)} is installed")


def _ucx() -> str:
    """The version of the UCX that comes with NIXL, else of the system's."""
    paths = [
        str(file.locate())
        for name in _NIXL
        for file in _files(name)
        if file.name.startswith("libucp") and ".so" in file.name
    ]
    library = ctypes.CDLL((paths or ["libucp.so.0"])[0])
    library.ucp_get_version_string.restype = ctypes.c_char_p
    version: bytes = library.ucp_get_version_string()
    return version.decode()


def _files(distribution: str) -> list[metadata.PackagePath]:
    try:
        return metadata.files(distribution) or []
    except metadata.PackageNotFoundError:
        return []


def transfer(backend: str, device: str) -> dict[str, Any]:
    """Read from another process over NIXL.

    Args:
        backend: NIXL's, e.g. `UCX`.
        device: where the memory is, `cpu` or `cuda`.

    Returns:
        `bytes` and `seconds` of the quickest of three reads.

    Raises:
        RuntimeError: it could not read.
    """
    _api()
    os.environ["UCX_LOG_LEVEL"] = "info"
    context = multiprocessing.get_context("fork")  # loading torch twice would take twice as long
    ours, theirs = context.Pipe()
    holder = context.Process(target=_hold, args=(theirs, backend, device), daemon=True)
    holder.start()
    theirs.close()
    try:
        return _read(ours, backend, device)
    finally:
        holder.terminate()
        holder.join()


def _tensor(api: Any, backend: str, device: str, name: str, gpu: int) -> tuple[Any, Any]:
    torch = importlib.import_module("torch")
    agent = api.nixl_agent(name, api.nixl_agent_config(backends=[backend]))
    where = f"cuda:{gpu % torch.cuda.device_count()}" if device == "cuda" else "cpu"
    tensor = torch.full((TRANSFER_BYTES,), gpu, dtype=torch.uint8, device=where)
    agent.register_memory(tensor, backends=[backend])
    return agent, tensor


def _hold(pipe: Connection, backend: str, device: str) -> None:
    agent, tensor = _tensor(_api(), backend, device, "holder", 1)
    pipe.send((agent.get_agent_metadata(), agent.get_serialized_descs(agent.get_xfer_descs(tensor))))
    pipe.recv()


def _read(pipe: Connection, backend: str, device: str) -> dict[str, Any]:
    if not pipe.poll(TRANSFER_S):
        raise RuntimeError("no memory was registered")
    try:
        described, remote = pipe.recv()
    except EOFError as error:
        raise RuntimeError(f"NIXL's backend {backend} cannot be used") from error
    agent, tensor = _tensor(_api(), backend, device, "reader", 0)
    name = agent.add_remote_agent(described)
    local = agent.get_xfer_descs(tensor)
    handle = agent.initialize_xfer("READ", local, agent.deserialize_descs(remote), name, b"read")
    seconds = []
    for _ in range(3):  # the first one connects
        began = time.perf_counter()
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
            if time.perf_counter() - began > TRANSFER_S:
                raise RuntimeError(f"not read within {TRANSFER_S:g} s")
        if state != "DONE":
            raise RuntimeError(f"the read ended with {state}")
        seconds.append(time.perf_counter() - began)
    if int(tensor[-1]) != 1:
        raise RuntimeError("what was read is not what was held")
    return {"bytes": TRANSFER_BYTES, "seconds": min(seconds)}


def main() -> None:
    """Run one of the two, and print what it found; `error` if it did not work."""
    parser = argparse.ArgumentParser(prog="carryback_vllm.probe", description=__doc__)
    parser.add_argument("what", choices=["versions", "transfer"])
    parser.add_argument("--backend", default="UCX")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    args = parser.parse_args()
    ask: Callable[[], dict[str, Any]] = (
        versions if args.what == "versions" else lambda: transfer(args.backend, args.device)
    )
    try:
        found = ask()
    except Exception as error:  # noqa: BLE001 -- for whoever reads the JSON
        found = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(found), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
