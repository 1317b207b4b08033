"""The scheduler: whose rows are computed, who comes in, who gives way."""

from __future__ import annotations

import pytest
from engine_kit import CONFIG, NS, greedy, text
from hypothesis import given
from hypothesis import strategies as st

from duokv.engine import Handle
from duokv.engine.live import LiveBlock, LiveBlocks
from duokv.engine.request import Request, blocks_for
from duokv.engine.scheduler import Progress, Scheduler, plan_rows
from duokv.engine.session import Session
from duokv.engine.slots import BlockSlots
from duokv.kvstore import BlockKeys
from duokv.replay import Reason, ReplayPlan


class World:
    """A scheduler over a few slots, and requests made as an engine would."""

    def __init__(self, num_slots: int = 8, *, max_batch: int = 4, chunk_tokens: int = 256) -> None:
        self.live = LiveBlocks(BlockSlots(CONFIG.cache, num_slots, poison=True))
        self.scheduler = Scheduler(self.live, max_batch=max_batch, chunk_tokens=chunk_tokens)
        self.number = 0

    def submit(self, tokens: int) -> Request:
        self.number += 1
        request = Request(
            handle=Handle(str(self.number)), number=self.number, namespace=NS, traffic=None,
            tokens=text(self.number, tokens), prompt_tokens=tokens, keys=BlockKeys(), sampling=greedy(1), seed=0,
            on_token=None, submitted_s=0.0, decoder_start=None,
        )  # fmt: skip
        self.scheduler.wait(request)
        return request

    def start(self, request: Request, computed: int = 0) -> None:
        """Let a loading request run, `computed` rows of it done."""
        slots = self.live.allocate(blocks_for(len(request.tokens)))
        request.session = Session.begin(CONFIG, ReplayPlan(0, 0, 0, 0, Reason.NO_HIT), request.tokens, slots=slots)
        request.session.computed = computed
        self.scheduler.forget(request)
        self.scheduler.run(request)

    def running(self, tokens: int, computed: int = 0) -> Request:
        request = self.submit(tokens)
        self.start(request, computed)
        return request

    def give_way(self, request: Request) -> None:
        assert request.session is not None
        self.live.release(request.session.slots)
        request.session = None
        self.scheduler.forget(request)
        self.scheduler.wait(request)

    def turns(self) -> list[tuple[int, int, int]]:
        """(request's number, first row, end) of a step."""
        return [(turn.request.number, turn.start, turn.end) for turn in self.scheduler.turns(self.give_way)]


def test_decoding_rows_come_first_and_prompts_share_the_chunk_by_age() -> None:
    running = [Progress(0, 300), Progress(99, 100), Progress(40, 50), Progress(0, 400), Progress(7, 8)]
    ends = plan_rows(running, chunk_tokens=320)
    assert list(ends.items()) == [(1, 100), (4, 8), (0, 300), (2, 50), (3, 10)]


def test_a_prompt_never_takes_a_decoding_row_s_place() -> None:
    ends = plan_rows([Progress(0, 9000), Progress(9, 10)], chunk_tokens=1)
    assert ends == {1: 10, 0: 1}


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 90)).map(lambda pair: Progress(pair[0], sum(pair)))),
    st.integers(1, 100),
)
def test_a_step_never_exceeds_its_rows_and_always_gets_on(running: list[Progress], chunk_tokens: int) -> None:
    ends = plan_rows(running, chunk_tokens=chunk_tokens)
    rows = [end - running[place].computed for place, end in ends.items()]
    assert all(count > 0 for count in rows)
    assert all(end <= running[place].tokens for place, end in ends.items())
    single = sum(one.tokens - one.computed == 1 for one in running)
    assert sum(rows) <= chunk_tokens + single
    assert bool(ends) is bool(running)
    left = sum(one.tokens - one.computed for one in running)
    assert sum(rows) == min(left, chunk_tokens + single) if single else sum(rows) == min(left, chunk_tokens)


def test_the_oldest_comes_in_first_and_none_overtakes_it() -> None:
    world = World(num_slots=8)
    world.running(300)
    large, small = world.submit(700), world.submit(10)
    assert world.scheduler.next_to_load() is None, "5 slots are free; it needs 6 and the running one may need another"
    assert world.scheduler.waiting == [large, small]


def test_slots_are_counted_while_blocks_are_loaded_and_one_is_left_for_each_running_request() -> None:
    world = World(num_slots=5)
    world.running(128)
    first, second = world.submit(256), world.submit(256)
    assert world.scheduler.next_to_load() is first
    assert world.scheduler.next_to_load() is None
    world.scheduler.forget(first)
    assert world.scheduler.next_to_load() is second


def test_slots_that_a_load_has_taken_are_not_counted_twice() -> None:
    world = World(num_slots=6)
    first, second = world.submit(384), world.submit(384)
    assert world.scheduler.next_to_load() is first
    taken = world.live.allocate(2)
    first.taken = 2
    assert world.scheduler.next_to_load() is second, "4 are free, 1 of them is still the first one's"
    world.live.release(taken)


def test_max_batch_counts_loading_requests() -> None:
    world = World(max_batch=2)
    world.running(10)
    first = world.submit(10)
    world.submit(10)
    assert world.scheduler.next_to_load() is first
    assert world.scheduler.next_to_load() is None


def test_blocks_that_others_hold_need_no_slots_unless_that_proved_wrong() -> None:
    world = World(num_slots=5)
    keys = BlockKeys(bytes(32) + bytes([1] * 32) + bytes([2] * 32))
    holder = world.running(384)
    assert holder.session is not None
    world.live.share(keys, [LiveBlock(slot, True) for slot in holder.session.slots])
    request = world.submit(390)
    request.keys = keys
    request.crowded = True
    assert world.scheduler.next_to_load() is None
    request.crowded = False
    assert world.scheduler.next_to_load() is request


def test_the_youngest_gives_way_and_comes_back_first() -> None:
    world = World(num_slots=4)
    old, young = world.running(256, 255), world.running(256, 100)
    waiting = world.submit(10)
    old.tokens.append(1)
    assert old.session is not None
    old.session.computed = 256
    assert world.turns() == [(old.number, 256, 257)]
    assert young.session is None
    assert world.scheduler.waiting == [young, waiting]


def test_a_request_may_have_to_give_way_itself() -> None:
    world = World(num_slots=4)
    old, young = world.running(256, 100), world.running(256, 255)
    young.tokens.append(1)
    assert young.session is not None
    young.session.computed = 256
    assert world.turns() == [(old.number, 100, 256)]
    assert world.scheduler.waiting == [young]


def test_a_request_waits_a_step_for_a_younger_one_that_is_still_loading() -> None:
    """That one holds slots and can give way only once it runs."""
    world = World(num_slots=5)
    old, young = world.submit(256), world.submit(128)
    assert [world.scheduler.next_to_load() for _ in range(2)] == [old, young]
    world.start(old, computed=256)
    old.tokens.append(1)
    held = world.live.allocate(3)
    assert world.turns() == []
    assert world.scheduler.running == [old]
    world.live.release(held)
    world.start(young)
    assert world.turns() == [(old.number, 256, 257), (young.number, 0, 128)]


@pytest.mark.parametrize("exact", [True, False])
def test_an_approximate_live_block_never_stands_in_for_an_exact_stored_one(exact: bool) -> None:
    live = LiveBlocks(BlockSlots(CONFIG.cache, 4))
    keys = [b"a", b"b"]
    slots = live.allocate(2)
    live.share(keys, [LiveBlock(slots[0], True), LiveBlock(slots[1], exact)])
    assert len(live.hold(keys, exact_blocks=2)) == 1 + exact
    live.release(slots[: 1 + exact])
    assert [block.exact for block in live.hold(keys, exact_blocks=0)] == [True, exact]
    live.release(slots)
    live.release(slots)
    assert live.hold(keys, exact_blocks=0) == [], "a block is shared only while somebody holds its slot"
    live.check_integrity([])


def test_an_exact_block_takes_the_place_of_an_approximate_one() -> None:
    live = LiveBlocks(BlockSlots(CONFIG.cache, 4))
    old, new = live.allocate(2)
    live.share([b"a"], [LiveBlock(old, False)])
    live.share([b"a"], [LiveBlock(new, True)])
    live.share([b"a"], [LiveBlock(old, False)])
    assert live.hold([b"a"], exact_blocks=1) == [LiveBlock(new, True)]
    live.release([old, new])
    assert live.live_run([b"a"]) == 1
    live.check_integrity([new])
    live.release([new])
    assert live.live_run([b"a"]) == 0
