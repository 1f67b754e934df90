"""Bodies: whose they are comes first, they are decoded within limits, and none of them holds the others up."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import sys
import zlib
from typing import Any

import pytest
from carryback_server import reading
from carryback_server.body_worker import Job, answer
from carryback_server.hints import look
from service import ENDPOINTS, TEXT, Serve, Service, request_to, said, until, user
from stub_engine import expected
from stub_engine.prompts import CHAT, COMPLETIONS, MESSAGES, RESPONSES

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

KEY = "sk-acme-0123456789-0123456789"
OTHER = "sk-other-0123456789-0123456789"
WITH_KEY = {"Authorization": f"Bearer {KEY}"}
ALL = (*ENDPOINTS, "/tokenize", "/v1/messages/count_tokens")


def packed(data: bytes, encoding: str) -> bytes:
    if encoding == "deflate":
        return zlib.compress(data)
    if encoding == "raw deflate":
        pack = zlib.compressobj(wbits=-zlib.MAX_WBITS)
        return pack.compress(data) + pack.flush()
    return zstd.compress(data) if encoding == "zstd" else gzip.compress(data)


# -- A41


@pytest.mark.parametrize("path", ALL)
@pytest.mark.parametrize(
    ("label", "encoding"),
    [("gzip", "gzip"), ("Gzip", "gzip"), ("x-gzip", "gzip"), ("deflate", "deflate"), ("deflate", "raw deflate"),
     ("zstd", "zstd"), ("identity", ""), ("", ""), ("identity, gzip", "gzip")],
)  # fmt: skip
async def test_a41_engines_get_a_plain_body(serve: Serve, path: str, label: str, encoding: str) -> None:
    service = await serve()
    body = (
        {"prompt": TEXT * 200}
        if path == "/tokenize"
        else request_to(path if path in ENDPOINTS else MESSAGES, TEXT * 50)
    )
    body |= {"max_tokens": 4} if "messages" in path else {}
    plain = json.dumps(body).encode()
    data = packed(plain, encoding) if encoding else plain
    packed_answer = await service.post(path, data, {"Content-Encoding": label})
    assert packed_answer.status == (await service.post(path, plain)).status
    received = [each for engine in service.engines for each in engine.received if each.path == path]
    assert received
    for each in received:
        names = {name.lower() for name in each.headers}
        assert "content-encoding" not in names
        sent = json.loads(each.raw)
        assert all(
            sent[name] == value for name, value in body.items() if name in ("messages", "prompt", "input")
        )


@pytest.mark.parametrize("label", ["br", "gzip, gzip", "gzip, deflate", "snappy", "x" * 300, "gzip;q=1"])
async def test_a41_what_is_not_known_is_a_415_that_names_it(serve: Serve, label: str) -> None:
    service = await serve()
    for path in ALL:
        refused = await service.post(path, gzip.compress(b"{}"), {"Content-Encoding": label})
        assert refused.status == 415
        assert label[:60] in refused.error["message"]
        assert refused.headers["accept-encoding"] == "gzip, deflate, zstd"
    assert service.prefill.requests == []


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
async def test_a41_what_is_not_what_it_says_is_a_400(serve: Serve, encoding: str) -> None:
    service = await serve()
    whole = packed(json.dumps(request_to(CHAT)).encode(), encoding)
    for wrong in (
        b"junk",
        b'{"messages":[]}',
        whole[:-3],
        whole[: len(whole) // 2],
        whole + b"more",
        whole + whole,
    ):
        refused = await service.post(CHAT, wrong, {"Content-Encoding": encoding})
        assert (refused.status, refused.error["code"]) == (400, "invalid_body"), wrong
    assert service.prefill.requests == []


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
async def test_a41_the_limit_counts_decoded_bytes(
    serve: Serve, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = await serve(max_body_bytes=1_000_000, max_body_bytes_in_all=2_000_000)
    bomb = packed(b'{"prompt":"' + b"a" * 200_000_000 + b'"}', encoding)
    sizes: list[int] = []
    decode = reading._decode

    def counted(decoder: Any, data: bytes) -> bytes:
        sizes.append(len(decoded := decode(decoder, data)))
        return decoded

    monkeypatch.setattr(reading, "_decode", counted)
    for path in ALL:
        refused = await service.post(path, bomb, {"Content-Encoding": encoding})
        assert refused.status == 413
        assert "max_body_bytes" in refused.error["message"]
    # No more was decoded, and never much at once.
    assert sum(sizes) < len(ALL) * 1_500_000
    assert max(sizes) <= 2**18


# -- the key comes first


@pytest.mark.parametrize("path", ALL)
async def test_without_a_key_nothing_is_read(
    serve: Serve, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = await serve(api_keys=[f"acme={KEY}"])

    async def read(*_: object) -> None:
        raise AssertionError("it was read")

    monkeypatch.setattr(reading.Bodies, "read", read)
    for body, encoding in ((gzip.compress(b" " * 9_000_000), "gzip"), (b"x", "br"), (b"{" * 100_000, "")):
        refused = await service.post(path, body, {"Content-Encoding": encoding})
        assert refused.status == 401
        refused = await service.post(
            path, body, {"Content-Encoding": encoding, "Authorization": "Bearer wrong"}
        )
        assert refused.status == 401


# -- nobody is held up


def hostile() -> dict[str, tuple[str, bytes]]:
    """Bodies within the limit of bytes that take long to look at."""
    empties = b'{"messages":[' + b"{}," * 300_000 + b"{}]}"
    return {
        "messages": (CHAT, empties),
        "parts": (CHAT, b'{"messages":[{"role":"user","content":[' + b'{"a":1},' * 300_000 + b"1]}]}"),
        "numbers": (CHAT, b'{"messages":[{"role":"user","content":[' + b"1," * 600_000 + b"1]}]}"),
        "tools": (
            CHAT,
            b'{"messages":[{"role":"user","content":"a"}],"tools":[' + b'{"a":1},' * 300_000 + b"{}]}",
        ),
        "text": (CHAT, b'{"messages":[{"role":"user","content":"' + b"a\\n" * 3_000_000 + b'"}]}'),
        "tokens": (COMPLETIONS, b'{"prompt":[' + b"1," * 900_000 + b"1]}"),
        "prompts": (COMPLETIONS, b'{"prompt":[' + b'"a",' * 600_000 + b'"a"]}'),
        "input": (RESPONSES, b'{"input":[' + b'{"role":"user"},' * 300_000 + b"{}]}"),
        "system": (MESSAGES, b'{"system":[' + b'{"type":"text"},' * 300_000 + b'{}],"messages":[]}'),
        "fields": (CHAT, b"{" + b",".join(b'"%d":1' % at for at in range(300_000)) + b"}"),
        "model": (CHAT, b'{"model":[' + b"{}," * 300_000 + b'{}],"messages":[]}'),
        "deep": (CHAT, b'{"messages":' + b"[" * 900_000 + b"]" * 900_000 + b"}"),
        "tokenize": ("/tokenize", empties),
        "count": ("/v1/messages/count_tokens", empties),
    }


@pytest.mark.parametrize("name", hostile())
async def test_what_takes_long_is_not_looked_at_on_the_loop(
    serve: Serve, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only small bodies and small values are ever parsed in the router's own process."""
    path, data = hostile()[name]
    service = await serve(api_keys=[f"acme={KEY}", f"other={OTHER}"])
    refuse(service)
    parsed: list[int] = []
    init, get = reading.Body.__init__, reading.Body.get

    def counted(self: reading.Body, data: bytes) -> None:
        parsed.append(len(data))
        init(self, data)

    def looked(self: reading.Body, path: str) -> Any:
        value = get(self, path)
        parsed.append(len(self._fields.get(path.split(".")[0], b"")))
        return value

    monkeypatch.setattr(reading.Body, "__init__", counted)
    monkeypatch.setattr(reading.Body, "get", looked)
    for encoding in ("", "gzip"):
        sent = gzip.compress(data) if encoding else data
        status = (await service.post(path, sent, {**WITH_KEY, "Content-Encoding": encoding})).status
        assert status in (200, 400, 413)
    assert max([*parsed, 0]) <= reading.LIGHT_BYTES
    assert "body_workers_lost_total 1" not in await service.metrics()


async def test_others_are_answered_before_a_body_that_takes_long(serve: Serve) -> None:
    service = await serve(api_keys=[f"acme={KEY}", f"other={OTHER}"])
    path, data = hostile()["parts"]
    attacks = [asyncio.create_task(service.post(path, data, WITH_KEY)) for _ in range(3)]
    await until(lambda: service.router.pipeline.bodies._waiting["acme"] == 3, "they are there")
    for number in range(10):
        answered = await service.chat(
            [user(f"{number} {TEXT}")], headers={"Authorization": f"Bearer {OTHER}"}
        )
        assert answered.status == 200
        assert not all(each.done() for each in attacks)
    for attack in attacks:
        attack.cancel()
    await asyncio.gather(*attacks, return_exceptions=True)


async def test_bodies_that_take_milliseconds_do_not_follow_on_each_other_at_once(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two of them, all others have their turn."""
    service = await serve()
    refuse(service)
    turns = 0
    parsed: list[int] = []
    init = reading.Body.__init__

    def noted(self: reading.Body, data: bytes) -> None:
        parsed.append(turns)
        init(self, data)

    monkeypatch.setattr(reading.Body, "__init__", noted)

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(others())
    body = b'{"messages":[' + b"{}," * 5000 + b"{}]}"
    await asyncio.gather(*(service.post(CHAT, body) for _ in range(12)))
    running.cancel()
    assert len(set(parsed)) == 12


async def test_large_bodies_of_one_tenant_wait_for_each_other_not_others(serve: Serve) -> None:
    service = await serve(api_keys=[f"acme={KEY}", f"other={OTHER}"])
    path, data = hostile()["parts"]
    attacks = [asyncio.create_task(service.post(path, data, WITH_KEY)) for _ in range(4)]
    await until(lambda: service.router.pipeline.bodies._waiting["acme"] == 4, "they are there")
    refuse(service)
    large = {"messages": [user("word, " * 100_000)]}
    answered = await service.post(CHAT, large, {"Authorization": f"Bearer {OTHER}"})
    assert answered.status in (200, 400)
    assert sum(each.done() for each in attacks) <= 2
    await asyncio.gather(*attacks)


def refuse(service: Service) -> None:
    """Engines take none of it: what they would do with it is not what this is about."""
    for engine in service.engines:
        engine.fault(times=None, status=400)


def big(path: str, turns: int) -> dict[str, Any]:
    """A conversation that is too large for the loop."""
    talk = [user("a word, " * 20_000)]
    for turn in range(1, turns):
        talk += [said(f"answer {turn}"), user(f"question {turn}")]
    if path == COMPLETIONS:
        return {"prompt": "a word, " * 20_000 * turns}
    return {"input" if path == RESPONSES else "messages": talk}


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a_large_body_is_served_as_a_small_one_is(serve: Serve, path: str) -> None:
    service = await serve()
    refuse(service)
    seen = []
    for turns in (1, 2, 3):
        body = {**big(path, turns), "tools": [], "x_unknown": {"a": [1.0, 12345678901234567890]}}
        data = json.dumps(body).encode()
        assert not reading.is_light(data)
        looked = answer(Job(path, "t", False, 20_000), data)
        ours = look(reading_endpoint(path), reading.Body(data), scope="t")
        ours.alone = reading_endpoint(path).alone(reading.Body(data))
        assert looked.looked == ours
        fields = reading.Body.of(data, looked.fields)
        assert json.loads(fields.encode({})) == body
        seen.append((await service.post(path, data)).headers.get("x-carryback-conversation"))
    if path != COMPLETIONS:
        assert len({*seen}) == 1


def reading_endpoint(path: str) -> Any:
    from carryback_server.endpoints import ENDPOINTS as endpoints

    return endpoints[path]


async def test_a_worker_that_is_killed_is_replaced(serve: Serve) -> None:
    service = await serve()
    data = json.dumps(big(CHAT, 1)).encode()
    first = await service.post(CHAT, data)
    process = service.router.pipeline.bodies._worker._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    assert (await service.post(CHAT, data)).status == first.status
    # Killed while it works.
    path, slow = hostile()["parts"]
    asked = asyncio.create_task(service.post(path, slow))
    worker = service.router.pipeline.bodies._worker
    await until(lambda: worker._turn.locked(), "it works")
    assert worker._process is not None
    worker._process.kill()
    assert (await asked).status == 503
    assert "carryback_body_workers_lost_total 1.0" in await service.metrics()
    assert (await service.post(CHAT, data)).status == first.status


async def test_a_body_that_takes_too_long_is_given_up(serve: Serve) -> None:
    service = await serve(body_work_timeout_s=0.05)
    path, data = hostile()["parts"]
    refused = await service.post(path, data)
    assert refused.status == 413
    assert "body_work_timeout_s" in refused.error["message"]


@pytest.mark.parametrize(
    ("setting", "most", "body"),
    [
        ("max_body_values", 1000, b'{"prompt":[' + b"1," * 2000 + b"1]}"),
        ("max_messages", 20_000, b'{"messages":[' + b"{}," * 30_000 + b"{}]}"),
    ],
)
async def test_limits_of_what_is_in_a_body_name_their_setting(
    serve: Serve, setting: str, most: int, body: bytes
) -> None:
    service = await serve(**{setting: most})
    refused = await service.post(CHAT, body)
    assert refused.status == 413
    assert setting in refused.error["message"]
    assert str(most) in refused.error["message"]


# -- memory


async def test_bodies_in_memory_are_limited_in_all_and_for_a_tenant(serve: Serve) -> None:
    service = await serve(
        api_keys=[f"acme={KEY}", f"other={OTHER}"], max_body_bytes=100_000, max_body_bytes_in_all=200_000
    )
    fault = service.prefill.fault(times=None, hang=True)
    body = {"messages": [user("x" * 60_000)]}
    waiting = asyncio.create_task(service.post(CHAT, body, WITH_KEY))
    await until(
        lambda: service.prefill.received and service.router.pipeline.bodies._in_all > 50_000, "it waits"
    )
    refused = await service.post(CHAT, body, WITH_KEY)
    assert (refused.status, refused.headers["retry-after"]) == (429, "1")
    assert "max_body_bytes_in_all" in refused.error["message"]
    assert (await service.post(CHAT, {"messages": []}, {"Authorization": "Bearer wrong"})).status == 401
    service.prefill.faults.remove(fault)
    answered = await service.post(CHAT, body, {"Authorization": f"Bearer {OTHER}"})
    assert answered.text == expected(body).text
    waiting.cancel()
    await until(lambda: service.router.pipeline.bodies._in_all == 0, "all is given back")


async def test_a_long_answer_keeps_no_body(serve: Serve) -> None:
    service = await serve()
    service.decode.fault(chunk_delay_s=0.2)
    request = asyncio.create_task(service.chat([user(TEXT)], stream=True))
    bodies = service.router.pipeline.bodies
    await until(lambda: bodies._in_all > 0, "it is there")
    await until(lambda: bodies._in_all == 0, "it is given back")
    assert not request.done()
    assert (await request).status == 200
