"""`step` is a function: of its arguments only, of the past only, of live memory only."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4 import model
from dsv4.tree import leaves
from runtime.assemble import Shape, assemble
from tests.property import world
from tests.property.world import World, alone, prompts, schedules


@given(setting=world.settings(), length=world.lengths, cut=st.integers(1, 19))
def test_arguments_keep_their_bits(setting: world.Setting, length: int, cut: int) -> None:
    w = World(setting, prompts(setting, length))
    w.step([(0, cut)])
    row = w.row(0, w.tokens[0][cut:])
    shape = Shape(tokens=length - cut + 3)
    batch = assemble(
        [row], setting.cfg, page_tokens=setting.page_tokens, block=setting.block, shape=shape
    )
    arguments = (setting.params, w.pools, batch)
    before = [x.clone() for x in leaves(arguments)]
    with torch.no_grad():
        first, new = model.step(setting.params, w.pools, batch, setting.ctx)
        again, same = model.step(setting.params, w.pools, batch, setting.ctx)
    for old, now in zip(before, leaves(arguments), strict=True):
        assert torch.equal(old, now)
    for x, y in zip(leaves((first, new)), leaves((again, same)), strict=True):
        assert torch.equal(x, y)


@given(setting=world.settings(), length=world.lengths, data=st.data())
def test_no_look_ahead(setting: world.Setting, length: int, data: st.DataObject) -> None:
    """Other later tokens change no bit of an earlier position, and do change their own."""
    (tokens,) = prompts(setting, length)
    at = data.draw(st.integers(1, length - 1))
    later = [(t + 1 + i % 7) % setting.cfg.vocab for i, t in enumerate(tokens[at:])]
    one, other = alone(setting, tokens)[0], alone(setting, tokens[:at] + later)[0]
    assert torch.equal(one[:at], other[:at])
    assert not torch.equal(one[at:], other[at:])


@given(
    setting=world.settings(),
    many=st.lists(world.lengths, min_size=1, max_size=3),
    data=st.data(),
)
def test_stale_memory_is_never_read(
    setting: world.Setting, many: list[int], data: st.DataObject
) -> None:
    """NaN in every free page, free slot and dead row: not one bit differs."""
    steps = data.draw(schedules(many))
    clean = World(setting, prompts(setting, *many))
    dirty = World(setting, prompts(setting, *many))
    for work in steps:
        dirty.poison()
        want, got = clean.step(work), dirty.step(work)
        for i, _ in work:
            assert torch.equal(got[i], want[i])
    for i in range(len(many)):
        rows = dirty.state(i)
        for name, want in clean.state(i).items():
            assert torch.equal(rows[name], want), name


@given(setting=world.settings(), length=world.lengths, data=st.data())
def test_nan_stays_in_its_sequence(
    setting: world.Setting, length: int, data: st.DataObject
) -> None:
    """A sequence whose state is NaN neither changes its neighbour nor stops the step."""
    many = [length, length]
    head = data.draw(st.integers(1, length - 1))
    clean = World(setting, prompts(setting, *many))
    spoilt = World(setting, prompts(setting, *many))
    rest = [(i, length - head) for i in data.draw(st.permutations([0, 1]))]
    for w in (clean, spoilt):
        w.step([(0, head), (1, head)])
    spoilt.poison(1)
    want, got = clean.step(rest), spoilt.step(rest)
    assert torch.equal(got[0], want[0])
    assert got[1].isnan().any()
