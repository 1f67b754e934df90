"""A planner and readers that work in parallel, each over one file, with long contexts.

    carryback serve
    python examples/research_team.py --base-url http://127.0.0.1:8000/v1 README.md docs/client.md docs/serve.md

Each reader is a conversation of its own, a child of the planner's: `carryback.conversation(...)` around its
work is all that it takes. The planner hears what the readers found, sends one of them back to its file, and
reports. A reader that goes on finds its file's KV where it left it.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import carryback
from report import Report

ROOT = Path(__file__).parents[1]
FILES = ("examples/handbook.md", "docs/client.md", "docs/design.md")
CHARACTERS = 2400  # of a file that a reader gets; raise it for a larger model


@dataclass
class Agent:
    """One conversation with the model.

    Attributes:
        name: also the conversation's id, behind the team's.
        messages: all that was said.
    """

    name: str
    system: str
    team: Team
    messages: list[Any] = field(default_factory=list)

    async def ask(self, question: str, *, tokens: int = 32, **options: Any) -> str:
        """Say something and return the answer."""
        if not self.messages:
            self.messages.append({"role": "system", "content": self.system})
        self.messages.append({"role": "user", "content": question})
        async with carryback.conversation(f"{self.team.id}/{self.name}"):
            stream = await self.team.client.chat.completions.create(
                model=self.team.model,
                messages=self.messages,
                max_completion_tokens=tokens,
                temperature=0,
                stream=True,
                **options,
            )
            self.team.report.add(self.name, carryback.last_reuse())
            text = "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
        self.messages.append({"role": "assistant", "content": text})
        return text


@dataclass
class Team:
    """A planner and its readers."""

    client: carryback.AsyncOpenAI
    model: str
    report: Report
    id: str = field(default_factory=lambda: carryback.conversation().id)

    async def research(self, question: str, files: list[Path]) -> str:
        """Answer a question from some files.

        Args:
            files: each is read by a reader of its own, all at the same time.
        """
        readers = {path.name: self.reader(path) for path in files}
        contents = "\n".join(f"- {path.name}: {', '.join(headings(path))}" for path in files)
        planner = Agent("planner", f"You lead a team of readers. Each has one file:\n{contents}", self)
        plan = await planner.ask(f"{question}\nWhat should the readers look for? One sentence.")
        print(f"planner: {plan!r}")
        async with carryback.conversation(f"{self.id}/planner"):  # the readers' parent
            notes = await asyncio.gather(*(each.ask(f"{question} {plan}") for each in readers.values()))
            for name, note in zip(readers, notes, strict=True):
                print(f"{name}: {note!r}")
            quotes = await asyncio.gather(
                *(each.ask("Quote the words that say so.") for each in readers.values())
            )
        found = "\n".join(
            f"{name}: {note} Quote: {quote}" for name, note, quote in zip(readers, notes, quotes, strict=True)
        )
        # A grammar, so that any model names one of the files.
        choice = {"type": "string", "enum": list(readers)}
        schema = {
            "type": "object",
            "properties": {"file": choice},
            "required": ["file"],
            "additionalProperties": False,
        }
        answer = await planner.ask(
            f"The readers found:\n{found}\nWhich file should be read once more?",
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "file", "schema": schema, "strict": True},
            },
        )
        named = next((name for name in readers if name in answer), next(iter(readers)))
        print(f"planner: read {named} once more")
        async with carryback.conversation(f"{self.id}/planner"):
            more = await readers[named].ask("What else does the file say on this?")
        print(f"{named}: {more!r}")
        return await planner.ask(f"{named} also says: {more}\nNow answer: {question}", tokens=48)

    def reader(self, path: Path) -> Agent:
        """A reader of a file."""
        text = path.read_text()[:CHARACTERS]
        return Agent(
            path.stem, f"You read one file and answer from it in one sentence. The file:\n\n{text}", self
        )


def headings(path: Path) -> list[str]:
    """What a Markdown file is about."""
    return re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)[:4]


async def main() -> None:
    parser = argparse.ArgumentParser(description="A planner and readers over files.")
    parser.add_argument("files", nargs="*", type=Path, default=[ROOT / name for name in FILES])
    parser.add_argument("--question", default="How long is something kept?")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--model", help="the server's first one if not given")
    options = parser.parse_args()
    client = carryback.AsyncOpenAI(base_url=options.base_url, api_key=options.api_key, timeout=600)
    model = options.model or (await client.models.list()).data[0].id
    report = Report()
    answer = await Team(client, model, report).research(options.question, options.files)
    print(f"\n{answer}\n")
    report.total()


if __name__ == "__main__":
    asyncio.run(main())
