from __future__ import annotations

from dataclasses import dataclass

from carryback_server.pipeline.place import TokenEstimate, decode_engine, less_loaded
from hypothesis import assume, given
from hypothesis import strategies as st


@dataclass(eq=False)
class Stub:
    load: int


ENGINES = st.lists(st.integers(0, 10**6).map(Stub), max_size=8)
FACTORS = st.floats(1, 10)
SLACKS = st.integers(0, 10**5)


@st.composite
def scenes(draw: st.DrawFn) -> tuple[list[Stub], list[Stub]]:
    """Engines, and some of them to leave out."""
    engines = draw(ENGINES)
    but = draw(st.lists(st.sampled_from(engines), unique_by=id)) if engines else []
    return engines, but


@given(scenes())
def test_the_choice_is_one_of_the_candidates_if_there_is_any(scene: tuple[list[Stub], list[Stub]]) -> None:
    engines, but = scene
    candidates = [each for each in engines if each not in but]
    chosen = less_loaded(engines, but=but)
    assert (chosen in candidates) if candidates else (chosen is None)


@given(ENGINES)
def test_the_busiest_engine_is_never_chosen_while_there_is_another(engines: list[Stub]) -> None:
    busiest = Stub(10**6 + 1)
    assume(engines)
    assert less_loaded([*engines, busiest]) is not busiest


def test_equal_engines_share_the_work() -> None:
    engines = [Stub(5) for _ in range(4)]
    counts = {id(each): 0 for each in engines}
    for _ in range(4000):
        chosen = less_loaded(engines)
        assert chosen is not None
        counts[id(chosen)] += 1
    assert min(counts.values()) > 700


def test_routers_with_the_same_view_do_not_all_choose_the_least_loaded() -> None:
    engines = [Stub(load) for load in range(8)]
    assert len({id(less_loaded(engines)) for _ in range(500)}) == 7


@given(scenes(), FACTORS, SLACKS, st.data())
def test_the_holder_keeps_its_conversation_unless_overloaded(
    scene: tuple[list[Stub], list[Stub]], factor: float, slack: int, data: st.DataObject
) -> None:
    engines, but = scene
    assume(engines)
    holder = data.draw(st.sampled_from(engines))
    others = [each for each in engines if each is not holder and each not in but]
    chosen = decode_engine(engines, holder, overload_factor=factor, slack_tokens=slack, but=but)
    if holder in but:
        assert chosen in others or (chosen is None and not others)
    elif others and holder.load > factor * sum(each.load for each in others) / len(others) + slack:
        assert chosen in others
    else:
        assert chosen is holder


@given(st.integers(0, 30_000), st.integers(1, 7))
def test_conversations_stay_where_they_are_on_idle_engines(load: int, others: int) -> None:
    holder = Stub(load)
    engines = [holder, *(Stub(0) for _ in range(others))]
    assert decode_engine(engines, holder, overload_factor=2, slack_tokens=32_768) is holder


@given(ENGINES)
def test_a_holder_that_is_gone_is_not_chosen(engines: list[Stub]) -> None:
    gone = Stub(0)
    for holder in (gone, None):
        chosen = decode_engine(engines, holder, overload_factor=2, slack_tokens=0)
        assert (chosen in engines) if engines else (chosen is None)


@given(st.lists(st.tuples(st.integers(0, 10**8), st.integers(-1, 10**6)), max_size=50), st.integers(0, 10**8))
def test_an_estimate_is_sane_whatever_was_learned(seen: list[tuple[int, int]], size: int) -> None:
    estimate = TokenEstimate()
    for known, tokens in seen:
        estimate.learn(known, tokens)
    assert max(size // 16, 1) <= estimate.tokens(size) <= max(size, 1)


@given(st.floats(1.5, 12))
def test_an_estimate_comes_near_what_engines_count(bytes_per_token: float) -> None:
    estimate = TokenEstimate()
    for _ in range(200):
        estimate.learn(30_000, round(30_000 / bytes_per_token))
    assert abs(estimate.tokens(60_000) * bytes_per_token / 60_000 - 1) < 0.05
