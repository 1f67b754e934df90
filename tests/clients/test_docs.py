"""The snippets of the client's documentation, run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from carryback import wire
from fake_server import FakeServer

PAGE = Path(__file__).parents[2] / "docs" / "client.md"
SNIPPETS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_snippets_run(server: FakeServer, snippet: str) -> None:
    server.reuse = "hit; tokens=1024; reason=verified; recomputed=37; cached=0"
    program = snippet.replace("http://127.0.0.1:8000/v1", server.base_url)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    asked = [request for request in server.requests if request.method == "POST"]
    assert asked
    assert len({request.conversation for request in asked}) == 1
    for request in server.requests:
        if request.method == "DELETE":
            assert request.path == f"/v1/conversations/{asked[0].conversation}"
    assert ("end()" in snippet) == (server.last.method == "DELETE")
    assert ("print(" in snippet) == ("1024" in done.stdout)
    assert asked[-1].value(wire.TURN_ID) == str(len(asked))
