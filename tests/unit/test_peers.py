"""What a prefill engine asks decode engines, over real sockets; the engines are publishers with answers by hand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq
from carryback.wire import events
from carryback_vllm import peers as peers_module
from carryback_vllm.events import Publisher
from carryback_vllm.peers import Peers, Question

WITHIN_S = 20.0
HASHES = [bytes([number]) * events.HASH_BYTES for number in range(4)]


def free_address() -> str:
    with zmq.Context() as context, context.socket(zmq.PUB) as probe:
        return f"tcp://127.0.0.1:{probe.bind_to_random_port('tcp://127.0.0.1')}"


def until(is_so: Callable[[], Any]) -> Any:
    """What is so, as soon as it is."""
    deadline = time.monotonic() + WITHIN_S
    while not (found := is_so()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return found


class Decode:
    """A decode engine that has so many tokens of every prompt; None: it never answers."""

    def __init__(
        self, tokens: int | None, address: str = "", *, secret: str | None = None, reason: str = ""
    ) -> None:
        self.tokens, self.reason = tokens, reason
        self.address = address or free_address()
        self.name = f"engine at {self.address}"
        self.heard: list[events.Command] = []
        self._ready = threading.Event()
        self.publisher = Publisher(
            self.address, self.name, capacity=9, secret=secret, on_command=self._on_command
        )
        self.is_closed = False
        self._ready.set()

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.publisher.close()

    def _on_command(self, command: events.Command | None) -> None:
        if command is None:
            return
        self._ready.wait()
        self.heard.append(command)
        if isinstance(command, events.Ask) and self.tokens is not None:
            self.answer(command, self.tokens)

    def answer(self, ask: events.Ask, tokens: int) -> None:
        record = b"{}" if tokens and not self.reason else b""
        self.publisher.answer(
            events.Leased(
                self.name, ask.asker, ask.lease, tokens, record, b"", self.reason or "nothing" * (not tokens)
            )
        )

    def asked(self) -> list[events.Ask]:
        return [each for each in self.heard if isinstance(each, events.Ask)]

    def done(self) -> list[str]:
        """The leases of which it was told that they are over."""
        return [lease for each in self.heard if isinstance(each, events.Done) for lease in each.leases]

    def kept(self) -> list[str]:
        return [lease for each in self.heard if isinstance(each, events.Keep) for lease in each.leases]


@pytest.fixture
def engines() -> Iterator[Callable[..., Decode]]:
    made: list[Decode] = []

    def make(*args: Any, **options: Any) -> Decode:
        made.append(Decode(*args, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def asker() -> Iterator[Callable[..., Peers]]:
    made: list[Peers] = []

    def make(timeout_s: float = WITHIN_S, secret: str | None = None) -> Peers:
        made.append(Peers("prefill", secret=secret, timeout_s=timeout_s))
        return made[-1]

    yield make
    for each in made:
        each.close()
        assert not each._thread.is_alive()
        assert each._guarded.failures == 0


def ask(peers: Peers, request: str, *addresses: str) -> Question:
    """What engines say of a prompt."""
    peers.ask(request, addresses, HASHES, block_size=16, max_tokens=60)
    answer: Question = until(lambda: peers.answer(request))
    return answer


def assert_nothing_is_left(peers: Peers) -> None:
    assert (peers._questions, peers._by_lease) == ({}, {})


@pytest.mark.parametrize("secret", [None, "right"])
def test_the_longest_wins_and_the_others_are_told(
    engines: Callable[..., Decode], asker: Callable[..., Peers], secret: str | None
) -> None:
    less, more, nothing = (engines(tokens, secret=secret) for tokens in (32, 48, 0))
    peers = asker(secret=secret)
    question = ask(peers, "a", less.address, more.address, nothing.address)
    assert question.best is not None
    assert (question.best.engine, question.best.tokens, len(question.answers)) == (more.name, 48, 3)
    (asked,) = more.asked()
    assert (asked.hashes, asked.block_size, asked.max_tokens) == (b"".join(HASHES), 16, 60)
    leases = {each.asked()[0].lease for each in (less, more, nothing)}
    assert len(leases) == 3
    until(lambda: less.done() and nothing.done())
    assert more.done() == []
    assert peers.answer("a") is question  # as often as it is asked
    peers.end("a")
    assert until(more.done) == [question.best.lease]
    assert_nothing_is_left(peers)
    peers.end("a")  # of which nothing is known
    assert not peers.is_asked("a")


def test_an_answer_without_a_lease_is_none(
    engines: Callable[..., Decode], asker: Callable[..., Peers]
) -> None:
    full, less = engines(48, reason="too_many_leases"), engines(16)
    question = ask(asker(), "a", full.address, less.address)
    assert question.best is not None
    assert question.best.engine == less.name
    assert {each.tokens for each in question.answers.values()} == {48, 16}


def test_one_that_never_answers_costs_the_time_once(
    engines: Callable[..., Decode], asker: Callable[..., Peers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "LEFT_OUT_S", 1000.0)
    monkeypatch.setattr(peers_module, "MAX_LEFT_OUT_S", 1000.0)
    silent, good = engines(None), engines(32)
    peers = asker(timeout_s=0.5)
    question = ask(peers, "a", silent.address, good.address)
    assert question.best is not None
    assert question.best.engine == good.name
    assert [*question.answers] == [good.address]
    # Its lease is over, should it have been given.
    assert until(silent.done) == [silent.asked()[0].lease]
    peers.ask("b", [silent.address, good.address], HASHES, block_size=16, max_tokens=60)
    assert [*peers._questions["b"].leases.values()] == [good.address]
    only = ask(peers, "c", silent.address)
    assert (only.best, only.answers) == (None, {})
    for name in "abc":
        peers.end(name)
    assert len(silent.asked()) == 1
    assert_nothing_is_left(peers)


def test_many_prompts_at_once_leave_a_silent_engine_out_as_one_does(
    engines: Callable[..., Decode], asker: Callable[..., Peers]
) -> None:
    """It is asked again soon; and in the end it is known how often that was."""
    silent = engines(None)
    peers = asker(timeout_s=0.1)
    for number in range(50):
        peers.ask(str(number), [silent.address], HASHES, block_size=16, max_tokens=60)
    until(lambda: len(silent.asked()) == 50)
    until(lambda: all(peers.answer(str(number)) for number in range(50)))
    peer = peers._peers[silent.address]
    assert peer.silent == 1
    assert peer.left_out_until - time.monotonic() <= peers_module.LEFT_OUT_S


def test_an_engine_that_was_silent_for_days_is_left_out_still(
    engines: Callable[..., Decode], asker: Callable[..., Peers]
) -> None:
    silent = engines(None)
    peers = asker(timeout_s=0.1)
    ask(peers, "a", silent.address)
    peer = peers._peers[silent.address]
    peer.silent, peer.left_out_until = 5000, 0.0
    ask(peers, "b", silent.address)
    assert 0 < peer.left_out_until - time.monotonic() <= peers_module.MAX_LEFT_OUT_S


def test_one_that_was_silent_comes_back(
    engines: Callable[..., Decode], asker: Callable[..., Peers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "LEFT_OUT_S", 0.1)
    engine = engines(None)
    peers = asker(timeout_s=0.1)
    assert ask(peers, "a", engine.address).best is None
    until(engine.asked)
    until(lambda: not peers._is_left_out(engine.address, time.monotonic()))
    engine.tokens = 32
    peers._timeout_s = WITHIN_S
    assert ask(peers, "b", engine.address).best is not None
    assert peers._peers[engine.address].silent == 0


def test_a_late_answer_brings_it_back_and_its_lease_is_over(
    engines: Callable[..., Decode], asker: Callable[..., Peers]
) -> None:
    engine = engines(None)
    peers = asker(timeout_s=0.1)
    question = ask(peers, "a", engine.address)
    (asked,) = until(engine.asked)
    assert until(engine.done) == [asked.lease]
    assert peers._is_left_out(engine.address, time.monotonic())
    engine.answer(asked, 32)
    until(lambda: not peers._is_left_out(engine.address, time.monotonic()))
    assert peers.answer("a") is question
    assert (question.best, question.answers) == (None, {})
    peers.end("a")
    assert_nothing_is_left(peers)


def test_answers_for_others_are_none(engines: Callable[..., Decode], asker: Callable[..., Peers]) -> None:
    engine = engines(None)
    peers = asker(timeout_s=1.0)
    peers.ask("a", [engine.address], HASHES, block_size=16, max_tokens=60)
    (asked,) = until(engine.asked)
    engine.answer(events.Ask("another", asked.lease, b"", 16, 60), 48)
    engine.answer(events.Ask(asked.asker, "another's", b"", 16, 60), 48)
    assert until(lambda: peers.answer("a")).best is None


def test_an_engine_that_is_asked_at_two_addresses_answers_each_once(
    engines: Callable[..., Decode], asker: Callable[..., Peers]
) -> None:
    """It publishes what it says on all its links."""
    engine = engines(None)
    peers = asker()
    other = engine.address.replace("127.0.0.1", "localhost")
    peers.ask("a", [engine.address, other], HASHES, block_size=16, max_tokens=60)
    first, second = until(lambda: len(engine.asked()) == 2 and engine.asked())
    engine.answer(first, 32)
    until(lambda: len(peers._questions["a"].answers) == 1)
    assert peers.answer("a") is None
    engine.answer(second, 16)
    question = until(lambda: peers.answer("a"))
    assert question.best.tokens == 32
    assert sorted(each.tokens for each in question.answers.values()) == [16, 32]
    assert until(engine.done) == [second.lease]


@pytest.mark.parametrize(("theirs", "ours"), [("right", "wrong"), ("right", None), (None, "right")])
def test_without_their_key_there_is_no_answer(
    engines: Callable[..., Decode], asker: Callable[..., Peers], theirs: str | None, ours: str | None
) -> None:
    engine = engines(32, secret=theirs)
    peers = asker(timeout_s=0.5, secret=ours)
    question = ask(peers, "a", engine.address)
    assert (question.best, question.answers, engine.heard) == (None, {}, [])


def test_an_engine_that_starts_again_is_asked_again(
    engines: Callable[..., Decode], asker: Callable[..., Peers]
) -> None:
    old = engines(16)
    peers = asker()
    assert ask(peers, "a", old.address).best is not None
    old.close()
    new = engines(48, old.address)
    question = ask(peers, "b", new.address)
    assert question.best is not None
    assert question.best.tokens == 48
    peers.end("a")  # the new one knows nothing of that
    peers.end("b")
    until(new.done)
    assert_nothing_is_left(peers)


def test_leases_are_kept_while_they_are_needed(
    engines: Callable[..., Decode], asker: Callable[..., Peers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "KEEP_INTERVAL_S", 0.02)
    less, more = engines(16), engines(32)
    peers = asker()
    for name in "ab":
        ask(peers, name, less.address, more.address)
    # All that was asked at first, and then those that are read.
    leases = [each.lease for each in more.asked()]
    until(lambda: less.done() and more.kept()[-2:] == leases)
    peers.end("a")
    until(lambda: more.kept()[-2:] == [leases[1]] * 2)
    peers.end("b")
    until(lambda: sorted(more.done()) == sorted(leases))
    count = len(more.kept())
    until(lambda: ask(peers, "c", more.address))
    assert set(more.kept()[count:]) <= {more.asked()[-1].lease}


def test_a_link_that_nobody_uses_is_closed(
    engines: Callable[..., Decode], asker: Callable[..., Peers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "KEEP_INTERVAL_S", 0.02)
    monkeypatch.setattr(peers_module, "_IDLE_S", 0.1)
    engine = engines(16)
    peers = asker()
    ask(peers, "a", engine.address)
    assert engine.address in peers._peers
    peers.end("a")
    until(lambda: not peers._peers)
    assert ask(peers, "b", engine.address).best is not None


def test_a_prompt_without_a_full_block_asks_nobody(
    engines: Callable[..., Decode], asker: Callable[..., Peers]
) -> None:
    engine = engines(16)
    peers = asker()
    peers.ask("a", [engine.address], [], block_size=16, max_tokens=9)
    question = peers.answer("a")
    assert question is not None
    assert (question.best, engine.heard) == (None, [])
    with pytest.raises(KeyError):
        peers.answer("b")
