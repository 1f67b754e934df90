"""Files and variables that are no settings are an error that says so, whatever is in them."""

from __future__ import annotations

from pathlib import Path

import pytest
from carryback_server.config import ConfigError, RouterSettings, load
from carryback_server.tenants import Tenants

HOSTILE = {
    "deep": "[" * 3_000,
    "deep and closed": "[" * 3_000 + "]" * 3_000,
    "deep mapping": "{a: " * 3_000 + "}" * 3_000,
    "deep block": "".join(" " * depth + "a:\n" for depth in range(500)),
    "itself": "tenants: &a [*a]\nengines: *a\n",
    "a list": "[1, 2]",
    "a word": "word",
    "a number": "1" * 10_000,
    "a key that is a list": "? [a]\n: b",
    "a tag": "!!python/object:os.system x",
    "no UTF-8": "\udcff",
    "NUL": "a: \0",
    "tabs": "a:\n\t- b",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_an_error_that_names_it(name: str, tmp_path: Path) -> None:
    file = tmp_path / "file.yaml"
    file.write_bytes(HOSTILE[name].encode(errors="surrogateescape"))
    with pytest.raises(ConfigError):
        load(RouterSettings, file)
    with pytest.raises(ConfigError, match=r"file\.yaml"):
        Tenants(file)


@pytest.mark.parametrize("value", ["[" * 100_000, "[" * 100_000 + "]" * 100_000, "[1]", "x", '{"a": 1}'])
def test_a_hostile_variable_is_an_error(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYBACK_ENGINES", value)
    with pytest.raises(ConfigError):
        load(RouterSettings)


def test_a_file_that_goes_wrong_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "file.yaml"
    file.write_text("tenants: [{name: acme, anonymous: true}]")
    tenants = Tenants(file)
    file.write_text(HOSTILE["deep"])
    assert not tenants.reload()
    assert [each.name for each in tenants] == ["acme"]
