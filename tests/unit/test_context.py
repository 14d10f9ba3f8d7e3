"""What a `Ctx` refuses."""

import dataclasses

import pytest

from dsv4.config import kinds_of, preset
from dsv4.context import Ctx
from dsv4.mesh import P, Rules, local_shape


def test_qat_refuses_widths_it_cannot_round():
    tiny = preset("tiny")
    Ctx(preset("flash"), qat=True)
    with pytest.raises(ValueError, match=r"head_dim - rope_dim = 48 .* multiple of 64"):
        Ctx(tiny, qat=True)
    fits = dataclasses.replace(tiny, head_dim=80)
    Ctx(fits, qat=True)
    odd = dataclasses.replace(fits, index_dim=48)
    with pytest.raises(ValueError, match=r"index_dim = 48 .* power of two"):
        Ctx(odd, qat=True)
    # Without an indexer its width does not matter.
    Ctx(dataclasses.replace(odd, kinds=kinds_of("wwhhh")), qat=True)


def test_rules_refuse_an_axis_used_twice():
    with pytest.raises(ValueError, match="uses a mesh axis twice"):
        Rules().place(P("vocab", "heads"))


def test_a_mesh_of_ones_changes_no_shape():
    cfg = preset("flash")
    from dsv4 import table, tree

    for leaf in tree.leaves(table.spec(cfg)):
        assert local_shape(leaf.shape, leaf.axes, Rules(), Ctx(cfg).mesh) == leaf.shape


def test_replaced_leaves_are_found_by_path():
    import torch

    from dsv4 import model, table, tree

    cfg = dataclasses.replace(preset("tiny"), kinds=kinds_of("w"), hash_layers=(True,), mtp=0)
    params = table.init(cfg, torch.Generator().manual_seed(0))
    weights = tree.floats(params)
    assert weights.keys() == tree.paths(params).keys() - {"layers.0.ffn.tid2eid"}
    changed = tree.replaced(params, {"norm": torch.zeros(cfg.dim)})
    assert changed.norm.abs().sum() == 0
    assert changed.embed is params.embed
    with pytest.raises(ValueError, match="the tree has no nothing"):
        tree.replaced(params, {"nothing": params.norm})
    with pytest.raises(ValueError, match=r"tokens have shape \(3,\)"):
        model.forward(params, torch.zeros(3).long(), Ctx(cfg))
