"""carryback in the environment of a vLLM that was not made for it: it does nothing, and breaks nothing."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from carryback_vllm.cpu import MAX_WAIT_MS, register


class SpinCondition:
    """As vLLM has it, as far as the plug-in is concerned."""

    def __init__(self) -> None:
        self.busy_loop_s = 1.0
        self.last_read = 7.0
        self.waits: list[tuple[int | None, float]] = []

    def wait(self, timeout_ms: int | None = None) -> None:
        self.waits.append((timeout_ms, self.busy_loop_s))


def fail(*_: object) -> Any:
    raise OSError("libcuda.so.1: cannot open shared object file")


Parts = dict[str, dict[str, Any]]
QUEUE = "vllm.distributed.device_communicators.shm_broadcast"


def parts() -> Parts:
    """The modules of a vLLM on a CPU that is as we know it, and what is in them."""
    stock: Any = type("SpinCondition", (SpinCondition,), {"wait": SpinCondition.wait})
    return {
        "vllm": {"__version__": "0.32.0"},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: True)},
        QUEUE: {"SpinCondition": stock},
    }


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[Parts], None]:
    """Puts a vLLM of these modules, and of no others, in the place of the installed one."""

    def put(modules: Parts) -> None:
        for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
            monkeypatch.delitem(sys.modules, name)
        packages = {name.rsplit(".", depth)[0] for name in modules for depth in range(name.count(".") + 1)}
        # None: it is not there.
        for name in {"vllm", "vllm.platforms", QUEUE, *packages}:
            monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
        for name in sorted({*packages, *modules}):
            module = ModuleType(name)
            module.__path__ = []
            module.__dict__.update(modules.get(name, {}))
            monkeypatch.setitem(sys.modules, name, module)

    return put


def without(module: str, name: str = "") -> Parts:
    """A vLLM that lacks a module, or a name in it."""
    found = parts()
    if name:
        del found[module][name]
    else:
        del found[module]
    return found


def other(module: str, **values: object) -> Parts:
    """A vLLM in which something is not as we know it."""
    found = parts()
    found[module] |= values
    return found


FOREIGN = {
    "no vllm": {},
    "no version": without("vllm", "__version__"),
    "no platforms": without("vllm.platforms"),
    "no current_platform": without("vllm.platforms", "current_platform"),
    "no is_cpu": other("vllm.platforms", current_platform=object()),
    "a platform that fails": other("vllm.platforms", current_platform=SimpleNamespace(is_cpu=fail)),
    "no queue": without(QUEUE),
    "no SpinCondition": without(QUEUE, "SpinCondition"),
    "no wait": other(QUEUE, SpinCondition=type("SpinCondition", (), {})),
    "another wait": other(
        QUEUE, SpinCondition=type("SpinCondition", (), {"wait": lambda self, timeout_s, cancel: None})
    ),
    "an older version": other("vllm", __version__="0.9.1"),
    "a newer version": other("vllm", __version__="1.2.0"),
    "a build of one's own": other("vllm", __version__="dev"),
}


@pytest.mark.parametrize("modules", FOREIGN.values(), ids=FOREIGN)
def test_a_vllm_that_lacks_something_stays_as_it_is(
    modules: Parts, install: Callable[[Parts], None], caplog: pytest.LogCaptureFixture
) -> None:
    install(modules)
    condition = modules.get(QUEUE, {}).get("SpinCondition")
    wait = getattr(condition, "wait", None)
    with caplog.at_level(logging.INFO, "vllm.carryback"):
        register()
    assert "carryback leaves this vLLM as it is" in caplog.text
    assert getattr(condition, "wait", None) is wait


def test_a_vllm_on_a_gpu_stays_as_it_is(
    install: Callable[[Parts], None], caplog: pytest.LogCaptureFixture
) -> None:
    install(other("vllm.platforms", current_platform=SimpleNamespace(is_cpu=lambda: False)))
    with caplog.at_level(logging.DEBUG):
        register()
    assert caplog.text == ""


def test_on_a_cpu_the_queue_sleeps(install: Callable[[Parts], None]) -> None:
    modules = parts()
    install(modules)
    register()
    register()  # vLLM may load it again
    condition = modules[QUEUE]["SpinCondition"]()
    condition.wait()
    condition.wait(1)
    condition.wait(timeout_ms=60_000)
    assert condition.waits == [(MAX_WAIT_MS, 0), (1, 0), (MAX_WAIT_MS, 0)]


def test_what_vllm_loads_needs_none_of_our_packages() -> None:
    # An environment with the client alone has none of the server's.
    program = """
import sys
ours = ("msgspec", "zmq", "aiohttp", "openai", "httptools", "uvloop", "prometheus_client", "pydantic", "yaml", "vllm")
sys.modules.update(dict.fromkeys(ours))
from importlib.metadata import EntryPoint
EntryPoint("carryback", "carryback_vllm.cpu:register", "vllm.general_plugins").load()()
"""
    subprocess.run([sys.executable, "-c", program], check=True)
