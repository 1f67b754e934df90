"""What a person sees of a run: on a terminal, in Markdown, as a page."""

from __future__ import annotations

import builtins
import io
import re
import sys
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from bench_results import paper, request, result
from carryback_server.bench import page, report
from carryback_server.bench.result import Request, Result
from carryback_server.bench.stats import summarize
from rich.console import Console

VOID = {"meta", "link", "br", "hr", "img", "input"}


def terminal(of: Result) -> str:
    """What it prints."""
    console = Console(file=io.StringIO(), width=200)
    report.terminal(of, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


class Page(HTMLParser):
    """A page, checked to be well formed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.ids: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id" and value]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        """All that can be read in it."""
        return "\n".join(self.texts)


FEW: list[list[Request]] = [
    [],
    [request()],
    [request(error="503", ttft_s=0.0)],
    [request(arm, error="503", ttft_s=0.0) for arm in ("reuse", "no_reuse")],
    [request(arm, turn=turn) for arm in ("reuse", "no_reuse") for turn in range(1, 4)],
    [request(new_tokens=0, recomputed_tokens=0, prompt_tokens=0)],
    [
        request("$x_1$", f"c{place}", group="<b>|</b>" if place % 2 else "other", itl_s=[0.1])
        for place in range(8)
    ],
]
few = pytest.mark.parametrize(
    "requests", FEW, ids=["none", "one", "failed", "all", "no-tokens", "empty", "odd"]
)


def test_terminal_says_what_came_out() -> None:
    text = terminal(paper(rounds=1, sizes=(512, 4096)))
    assert re.search(r"With no reuse the first token takes [\d.]+ times as long as with reuse at 4,096", text)
    assert "Identical outputs: 4 of 4." in text
    assert "failed:" not in text
    assert "What the router learned" in text
    assert "decode to prefill" in text


def test_a_narrow_terminal_shows_whole_figures() -> None:
    console = Console(file=io.StringIO(), width=80)
    report.terminal(paper(), console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    medians = [f"{each.ttft.p50.value * 1000:,.0f}" for each in summarize(paper()).figures if each.ttft.p50]
    assert len(medians) == 15
    for median in medians:
        assert re.search(rf" {median} ", text)
    assert "…" not in text
    assert "Intervals are shown where" in text
    assert "Intervals are shown where" not in terminal(paper())


def test_terminal_says_that_requests_failed() -> None:
    assert "Requests that failed: 1 of 2." in terminal(result([request(), request(turn=3, error="503")]))


def test_turns_are_not_taken_for_sizes() -> None:
    requests = [
        request(arm, f"c{number}", turn, group=str(turn))
        for arm in ("reuse", "no_reuse")
        for number in range(3)
        for turn in (1, 2)
    ]
    text = terminal(result(requests, workload="agent"))
    assert "at 2 prompt tokens" not in text
    assert re.search(r"^ turn +arm", text, re.MULTILINE)


def test_markdown_has_whole_tables() -> None:
    text = report.markdown(paper())
    assert text.startswith("## carryback bench: paper\n")
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert len(tables) == 7
    for table in tables:
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(widths) == 1, table
    assert "| 4,096 | no reuse | 8 | 0 | 4,096 |" in text
    assert "| device | cpu |" in text


@few
def test_terminal_and_markdown_of_almost_nothing(requests: list[Request]) -> None:
    assert "95%" in terminal(result(requests))
    text = report.markdown(result(requests))
    assert "nan" not in text
    assert "<b>" not in text


@pytest.mark.parametrize("of", [paper(), *map(result, FEW)], ids=lambda each: str(len(each.requests)))
def test_page_stands_alone(of: Result) -> None:
    text = page.html(of)
    parsed = Page(text)
    assert "nan" not in parsed.text.split()
    assert not re.search(r"https?://|\burl\((?!#)|@import", re.sub(r"<t[dh].*?</t[dh]>", "", text))
    for tag, attributes in parsed.tags:
        assert tag not in {"script", "link", "img", "iframe", "object", "embed", "image"}
        target = attributes.get("href") or attributes.get("src")
        assert target is None or target[1:] in parsed.ids, target
    assert len(parsed.ids) == len(set(parsed.ids))
    assert set(re.findall(r"url\(#(.*?)\)", text)) <= set(parsed.ids)
    defined = set(re.findall(r"(--[\w-]+):", text))
    assert set(re.findall(r"var\((--[\w-]+)\)", text)) <= defined
    # Every colour is the page's to choose, for light and for dark.
    assert not re.search(r"(?:fill|stroke): #", text)


def test_page_shows_every_plot_and_the_same_as_a_table() -> None:
    text = page.html(paper())
    parsed = Page(text)
    plots = [attributes for tag, attributes in parsed.tags if tag == "svg"]
    assert [tag for tag, _ in parsed.tags].count("figure") == len(plots) == 5
    assert all(each["role"] == "img" and each["aria-label"] and each["viewbox"] for each in plots)
    assert [tag for tag, _ in parsed.tags].count("details") == 5
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(svg)
        assert "<text" in svg
    assert "prefers-color-scheme: dark" in text
    for words in ("64 of 64", "32 of 32", "no reuse", "one engine", "4,096", "SmolLM2-135M-Instruct"):
        assert words in parsed.text


def test_page_without_an_aggregated_arm_or_token_counts() -> None:
    run = paper()
    requests = [
        msgspec.structs.replace(
            each, new_tokens=None, recomputed_tokens=None, reused_tokens=None, outcome="", is_identical=None
        )
        for each in run.requests
        if each.arm != "aggregated"
    ]
    text = Page(page.html(msgspec.structs.replace(run, requests=requests, transfers=[], costs=[]))).text
    assert "one engine" not in text
    assert "tokens of prompts came from" not in text
    assert "First token, no reuse / reuse" in text


def test_page_escapes_what_it_is_given() -> None:
    text = page.html(result([request("<i>", error="<u>")], settings={"<s>": "<script>alert(1)</script>"}))
    assert "<script" not in text
    assert "<i>" not in text


def test_page_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def refuse(
        name: str,
        scope: Mapping[str, object] | None = None,
        local: Mapping[str, object] | None = None,
        names: Sequence[str] = (),
        level: int = 0,
    ) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name=name)
        return imported(name, scope, local, names, level)

    monkeypatch.setattr(builtins, "__import__", refuse)
    monkeypatch.delitem(sys.modules, "carryback_server.bench.plots", raising=False)
    monkeypatch.delattr("carryback_server.bench.plots", raising=False)
    with pytest.raises(page.MissingPackage, match=r"matplotlib.*pip install 'carryback\[bench\]'"):
        page.html(paper())
