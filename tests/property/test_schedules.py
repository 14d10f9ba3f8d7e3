"""How a prompt is cut, laid out and accompanied changes neither its logits nor its rows."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4 import model
from runtime.assemble import Shape
from tests.property import world
from tests.property.world import BOUND, World, alone, assert_same, cuts, off, prompts, schedules


@given(setting=world.settings(), length=world.lengths, data=st.data())
def test_any_chunking(setting: world.Setting, length: int, data: st.DataObject) -> None:
    (tokens,) = prompts(setting, length)
    assert length > setting.cfg.window
    assert length > setting.cfg.index_topk * setting.cfg.csa_rate
    want = alone(setting, tokens)
    w = World(setting, [tokens])
    (logits,) = w.play([[(0, n)] for n in data.draw(cuts(length))])
    assert_same(w, 0, logits, want)


@given(setting=world.settings(), length=world.lengths)
def test_one_token_at_a_time(setting: world.Setting, length: int) -> None:
    (tokens,) = prompts(setting, length)
    w = World(setting, [tokens])
    (logits,) = w.play([[(0, 1)]] * length, block=1)
    assert_same(w, 0, logits, alone(setting, tokens))


@given(setting=world.settings(), length=world.lengths, data=st.data())
def test_dense_forward(setting: world.Setting, length: int, data: st.DataObject) -> None:
    """`forward` makes its batch itself (`batch.whole`), recycles nothing and has other pages."""
    (tokens,) = prompts(setting, length)
    w = World(setting, [tokens])
    (logits,) = w.play([[(0, n)] for n in data.draw(cuts(length))])
    with torch.no_grad():
        want = model.forward(setting.params, torch.tensor([tokens]), setting.ctx)[0]
    assert off(logits, want) <= BOUND


@given(
    setting=world.settings(),
    many=st.lists(world.lengths, min_size=2, max_size=4),
    data=st.data(),
)
def test_company_and_order(setting: world.Setting, many: list[int], data: st.DataObject) -> None:
    """Other sequences in the batch, in any order, prefill and decode mixed."""
    sequences = prompts(setting, *many)
    w = World(setting, sequences)
    logits = w.play(data.draw(schedules(many)))
    for i, tokens in enumerate(sequences):
        assert_same(w, i, logits[i], alone(setting, tokens))


@given(
    setting=world.settings(),
    length=world.lengths,
    spare=st.tuples(*[st.integers(0, 9)] * 6),
    data=st.data(),
)
def test_padding(
    setting: world.Setting, length: int, spare: tuple[int, ...], data: st.DataObject
) -> None:
    """Padding tokens, rows, blocks, closings and table columns, each on its own or together."""
    (tokens,) = prompts(setting, length)
    chunks = data.draw(cuts(length))
    w = World(setting, [tokens])
    seen = []
    for n in chunks:
        tiles = (w.lengths[0] + n - 1) // setting.block - w.lengths[0] // setting.block + 1
        pages = -(-(w.lengths[0] + n) // setting.page_tokens)
        shape = Shape(
            tokens=n + spare[0],
            seqs=2 + spare[1],
            wanted=n + spare[2],
            blocks=tiles + bool(spare[0]) + spare[3],
            closes=tuple(n // rate + 1 + spare[4] for rate in setting.cfg.rates),
            history=pages + spare[5],
            window=w.pages.width + spare[5],
        )
        seen.append(w.step([(0, n)], shape=shape)[0])
    assert_same(w, 0, torch.cat(seen), alone(setting, tokens))


@given(
    setting=world.settings(),
    many=st.lists(world.lengths, min_size=1, max_size=3),
    shuffle=st.integers(1, 2**16),
    data=st.data(),
)
def test_page_permutation(
    setting: world.Setting, many: list[int], shuffle: int, data: st.DataObject
) -> None:
    """Other physical pages and slots, tables and pools together: not one bit differs."""
    steps = data.draw(schedules(many))
    plain = World(setting, prompts(setting, *many))
    moved = World(setting, prompts(setting, *many), shuffle=shuffle)
    for a, b in zip(plain.play(steps), moved.play(steps), strict=True):
        assert torch.equal(a, b)
    for i in range(len(many)):
        rows = moved.state(i)
        for name, want in plain.state(i).items():
            assert torch.equal(rows[name], want), name
