"""Ten planted faults on real engines, and what `carryback doctor` says of each.

    .venv/bin/python benchmarks/doctor.py                 # all, in about ten minutes on two cores
    .venv/bin/python benchmarks/doctor.py key block-size  # some

A decode engine stays; for each fault of an engine a prefill engine of its own is started that has it. It ends with
status 1 if a fault was not found by the check that is meant for it, or if the healthy pair has a failure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "engine")]

from carryback_server.launch import EngineCommand, free_ports  # noqa: E402
from carryback_server.model import CHAT_TEMPLATE  # noqa: E402
from carryback_server.supervisor import Engines  # noqa: E402
from pair import Pair, commands_for  # noqa: E402
from tiny_model import make_tiny_model  # noqa: E402

# Python runs a module of this name when it starts.
CUSTOMIZE = "sitecustomize.py"
CLOCK = "import time\nright = time.time_ns\ntime.time_ns = lambda: right() - 300_000_000_000\n"
OLD = (
    "import sys, types\nold = types.ModuleType('vllm._version')\n"
    "old.__version__, old.__version_tuple__ = '0.19.2', (0, 19, 2)\nsys.modules['vllm._version'] = old\n"
)


@dataclass(frozen=True)
class Fault:
    """Something that is wrong, and the check that is to find it.

    Attributes:
        name: of the check, too, unless `check` says another.
        what: is wrong, in words.
        args: of vLLM, for the prefill engine that has the fault.
        env: the same, variables.
        customize: what Python is to run first in it.
        stock: it has vLLM's own connector, without the plug-in.
        other_model: it has another model.
        doctor: more arguments for doctor.
        settings: of a router before the engines.
    """

    name: str
    what: str
    check: str = ""
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    customize: str = ""
    stock: bool = False
    other_model: bool = False
    doctor: Sequence[str] = ()
    settings: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_of_engine(self) -> bool:
        """It needs an engine of its own."""
        return bool(self.args or self.env or self.customize or self.stock or self.other_model)


FAULTS = (
    Fault("key", "P has another CARRYBACK_KEY", env={"CARRYBACK_KEY": "another key"}),
    Fault("block-size", "P has blocks of 64 tokens, D of 32", args=("--block-size", "64")),
    Fault("plugin", "P has vLLM's own NixlConnector", stock=True),
    Fault("events", "nothing can connect to D's events"),
    Fault("hold", "what is held expires within 4 s", settings={"hold_s": 4, "hold_mid_turn_s": 4}),
    Fault("clock", "P's clock is five minutes behind", customize=CLOCK),
    Fault("transport", "P may use TCP only, and there should be InfiniBand", env={"UCX_TLS": "tcp"},
          doctor=("--profile", "infiniband")),
    Fault("vllm", "P says that it is vLLM 0.19.2", customize=OLD, stock=True),
    Fault("redis", "Redis is down"),
    Fault("model", "P has another model", other_model=True),
)  # fmt: skip


async def doctor(*args: str) -> tuple[int, str]:
    """Its exit status and what it prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "carryback_server", "doctor", *args,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env={name: value for name, value in os.environ.items() if not name.startswith("CARRYBACK_")},
    )  # fmt: skip
    out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode()


def with_fault(pair: Pair, fault: Fault, folder: Path) -> EngineCommand:
    """The prefill engine that has it."""
    env, args = dict(fault.env), list(fault.args)
    if fault.customize:
        (folder / fault.name).mkdir()
        (folder / fault.name / CUSTOMIZE).write_text(fault.customize)
        env["PYTHONPATH"] = str(folder / fault.name)
    command = pair.another("prefill", fault.name, *args, env=env)
    at = command.argv.index("--kv-transfer-config") + 1
    if fault.stock:
        transfer = json.loads(command.argv[at])
        del transfer["kv_connector_module_path"]
        transfer["kv_connector"] = "NixlConnector"
        command.argv[at] = json.dumps(transfer)
    if fault.other_model:
        other = make_tiny_model(folder / "other", CHAT_TEMPLATE, seed=1)
        command.argv[command.argv.index("--model") + 1] = str(other)
    return command


@asynccontextmanager
async def arguments(
    pair: Pair, prefill: EngineCommand, fault: Fault | None, folder: Path
) -> AsyncIterator[list[str]]:
    """What doctor is told."""
    decode = pair.commands[1]
    name = fault.name if fault is not None else ""
    if fault is not None and fault.settings:
        async with pair.router([prefill.engine(), decode.engine()], **fault.settings) as client:
            yield ["--router", client.url, "--admin-url", client.admin_url]
        return
    events = decode.events if name != "events" else f"tcp://127.0.0.1:{free_ports(1)[0]}"
    args = ["--prefill", f"{prefill.url},{prefill.events}", "--decode", f"{decode.url},{events}"]
    if name == "redis":
        args += ["--state", f"redis://127.0.0.1:{free_ports(1)[0]}/0"]
    yield [*args, *(fault.doctor if fault is not None else ())]


async def judge(pair: Pair, prefill: EngineCommand, fault: Fault | None, folder: Path) -> bool:
    """Run doctor and show what it finds; whether it is what it should be."""
    async with arguments(pair, prefill, fault, folder) as args:
        status, out = await doctor(*args)
    lines = out.splitlines()
    if fault is None:
        print(f"== healthy\n{out}exit status {status}\n", flush=True)
        return status == 0
    shown = [line for line in lines if not line.startswith(("ok ", "skip"))]
    found = any(line.startswith("FAIL") and line.split()[1] == (fault.check or fault.name) for line in lines)
    verdict = "found" if found and status == 1 else "NOT FOUND"
    print(
        f"== {fault.name}: {fault.what}: {verdict}", *shown, f"exit status {status}\n", sep="\n", flush=True
    )
    return found and status == 1


async def run(faults: Sequence[Fault], folder: Path) -> bool:
    """All of them; whether each was found."""
    commands = commands_for(make_tiny_model(folder / "tiny", CHAT_TEMPLATE))
    verdicts = []
    async with aiohttp.ClientSession() as session, Engines(commands[1:], log_dir=folder / "decode") as decode:
        pair = Pair(None, commands, session)
        async with Engines(commands[:1], log_dir=folder / "prefill") as prefill:
            await asyncio.gather(prefill.wait_ready(), decode.wait_ready())
            verdicts.append(await judge(pair, commands[0], None, folder))
            for fault in faults:
                if not fault.is_of_engine:
                    verdicts.append(await judge(pair, commands[0], fault, folder))
        for fault in faults:
            if fault.is_of_engine:
                command = with_fault(pair, fault, folder)
                async with Engines([command], log_dir=folder / "faults") as odd:
                    await odd.wait_ready()
                    verdicts.append(await judge(pair, command, fault, folder))
    return all(verdicts)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="FAULT", help=", ".join(each.name for each in FAULTS))
    names = parser.parse_args().names
    chosen = [each for each in FAULTS if not names or each.name in names]
    with tempfile.TemporaryDirectory(prefix="carryback-doctor-") as folder:
        sys.exit(0 if asyncio.run(run(chosen, Path(folder))) else 1)


if __name__ == "__main__":
    main()
