"""The engine's publisher: what subscribers hear, over real sockets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest
import zmq
from carryback.wire import events
from carryback.wire.curve import key_pair
from carryback_vllm.events import HELLO_INTERVAL_S, MAX_TOLD_BYTES, Publisher

WITHIN_MS = 20_000


@pytest.fixture
def address() -> str:
    with zmq.Context() as context, context.socket(zmq.PUB) as probe:
        port = probe.bind_to_random_port("tcp://127.0.0.1")
    return f"tcp://127.0.0.1:{port}"


@contextmanager
def publisher(address: str, secret: str | None = None) -> Iterator[Publisher]:
    made = Publisher(address, "engine", capacity=100, secret=secret)
    try:
        yield made
    finally:
        made.close()


class Subscriber:
    """Hears what an engine publishes: `hello`, and the events of one router."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        *,
        router: str = "",
        secret: str | None = None,
        own: tuple[bytes, bytes] | None = None,
    ) -> None:
        self.socket = context.socket(zmq.SUB)
        if secret is not None:
            public, private = key_pair(secret)
            self.socket.curve_serverkey = public
            self.socket.curve_publickey, self.socket.curve_secretkey = own or (public, private)
        self.socket.subscribe(router.encode())
        self.socket.subscribe(events.HELLO_TOPIC)
        self.socket.connect(address)

    def next(self, kind: type[events.Event], timeout_ms: int = WITHIN_MS) -> events.Event | None:
        """The next event of a kind; None if there is none in time."""
        deadline = time.monotonic() + timeout_ms / 1000
        while self.socket.poll(max(int((deadline - time.monotonic()) * 1000), 0)):
            event = events.decode(self.socket.recv_multipart()[-1])
            if isinstance(event, events.Hello):
                assert abs(event.time_ns - time.time_ns()) < 60e9
                event = msgspec.structs.replace(event, time_ns=0)
            if isinstance(event, kind):
                return event
        return None


@pytest.fixture
def subscribe(address: str) -> Iterator[Callable[..., Subscriber]]:
    with zmq.Context() as context:
        made: list[Subscriber] = []

        def connect(**options: object) -> Subscriber:
            made.append(Subscriber(context, address, **options))  # type: ignore[arg-type]
            return made[-1]

        yield connect
        for each in made:
            each.socket.close(linger=0)


def test_all_that_is_announced_is_heard(address: str, subscribe: Callable[..., Subscriber]) -> None:
    with publisher(address) as engine:
        router = subscribe()
        assert router.next(events.Hello) == events.Hello("engine", 0, pinned=0, capacity=100, takes_go=True)
        engine.pinned = 7
        engine.leased = 3
        engine.held("key", tokens=64, blocks=7, hold_s=12.5, tip=b"\xff" * 16, generated=9)
        assert router.next(events.Held) == events.Held("engine", 1, "key", 64, 7, 12.5, b"\xff" * 16, 7, 9)
        assert router.next(events.Hello) == events.Hello("engine", 1, 7, 100, takes_go=True, leased=3)
        engine.pinned = engine.leased = 0
        engine.released("key", "asked")
        assert router.next(events.Released) == events.Released("engine", 2, "key", "asked", 0)
        engine.declined("key", "unverified")
        assert router.next(events.Declined) == events.Declined("engine", 3, "key", "unverified")
        engine.prefilled("key", b"{}")
        assert router.next(events.Prefilled) == events.Prefilled("engine", 4, "key", b"{}")
        engine.found("key", 100, 64)
        assert router.next(events.Found) == events.Found("engine", 5, "key", 100, 64)
        # Another engine's answer is no router's event, and not numbered.
        leased = events.Leased("engine", "asker", "lease", 64, b"{}", b"\xff" * 64)
        engine.answer(leased)
        assert router.next(events.Leased) == leased
        assert router.next(events.Hello) == events.Hello("engine", 5, pinned=0, capacity=100, takes_go=True)


def test_an_engine_says_what_it_is(address: str, subscribe: Callable[..., Subscriber]) -> None:
    facts = {"model": "m", "block_size": 32, "backends": ["UCX"]}
    engine = Publisher(address, "engine", capacity=1, about=facts)
    try:
        hello = subscribe().next(events.Hello)
        assert isinstance(hello, events.Hello)
        assert events.about_of(hello) == facts
    finally:
        engine.close()


COMMANDS = [
    events.Ask("asker", "lease", b"\xff" * 64, 16, 100),
    events.Keep(["lease", "another"]),
    events.Done(["lease"]),
    events.Release(["key"]),
    events.Forget(),
]


def test_commands_are_heard_in_their_order_and_time_passes(address: str) -> None:
    heard: list[events.Command] = []
    ticks: list[None] = []
    engine = Publisher(
        address,
        "engine",
        capacity=1,
        on_command=lambda each: (ticks if each is None else heard).append(each),  # type: ignore[arg-type]
    )
    try:
        with zmq.Context() as context, context.socket(zmq.XSUB) as router:
            router.setsockopt(zmq.LINGER, 0)
            router.connect(address)
            for command in COMMANDS:
                router.send(events.encode_command(command))
            router.send(events.encode_command(events.Go("last", b"{}")))
            assert not engine.is_told("first")
            assert told(engine, "last") == b"{}"
        assert heard == COMMANDS
        count = len(ticks)
        wait_for(lambda: len(ticks) > count)
    finally:
        engine.close()


def test_a_command_that_fails_ends_nothing(address: str, subscribe: Callable[..., Subscriber]) -> None:
    def fail(command: events.Command | None) -> None:
        if command is not None:
            raise RuntimeError("ours")

    engine = Publisher(address, "engine", capacity=1, on_command=fail)
    try:
        with zmq.Context() as context, context.socket(zmq.XSUB) as router:
            router.setsockopt(zmq.LINGER, 0)
            router.connect(address)
            for command in COMMANDS:
                router.send(events.encode_command(command))
            router.send(events.encode_command(events.Go("a", b"{}")))
            assert told(engine, "a") == b"{}"
        hello = subscribe().next(events.Hello)
        assert isinstance(hello, events.Hello)
        assert hello.faults == len(COMMANDS)
    finally:
        engine.close()


def test_who_was_told_is_known_until_it_is_taken(address: str) -> None:
    with publisher(address) as engine, zmq.Context() as context, context.socket(zmq.XSUB) as router:
        router.setsockopt(zmq.LINGER, 0)
        router.connect(address)
        router.send(events.encode_command(events.Go("a", b"{}")))
        wait_for(lambda: engine.is_told("a"))
        assert engine.told("a") == b"{}"
        assert not engine.is_told("a")


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_MS / 1000
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def told(engine: Publisher, key: str) -> bytes | None:
    """What a router told a waiting request, once it is there."""
    deadline = time.monotonic() + WITHIN_MS / 1000
    while (params := engine.told(key)) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return params


@pytest.mark.parametrize("secret", [None, "right"])
def test_a_waiting_request_is_told_once_what_a_router_said(address: str, secret: str | None) -> None:
    with publisher(address, secret) as engine, zmq.Context() as context, context.socket(zmq.XSUB) as router:
        router.setsockopt(zmq.LINGER, 0)
        if secret is not None:
            public, private = key_pair(secret)
            router.curve_serverkey = router.curve_publickey = public
            router.curve_secretkey = private
        router.connect(address)
        router.send(b"\x01" + events.HELLO_TOPIC)
        assert router.poll(WITHIN_MS)
        assert engine.told("a") is None
        router.send(b"\x02what is this")
        for _ in range(2):
            router.send(events.encode_command(events.Go("a", b'{"a":1}')))
        router.send(events.encode_command(events.Go("b", b"{}")))
        assert told(engine, "b") == b"{}"
        assert told(engine, "a") == b'{"a":1}'
        assert engine.told("a") is None
        router.send(events.encode_command(events.Go("a", b"again")))
        router.send(events.encode_command(events.Go("c", b"{}")))
        assert told(engine, "c") == b"{}"
        assert engine.told("a") is None


def test_what_nobody_takes_does_not_pile_up(address: str) -> None:
    with publisher(address) as engine, zmq.Context() as context, context.socket(zmq.XSUB) as router:
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.SNDHWM, 0)
        router.connect(address)
        piece = bytes(MAX_TOLD_BYTES // 10)
        for number in range(30):
            router.send(events.encode_command(events.Go(str(number), piece)))
        assert told(engine, "29") == piece
        assert [engine.told(str(number)) for number in range(20)] == [None] * 20


def test_keys_do_not_pile_up_either(address: str) -> None:
    with publisher(address) as engine, zmq.Context() as context, context.socket(zmq.XSUB) as router:
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.SNDHWM, 0)
        router.connect(address)
        # As routers never write it.
        long = msgspec.msgpack.encode({"type": "go", "key": "k" * 1_000_000, "params": b""})
        for _ in range(10):
            router.send(b"\x02" + bytes([events.VERSION]) + long)
        router.send(events.encode_command(events.Go("last", b"{}")))
        assert told(engine, "last") == b"{}"
        assert engine._told_bytes < 1000


def test_a_frame_that_is_too_long_costs_its_sender_the_connection(address: str) -> None:
    with publisher(address) as engine, zmq.Context() as context:
        with context.socket(zmq.XSUB) as router:
            router.setsockopt(zmq.LINGER, 0)
            router.setsockopt(zmq.RECONNECT_IVL, -1)
            router.connect(address)
            router.send(b"\x01" + events.HELLO_TOPIC)
            assert router.poll(WITHIN_MS)
            router.send(events.encode_command(events.Go("a", bytes(events.MAX_FRAME_BYTES))))
            router.send(events.encode_command(events.Go("b", b"{}")))
        with context.socket(zmq.XSUB) as router:
            router.setsockopt(zmq.LINGER, 0)
            router.connect(address)
            router.send(events.encode_command(events.Go("c", b"{}")))
            assert told(engine, "c") == b"{}"
        assert engine.told("a") is engine.told("b") is None


@pytest.mark.parametrize(
    "frame",
    [
        b"\x02" + bytes([events.VERSION]) + b"\x82\xa4type\xa2go\xa6params" + b"\x91" * 100_000,
        b"\x02" + bytes([events.VERSION]) + b"\x81" * 100_000,
        b"\x02",
        b"\x03",
    ],
)
def test_nothing_that_a_router_sends_ends_the_events(address: str, frame: bytes) -> None:
    with publisher(address) as engine, zmq.Context() as context, context.socket(zmq.XSUB) as router:
        router.setsockopt(zmq.LINGER, 0)
        router.connect(address)
        router.send(frame)
        router.send(events.encode_command(events.Go("a", b"{}")))
        assert told(engine, "a") == b"{}"


def test_the_events_go_on_after_a_fault_and_say_how_many_there_were(
    address: str, subscribe: Callable[..., Subscriber], monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = iter([RuntimeError("one"), RecursionError("two"), zmq.ZMQError(11)])
    hear = Publisher._hear

    def fails_first(self: Publisher, frame: bytes) -> None:
        for error in faults:
            raise error
        hear(self, frame)

    monkeypatch.setattr(Publisher, "_hear", fails_first)
    with publisher(address) as engine, zmq.Context() as context, context.socket(zmq.XSUB) as router:
        router.setsockopt(zmq.LINGER, 0)
        router.connect(address)
        for number in range(4):
            router.send(events.encode_command(events.Go(str(number), b"{}")))
        assert told(engine, "3") == b"{}"
        assert engine.told("0") is None
        listener = subscribe(router="key")
        hello = listener.next(events.Hello)
        assert isinstance(hello, events.Hello)
        assert hello.faults == 3
        engine.declined("key", "unverified")
        assert listener.next(events.Declined)


def test_a_burst_of_events_is_taken_whole(address: str, subscribe: Callable[..., Subscriber]) -> None:
    count = 20_000
    with publisher(address) as engine:
        router = subscribe(router="last")
        assert router.next(events.Hello)
        for _ in range(count):
            engine.declined("another", "unverified")
        engine.declined("last", "unverified")
        assert router.next(events.Declined) == events.Declined("engine", count + 1, "last", "unverified")


def test_what_is_held_for_nobody_in_particular_is_in_the_hello(
    address: str, subscribe: Callable[..., Subscriber]
) -> None:
    with publisher(address) as engine:
        router = subscribe()
        assert router.next(events.Hello)
        engine.pinned = 5  # as on a prefill engine, which announces nothing
        for _ in range(2):
            heard = router.next(events.Hello)
        assert heard == events.Hello("engine", 0, pinned=5, capacity=100, takes_go=True)


def test_one_router_is_heard_of_while_another_is_busy(
    address: str, subscribe: Callable[..., Subscriber]
) -> None:
    with publisher(address) as engine:
        idle = subscribe(router="idle.")
        assert idle.next(events.Hello)
        heard = 0
        while heard < 2:  # the test's time ends it if nothing comes
            engine.declined("busy.1", "unverified")
            time.sleep(HELLO_INTERVAL_S / 50)
            heard += idle.next(events.Hello, timeout_ms=0) is not None
        assert idle.next(events.Declined, timeout_ms=0) is None


def test_only_who_has_the_key_hears(address: str, subscribe: Callable[..., Subscriber]) -> None:
    with publisher(address, secret="right"):
        stranger = zmq.curve_keypair()
        without = [
            subscribe(),
            subscribe(secret="wrong"),
            # It knows the engine's public key, which is no secret, and has a key pair of its own.
            subscribe(secret="right", own=stranger),
        ]
        router = subscribe(secret="right")
        for _ in range(4):  # long enough for all that could hear
            assert isinstance(router.next(events.Hello), events.Hello)
        assert [each.next(events.Hello, timeout_ms=100) for each in without] == [None, None, None]


def test_who_expects_a_key_hears_no_engine_without(
    address: str, subscribe: Callable[..., Subscriber]
) -> None:
    with publisher(address):
        router = subscribe(secret="right")
        anybody = subscribe()
        for _ in range(4):
            assert anybody.next(events.Hello)
        assert router.next(events.Hello, timeout_ms=100) is None


@pytest.mark.parametrize("secret", [None, "right"])
def test_an_address_in_use_is_named(address: str, secret: str | None) -> None:
    with publisher(address), pytest.raises(RuntimeError, match="set carryback_events") as refused:
        Publisher(address, "other", capacity=1, secret=secret)
    assert address in str(refused.value)
