from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from carryback.wire.curve import key_pair
from carryback_server.config import ConfigError, EngineConfig, RouterSettings, load
from pydantic import ValidationError

EVENTS = "tcp://127.0.0.1:8101"


def config(**fields: Any) -> EngineConfig:
    return EngineConfig(**{"role": "decode", "url": "http://127.0.0.1:8100", "events": EVENTS, **fields})


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:8100",
        "http://[::1]:8100",
        "http://decode",
        "https://[fd00::7]/engines/3",
        "http://d:80/",
    ],
)
def test_urls_that_are_right(url: str) -> None:
    assert config(url=url).url == url.rstrip("/")


@pytest.mark.parametrize(
    ("field", "value", "hint"),
    [
        ("url", "::1:8100", "http://[::1]:8100"),
        ("url", "http://::1:8100", "http://[::1]:8100"),
        ("url", "https://fd00::7", "https://[fd00::7]"),
        ("url", "http://fd00::7:8100/engine", "http://[fd00::7]:8100"),
        ("events", "tcp://::1:8101", "tcp://[::1]:8101"),
        ("url", "127.0.0.1:8100", "http://127.0.0.1:8100"),
        ("url", "http://:8100", "want an address"),
        ("url", "http://h:81000", "Port"),
        ("url", "http://user:secret@h:1", "api_key"),
        ("events", "http://127.0.0.1:8101", "tcp://127.0.0.1:8101"),
        ("events", "tcp://127.0.0.1", "port is missing"),
    ],
)
def test_an_address_that_is_wrong_is_refused_with_the_right_way_to_write_it(
    field: str, value: str, hint: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        config(**{field: value})
    (error,) = caught.value.errors()
    assert error["loc"] == (field,)
    assert hint in error["msg"]


@pytest.mark.parametrize(
    ("url", "events"),
    [
        ("http://10.0.0.5:8100", "tcp://10.0.0.5:8101"),
        ("http://[fd00::5]:8200/", "tcp://[fd00::5]:8201"),
        ("https://decode.example:9000/engine", "tcp://decode.example:9001"),
        ("dns+http://decode.models.svc:8200", "tcp://decode.models.svc:8201"),
    ],
)
def test_events_are_one_port_above_unless_given(url: str, events: str) -> None:
    assert EngineConfig(role="decode", url=url).events == events
    assert EngineConfig(role="decode", url=url, events="tcp://h:5").events == "tcp://h:5"


@pytest.mark.parametrize("url", ["http://decode", "http://decode:65535"])
def test_no_port_for_the_events(url: str) -> None:
    with pytest.raises(ValidationError, match="where are its events"):
        EngineConfig(role="decode", url=url)


def test_all_engines_of_a_name(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("engines: [{role: decode, url: 'dns+http://decode.models.svc:8200'}]")
    (engine,) = load(RouterSettings, file).engines
    assert (engine.url, engine.dns) == ("http://decode.models.svc:8200", True)
    assert engine == config(
        url="http://decode.models.svc:8200", events="tcp://decode.models.svc:8201", dns=True
    )
    with pytest.raises(ValidationError, match="dns needs http"):
        config(url="dns+https://decode:1")


@pytest.mark.parametrize(
    ("fields", "hint"),
    [
        ({"dns": True, "name": "d"}, "name"),
        ({"dns": True, "url": "https://decode:1"}, "https?://"),
        ({"data_parallel_size": 2, "events": "ipc:///run/events"}, "tcp://"),
    ],
)
def test_settings_that_exclude_each_other(fields: dict[str, Any], hint: str) -> None:
    with pytest.raises(ValidationError, match=hint):
        config(**fields)


def test_two_engines_of_one_name_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    engine = f"{{role: decode, url: 'http://d:1', events: '{EVENTS}', api_key: 5ec7e7}}"
    file.write_text(f"engines: [{engine}, {engine}]")
    with pytest.raises(ConfigError, match="two decode engines d:1") as caught:
        load(RouterSettings, file)
    assert "5ec7e7" not in str(caught.value)


def test_keys_are_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYBACK_EVENTS_KEY", "5ec7e7-events")
    file = tmp_path / "c.yaml"
    file.write_text(
        "engine_api_key: 5ec7e7-all\n"
        f"engines: [{{role: decode, url: 'http://d:1', events: '{EVENTS}', api_key: 5ec7e7-own}}]"
    )
    settings = load(RouterSettings, file)
    assert settings.events_key is not None
    assert settings.events_key.get_secret_value() == "5ec7e7-events"
    assert "5ec7e7" not in repr(settings)
    assert "5ec7e7" not in str(settings)
    assert "5ec7e7" not in repr(settings.engines)


def test_a_missing_field_does_not_show_the_key_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("engines: [{role: decode, events: 'tcp://d:1', api_key: 5ec7e7}]")
    with pytest.raises(ConfigError, match=r"engines\.0\.url") as caught:
        load(RouterSettings, file)
    assert "5ec7e7" not in str(caught.value)


def test_one_secret_is_one_key_pair() -> None:
    assert key_pair("secret") == key_pair("secret")
    assert key_pair("secret") != key_pair("another")
    assert all(len(key) == 40 for key in key_pair("secret"))
