"""An engine in the pools that were planned for it."""

import pytest
import torch

from dsv4.tree import leaves
from registry import builtin_model
from registry.build import build
from runtime.drafts import Drafts
from runtime.engine import Engine
from runtime.memory import Memory
from runtime.pools import PoolOptions, plan_pools
from runtime.request import Limits, Request

pytestmark = pytest.mark.e2e
NEW = 20  # tokens


def asking(tokens: int, first: int = 5) -> Request:
    """A request that comes to hold the state of `tokens` tokens: that of the last never is."""
    prompt = [first] * (tokens + 1 - NEW)
    return Request(prompt=prompt, limits=Limits(max_new_tokens=NEW, ignore_eos=True))


@pytest.mark.parametrize("depth", [0, 2])
def test_i1_i3_the_planned_bytes_are_allocated_and_the_largest_request_is_served(
    depth: int,
) -> None:
    model = build(builtin_model.path(), dtype=torch.float32)
    options = PoolOptions(max_model_len=200, slots=2, chunk=64, drafts=depth)
    plan = plan_pools(model.cfg, torch.float32, Memory(2_200_000, "a test"), options)
    engine = Engine(
        model, plan.sizes, chunk=options.chunk, drafts=Drafts(depth=depth) if depth else None
    )
    assert sum(t.numel() * t.element_size() for t in leaves(engine.pools)) == plan.num_bytes
    largest, half = plan.largest(), plan.largest(2)
    assert 200 <= half < largest < model.cfg.max_positions
    with pytest.raises(ValueError, match=r"(history|window) pages"):
        engine.add(asking(largest + 1))
    for requests in ([asking(largest)], [asking(half, 6), asking(half, 7)]):
        for request in engine.generate(requests):
            assert (len(request.output), request.preemptions) == (NEW, 0)
    engine.audit()
