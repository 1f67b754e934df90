"""Nothing of one tenant's is in what another gets, in a metric or in a log, whatever they do.

Three tenants, with words of their own in what they say. What each gets is searched for words, ids, answers
and keys of the others; metrics and log are searched for everybody's.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from live_router import LiveRouter
from service import TEXT, Answer, request_to
from stub_engine import CALL_MARKER, expected
from stub_engine.prompts import CHAT, COMPLETIONS, MESSAGES, RESPONSES

# Times as many examples, and others each time, for a long run.
FACTOR = int(os.environ.get("CARRYBACK_FUZZ_FACTOR", "1"))
KEYS = {name: f"sk-{name}-{secrets.token_hex(16)}" for name in ("aardvark", "beluga", "capybara")}
FUNCTION = {"name": "look", "parameters": {"required": ["where"]}}
TOOLS = {
    CHAT: [{"type": "function", "function": FUNCTION}],
    RESPONSES: [{"type": "function", **FUNCTION}],
    MESSAGES: [{"name": "look", "input_schema": FUNCTION["parameters"]}],
}

# All ids and words of prompts look so.
NAMES = re.compile(
    rf"(?:{'|'.join(KEYS)})-(?:word|id)-\d+\.|\bc-[0-9a-f]{{32}}|\bresp_[0-9a-f]{{16}}|\bshared-\d"
)

tenants = st.sampled_from(sorted(KEYS))
paths = st.sampled_from([CHAT, COMPLETIONS, RESPONSES, MESSAGES])
# Which of all known ids is meant.
which = st.integers(0, 10_000)


class Secrets:
    """What each tenant would not have others know, over all runs at one router.

    Attributes:
        ids: of conversations, responses and requests, and whose they are.
        words: of prompts, and whose they are.
        answers: what each was answered.
        sent: ids and words that a tenant has sent: what it says itself it may be told.
    """

    def __init__(self) -> None:
        self.ids: dict[str, str] = {}
        self.words: dict[str, str] = {}
        self.answers: dict[str, list[str]] = {name: [] for name in KEYS}
        self.sent: dict[str, set[str]] = {name: set() for name in KEYS}

    def word(self, tenant: str) -> str:
        """A new word for a prompt."""
        word = f"{tenant}-word-{len(self.words)}."
        self.words[word] = tenant
        return word

    def id(self, tenant: str) -> str:
        """A new id."""
        id = f"{tenant}-id-{len(self.ids)}."
        self.ids[id] = tenant
        return id

    def any_id(self, number: int) -> str:
        """A late id, whoever's it is; or one that all of them use."""
        known = ["shared-1", "shared-2", *list(self.ids)[-24:]]
        return known[number % len(known)]

    def is_known_to(self, tenant: str, id: str) -> bool:
        """Whether it is an id of the tenant's own, or one that it has used."""
        return self.ids.get(id) == tenant or id in self.sent[tenant]

    def told(self, tenant: str, text: str) -> list[str]:
        """What in a text is another's, and nothing that the tenant has said itself.

        Args:
            tenant: who gets it; empty if nobody knows.
        """
        names = set(NAMES.findall(text))
        found = {each for each in names if (self.ids.get(each) or self.words.get(each, tenant)) != tenant}
        late = [each for name in KEYS if name != tenant for each in self.answers[name][-20:]]
        keys = list(KEYS.values())
        return [*found - self.sent.get(tenant, set()), *(each for each in (*late, *keys) if each in text)]


class Tenants(RuleBasedStateMachine):
    """What the three do, in any order."""

    def __init__(self, router: LiveRouter, known: Secrets) -> None:
        super().__init__()
        self.router = router
        self.known = known
        self.histories: dict[tuple[str, str, str], list[dict[str, Any]]] = {}

    # -- generation

    @rule(tenant=tenants, path=paths, number=which, names=st.sampled_from(["header", "body", "session", "nothing"]),
          is_new=st.booleans(), streams=st.booleans(), calls=st.booleans(), ends=st.booleans())  # fmt: skip
    def say(
        self,
        tenant: str,
        path: str,
        number: int,
        names: str,
        is_new: bool,
        streams: bool,
        calls: bool,
        ends: bool,
    ) -> None:
        id = self.known.id(tenant) if is_new else self.known.any_id(number)
        body, headers = self.named(names, id)
        history = self.histories.setdefault((tenant, path, id), [])
        text = f"{self.known.word(tenant)} {TEXT} {CALL_MARKER if calls else ''}"
        history.append({"role": "user", "content": text})
        body |= request_to(path, "".join(str(each["content"]) for each in history), stream=streams)
        if "messages" in body:
            body["messages"] = history
        if path in TOOLS:
            body["tools"] = TOOLS[path]
        if ends and number % 4 == 0:
            headers["X-Conversation-End"] = "true"
        is_first = names != "nothing" and not self.known.is_known_to(tenant, id)
        answer = self.ask(tenant, "POST", path, body, headers)
        assert answer.status == 200, answer.raw
        if is_first:
            assert answer.reuse.outcome == "miss"
        if path != RESPONSES:
            right = expected(body, path)
            if right.call is None:
                assert answer.text == right.text
            history.append({"role": "assistant", "content": right.text or "Yes."})

    @rule(tenant=tenants, number=which, streams=st.booleans(), stores=st.booleans())
    def respond(self, tenant: str, number: int, streams: bool, stores: bool) -> None:
        previous = self.known.any_id(number)
        is_own = self.known.ids.get(previous) == tenant
        body = request_to(RESPONSES, f"{self.known.word(tenant)} {TEXT}", previous_response_id=previous)
        answer = self.ask(tenant, "POST", RESPONSES, {**body, "stream": streams, "store": stores})
        assert answer.status in ((200, 404) if is_own else (404,)), answer.raw

    def named(self, names: str, id: str) -> tuple[dict[str, Any], dict[str, str]]:
        """Body and headers that name a conversation."""
        if names == "header":
            return {}, {"X-Conversation-ID": id}
        body: dict[str, dict[str, Any]] = {
            "body": {"conversation_id": id}, "session": {"session_params": {"session_id": id}}, "nothing": {},
        }  # fmt: skip
        return body[names], {}

    # -- what is kept

    @rule(tenant=tenants, number=which, method=st.sampled_from(["GET", "DELETE"]))
    def look_up(self, tenant: str, number: int, method: str) -> None:
        id = self.known.any_id(number)
        is_unknown = not self.known.is_known_to(tenant, id)
        answer = self.ask(tenant, method, f"/v1/conversations/{quote(id, safe='')}")
        assert answer.status in ((404,) if is_unknown else (200, 404)), answer.raw
        if answer.status == 200 and method == "GET":
            assert answer.json["tenant"] == tenant

    @rule(tenant=tenants, limit=st.integers(1, 5))
    def list_all(self, tenant: str, limit: int) -> None:
        after = ""
        for _ in range(3):
            answer = self.ask(tenant, "GET", f"/v1/conversations?limit={limit}&after={after}")
            assert answer.status == 200
            assert {each["tenant"] for each in answer.json["data"]} <= {tenant}
            if not (after := answer.json["after"]):
                break

    @rule(tenant=tenants, other=tenants)
    def list_with_the_cursor_of_another(self, tenant: str, other: str) -> None:
        page = self.ask(other, "GET", "/v1/conversations?limit=1").json
        answer = self.ask(tenant, "GET", f"/v1/conversations?after={page['after'] or ''}", remember=False)
        # A cursor is its tenant's own.
        assert answer.status == (400 if page["after"] and other != tenant else 200), answer.raw
        if answer.status == 200:
            assert {each["tenant"] for each in answer.json["data"]} <= {tenant}

    @rule(tenant=tenants, number=which)
    def get_response(self, tenant: str, number: int) -> None:
        id = self.known.any_id(number)
        answer = self.ask(tenant, "GET", f"/v1/responses/{quote(id, safe='')}")
        assert answer.status in ((200, 404) if self.known.ids.get(id) == tenant else (404,)), answer.raw

    # -- what goes wrong

    @rule(tenant=tenants, path=st.sampled_from(["/tokenize", "/v1/messages/count_tokens"]))
    def count(self, tenant: str, path: str) -> None:
        body = request_to(COMPLETIONS if path == "/tokenize" else MESSAGES, self.known.word(tenant))
        assert self.ask(tenant, "POST", path, body).status == 200

    @rule(tenant=tenants, path=paths, number=st.integers(0, 6))
    def err(self, tenant: str, path: str, number: int) -> None:
        word, id = self.known.word(tenant), self.known.id(tenant)
        body = request_to(path, word)
        wrong: list[tuple[str, Any, dict[str, str]]] = [
            (path, json.dumps(body).encode()[:-2], {}),
            (path, {**body, "model": id}, {}),
            (path, {**body, "conversation_id": f"{id}\n{word}"}, {}),
            (path, {**body, "cache_salt": [word]}, {}),
            (path, {**body, "messages": word, "prompt": {word: word}, "input": {word: word}}, {}),
            (f"/v1/{id}/x", body, {}),
            (path, body, {"X-Carryback-Reuse": id}),
        ]
        where, sent, headers = wrong[number]
        assert self.ask(tenant, "POST", where, sent, headers).status in (400, 404)

    @rule(tenant=tenants, path=paths, key=st.sampled_from(["", "half", "other", "basic"]))
    def be_nobody(self, tenant: str, path: str, key: str) -> None:
        given = {"": "", "half": f"Bearer {KEYS[tenant][:-3]}", "other": f"Bearer {KEYS[tenant]}x",
                 "basic": f"Basic {KEYS[tenant]}"}  # fmt: skip
        headers = {"Authorization": given[key]} if given[key] else {}
        answer = self.ask(tenant, "POST", path, request_to(path, self.known.word(tenant)), headers, key=False)
        assert answer.status == 401

    @rule(tenant=tenants, path=paths, streams=st.booleans(), hop=st.sampled_from(["prefill", "decode"]),
          kind=st.sampled_from(["status", "drop", "cut", "error", "load", "leave"]))  # fmt: skip
    def fail(self, tenant: str, path: str, streams: bool, hop: str, kind: str) -> None:
        word = self.known.word(tenant)
        said = json.dumps(
            {"error": {"message": f"cannot do {word}", "type": "x", "param": None, "code": 500}}
        )
        faults: dict[str, dict[str, Any]] = {
            "status": {"status": 500, "error": said, "times": 2}, "drop": {"drop": "before_status", "times": 2},
            "cut": {"drop": 2}, "error": {"error_after": 1}, "load": {"fail_load": True},
            "leave": {"first_delay_s": 5.0, "status_delay_s": 5.0},
        }  # fmt: skip
        engine = self.router.prefill if hop == "prefill" else self.router.decode
        engine.fault(hop=hop, contains=word, **faults[kind])
        headers = {"X-Conversation-ID": self.known.id(tenant)}
        body = request_to(path, f"{word} {TEXT}", stream=streams)
        try:
            if kind == "leave":
                with pytest.raises(httpx.ReadTimeout):
                    self.ask(tenant, "POST", path, body, headers, timeout_s=0.1)
            else:
                assert self.ask(tenant, "POST", path, body, headers).status in (200, 500, 502, 503)
        finally:
            engine.faults.clear()

    # -- all of it

    def ask(
        self, tenant: str, method: str, path: str, body: Any = None, headers: Mapping[str, str] = {}, *,
        key: bool = True, remember: bool = True, timeout_s: float = 30.0,
    ) -> Answer:  # fmt: skip
        """A request, whose answer has nothing of the others' in it."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        own = {"X-Request-Id": self.known.id(tenant), "Content-Type": "application/json"}
        own |= {"Authorization": f"Bearer {KEYS[tenant]}"} if key else {}
        if remember:
            self.known.sent[tenant].update(NAMES.findall(f"{path} {headers} {(data or b'').decode()}"))
        got = self.router.client.request(
            method, self.router.url + path, content=data, headers={**own, **headers}, timeout=timeout_s
        )
        answer = Answer(got.status_code, dict(got.headers), got.content)
        text = "\n".join([*map(str, got.headers.multi_items()), got.content.decode()])
        assert self.known.told(tenant, text) == []
        self.learn(tenant, answer)
        return answer

    def learn(self, tenant: str, answer: Answer) -> None:
        """What others may not know from now on."""
        text = f"{answer.headers} {answer.raw.decode()}"
        for id in NAMES.findall(text):
            if id.startswith(("c-", "resp_")):
                self.known.ids.setdefault(id, tenant)
        if answer.status == 200 and "choices" in text and (said := answer.text):
            self.known.answers[tenant].append(said)


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRouter]:
    """A router that the three have keys of."""
    keys = [f"{name}={key}" for name, key in KEYS.items()]
    with LiveRouter(tmp_path_factory.mktemp("router"), api_keys=keys, prefill_lease_s=2.0) as router:
        yield router


def test_nothing_of_a_tenant_is_told_to_another(router: LiveRouter) -> None:
    known = Secrets()
    run_state_machine_as_test(
        lambda: Tenants(router, known),
        settings=settings(
            max_examples=8 * FACTOR, stateful_step_count=30, derandomize=FACTOR == 1, database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],  # the router remembers what was before, so that nothing can be tried again
        ),
    )  # fmt: skip
    router.check_well(KEYS["beluga"])
    metrics = router.metrics()
    router.stop()
    router.check_log()
    check_metrics(metrics, known)
    check_log(router, known)


def check_metrics(metrics: str, known: Secrets) -> None:
    """Nothing in them is a client's, but for the names of tenants."""
    answers = [each for name in KEYS for each in known.answers[name]]
    assert NAMES.findall(metrics) == []
    assert [each for each in (*KEYS.values(), *answers) if each in metrics] == []
    assert all(name in metrics for name in KEYS)


def check_log(router: LiveRouter, known: Secrets) -> None:
    """No prompt, answer or key; and ids in the lines of those alone who sent them."""
    text = router.log.read_text()
    answers = [each for name in KEYS for each in known.answers[name]]
    assert known.words.keys() & set(NAMES.findall(text)) == set()
    assert [each for each in (*KEYS.values(), *answers) if each in text] == []
    lines = [line for line in text.splitlines() if line.startswith("{")]
    assert len(lines) > 20
    for fields in map(json.loads, lines):
        tenant = fields.get("tenant", "")
        if not tenant:  # nobody knows whose that request was
            fields.pop("request_id", None)
        assert known.told(tenant, json.dumps(fields)) == []
