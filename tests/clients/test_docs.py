"""The documentation does what it says: its programs run as they stand, its commands and files are read."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
import typer
import yaml
from carryback import wire
from carryback_server.cli import app
from fake_server import FakeServer

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# LlamaIndex does not go with the openai that the others need; see scripts/test-tools.sh.
PYTHONS = {"llamaindex.md": ROOT / ".venv/llama-index/bin/python"}
# Their pages' programs have tools that are called.
FRAMEWORKS = {"index.md", "langgraph.md", "agents-sdk.md", "litellm.md", "pydantic-ai.md", "llamaindex.md"}
RUNNER = Path(__file__).with_name("run_snippets.py")
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
URL = re.compile(r"http://127\.0\.0\.1:8000/v1")


@dataclass(frozen=True)
class Snippet:
    """A block of code in a page."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def snippets(*languages: str) -> Any:
    """A parameter for each block in one of these languages."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in FENCE.finditer(text):
            if match[1] in languages:
                line = text.count("\n", 0, match.start()) + 1
                found.append(Snippet(page.name, line, match[1], match[2]))
    return pytest.mark.parametrize("snippet", found, ids=str)


class Programs:
    """Runs programs, those of one page in one process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._of_page: dict[str, subprocess.Popen[str]] = {}

    def run(self, page: str, program: str) -> Any:
        """See `run_snippets.run`."""
        if page not in self._of_page:
            kept = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}
            own = {"PYTHONPATH": str(ROOT / "sdk"), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
            self._of_page[page] = subprocess.Popen(
                [str(PYTHONS.get(page, sys.executable)), str(RUNNER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=self._folder,
                env=kept | own,
            )
        process = self._of_page[page]
        assert process.stdin
        assert process.stdout
        process.stdin.write(json.dumps(program) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    def end(self) -> None:
        """End the processes."""
        for process in self._of_page.values():
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    """For the whole file; each page's process starts with its first program."""
    programs = Programs(tmp_path_factory.mktemp("programs"))
    yield programs
    programs.end()


def results(body: dict[str, Any]) -> list[Any]:
    """The tools' results in a request."""
    items = [*body.get("messages", ()), *(body["input"] if isinstance(body.get("input"), list) else ())]
    return [
        each for each in items if each.get("role") == "tool" or each.get("type") == "function_call_output"
    ]


@snippets("python")
def test_programs_run(programs: Programs, server: FakeServer, snippet: Snippet) -> None:
    server.reuse = "hit; tokens=1024; reason=verified; recomputed=37; cached=0; found=1024"
    server.calls_tools = True
    done = programs.run(snippet.page, URL.sub(server.base_url, snippet.text))
    assert done["error"] == ""
    assert done["sought"] == []
    asked = [request for request in server.requests if request.method == "POST"]
    assert bool(asked) == bool(URL.search(snippet.text))
    if "carryback" in snippet.text:
        assert all(request.conversation for request in asked)
    deleted = [request.path for request in server.requests if request.method == "DELETE"]
    if re.search(r"\bc\.a?end\(\)", snippet.text):
        assert set(deleted) == {f"/v1/conversations/{request.conversation}" for request in asked}
    if re.search(r"print\(.*reuse\b", snippet.text):
        assert "1024" in done["output"]
    if snippet.page in FRAMEWORKS and re.search(r"tools=|@agent\.tool", snippet.text):
        assert any(results(request.body) for request in asked), "no tool was called"
    if snippet.page == "client.md":
        assert len({request.conversation for request in asked}) == 1
        assert asked[-1].value(wire.TURN_ID) == str(len(asked))


@snippets("sh")
def test_commands_are_there(snippet: Snippet) -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for line in snippet.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["make"]:
            assert words[1] in targets
        elif words[:1] == ["carryback"]:
            parsed(words[1:])
        for word in words[:-1] if words[:1] == ["cp"] else words:
            if re.match(r"(benchmarks|examples|scripts|deploy)/", word):
                assert (ROOT / word).exists()


def parsed(words: list[str]) -> None:
    """Read a command line of `carryback` without running it.

    Raises:
        click.UsageError: there is no such command or option.
    """
    command = typer.main.get_command(app)
    context = click.Context(command, info_name="carryback")  # type: ignore[arg-type]
    while hasattr(command, "resolve_command"):
        _, command, words = command.resolve_command(context, words)
        if not hasattr(command, "resolve_command"):
            command.make_context(command.name, words, parent=context)


@snippets("yaml", "json")
def test_files_are_read(snippet: Snippet) -> None:
    assert yaml.safe_load(snippet.text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_site_builds_and_fetches_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for page in tmp_path.rglob("*.html"):
        text = page.read_text()
        # What a browser fetches by itself; not links to follow.
        for tag in re.findall(r"<(?:link|script|img|iframe|source|video|object|embed)\b[^>]*>", text):
            if 'rel="canonical"' not in tag:
                assert not re.search(r"""(?:src|href|data)=["']?(?:https?:)?//""", tag), f"{page}: {tag}"
        # The theme's script fetches these from elsewhere: one for diagrams, and a repository's stars.
        assert 'class="mermaid"' not in text
        assert 'data-md-component="source"' not in text
    for style in tmp_path.rglob("*.css"):
        assert not re.search(r"""(?:@import|url\()\s*["']?(?:https?:)?//""", style.read_text()), style
    reference = (tmp_path / "reference" / "index.html").read_text()
    for name in (
        "carryback.headers",
        "carryback_langgraph.ChatCarryback",
        "carryback_agents.CarrybackProvider",
    ):
        assert f'id="{name}"' in reference
