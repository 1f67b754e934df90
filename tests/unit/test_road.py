"""Both hops of a request, with engines that follow a script: what each is told, in which order, and what is left there."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

import pytest
from carryback.wire.events import Held, Released
from carryback_server.access_log import Entry
from carryback_server.answer import Answer
from carryback_server.body import Body
from carryback_server.config import RouterConfig
from carryback_server.costs import Costs
from carryback_server.endpoints import ENDPOINTS
from carryback_server.engine_client import Blame, EngineDown, Prompt, Refused, Role, Visit, Why
from carryback_server.errors import ApiError
from carryback_server.hints import RequestIdentity
from carryback_server.live import Live, Step
from carryback_server.metrics import Metrics
from carryback_server.pipeline.context import Identified, RequestContext, Shared
from carryback_server.pipeline.decode import Decoding
from carryback_server.pipeline.hold import Holding
from carryback_server.pipeline.hops import carry
from carryback_server.pipeline.prefill import Prefilled
from carryback_server.state import Conversation, Location, MemoryState
from carryback_server.tracing import Trace
from carryback_server.upstream import Reply

CHAT = "/v1/chat/completions"
TIP = b"0123456789abcdef"
NOW = 1000.0


class _Closed:
    def close(self) -> None:
        pass


def answer(status: int = 200) -> Answer:
    return Answer(status, "application/json", b"{}", False, cast(Reply, _Closed()))


def given(reason: str = "verified", **report: Any) -> dict[str, Any]:
    """What a prefill engine says."""
    reuse = {"outcome": "hit", "tokens": 64, "reason": reason, "recomputed": 10, "found": 64} | report
    return {"remote_block_ids": [[1, 2]], "carryback_reuse": reuse}


class Engine:
    """An engine that does what it is told, at once.

    Attributes:
        does: what becomes of the requests sent to it, in turn: an error to raise, an event to wait for, an answer;
            without, all is well.
        told: all that it was told, in order, its key last.
    """

    def __init__(self, role: Role, name: str) -> None:
        self.role = role
        self.name = name
        self.run = f"run-{name}"
        self.load = self.in_flight = self.pinned = 0
        self.capacity, self.block_size = 100, 16
        self.takes_go = role == "decode"
        self.is_up = self.is_heard = True
        self.url, self.events_address = f"http://{name}", f"tcp://{name}"
        self.does: list[Any] = []
        self.requests: list[dict[str, Any]] = []
        self.gone: dict[str, dict[str, Any]] = {}
        self.released: list[str] = []
        self.wellbeing: list[str] = []
        self._going: dict[str, asyncio.Event] = {}

    async def _do(self, usual: Any) -> Any:
        does = self.does.pop(0) if self.does else usual
        if isinstance(does, asyncio.Event):
            await does.wait()
            return usual
        if isinstance(does, BaseException):
            raise does
        return does

    async def prefill(
        self,
        prompt: Prompt,
        params: dict[str, Any],
        *,
        key: str,
        headers: Mapping[str, str],
        timeout_s: float,
    ) -> dict[str, Any]:
        self.requests.append(params)
        done: dict[str, Any] = await self._do(given())
        return done

    async def decode(
        self, prompt: Prompt, params: dict[str, Any], *, key: str, headers: Mapping[str, str]
    ) -> Answer:
        self.requests.append(params)
        if "carryback_await" in params and not self.does and key not in self.gone:
            self._going[key] = asyncio.Event()
            await self._going[key].wait()
        done: Answer = await self._do(answer())
        return done

    def go(self, key: str, params: Mapping[str, Any]) -> None:
        self.gone[key] = dict(params)
        if key in self._going:
            self._going[key].set()

    def release(self, *keys: str) -> None:
        self.released += keys

    async def forget(self) -> bool:
        return self.is_heard

    def busy(self, tokens: int, blame: Blame | None = None) -> Visit:
        return Visit(self, tokens, blame)

    def within(self, timeout_s: float) -> asyncio.Timeout:
        return asyncio.timeout(timeout_s)

    def failed(self, why: Why) -> None:
        self.wellbeing.append("failed")

    def doubt(self, why: Why) -> None:
        self.wellbeing.append("doubt")

    def succeeded(self) -> None:
        self.wellbeing.append("succeeded")


class World:
    """Engines, and the road before them."""

    def __init__(self, prefill: int = 1, decode: int = 1, **settings: Any) -> None:
        self.prefills = [Engine("prefill", f"p{number}") for number in range(prefill)]
        self.decodes = [Engine("decode", f"d{number}") for number in range(decode)]
        self.unreadable: set[str] = set()
        self.config = RouterConfig(**settings)
        self.metrics = Metrics()
        self.state = MemoryState(
            max_conversations=100, responses_max_bytes=1000, on_message=lambda message: None
        )
        self.holding = Holding(self.config, self.state, self.metrics, self, clock=lambda: NOW)
        costs = Costs()
        self.shared = Shared(
            self.config,
            self,
            self.holding,
            self.metrics,
            costs,
            Live(costs.saved_s),
            lambda: next(self._keys),
        )
        self._keys = (f"k{number}" for number in itertools.count())
        self.freed = 0

    def of(self, role: Role, beside: Any = None) -> list[Engine]:
        return [each for each in (*self.prefills, *self.decodes) if each.role == role and each.is_up]

    def askable(self, prefill: Any) -> list[Engine]:
        return [
            each for each in self.decodes if each.is_up and each.is_heard and each.name not in self.unreadable
        ]

    def find(self, name: str) -> Engine | None:
        return next((each for each in self.decodes if each.name == name), None)

    def of_run(self, run: str) -> Engine | None:
        return next((each for each in self.decodes if each.run == run), None)

    def _free(self) -> None:
        self.freed += 1

    async def asked(self, name: str = "c", body: bytes = b'{"stream": true}', **fields: Any) -> Identified:
        """A request of a conversation, after the first step."""
        conversation = await self.state.open("t", name)
        conversation.turn = "turn"
        prompt = Prompt(CHAT, ENDPOINTS[CHAT], Body(body), self._free)
        usual: dict[str, Any] = {"came": NOW, "leaves": True, "hold_s": self.config.hold_s}
        return Identified(prompt, RequestIdentity(name), conversation, **usual | fields)

    async def ask(
        self,
        asked: Identified | None = None,
        relay: Callable[[Decoding, Answer], None] = lambda decoding, answer: None,
        ending: Literal["turn_end", "mid_turn", ""] = "turn_end",
    ) -> tuple[str, Prefilled, Answer]:
        """One request: the key of its decode, what the prefill hop gave, and its answer."""
        reported: list[Prefilled] = []

        def report(prefilled: Prefilled) -> None:
            reported.append(prefilled)
            self.context.entry.reuse = prefilled.reuse

        async def on_answer(decoding: Decoding, answer: Answer) -> tuple[str, Answer]:
            relay(decoding, answer)
            if ending:
                self.holding.ended(decoding.key, ending, self.context.had)
            return decoding.key, answer

        self.context = RequestContext(ENDPOINTS[CHAT], Trace({}), entry := Entry(CHAT), Step(entry))
        self.context.asked = asked or await self.asked()
        key, got = await carry(self.shared, self.context, report, on_answer)
        assert not any(each.in_flight for each in (*self.prefills, *self.decodes))
        return key, reported[0], got

    async def held(self, engine: Engine, key: str, *, blocks: int = 4, tokens: int = 64) -> None:
        """A decode engine says what it has of a request."""
        self.holding.on_event(engine, Held(engine.run, 1, key, tokens, blocks, 480.0, TIP, blocks))
        await asyncio.sleep(0.001)

    async def location(self, name: str = "c") -> Location | None:
        found = await self.state.get("t", name)
        return found.location if found is not None else None

    def sample(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"carryback_{name}", labels) or 0.0


def down(engine: Engine, **fields: Any) -> EngineDown:
    return EngineDown(engine, "told to fail", **fields)


# -- both hops


async def test_a_request_waits_at_its_decode_engine_and_goes_on_with_the_prompts_kv() -> None:
    world = World()
    (prefill,), (decode,) = world.prefills, world.decodes
    prefill.does = [computing := asyncio.Event()]
    asking = asyncio.create_task(world.ask())
    while not (prefill.requests and decode.requests):  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert prefill.load > 0
    assert decode.load > 0
    assert "carryback_await" in decode.requests[0]
    assert not decode.gone
    assert prefill.requests[0] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "carryback_key": prefill.requests[0]["carryback_key"],
        "carryback_tell": True,
        "hold_s": world.config.prefill_lease_s,
        "carryback_ask": ["tcp://d0"],
    }
    computing.set()
    key, prefilled, got = await asking
    assert got.status == 200
    assert decode.gone == {key: {"remote_block_ids": [[1, 2]], "carryback_cached": 64}}
    assert prefilled.reuse.header().startswith("hit; tokens=64; reason=verified; recomputed=10")
    assert (prefill.released, decode.released) == ([], [])
    assert (prefill.load, decode.load) == (0, 0)
    assert prefill.wellbeing == decode.wellbeing == ["succeeded"]
    assert world.freed == 1


async def test_with_admit_early_off_it_comes_when_its_prompt_is_computed() -> None:
    world = World(admit_early=False)
    key, _, _ = await world.ask()
    [request] = world.decodes[0].requests
    assert request["remote_block_ids"] == [[1, 2]]
    assert (request["carryback_key"], request["hold_s"]) == (key, 480)
    assert "carryback_await" not in request


async def test_what_needs_its_whole_prompt_at_a_decode_engine_goes_there_alone() -> None:
    world = World()
    asked = await world.asked(alone="several_answers", leaves=False, hold_s=0.0)
    _, prefilled, _ = await world.ask(asked)
    assert prefilled.reuse.reason == "several_answers"
    assert not world.prefills[0].requests
    assert "carryback_await" not in world.decodes[0].requests[0]


# -- whom to ask


def at(engine: Engine, **fields: Any) -> Location:
    """A conversation is at an engine."""
    usual: dict[str, Any] = {"run": engine.run, "tokens": 64, "until": 0.0, "turn": "", "tip": TIP, "at": NOW}
    return Location(engine=engine.name, key="k-last", **usual | fields)


async def test_the_engine_where_the_conversation_was_is_asked_first_and_gets_the_request() -> None:
    world = World(decode=5, ask_engines=3)
    await world.asked()
    await world.state.locate("t", "c", at(world.decodes[3]))
    await world.ask()
    asked = world.prefills[0].requests[0]
    assert asked["carryback_ask"][0] == "tcp://d3"
    assert len(set(asked["carryback_ask"])) == 3
    assert asked["carryback_tip"] == {"tokens": 64, "digest": TIP.hex()}
    assert len(world.decodes[3].requests) == 1


async def test_when_nobody_knows_it_several_are_asked_and_who_decodes_first() -> None:
    world = World(decode=5, ask_engines=3)
    await world.ask()
    [decoder] = [each for each in world.decodes if each.requests]
    asked = world.prefills[0].requests[0]
    assert asked["carryback_ask"][0] == decoder.events_address
    assert len(set(asked["carryback_ask"])) == 3
    assert "carryback_tip" not in asked


async def test_who_cannot_be_read_or_does_not_answer_is_not_asked() -> None:
    world = World(decode=4)
    world.unreadable = {"d0"}
    world.decodes[1].is_heard = world.decodes[2].is_up = False
    await world.ask()
    assert world.prefills[0].requests[0]["carryback_ask"] == ["tcp://d3"]


async def test_without_reuse_nobody_is_asked() -> None:
    world = World()
    await world.asked()
    await world.state.locate("t", "c", at(world.decodes[0]))
    world.prefills[0].does = [given("off", outcome="miss", tokens=0, found=0)]
    _, prefilled, _ = await world.ask(await world.asked(use=False, leaves=False))
    asked = world.prefills[0].requests[0]
    assert asked["carryback_ask"] == []
    assert "carryback_tip" not in asked
    assert prefilled.reuse.reason == "off"


@pytest.mark.parametrize(
    ("said", "reason"), [("overwritten", "engine_lost"), ("new", "engine_lost"), ("history_changed",) * 2]
)
async def test_an_engine_that_was_started_anew_is_why_less_was_found(said: str, reason: str) -> None:
    world = World()
    await world.asked()
    await world.state.locate("t", "c", at(world.decodes[0], run="another run"))
    world.prefills[0].does = [given(said, outcome="miss", tokens=0, found=0)]
    _, prefilled, _ = await world.ask()
    assert (prefilled.reuse.outcome, prefilled.reuse.reason) == ("miss", reason)


async def test_where_nobody_could_be_asked_that_is_said() -> None:
    world = World()
    world.decodes[0].is_heard = False
    world.prefills[0].does = [given("off", outcome="miss", tokens=0, found=0)]
    _, prefilled, _ = await world.ask()
    assert prefilled.reuse.reason == "no_answer"


async def test_what_was_asked_and_found_is_counted() -> None:
    world = World(decode=3)
    world.prefills[0].does = [given(holder="run-d1", asked=2, found=96)]
    _, prefilled, _ = await world.ask()
    assert prefilled.holder is world.decodes[1]
    assert world.sample("asked_engines_total", result="answered") == 2
    assert world.sample("asked_engines_total", result="silent") == 1
    assert world.sample("found_tokens_total") == 96


# -- a prefill engine fails


async def test_the_next_prefill_engine_gets_the_same_question_and_nothing_is_left_at_the_first() -> None:
    world = World(prefill=2)
    one, two = world.prefills
    two.load = 10**9  # so that the other one is tried first
    one.does = [down(one)]
    await world.asked()
    await world.state.locate("t", "c", at(world.decodes[0]))
    await world.ask()
    assert (one.released, two.released) == ([one.requests[0]["carryback_key"]], [])
    for name in ("carryback_ask", "carryback_tip"):
        assert one.requests[0][name] == two.requests[0][name]
    assert (one.wellbeing, two.wellbeing) == (["failed"], ["succeeded"])
    assert world.sample("retries_total", hop="prefill", reason="down") == 1


async def test_without_any_prefill_engine_the_decode_engine_computes() -> None:
    world = World(prefill=2)
    for each in world.prefills:
        each.does = [down(each)]
    key, prefilled, _ = await world.ask()
    assert prefilled.reuse.reason == "prefill_failed"
    assert world.decodes[0].gone[key] == {"carryback_cached": 0}
    assert [len(each.released) for each in world.prefills] == [1, 1]
    assert world.prefills[0].wellbeing == world.prefills[1].wellbeing == []  # perhaps it is the request
    world.context.blame.settle()
    assert world.prefills[0].wellbeing == world.prefills[1].wellbeing == ["doubt"]
    world.prefills.clear()
    assert (await world.ask())[1].reuse.reason == "prefill_unavailable"


async def test_a_refusal_is_the_clients_and_leaves_nothing_waiting() -> None:
    world = World()
    world.prefills[0].does = [Refused(422, "application/json", b"{}")]
    with pytest.raises(Refused):
        await world.ask()
    assert world.decodes[0].in_flight == 0
    assert world.prefills[0].released
    await world.holding.stop()  # waits for nothing


async def test_a_refused_choice_of_tools_is_left_to_the_decode_engine() -> None:
    world = World()
    world.prefills[0].does = [Refused(400, "application/json", b"{}")]
    _, prefilled, got = await world.ask(await world.asked(body=b'{"tool_choice": "required"}'))
    assert (prefilled.reuse.reason, got.status) == ("prefill_refused", 200)


@pytest.mark.parametrize("params", [{}, {"carryback_reuse": {"outcome": "hit"}}, {"carryback_reuse": 1}])
async def test_without_the_plug_in_nothing_is_transferred(params: dict[str, Any]) -> None:
    world = World()
    world.prefills[0].does = [{"remote_block_ids": [[1]], **params}]
    key, prefilled, _ = await world.ask()
    assert prefilled.reuse.reason == "no_plugin"
    assert world.decodes[0].gone[key] == {"carryback_cached": 0}


# -- a decode engine fails


async def test_what_failed_with_the_transfer_is_tried_once_more_without_it() -> None:
    world = World(decode=2, admit_early=False)
    first, second = world.decodes
    first.does, second.load = [answer(500)], 10**9  # so that the other one is tried first
    _, _, got = await world.ask()
    assert "remote_block_ids" in first.requests[0]
    assert got.status == 200
    assert second.requests[0].keys() == {"carryback_cached", "carryback_key", "hold_s"}
    # It has ended there, so it is certain that nobody reads it.
    assert world.prefills[0].released == [world.prefills[0].requests[0]["carryback_key"]]
    assert (first.wellbeing, second.wellbeing) == (["failed"], ["succeeded"])


async def test_what_broke_off_may_still_be_read() -> None:
    world = World(decode=2, admit_early=False)
    for each in world.decodes:
        each.does = [down(each)]
    with pytest.raises(ApiError) as caught:
        await world.ask()
    assert (caught.value.status, caught.value.code) == (502, "engine_failed")
    assert world.prefills[0].released == []  # its lease ends by itself


async def test_what_takes_too_long_is_not_tried_again() -> None:
    world = World(decode=2, admit_early=False)
    for each in world.decodes:
        each.does = [down(each, is_timeout=True)]
    with pytest.raises(ApiError) as caught:
        await world.ask()
    assert caught.value.status == 504
    assert sum(len(each.requests) for each in world.decodes) == 1


async def test_what_breaks_off_while_it_waits_costs_no_transfer() -> None:
    world = World(decode=2)
    for each in world.decodes:
        each.does = [down(each)]
    world.prefills[0].does = [computing := asyncio.Event()]
    asking = asyncio.create_task(world.ask())
    while not any(each.requests for each in world.decodes):  # noqa: ASYNC110
        await asyncio.sleep(0)
    first = next(each for each in world.decodes if each.requests)
    second = next(each for each in world.decodes if each is not first)
    second.does = []
    computing.set()
    _, _, got = await asking
    assert got.status == 200
    assert "remote_block_ids" in second.requests[0]
    assert not first.gone
    assert world.prefills[0].released == []


async def test_a_decode_engines_refusal_is_the_clients_and_the_prompts_kv_is_released() -> None:
    world = World(admit_early=False)
    world.decodes[0].does = [answer(400)]
    _, _, got = await world.ask(ending="")
    assert got.status == 400
    assert world.prefills[0].released == [world.prefills[0].requests[0]["carryback_key"]]
    assert world.decodes[0].wellbeing == []


async def test_without_a_decode_engine_there_is_no_answer() -> None:
    world = World()
    world.decodes.clear()
    with pytest.raises(ApiError, match="no decode engine is up"):
        await world.ask()
    assert world.prefills[0].released  # nobody will read it


# -- the client leaves


async def test_who_leaves_while_the_prompt_is_computed_leaves_nothing() -> None:
    world = World()
    world.prefills[0].does = [asyncio.Event()]
    asking = asyncio.create_task(world.ask())
    while not (world.prefills[0].requests and world.decodes[0].requests):  # noqa: ASYNC110
        await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert world.prefills[0].released == [world.prefills[0].requests[0]["carryback_key"]]
    assert world.prefills[0].in_flight == world.decodes[0].in_flight == 0
    await world.holding.stop()  # its decode engine never began, and will say nothing


async def test_who_leaves_in_the_middle_of_the_answer_leaves_nothing_pinned() -> None:
    world = World()
    for held_first in (True, False):

        def leave(decoding: Decoding, answer: Answer, held_first: bool = held_first) -> None:
            if held_first:
                world.holding.on_event(
                    world.decodes[0], Held("run-d0", 1, decoding.key, 64, 4, 480.0, TIP, 4)
                )
            raise ConnectionResetError

        with pytest.raises(ConnectionResetError):
            await world.ask(relay=leave)
        key = world.decodes[0].requests[-1]["carryback_key"]
        if not held_first:
            await world.held(world.decodes[0], key)
        assert world.decodes[0].released[-1] == key
        assert len(world.holding.pins) == 0
        # What is there can be found all the same.
        await asyncio.sleep(0.001)
        location = await world.location()
        assert location is not None
        assert (location.engine, location.key) == ("d0", key)


# -- hold


async def test_where_a_conversation_is_and_what_is_pinned_for_it_is_noted() -> None:
    world = World(hold_s=300)
    key, _, _ = await world.ask()
    assert world.decodes[0].requests[0]["hold_s"] == 300
    await world.held(world.decodes[0], key)
    assert await world.location() == Location("d0", "run-d0", key, 64, NOW + 300, "turn", TIP, NOW)
    [pin] = world.holding.pins.of("t", "c")
    assert (pin.key, pin.tokens, pin.blocks) == (key, 64, 4)
    assert 299 < pin.time_left <= 300
    assert world.sample("held_blocks", engine="d0") == 4
    assert world.sample("locations_noted_total") == 2  # once before its engine said what it has


async def test_the_event_may_come_before_the_answers_end() -> None:
    world = World(hold_mid_turn_s=100, hold_s=200)

    def held(decoding: Decoding, answer: Answer) -> None:
        world.holding.on_event(world.decodes[0], Held("run-d0", 1, decoding.key, 64, 4, 480.0, TIP, 4))
        assert world.holding.pins.of("t", "c")[0].time_left > 199

    key, _, _ = await world.ask(relay=held, ending="mid_turn")
    assert world.holding.pins.of("t", "c")[0].time_left <= 100
    await asyncio.sleep(0.001)
    location = await world.location()
    assert location is not None
    assert location.key == key


async def test_without_a_budget_nothing_is_pinned_and_the_place_is_known() -> None:
    world = World(pin_budget=0)
    key, _, _ = await world.ask(await world.asked(hold_s=0.0))
    assert world.decodes[0].requests[0]["hold_s"] == 0
    await world.held(world.decodes[0], key, blocks=0)
    location = await world.location()
    assert location is not None
    assert (location.tokens, location.until, location.tip) == (64, 0.0, TIP)
    assert len(world.holding.pins) == 0


async def test_what_was_left_by_a_newer_request_counts() -> None:
    world = World(decode=2)
    asked = [await world.asked(came=NOW + number) for number in range(2)]
    older, _, _ = await world.ask(asked[0])
    newer, _, _ = await world.ask(asked[1])
    await world.held(world.decodes[1], newer)
    await world.held(world.decodes[0], older)
    location = await world.location()
    assert location is not None
    assert (location.engine, location.key) == ("d1", newer)
    assert {pin.key for pin in world.holding.pins.of("t", "c")} == {older, newer}  # both may be of use


async def test_several_pins_of_one_name_end_with_the_conversation() -> None:
    world = World()
    keys = [(await world.ask())[0] for _ in range(2)]
    for key in keys:
        await world.held(world.decodes[0], key)
    under_way, _, _ = await world.ask()
    world.holding.drop(
        "t", "c", (await world.state.delete("t", "c") or Conversation.new("t", "c", None)).location
    )
    assert sorted(world.decodes[0].released) == sorted(keys)
    await world.held(world.decodes[0], under_way)
    assert world.decodes[0].released[-1] == under_way
    assert len(world.holding.pins) == 0
    assert await world.location() is None


async def test_nothing_stays_pinned_for_a_conversation_that_is_known_no_more() -> None:
    """Another router may have been told to delete it."""
    world = World()
    key, _, _ = await world.ask()
    await world.state.delete("t", "c")
    await world.held(world.decodes[0], key)
    assert world.decodes[0].released == [key]
    assert len(world.holding.pins) == 0
    assert await world.location() is None


async def test_what_an_engine_says_is_newer_than_what_was_noted_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    locate, noted = world.state.locate, []

    async def later(tenant: str, id: str, location: Location) -> bool:
        noted.append(location)
        if len(noted) == 1:  # it is on its way for longer than what is noted after it
            while len(noted) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0)
            await asyncio.sleep(0)
        return await locate(tenant, id, location)

    monkeypatch.setattr(world.state, "locate", later)
    key, _, _ = await world.ask()
    await asyncio.sleep(0)
    await world.held(world.decodes[0], key)
    assert [each.tokens for each in noted] == [0, 64]
    location = await world.location()
    assert location is not None
    assert (location.tokens, location.tip) == (64, TIP)


async def test_what_another_router_pinned_ends_with_the_conversation_too() -> None:
    world = World()
    world.holding.drop("t", "c", at(world.decodes[0], until=NOW + 10))
    world.holding.drop("t", "c", at(world.decodes[0], until=NOW + 10, run="another run"))
    assert world.decodes[0].released == ["k-last"]


@pytest.mark.parametrize("is_whole", [True, False])
async def test_a_conversation_that_moved_is_not_pinned_twice(is_whole: bool) -> None:
    world = World(decode=2)
    one, two = world.decodes
    two.load = 10**9
    key, _, _ = await world.ask()
    await world.held(one, key)
    one.load, two.load = 10**9, 0
    if not is_whole:
        world.prefills[0].does = [given("history_changed", outcome="partial", tokens=32)]
    moved, _, _ = await world.ask()
    assert one.released == []
    await world.held(two, moved)
    assert one.released == ([key] if is_whole else [])
    assert {pin.key for pin in world.holding.pins.of("t", "c")} == {moved, *([] if is_whole else [key])}


@pytest.mark.parametrize("hold_s", [float("nan"), float("inf"), -1.0])
async def test_what_an_engine_makes_up_harms_nothing(hold_s: float) -> None:
    world = World()
    for tokens in (-(2**60), 2**60):
        key, _, _ = await world.ask()
        held = Held("run-d0", 1, key, tokens, 4, hold_s, b"x" * 10**6, 4)
        world.holding.on_event(world.decodes[0], held)
        await asyncio.sleep(0.001)
        location = await world.location()
        assert location is not None
        assert location.tip == b""
        assert location.tokens >= 0
        _, _, got = await world.ask()
        assert got.status == 200
        assert world.prefills[0].load == 0


async def test_pins_over_the_budget_are_given_up_and_an_engine_unpins_by_itself() -> None:
    world = World(pin_budget=0.05)
    keys = [(await world.ask())[0] for _ in range(3)]
    for key in keys:
        world.decodes[0].pinned += 4
        await world.held(world.decodes[0], key)
    assert world.decodes[0].released == keys[:2]
    world.decodes[0].pinned = 0
    world.holding.on_event(world.decodes[0], Released("run-d0", 9, keys[2], "covered", 0))
    assert len(world.holding.pins) == 0
    assert (await world.location()) is not None


async def test_a_conversation_that_is_back_has_its_pin_given_up_before_those_of_absent_ones() -> None:
    world = World(pin_budget=0.08)
    for name in ("absent", "back"):
        world.decodes[0].pinned += 4
        await world.held(world.decodes[0], (await world.ask(await world.asked(name), ending="turn_end"))[0])
    [back] = world.holding.pins.of("t", "back")

    def over_the_budget(decoding: Decoding, answer: Answer) -> None:
        assert not world.decodes[0].released  # it stays while there is room
        world.decodes[0].pinned += 1
        world.holding.pins.enforce(world.decodes[0])

    await world.ask(await world.asked("back"), over_the_budget)
    assert world.decodes[0].released == [back.key]


async def test_a_name_that_several_use_has_its_newest_pin_given_up_last() -> None:
    world = World(pin_budget=0.1)
    keys = []
    for name in ("other", "shared", "shared"):
        world.prefills[0].does = [given("new", outcome="miss", tokens=0, found=0)]
        world.decodes[0].pinned += 4
        keys.append((await world.ask(await world.asked(name)))[0])
        await world.held(world.decodes[0], keys[-1])
    assert world.decodes[0].released == [keys[1]]


async def test_pins_of_an_engine_that_is_gone_or_told_to_forget_are_void() -> None:
    world = World()
    for number in range(2):
        await world.held(world.decodes[0], (await world.ask(await world.asked(f"c{number}")))[0])
    assert await world.holding.forget(world.decodes[0]) == (2, True)
    await world.held(world.decodes[0], (await world.ask())[0])
    world.holding.lost(world.decodes[0])
    assert len(world.holding.pins) == 0
    world.decodes[0].is_heard = False
    assert await world.holding.forget(world.decodes[0]) == (0, False)


async def test_a_router_that_stops_unpins_its_own_and_waits_for_the_engine() -> None:
    world = World()
    key, _, _ = await world.ask()
    await world.held(world.decodes[0], key)
    stopping = asyncio.create_task(world.holding.stop())
    while not world.decodes[0].released:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert not stopping.done()
    world.holding.on_event(world.decodes[0], Released("run-d0", 2, key, "asked", 0))
    async with asyncio.timeout(10):
        await stopping


async def test_an_event_that_nobody_waits_for_is_unpinned() -> None:
    world = World()
    await world.held(world.decodes[0], "never heard of")
    assert world.decodes[0].released == ["never heard of"]
    await world.held(world.decodes[0], "never heard of either", blocks=0)
    assert world.decodes[0].released == ["never heard of"]
