"""Hostile input: what is no HTTP, no JSON, or has the wrong type in each field that the router reads.

Nothing of it is a 5xx, is left without an answer, or leaves anything behind.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from live_router import LIMIT_S, LiveRouter
from service import request_to
from stub_engine.prompts import CHAT, COMPLETIONS, MESSAGES, RESPONSES

# Times as many examples, and others each time, for a long run.
FACTOR = int(os.environ.get("CARRYBACK_FUZZ_FACTOR", "1"))
PATHS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES, "/v1/messages/count_tokens", "/tokenize", "/detokenize")
BODY_TIMEOUT_S = 1.0
# For more of an answer, until it is taken to be over.
QUIET_S = 0.03


def some(examples: int) -> settings:
    """How many of them."""
    return settings(max_examples=examples * FACTOR, derandomize=FACTOR == 1, database=None)


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRouter]:
    """A router that everybody may use; when all is over, it has to be well."""
    limits = {"body_timeout_s": BODY_TIMEOUT_S, "max_body_bytes": 300_000}
    with LiveRouter(tmp_path_factory.mktemp("router"), **limits) as router:
        yield router
        router.check_well()
        router.stop()
        router.check_log()


# -- HTTP

text = st.text(st.characters(codec="latin-1", exclude_characters="\r\n\0"), max_size=12)
junk = st.one_of(
    st.binary(max_size=30),
    st.sampled_from([b"\r\n", b"\n", b"\0", b"\r", b" ", b":", b"\x16\x03\x01\x02\x00\x01", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"]),
)  # fmt: skip
methods = st.sampled_from(
    [b"POST", b"POST", b"POST", b"GET", b"DELETE", b"HEAD", b"OPTIONS", b"TRACE", b"CONNECT", b"PUT", b"post",
     b"BREW", b"P\0ST", b"", b"POST ", b"G" * 5000]
)  # fmt: skip
targets = st.one_of(
    st.sampled_from([path.encode() for path in PATHS]),
    st.sampled_from(
        [b"/v1/conversations", b"/v1/conversations/a%2Fb", b"/v1/conversations/%ff", b"/v1/conversations/%00",
         b"/v1/conversations/%0d%0aX-Evil:%201", b"/v1/conversations/\xff", b"/v1/conversations/" + b"x" * 9000,
         b"/v1/conversations?limit=\xd9\xa1", b"/v1/conversations?limit=1e9&after=%ff%00",
         b"/v1/conversations?after=" + b"A" * 3000, b"/v1/responses/%00c", b"/v1/responses/%ed%a0%80",
         b"/v1/chat/%63ompletions", b"/v1//chat/completions", b"/v1/chat/completions/", b"/v1/chat/../models",
         b"/v1/embeddings", b"*", b"", b"/", b"//", b"http://[::1", b"http://evil/v1/models", b"evil:80",
         b"/%", b"/%zz", b"/\xed\xa0\x80", b"/?" + b"a=b&" * 900, b"/v1/models#\xff", b"/health", b"/ready",
         b"/metrics", b"/admin/engines", b"/" + b"%41" * 6000, b"/v1/models HTTP/1.1\r\nX: y"]
    ),
)  # fmt: skip
versions = st.sampled_from(
    [
        b"HTTP/1.1",
        b"HTTP/1.1",
        b"HTTP/1.1",
        b"HTTP/1.0",
        b"HTTP/0.9",
        b"HTTP/2.0",
        b"HTTP/9.9",
        b"HTTP",
        b"",
        b"ICY",
    ]
)
names = st.sampled_from(
    [b"X-Conversation-ID", b"X-Conversation-Parent", b"X-Conversation-End", b"X-Turn-ID", b"X-Turn-Step",
     b"X-Session-ID", b"session_id", b"X-Carryback-Reuse", b"X-Request-Id", b"Authorization", b"x-api-key",
     b"traceparent", b"tracestate", b"Content-Type", b"Accept", b"Cookie", b"Host", b"Range", b"Connection",
     b"Forwarded", b"X-data-parallel-rank", b"Expect", b"Upgrade", b"Accept-Encoding", b"Content-Encoding", b"TE",
     b"Trailer", b"Date", b"If-None-Match", b"Origin", b"Sec-WebSocket-Key", b"HTTP2-Settings"]
)  # fmt: skip
values = st.one_of(
    text.map(lambda value: value.encode("latin-1")),
    st.sampled_from(
        [b"", b"a", b"\xff\xfe", b"\xed\xa0\x80", b"a\0b", b"a\tb", b"x" * 300, b"x" * 20_000, "é".encode(), b"\x7f",
         b"a\r\n X: folded", b"a\nX-Evil: 1", b"0", b"-1", b"1e9", b"9" * 30, "١".encode(), b"100-continue",
         b"200-ok", b"websocket", b"h2c", b"upgrade", b"close", b"gzip", b"br", b"identity", b"chunked",
         b"Bearer \xff", b"Basic ====", b"bytes=0-", b"00-" + b"f" * 32 + b"-" + b"0" * 16 + b"-01", b"off", b"\""]
    ),
)  # fmt: skip
headers = st.lists(st.tuples(names, values), min_size=1, max_size=4)
hosts = st.sampled_from([b"", b"Host: a\r\nHost: b\r\n", b"Host: \xff\r\n", b"Host:\r\n", b"Host: a/b\r\n"])
bodies = st.one_of(
    st.sampled_from(PATHS).map(lambda path: json.dumps(request_to(path)).encode()),
    st.sampled_from([b"", b"{", b"[]", b"\xff\xfe{\0}\0", b"\x1f\x8b\x08junk", b"x" * 400_000]),
    junk,
)
# Of a body: whole, or wrong in one of many ways.
framings = st.sampled_from(
    ["length", "length", "length", "chunked", "chunked", "longer", "shorter", "none", "both", "negative", "huge", "two",
     "word", "plus", "bad_size", "huge_size", "no_end", "trailers", "extension", "gzip_te", "te_twice", "unicode"]
)  # fmt: skip


def framed(how: str, body: bytes) -> bytes:
    """Header lines about a body, the end of the headers, and the body."""
    size = len(body)
    chunk = b"%x\r\n%b\r\n" % (size, body) if body else b""
    te, end = b"Transfer-Encoding: chunked\r\n", b"0\r\n\r\n"
    length = b"Content-Length: %d\r\n"
    return {
        "length": length % size + b"\r\n" + body,
        "chunked": te + b"\r\n" + chunk + end,
        "longer": length % (size + 7) + b"\r\n" + body,
        "shorter": length % max(size - 7, 0) + b"\r\n" + body,
        "none": b"\r\n" + body,
        "both": length % size + te + b"\r\n" + chunk + end,
        "negative": b"Content-Length: -1\r\n\r\n" + body,
        "huge": length % 10**18 + b"\r\n" + body,
        "two": length % size + length % (size + 1) + b"\r\n" + body,
        "word": b"Content-Length: ten\r\n\r\n" + body,
        "plus": b"Content-Length: +%d\r\n\r\n" % size + body,
        "bad_size": te + b"\r\nzz\r\n" + body + b"\r\n" + end,
        "huge_size": te + b"\r\n" + b"f" * 20 + b"\r\n" + body,
        "no_end": te + b"\r\n" + chunk,
        "trailers": te + b"\r\n" + chunk + b"0\r\nX-Conversation-ID: late\r\n\r\n",
        "extension": te + b"\r\n%x;a=b\r\n%b\r\n" % (size, body) + end,
        "gzip_te": b"Transfer-Encoding: gzip, chunked\r\n\r\n" + chunk + end,
        "te_twice": te + te + b"\r\n" + chunk + end,
        "unicode": "Content-Length: ١\r\n\r\n".encode() + body,
    }[how]


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """One request, right but for one or two things."""
    wrong = draw(
        st.sets(st.sampled_from(["line", "version", "host", "headers", "framing", "body"]), max_size=2)
    )
    method, target = b"POST", draw(st.sampled_from(PATHS)).encode()
    if "line" in wrong:
        method, target = draw(methods), draw(targets)
    version = draw(versions) if "version" in wrong else b"HTTP/1.1"
    lines = draw(hosts) if "host" in wrong else b"Host: x\r\n"
    for name, value in draw(headers) if "headers" in wrong else []:
        # Where there is no such path, aiohttp itself fails if that is no UTF-8.
        if name != b"Expect" or target.decode("latin-1") in PATHS:
            lines += b"%b: %b\r\n" % (name, value)
    body = draw(bodies) if "body" in wrong else json.dumps(request_to(target.decode("latin-1"))).encode()
    how = draw(framings) if "framing" in wrong else "length"
    return b"%b %b %b\r\n" % (method, target, version) + lines + framed(how, body)


@st.composite
def conversations(draw: st.DrawFn) -> list[bytes]:
    """What a client sends on one connection, in pieces."""
    data = b"".join(draw(st.lists(st.one_of(requests(), requests(), junk), min_size=1, max_size=3)))
    if draw(st.integers(0, 3)) == 0:
        data = data[: draw(st.integers(0, min(len(data), 2000)))]
    cut = draw(st.integers(0, min(len(data), 500)))
    return [data[:cut], data[cut:]] if draw(st.booleans()) else [data]


STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")


def exchange(router: LiveRouter, pieces: list[bytes]) -> bytes:
    """Send pieces, wait for what is said, and leave; then the router has to let go of the connection."""
    received = b""
    with socket.create_connection(("127.0.0.1", router.port), timeout=LIMIT_S) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
            connection.settimeout(QUIET_S)
            try:
                while data := connection.recv(2**16):
                    received += data
                return received
            except TimeoutError:
                pass
            connection.settimeout(LIMIT_S)
            connection.shutdown(socket.SHUT_WR)
            while data := connection.recv(2**16):
                received += data
        except (ConnectionError, BrokenPipeError):
            pass
    return received


def check_answers(received: bytes) -> None:
    """None of the statuses says that the router failed; and no header of the client's came back as one."""
    assert [status for status in STATUS.findall(received) if status >= b"500"] == [], received
    assert re.search(rb"(?im)^x-evil:", received) is None, received


@some(40)
@given(pieces=conversations())
@example(
    pieces=[
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\njunk"
    ]
)
@example(
    pieces=[
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"zz\r\n\r\n",
    ]
)
@example(
    pieces=[
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n",
        b"zz\r\n\r\n",
    ]
)
@example(
    pieces=[b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Encoding: br\r\nContent-Length: 4\r\n\r\njunk"]
)
@example(pieces=[b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n"])
@example(pieces=[b"GET /%ED%A0%80 HTTP/1.1\r\nHost: x\r\n\r\n"])
@example(pieces=[b"POST /tokenize HTTP/1.1\r\nHost: x\r\nExpect: \xff\r\nContent-Length: 2\r\n\r\n{}"])
@example(pieces=[b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n"])
@example(pieces=[b"CONNECT evil:80 HTTP/1.1\r\nHost: x\r\n\r\n", b"junk"])
def test_what_is_no_http_is_refused(router: LiveRouter, pieces: list[bytes]) -> None:
    check_answers(exchange(router, pieces))


def test_bodies_that_do_not_come_are_given_up(router: LiveRouter) -> None:
    started = []
    for path in PATHS:
        for head in (b"Content-Length: 90", b"Transfer-Encoding: chunked"):
            connection = socket.create_connection(("127.0.0.1", router.port), timeout=LIMIT_S)
            connection.sendall(b"POST %b HTTP/1.1\r\nHost: x\r\n%b\r\n\r\n4\r\n{" % (path.encode(), head))
            started.append(connection)
    for connection in started:
        with connection:
            received = b""
            while b"}}" not in received:
                data = connection.recv(2**16)
                assert data, received
                received += data
            assert STATUS.findall(received) == [b"408"]
            assert b"body_timeout_s" in received


# -- JSON

FIELDS = (
    "conversation_id", "session_id", "session_params", "messages", "input", "prompt", "tools", "tool_choice",
    "prompt_cache_key", "previous_response_id", "store", "cache_salt", "model", "n", "best_of", "stream",
    "stream_options", "kv_transfer_params", "ec_transfer_params", "instructions", "system", "output_config",
    "background", "echo", "prompt_logprobs", "prompt_embeds", "use_beam_search", "logprobs", "top_logprobs",
    "max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "tokens", "x_unknown",
)  # fmt: skip
odd_text = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["", " ", "a", "a" * 257, "\0", "\n", "é", "\u2028", "\U0001f642", "null", "data: [DONE]\n\n", "uuid",
                     "x-anthropic-billing-header: 1", "[call]", "../..", "c" * 100_000]),
)  # fmt: skip
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 3), odd_text,
    st.sampled_from([-(2**63), 2**64, 10**30, 0.5, -0.0, 1e308]),
)  # fmt: skip
# What the router looks for in messages and tools.
keys = st.one_of(
    st.sampled_from(["role", "content", "type", "text", "id", "name", "tool_calls", "function", "arguments", "input",
                     "tool_use_id", "call_id", "output", "uuid", "image_url", "session_id", "parameters", "required",
                     "do_remote_prefill", "remote_block_ids", "carryback_key", "carryback_ask", "hold_s"]),
    odd_text,
)  # fmt: skip
said = st.sampled_from(
    [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
     {"role": "tool", "content": "a"}, {"role": "system", "content": [{"type": "text", "text": "a"}]},
     {"type": "function_call", "call_id": "1", "name": "a", "arguments": "{"}, {"type": "reasoning", "summary": []},
     {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text"}]}]},
     {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "a", "input": {}}]},
     {"type": "message", "role": "assistant", "content": []}]
)  # fmt: skip
trees = st.recursive(
    st.one_of(scalars, said),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(keys, inner, max_size=4)),
    max_leaves=8,
)


def quoted(value: Any) -> bytes:
    """As JSON."""
    return json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass")


# Text that json.dumps does not write.
raw_values = st.one_of(
    st.sampled_from(
        [
            b"NaN",
            b"Infinity",
            b"-Infinity",
            b"1e999",
            b"-1e999",
            b"9" * 400,
            b"0." + b"1" * 400,
            b"01",
            b"1.",
            b".5",
            b"'a'",
            b'"\xff"',
            b'"\xed\xa0\x80"',
            b'"\\ud800"',
            b'"\\udc00\\ud800"',
            b'"\\u0000"',
            b'"\\x41"',
            b'"\t"',
            b'"',
            b"[",
            b"{",
            b"tru",
            b"undefined",
            b"/* */1",
            b"[1,]",
            b'{"a":1,}',
            b'{"a":1,"a":2}',
            b"",
            b"[[1,2],[3]]",
            b"[[]]",
            b'[["a"]]',
            b"[1.5]",
            b"[-1]",
            b"[null]",
            b"[true]",
            b"\xef\xbb\xbf1",
        ]
    ),
    st.builds(lambda deep: b"[" * deep + b"]" * deep, st.sampled_from([100, 900, 1000, 5000, 60_000])),
    st.builds(lambda deep: b'{"a":' * deep + b"1" + b"}" * deep, st.sampled_from([100, 900, 1000, 30_000])),
    st.builds(
        lambda deep, part: b'[{"role":"user","content":[%b]}]' % (part[0] * deep + b"1" + part[1] * deep),
        st.sampled_from([100, 480, 500, 950, 990, 1000]),
        st.sampled_from([(b"[", b"]"), (b'{"type":"tool_result","content":[', b"]}")]),
    ),
)


@st.composite
def json_bodies(draw: st.DrawFn, path: str) -> bytes:
    """A body that is right but for some fields; some fields may be there twice."""
    fields = [(name, quoted(value)) for name, value in request_to(path).items()]
    value = st.integers(0, 7).flatmap(lambda number: raw_values if number == 0 else trees.map(quoted))
    for name in draw(st.lists(st.sampled_from(FIELDS), max_size=4)):
        fields.insert(draw(st.integers(0, len(fields))), (name, draw(value)))
    body = b"{%b}" % b",".join(b'"%b":%b' % (name.encode(), value) for name, value in fields)
    if draw(st.integers(0, 9)) == 0:
        return draw(
            st.one_of(value, st.just(body[: len(body) // 2]), st.just(body + body), st.binary(max_size=20))
        )
    return body


HINTS = ("X-Conversation-ID", "X-Conversation-Parent", "X-Conversation-End", "X-Turn-ID", "X-Turn-Step",
         "X-Session-ID", "session_id", "X-Correlation-ID", "X-Carryback-Reuse", "X-Request-Id", "traceparent",
         "tracestate", "X-data-parallel-rank")  # fmt: skip
hints = st.lists(
    st.tuples(
        st.sampled_from(HINTS),
        st.one_of(
            st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=6),
            st.sampled_from(
                ["a b", "x" * 256, "x" * 257, "é", "\xff", "\x80", "a\tb", "true", "off", "OFF", "on", "0", "-1", "٣",
                 "00-" + "a" * 32 + "-" + "b" * 16 + "-01", "00-" + "0" * 55]
            ),
        ).map(lambda value: value.encode()),
    ),
    max_size=4,
)  # fmt: skip
kinds = st.sampled_from([b"application/json", b"application/json; charset=utf-16", b"text/plain", b"\xff/"])


def check_error(path: str, answer: httpx.Response) -> None:
    """An answer that is no 200 says in the client's terms what is wrong with the request."""
    assert answer.status_code in (400, 404, 408, 413), (answer.status_code, answer.text)
    fields = answer.json()
    assert fields["error"]["message"]
    assert fields["error"]["type"]
    if path.startswith(MESSAGES):
        assert fields["type"] == "error"
    else:
        assert {"message", "type", "param", "code"} <= fields["error"].keys()


@pytest.mark.parametrize("path", PATHS)
def test_a_body_of_any_shape_has_an_answer(router: LiveRouter, path: str) -> None:
    @some(12)
    @given(body=json_bodies(path), headers=hints, kind=kinds)
    def check(body: bytes, headers: list[tuple[str, bytes]], kind: bytes) -> None:
        sent = [("Content-Type", kind), *headers]
        answer = router.client.post(router.url + path, content=body, headers=sent)
        if answer.status_code != 200:
            check_error(path, answer)
        elif answer.headers["content-type"].startswith("text/event-stream"):
            assert (
                b"[DONE]" in answer.content or b"_stop" in answer.content or b"response.co" in answer.content
            )
        else:
            assert answer.json()

    check()


ids = st.one_of(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=20),
    st.sampled_from(
        [".", "..", "%00", "%ff", "a/b", "\0c", "a" * 3000, "\udcff", "'; --", "{id}", "\n", "é"]
    ),
)


@some(40)
@given(
    id=ids, path=st.sampled_from(["/v1/conversations/", "/v1/responses/", "/v1/conversations?limit=1&after=",
                                  "/v1/conversations?limit="]),
    method=st.sampled_from(["GET", "DELETE"]),
)  # fmt: skip
def test_any_id_may_be_asked_for(router: LiveRouter, id: str, path: str, method: str) -> None:
    answer = router.client.request(method, router.url + path + quote(id, safe="", errors="surrogateescape"))
    assert answer.status_code in (200, 400, 404, 405), answer.text
    if answer.status_code != 200:
        assert answer.json()["error"]["code"]
