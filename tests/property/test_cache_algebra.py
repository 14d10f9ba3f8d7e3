"""Any order of the operations of `runtime.cache`, against runs of the tokens alone.

Two caches of one model that differ in pool sizes and in room for drafts; sequences in them grow,
take back, fork, leave, arrive, begin with cached pages and end, while pages run short. Whatever
happened before, every step has the logits of its tokens alone, to rounding, and no page is lost.

A failure here is printed as a short program of `Lives` calls.
"""

import pytest
from hypothesis import Phase
from hypothesis import settings as runs
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.property.lives import MOST, Life, Lives, dense, ids, same, settings
from tests.property.world import BOUND, Setting

LONGEST = 64  # tokens of one sequence

which = st.integers(0, 7)
seeds = st.integers(0, 1000)
few = st.integers(0, 4)


def some(machine: "CacheAlgebra") -> bool:
    """Whether there is a sequence."""
    return any(lives.all for lives in machine.caches)


class CacheAlgebra(RuleBasedStateMachine):
    """Two caches and what may be done with them."""

    def __init__(self) -> None:
        """No cache yet."""
        super().__init__()
        self.caches: list[Lives] = []

    @initialize(setting=settings(), one=few, other=few, room=st.integers(10, 30))
    def make(self, setting: Setting, one: int, other: int, room: int) -> None:
        """The first cache is roomy or not, the second is small."""
        self.setting = setting
        self.caches = [
            Lives(setting, drafts=one, history=room, window=room, slots=5),
            Lives(setting, drafts=other, history=13, window=11, slots=4),
        ]
        self.begin(False, 21, 1)
        self.begin(True, 17, 2)

    def pick(self, i: int) -> tuple[Lives, Life]:
        """One of all sequences, and where it is."""
        everyone = [(lives, life) for lives in self.caches for life in lives.all]
        return everyone[i % len(everyone)]

    @rule(where=st.booleans(), length=st.integers(0, 40), seed=seeds)
    def begin(self, where: bool, length: int, seed: int) -> None:
        """A new sequence, if a slot is free, and its prompt as far as there are pages."""
        lives = self.caches[where]
        free = lives.pages.slots.available
        life = lives.open()
        assert (life is None) == (free == 0)
        if life is None:
            return
        prompt = ids(self.setting, length, seed)
        want = dense(self.setting, tuple(prompt)) if prompt else None
        for at in range(0, length, MOST):
            if not lives.advance(life, prompt[at : at + MOST], want=want):
                break

    @precondition(some)
    @rule(i=which, count=st.integers(1, MOST), drafts=few, kept=few, seed=seeds)
    def step(self, i: int, count: int, drafts: int, kept: int, seed: int) -> None:
        """Append n, run, commit k: the others were drafts that do not hold."""
        lives, life = self.pick(i)
        drafts = min(drafts, lives.drafts)
        before = life.snapshot()
        tokens = ids(self.setting, count + drafts, seed)
        if life.held.length + len(tokens) > LONGEST:
            lives.release(life)
        elif not lives.advance(life, tokens, keep=count + min(kept, drafts)):
            assert life.snapshot() == before
            assert lives.pages.room(life.held) < len(tokens)

    @precondition(some)
    @rule(i=which, count=few, ran=st.booleans(), seed=seeds)
    def take_back(self, i: int, count: int, ran: bool, seed: int) -> None:
        """Append n, run or not, take back all: the length is as before and nothing else counts."""
        lives, life = self.pick(i)
        length = life.held.length
        count = min(count, lives.drafts) if ran else count
        if not count or length + count > LONGEST or not lives.cache.append(life.held, count):
            return
        if ran:
            assert lives.run(life, ids(self.setting, count, seed)) <= BOUND
        lives.cache.rollback(life.held, count)
        assert (life.held.length, life.held.written) == (length, length)

    @precondition(some)
    @rule(i=which)
    def fork(self, i: int) -> None:
        """A second sequence with the same state, or nothing at all."""
        lives, life = self.pick(i)
        before = life.snapshot()
        child = lives.fork(life)
        assert life.snapshot() == before
        if child is not None and life.tokens:
            assert same(lives.export(life), lives.export(child))

    @precondition(some)
    @rule(i=which, where=st.booleans(), leave=st.booleans())
    def move(self, i: int, where: bool, leave: bool) -> None:
        """Export and import, into the same cache or the other; the first may stay or go."""
        lives, life = self.pick(i)
        if not life.tokens:
            return
        state = lives.export(life)
        if leave:
            lives.release(life)
        target = self.caches[where]
        free = [p.available for p in (target.pages.slots, target.pages.history)]
        got = target.receive(state, [*state.tokens, 0])
        if got is not None:
            assert same(target.export(got), state)
        else:
            assert [target.pages.slots.available, target.pages.history.available] == free

    @precondition(some)
    @rule(i=which, where=st.booleans(), seed=seeds)
    def hit(self, i: int, where: bool, seed: int) -> None:
        """A new sequence that begins with what is cached of another one's tokens, and one more."""
        _, life = self.pick(i)
        lives = self.caches[where]
        if lives.pages.slots.available:
            new = lives.restore([*life.tokens, *ids(self.setting, 1, seed)])
            assert life.tokens[: new.held.length] == new.tokens

    @precondition(some)
    @rule(i=which)
    def end(self, i: int) -> None:
        """A sequence goes; its full pages stay cached."""
        lives, life = self.pick(i)
        lives.release(life)

    @rule(where=st.booleans(), rarely=st.integers(0, 5))
    def forget(self, where: bool, rarely: int) -> None:
        """The prefix cache is emptied under running sequences."""
        if rarely == 5:
            self.caches[where].prefix.forget()

    @invariant()
    def nothing_is_lost(self) -> None:
        """Counts, tables and owners agree."""
        for lives in self.caches:
            lives.audit()

    def teardown(self) -> None:
        """All that still run are right; then everything is there again."""
        for lives in self.caches:
            for life in lives.all:
                if life.held.length < LONGEST:
                    lives.advance(life, ids(self.setting, 1, 7))
            lives.end()


def test_any_order_of_operations() -> None:
    """B1, B9: what a sequence needs travels with its pages, whoever had its slot before.

    A failure is told at once and unshrunk; the long form below shrinks it, for up to 5 minutes.
    """
    short = runs(
        max_examples=18,
        stateful_step_count=22,
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
    )
    run_state_machine_as_test(CacheAlgebra, settings=short)


@pytest.mark.long
def test_any_order_of_many_operations() -> None:
    """As above, for minutes."""
    run_state_machine_as_test(CacheAlgebra, settings=runs(max_examples=150, stateful_step_count=50))
