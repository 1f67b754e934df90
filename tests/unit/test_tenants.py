"""Tenants: keys, limits, salts; and that no key is ever shown."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import socket
import traceback
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from carryback_server.config import ConfigError, RouterSettings, load
from carryback_server.errors import ApiError, HideMalformed
from carryback_server.tenants import Tenant, Tenants, hash_key, new_key
from hypothesis import example, given
from hypothesis import strategies as st
from multidict import CIMultiDict

ACME = "sk-acme-0123456789abcdef0123"
BETA = "sk-beta-0123456789abcdef0123"

names = st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True)
salts = st.none() | st.text(min_size=1)


def _write(path: Path, *entries: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump({"tenants": list(entries)}))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tenants.yaml"


def _bearer(key: str) -> CIMultiDict[str]:
    return CIMultiDict({"Authorization": f"Bearer {key}"})


def _refused(tenants: Tenants, headers: CIMultiDict[str]) -> None:
    with pytest.raises(ApiError) as caught:
        tenants.of(headers)
    response = caught.value.response()
    assert response.status == 401
    assert response.headers["WWW-Authenticate"] == "Bearer"
    error = json.loads(caught.value.body())["error"]
    assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")


# -- keys


def test_nobody_needs_a_key_where_there_are_none() -> None:
    tenants = Tenants()
    everybody = tenants.of(CIMultiDict())
    assert everybody.name == "default"
    assert tenants.of(_bearer("anything")) is everybody
    assert tenants.of(CIMultiDict({"x-api-key": ACME})) is everybody
    assert [tenant.name for tenant in tenants] == ["default"]


@pytest.mark.parametrize("hashed", [False, True])
def test_a_key_is_its_tenants(file: Path, hashed: bool) -> None:
    acme, beta = (hash_key(key) if hashed else key for key in (ACME, BETA))
    tenants = Tenants(_write(file, {"name": "acme", "keys": [acme]}, {"name": "beta", "keys": [beta]}))
    assert tenants.of(_bearer(ACME)).name == "acme"
    assert tenants.of(_bearer(BETA)).name == "beta"
    assert tenants.of(CIMultiDict({"AUTHORIZATION": f"bearer  {BETA}"})).name == "beta"
    assert tenants.of(CIMultiDict({"X-Api-Key": ACME})).name == "acme"
    assert tenants.of(CIMultiDict({"X-Api-Key": ACME, "Authorization": "Bearer"})).name == "acme"
    assert tenants.of(CIMultiDict({"X-Api-Key": ACME, "Authorization": f"Bearer {BETA}"})).name == "beta"


JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJhY21lIn0.dBjftJeZ4CVP-mB92K27uhbUJU1p1r_wW1gFWFOEjXk"
STRANGERS = [
    {},
    {"Authorization": ""},
    {"Authorization": "Bearer"},
    {"Authorization": "Bearer none"},
    {"Authorization": f"Bearer {ACME[:-1]}"},
    {"Authorization": f"Bearer {ACME}x"},
    {"Authorization": f"Bearer {ACME.upper()}"},
    {"Authorization": f"Bearer {JWT}"},
    {"Authorization": f"Bearer {hash_key(ACME)}"},
    {"Authorization": f"Basic {ACME}"},
    {"Authorization": ACME},
    {"Authorization": "Bearer acme"},
    {"Authorization": "Bearer caf\udce9"},
    {"x-api-key": ""},
    {"x-api-key": BETA},
    {"Authorization": "Bearer", "x-api-key": BETA},
    # A token that is nobody's is not made good by a key beside it.
    {"Authorization": f"Bearer {JWT}", "x-api-key": ACME},
]


@pytest.mark.parametrize("headers", STRANGERS)
def test_a_stranger_is_refused(file: Path, headers: dict[str, str]) -> None:
    _refused(Tenants(_write(file, {"name": "acme", "keys": [ACME]})), CIMultiDict(headers))


@pytest.mark.parametrize("headers", STRANGERS)
def test_only_a_request_without_any_key_is_anonymous(file: Path, headers: dict[str, str]) -> None:
    """And a key that is not known is refused, also where nobody has one."""
    for keys in ([ACME], []):
        acme = {"name": "acme", "keys": keys}
        tenants = Tenants(_write(file, acme, {"name": "guests", "anonymous": True}))
        if {value.removeprefix("Bearer") for value in headers.values()} <= {""}:
            assert tenants.of(CIMultiDict(headers)).name == "guests"
        else:
            _refused(tenants, CIMultiDict(headers))


def test_keys_from_the_environment(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    monkeypatch.setenv("CARRYBACK_API_KEYS", f"acme={ACME}, acme={hash_key('k' * 40)},beta={BETA}=")
    monkeypatch.setenv("CARRYBACK_TENANTS_FILE", str(_write(file, {"name": "beta", "max_in_flight": 3})))
    settings = load(RouterSettings)
    tenants = Tenants(settings.tenants_file, settings.api_keys)
    assert tenants.of(_bearer(ACME)).name == "acme"
    assert tenants.of(_bearer("k" * 40)).name == "acme"
    beta = tenants.of(_bearer(f"{BETA}="))  # base64 may end so
    assert (beta.name, beta.max_in_flight) == ("beta", 3)
    _refused(tenants, CIMultiDict())


def test_a_new_key_works_and_its_hash_is_what_shells_compute(file: Path) -> None:
    key, key_hash = new_key()
    assert key_hash == f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"
    assert new_key()[0] != key
    tenants = Tenants(_write(file, {"name": "acme", "keys": [key_hash.upper().replace("SHA", "sha")]}))
    assert tenants.of(_bearer(key)).name == "acme"


# -- the file


def _reads(file: Path) -> None:
    Tenants(file)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", ["mapping", "'tenants'"]),
        ("- a", ["mapping", "'tenants'"]),
        ("tenants: []", ["'tenants'", "at least 1"]),
        ("tenants: {a: b}", ["'tenants'", "list"]),
        ("tenants: [acme]", ["'tenants', entry 1", "mapping"]),
        ("tenant: []", ["unknown field 'tenant'", "did you mean 'tenants'?"]),
        ("tenants: [{name: acme, key: []}]", ["'acme'", "unknown field 'key'", "did you mean 'keys'?"]),
        ("tenants: [{name: a, max_inflight: 1}]", ["'a'", "'max_inflight'", "'max_in_flight'?"]),
        ("tenants: [{name: a}, {keys: []}]", ["tenant 2", "'name'", "required"]),
        ("tenants: [{name: a}, {name: a}]", ["two tenants 'a'"]),
        ("tenants: [{name: a, anonymous: true}, {name: b, anonymous: true}]", ["'b'", "'anonymous'"]),
        ("tenants: [{name: a b}]", ["tenant 1", "'name'"]),
        (f"tenants: [{{name: {'a' * 65}}}]", ["tenant 1", "'name'"]),
        ('tenants: [{name: "a\\n"}]', ["tenant 1", "'name'"]),
        ("tenants: [{name: 7}]", ["tenant 1", "'name'", "string"]),
        ("tenants: [{name: a, max_in_flight: 0}]", ["'a'", "'max_in_flight'"]),
        ("tenants: [{name: a, requests_per_minute: 1.5}]", ["'a'", "'requests_per_minute'"]),
        ("tenants: [{name: a, pin_share: 1.01}]", ["'a'", "'pin_share'"]),
        ("tenants: [{name: a, models: []}]", ["'a'", "'models'"]),
        ("tenants: [{name: a, anonymous: maybe}]", ["'a'", "'anonymous'"]),
        ("tenants: [{name: a, keys: [sha256:abc]}]", ["'a'", "'keys', entry 1", "64 hex digits"]),
        (f"tenants: [{{name: a, keys: [{ACME}]}}, {{name: b, keys: [{ACME}]}}]", ["'b'", "another tenant"]),
        ("tenants: [\n  {name: a", ["not YAML", "line 2"]),
        ("tenants: 2024-99-99", ["not YAML"]),
    ],
)
def test_a_wrong_file_is_named_with_tenant_and_field(file: Path, content: str, said: list[str]) -> None:
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        Tenants(file)
    for part in [str(file), *said]:
        assert part in str(caught.value)


def test_a_file_that_is_not_there(file: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Tenants(file)
    file.write_bytes(b"tenants: \xff\xfe")
    with pytest.raises(ConfigError, match="not YAML"):
        Tenants(file)


def test_all_errors_of_a_file_are_said_at_once(file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Tenants(_write(file, {"name": "a", "pin_share": 2}, {"name": "b", "models": "x"}))
    assert len(str(caught.value).splitlines()) == 2


# -- reload


def test_reload(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    tenants = Tenants(_write(file, {"name": "acme", "keys": [hash_key(ACME)], "models": ["m"]}))
    acme = tenants.of(_bearer(ACME))

    _write(file, {"name": "acme", "keys": [hash_key(BETA)], "pin_share": 0.25})
    assert tenants.reload()
    _refused(tenants, _bearer(ACME))
    assert tenants.of(_bearer(BETA)) is acme  # with what it has in flight
    assert (acme.models, acme.pin_share) == (None, 0.25)

    for broken in ("", "tenants: []", "tenants: [{name: acme, keyz: []}]", "tenants: ["):
        file.write_text(broken)
        caplog.clear()
        assert not tenants.reload()
        assert tenants.of(_bearer(BETA)) is acme
        assert str(file) in caplog.text
        assert caplog.records[0].levelno == logging.ERROR
    file.unlink()
    assert not tenants.reload()
    assert tenants.of(_bearer(BETA)) is acme

    _write(file, {"name": "other", "keys": [hash_key(ACME)]})
    assert tenants.reload()
    _refused(tenants, _bearer(BETA))
    assert [tenant.name for tenant in tenants] == ["other"]


async def test_requests_in_flight_count_over_a_reload(file: Path) -> None:
    tenants = Tenants(_write(file, {"name": "a", "anonymous": True, "max_in_flight": 2}))
    tenant = tenants.of(CIMultiDict())
    async with tenant.admit():
        _write(file, {"name": "a", "anonymous": True, "max_in_flight": 1})
        assert tenants.reload()
        with pytest.raises(ApiError):
            async with tenants.of(CIMultiDict()).admit():
                pass
    async with tenants.of(CIMultiDict()).admit():
        pass


def test_without_keys_a_reload_changes_nothing() -> None:
    tenants = Tenants()
    before = tenants.of(CIMultiDict())
    assert tenants.reload()
    assert tenants.of(CIMultiDict()) is before


# -- models


def test_models(file: Path) -> None:
    _write(file, {"name": "acme", "keys": [ACME], "models": ["one", "two"]}, {"name": "beta", "keys": [BETA]})
    tenants = Tenants(file)
    acme, beta = tenants.of(_bearer(ACME)), tenants.of(_bearer(BETA))
    acme.check_model("two")
    for model in ("three", None, "one", 1):
        beta.check_model(model)  # the engine knows what there is
    for model, status, code in (
        ("three", 404, "model_not_found"),
        ("ONE", 404, "model_not_found"),
        (None, 400, "missing_field"),
        (["one"], 400, "invalid_field"),
    ):
        with pytest.raises(ApiError) as caught:
            acme.check_model(model)
        assert (caught.value.status, caught.value.code, caught.value.param) == (status, code, "model")

    listing = json.dumps(
        {"object": "list", "data": [{"id": "one", "x": 1}, {"id": "three"}], "y": None}
    ).encode()
    assert json.loads(acme.visible(listing)) == {
        "object": "list",
        "data": [{"id": "one", "x": 1}],
        "y": None,
    }
    assert beta.visible(listing) == listing
    for broken in (b"no", b"[]", b"{}", b'{"data": [1]}', b'{"data": [{}]}', b"\xff"):
        with pytest.raises(ApiError) as caught:
            acme.visible(broken)
        assert caught.value.status == 502


# -- limits


async def test_requests_in_flight(file: Path) -> None:
    tenants = Tenants(
        _write(
            file,
            {"name": "acme", "keys": [ACME], "max_in_flight": 2},
            {"name": "beta", "keys": [BETA]},
        )
    )
    acme, beta = tenants.of(_bearer(ACME)), tenants.of(_bearer(BETA))

    async def refused() -> ApiError:
        with pytest.raises(ApiError) as caught:
            async with acme.admit():
                pass
        return caught.value

    async with acme.admit(), acme.admit():
        assert acme.in_flight == 2
        error = await refused()
        assert (error.status, error.code) == (429, "too_many_requests")
        assert int(error.response().headers["Retry-After"]) > 0
        assert "max_in_flight" in error.message
        async with beta.admit(), beta.admit(), beta.admit():
            assert beta.in_flight == 3
    with pytest.raises(RuntimeError):
        async with acme.admit():
            raise RuntimeError
    waiting = asyncio.Event()

    async def hang() -> None:
        async with acme.admit():
            waiting.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(hang())
    await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert acme.in_flight == 0
    async with acme.admit(), acme.admit():
        pass


async def _admitted(tenant: Tenant, times: int) -> int:
    refused = []
    for _ in range(times):
        try:
            async with tenant.admit():
                pass
        except ApiError as error:
            refused.append(error)
    for error in refused:
        assert (error.status, error.code) == (429, "rate_limit_exceeded")
        assert 1 <= int(error.response().headers["Retry-After"]) <= 60
        assert "requests_per_minute" in error.message
        assert json.loads(error.body())["error"]["type"] == "rate_limit_error"
    return times - len(refused)


@pytest.mark.usefixtures("within_a_minute")
async def test_request_rate(file: Path) -> None:
    acme = {"name": "acme", "keys": [ACME], "requests_per_minute": 7}
    tenants = Tenants(_write(file, acme, {"name": "beta", "keys": [BETA], "requests_per_minute": 7}))
    assert await _admitted(tenants.of(_bearer(ACME)), 100) == 7
    assert await _admitted(tenants.of(_bearer(BETA)), 100) == 7
    tenants.reload()
    assert await _admitted(tenants.of(_bearer(ACME)), 10) == 0
    assert tenants.of(_bearer(ACME)).in_flight == 0


@pytest.mark.usefixtures("within_a_minute")
async def test_without_redis_the_router_counts_by_itself(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))  # nobody listens
        uncounted: list[None] = []
        tenants = Tenants(
            _write(file, {"name": "a", "anonymous": True, "requests_per_minute": 5}),
            redis_url=f"redis://:hunter2-secret@127.0.0.1:{unheard.getsockname()[1]}",
            on_uncounted=lambda: uncounted.append(None),
        )
        assert await _admitted(tenants.of(CIMultiDict()), 20) == 5
        await tenants.stop()
    assert len(uncounted) == 20
    assert caplog.text.count("Redis is gone") == 1
    assert "hunter2" not in caplog.text


# -- salts


@given(st.lists(st.tuples(names, salts), min_size=2, max_size=2, unique=True))
@example([("ab", "c"), ("a", "bc")])
@example([("a", None), ("a", "None")])
def test_no_two_tenants_have_a_salt_in_common(pairs: list[tuple[str, str | None]]) -> None:
    """Whatever salts clients choose; and vLLM takes them."""
    tenants = Tenants(None, [f"{name}={index}{ACME}" for index, (name, _) in enumerate(pairs)])
    found = [
        tenants.of(_bearer(f"{index}{ACME}")).salt(client_salt)
        for index, (_, client_salt) in enumerate(pairs)
    ]
    assert found[0] != found[1]
    for salt in found:
        assert salt is not None
        assert 1 <= len(salt) <= 128
        assert salt.isalnum()


def test_a_client_cannot_choose_its_tenants_salt_or_anothers() -> None:
    tenants = Tenants(None, [f"acme={ACME}", f"beta={BETA}"])
    acme, beta = tenants.of(_bearer(ACME)), tenants.of(_bearer(BETA))
    for client_salt in (acme.salt(None), beta.salt(None), "acme", "beta", "acme\0"):
        assert acme.salt(client_salt) not in (None, client_salt, acme.salt(None), beta.salt(None))


def test_salts_are_the_same_in_each_router_and_differ_by_the_clients_own() -> None:
    first, second = (Tenants(None, [f"acme={key}"]) for key in (ACME, BETA))
    acme, replica = first.of(_bearer(ACME)), second.of(_bearer(BETA))
    assert acme.salt(None) == replica.salt(None)
    assert acme.salt("mine") == replica.salt("mine") != acme.salt(None)


def test_alone_a_client_salts_as_it_likes() -> None:
    everybody = Tenants().of(CIMultiDict())
    assert everybody.salt(None) is None
    assert everybody.salt("mine") == "mine"


@pytest.mark.parametrize("client_salt", ["", 1, ["a"], {"a": 1}, True])
def test_a_salt_that_is_none(client_salt: object) -> None:
    for tenants in (Tenants(), Tenants(None, [f"acme={ACME}"])):
        with pytest.raises(ApiError) as caught:
            tenants.of(_bearer(ACME)).salt(client_salt)
        assert (caught.value.status, caught.value.param) == (400, "cache_salt")


# -- secrets


@pytest.mark.parametrize(
    "content",
    [
        "tenants: [{{name: a, keys: [{key}]}}]",
        "tenants: [{{name: a, keys: {key}}}]",
        "tenants: [{{name: a, keys: [{key}: x]}}]",
        "tenants: [{{name: a, keys: {{{key}: x}}}}]",
        "tenants: [{{name: a, {key}: x}}]",
        "tenants: [{{name: a, keys: [{key}]}}, {{name: b, keys: [{key}]}}]",
        "tenants: [{{name: a b, keys: [{key}]}}]",
        "tenants: [{{name: {key}!}}]",
        "tenants: [{{name: a, keys: [{key}], keyz: 1}}]",
        "tenants: [{{name: a, models: {key}}}]",
        "tenants: [{{name: a, keys: [sha256:{key}]}}]",
        "tenants: [{{name: a, keys: ['{key} x']}}]",
        "tenants: [{{name: a, keys: ['{key}ü']}}]",
        "tenants: [{{name: a, keys: [*{key}]}}]",
        "tenants: [{{name: a, keys: [!{key} x]}}]",
        "tenants: [{{name: a, keys: ['{key}]}}]",
        "{key}: a",
        "{key}",
    ],
)
def test_a_key_in_the_file_is_never_shown(file: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    file.write_text(content.format(key=ACME))
    try:
        tenants = Tenants(file)
    except ConfigError as error:
        shown = "".join(traceback.format_exception(error)) + repr(error)
    else:
        assert "in plain text" in caplog.text
        shown = repr(tenants) + repr(list(tenants)) + repr(vars(tenants))
        with pytest.raises(ApiError) as caught:
            tenants.of(_bearer(f"{ACME}x"))
        shown += "".join(traceback.format_exception(caught.value)) + caught.value.body().decode()
        tenants.reload()
    assert ACME not in shown + caplog.text


@pytest.mark.parametrize(
    "value",
    [
        f"acme={ACME}",
        ACME,
        f"{ACME}==",
        f"{ACME}=short",
        f"a={ACME},b={ACME}",
        f"=={ACME}",
        f"a=sha256:{ACME}",
    ],
)
def test_a_key_in_a_setting_is_never_shown(
    value: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("CARRYBACK_API_KEYS", value)
    monkeypatch.setenv("CARRYBACK_ENGINE_API_KEY", BETA)
    settings = load(RouterSettings)
    shown = repr(settings) + str(settings)
    if value == f"acme={ACME}":
        Tenants(settings.tenants_file, settings.api_keys)
    else:
        with pytest.raises(ConfigError, match="'api_keys', entry") as caught:
            Tenants(settings.tenants_file, settings.api_keys)
        shown += "".join(traceback.format_exception(caught.value))
    assert ACME not in shown + caplog.text
    assert BETA not in shown


@pytest.mark.parametrize(
    "content", [f"api_keys: [a, [{ACME}]]", f"api_keys: {{a: {ACME}}}", "engine_api_key: 73141592"]
)
def test_a_key_in_a_wrong_setting_is_never_shown(tmp_path: Path, content: str) -> None:
    file = tmp_path / "router.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load(RouterSettings, file)
    assert content.partition(":")[0] in str(caught.value)
    assert ACME not in str(caught.value)
    assert "73141592" not in str(caught.value)


@pytest.mark.parametrize("tail", ["x" * 9000, "\x01", "\x00"])
async def test_a_key_in_a_header_that_cannot_be_read_is_not_logged(
    tail: str, caplog: pytest.LogCaptureFixture
) -> None:
    log = logging.getLogger("aiohttp.server")
    hide = HideMalformed()
    log.addFilter(hide)
    runner = web.AppRunner(web.Application())
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        reader, writer = await asyncio.open_connection(*runner.addresses[0])
        request = f"GET / HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {ACME}{tail}\r\n\r\n"
        writer.write(request.encode())
        assert b" 400 " in await reader.readline()
        writer.close()
    finally:
        await runner.cleanup()
        log.removeFilter(hide)
    assert "not HTTP" in caplog.text
    assert ACME not in caplog.text
