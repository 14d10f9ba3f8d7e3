"""The eager backend's lowerings mean what the plain operators mean."""

import pytest
import torch

from compiler.backend import EAGER, backend, states, write_rows_in_place
from compiler.segments import experts_by_segment
from dsv4 import ops


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_segments_equal_the_plain_experts(tokens: int, dtype: torch.dtype):
    g = torch.Generator().manual_seed(tokens)
    slots, dim, hidden, kept = 9, 16, 24, 3

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)

    w = ops.Experts(
        w1=3 * draw(slots, hidden, dim), w3=3 * draw(slots, hidden, dim),
        w2=draw(slots, dim, hidden), limit=4.0,
    )  # fmt: skip
    x = draw(tokens, dim)
    chosen = torch.rand(tokens, slots, generator=g).topk(kept, -1).indices
    weights = torch.rand(tokens, kept, generator=g).to(torch.promote_types(dtype, torch.float32))
    want = ops.experts(x, weights, chosen, w)
    got = experts_by_segment(x, weights, chosen, w)
    assert got.dtype == want.dtype
    scale = want.abs().max()
    bound = 1e-13 if dtype == torch.float64 else 2**-8  # one bfloat16 rounding of a GEMM's rows
    assert (got - want).abs().max() <= bound * scale


def test_both_plain_forms_agree():
    """Few rows gather weights, many rows mask: the same function on either side of the switch."""
    g = torch.Generator().manual_seed(0)
    draw = lambda *s: torch.randn(s, generator=g, dtype=torch.float64)  # noqa: E731
    w = ops.Experts(w1=draw(8, 6, 5), w3=draw(8, 6, 5), w2=draw(8, 5, 6), limit=10.0)
    x, weights = draw(6, 5), torch.rand(6, 2, generator=g, dtype=torch.float64)
    chosen = torch.rand(6, 8, generator=g).topk(2, -1).indices
    many = ops.experts(x, weights, chosen, w)  # 12 rows >= 8 slots
    few = torch.cat([ops.experts(x[i : i + 1], weights[i : i + 1], chosen[i : i + 1], w)
                     for i in range(6)])  # fmt: skip
    torch.testing.assert_close(many, few, rtol=0, atol=1e-13)


def test_an_expert_named_twice_counts_twice():
    g = torch.Generator().manual_seed(1)
    draw = lambda *s: torch.randn(s, generator=g, dtype=torch.float64)  # noqa: E731
    w = ops.Experts(w1=draw(4, 6, 5), w3=draw(4, 6, 5), w2=draw(4, 5, 6), limit=10.0)
    x, weights = draw(3, 5), torch.full((3, 2), 0.5, dtype=torch.float64)
    chosen = torch.full((3, 2), 2)
    # The weight stands before w2, so half twice is one whole.
    once = ops.experts(x, torch.ones(3, 1, dtype=torch.float64), chosen[:, :1], w)
    torch.testing.assert_close(ops.experts(x, weights, chosen, w), once, rtol=0, atol=1e-13)
    torch.testing.assert_close(experts_by_segment(x, weights, chosen, w), once, rtol=0, atol=1e-13)


def test_in_place_writes_keep_the_address():
    pool = torch.zeros(6, 2)
    out = write_rows_in_place(pool, torch.tensor([2, 5]), torch.ones(2, 2))
    assert out.data_ptr() == pool.data_ptr()
    assert torch.equal(out, ops.write_rows(torch.zeros(6, 2), torch.tensor([2, 5]), out[[2, 5]]))


def test_backends_are_refused_by_name():
    assert backend("eager") is EAGER
    with pytest.raises(ValueError, match=r"'fast' is unknown.*eager"):
        backend("fast")
    for name, device in (("torchair", "cpu"), ("auto", "npu")):
        with pytest.raises(ValueError, match=r"torchair cannot run here: torch_npu.*eager"):
            backend(name, device)
    with pytest.raises(ValueError, match="no backend for device 'tpu'"):
        backend("auto", "tpu")


def test_auto_says_which_backend_and_why():
    chosen = backend("auto")
    assert chosen.name == "inductor"
    assert chosen.why.startswith("auto on device cpu: compiles each shape")


def test_a_machine_without_a_compiler_gets_a_reason_and_no_other_backend(monkeypatch):
    monkeypatch.setenv("PATH", "")
    for name in ("auto", "inductor", "kernels"):
        with pytest.raises(ValueError, match=r"cannot run here: there is no C.. compiler.*eager"):
            backend(name)
    assert states()["eager"] is None
    assert "compiler" in str(states()["inductor"])
