from __future__ import annotations

import json
from typing import Any

import pytest
from carryback_vllm.seal import SEALED_FIELDS, Sealer
from carryback_vllm.version import check_version
from hypothesis import given
from hypothesis import strategies as st


def hashes(*names: int) -> list[bytes]:
    return [bytes([name]) * 32 for name in names]


def record(sealer: Sealer, held: list[bytes]) -> dict[str, Any]:
    made = {
        "do_remote_decode": True, "remote_engine_id": "e", "remote_request_id": "r",
        "remote_host": "10.0.0.1", "remote_port": 5600, "remote_block_ids": [list(range(len(held)))],
        "remote_num_tokens": 32 * len(held), "remote_blocks_expiry_time": 12345.678901,
        "tp_size": 1, "dcp_size": 1, "pp_size": 1,
    }  # fmt: skip
    sealer.seal(made, digests=sealer.digests(held), tail=sealer.tail([1, 2]), block_size=32)
    # As it travels: through JSON, twice.
    return json.loads(json.dumps(json.loads(json.dumps(made))))


@given(
    held=st.lists(st.integers(0, 5), max_size=8),
    prompt=st.lists(st.integers(0, 5), max_size=8),
)
def test_the_common_prefix_is_found(held: list[int], prompt: list[int]) -> None:
    sealer = Sealer(b"key")
    expected = 0
    for a, b in zip(held, prompt, strict=False):
        if a != b:
            break
        expected += 1
    made = record(sealer, hashes(*held))
    assert sealer.is_authentic(made)
    assert sealer.common_blocks(made, hashes(*prompt)) == (expected, len(held))


@pytest.mark.parametrize("name", SEALED_FIELDS)
def test_every_field_that_a_reader_acts_on_is_sealed(name: str) -> None:
    sealer = Sealer(b"key")
    made = record(sealer, hashes(1, 2))
    made[name] = "other"
    assert not sealer.is_authentic(made)
    del made[name]
    assert not sealer.is_authentic(made)


@pytest.mark.parametrize("name", ["v", "block_size", "digests", "tail", "mac"])
def test_the_seal_itself_is_sealed(name: str) -> None:
    sealer = Sealer(b"key")
    made = record(sealer, hashes(1, 2))
    made["carryback"][name] = made["carryback"][name] * 2
    assert not sealer.is_authentic(made)


def test_fields_that_only_some_vllms_have_are_sealed() -> None:
    sealer = Sealer(b"key")
    plain = record(sealer, hashes(1, 2))
    assert not sealer.is_authentic({**plain, "remote_registration_generation": 1})
    made = {name: value for name, value in plain.items() if name != "carryback"}
    made["remote_registration_generation"] = 1
    sealer.seal(made, digests=sealer.digests(hashes(1, 2)), tail="", block_size=32)
    assert sealer.is_authentic(made)
    assert not sealer.is_authentic({**made, "remote_registration_generation": 2})
    del made["remote_registration_generation"]
    assert not sealer.is_authentic(made)
    del made["carryback"]["others"]
    assert not sealer.is_authentic(made)


def test_what_the_router_adds_does_not_break_a_seal() -> None:
    sealer = Sealer(b"key")
    made = record(sealer, hashes(1, 2)) | {"hold_s": 30, "carryback_key": "k", "do_remote_decode": False}
    assert sealer.is_authentic(made)


def test_another_key_is_another_seal() -> None:
    made = record(Sealer(b"key"), hashes(1, 2))
    assert not Sealer(b"other").is_authentic(made)
    assert Sealer(b"key").digests(hashes(1)) != Sealer(b"other").digests(hashes(1))


@pytest.mark.parametrize(
    "value",
    [{}, {"carryback": None}, {"carryback": "x"}, {"carryback": {"mac": 1}}, {"carryback": {"mac": "é"}},
     {"carryback": {"mac": "x"}, "remote_block_ids": object()}],
)  # fmt: skip
def test_nonsense_is_not_authentic(value: dict[str, Any]) -> None:
    assert not Sealer(b"key").is_authentic(value)


def test_images_are_part_of_the_tail() -> None:
    sealer = Sealer(b"key")
    tails = {
        sealer.tail([1]),
        sealer.tail([1, 2]),
        sealer.tail([1], ["a"]),
        sealer.tail([1], ["b"]),
        sealer.tail([]),
    }
    assert len(tails) == 5


def test_no_key_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CARRYBACK_KEY", raising=False)
    monkeypatch.delenv("CARRYBACK_INSECURE_DEV", raising=False)
    with pytest.raises(RuntimeError, match="CARRYBACK_KEY is not set"):
        Sealer.from_environment()
    monkeypatch.setenv("CARRYBACK_INSECURE_DEV", "1")
    Sealer.from_environment()
    monkeypatch.setenv("CARRYBACK_KEY", "k")
    assert Sealer.from_environment().digests(hashes(1)) == Sealer(b"k").digests(hashes(1))


@pytest.mark.parametrize("version", ["0.30.0", "0.32.1+cpu", "0.33.0rc1"])
def test_supported_versions(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.29.0", "0.34.0", "1.0", "dev"])
def test_unsupported_versions_are_named(version: str) -> None:
    with pytest.raises(RuntimeError, match=version):
        check_version(version)
