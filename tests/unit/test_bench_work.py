"""What the benchmark says a step must do, against counting it."""

import dataclasses
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from compiler.backend import EAGER
from dsv4 import model, table
from dsv4.config import Config, Kind
from dsv4.context import Ctx
from dsv4.state import PoolSizes, init_pools
from dsv4.tree import leaves, paths
from runtime.assemble import Row, assemble
from tests import tiny
from tests.bench import agree, work
from tests.bench.case import Case, longest, parse
from tests.bench.vllm_kernels import chunk_metadata, compressed_slots, token_request, window_slots

CFG = tiny.config("wchc", hash_layers=1, index_topk=8)
PAGE = CFG.page_tokens


def decode(batch: int, tokens: int) -> Case:
    """A decode case."""
    return Case(decode=True, batch=batch, tokens=tokens)


def counted(cfg: Config, position: int) -> tuple[int, int, int]:
    """Operations that torch counts in a step of one token, keys and scores it gathers per layer."""
    pages = position // PAGE + 1
    sizes = PoolSizes(history_pages=pages + 1, window_pages=pages + 1, slots=2, page_tokens=PAGE)
    pools = init_pools(cfg, sizes, torch.bfloat16)
    # In float32 our experts pad their rows.
    params = table.init(cfg, torch.Generator().manual_seed(0), torch.bfloat16)
    listed = list(range(1, pages + 1))
    batch = assemble([Row([5], position, 1, listed, listed)], cfg, page_tokens=PAGE, block=1)
    ctx = Ctx(cfg, ops=EAGER.ops)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.step(params, pools, batch, ctx)
    keys = scores = 0
    for plan in cfg.plans:
        entries = pages * PAGE // plan.rate if plan.rate else 0
        scoring = plan.kind is Kind.CSA and entries > cfg.index_topk
        keys += cfg.window + (cfg.index_topk if scoring else entries)
        scores += entries if scoring else 0
    return counter.get_total_flops(), keys, scores


@pytest.mark.parametrize("position", [130, 255, 256, 300])
def test_flops_of_one_token_are_those_torch_counts(position: int) -> None:
    cfg = dataclasses.replace(CFG, index_topk=64)
    total, keys, scores = counted(cfg, position)
    own = work.linear_flops(cfg, position) + work.stream_flops(cfg) + work.logits_flops(cfg)
    scoring = [work.scored(cfg, plan, position) for plan in cfg.plans]
    csa = sum(plan.kind is Kind.CSA for plan in cfg.plans)
    # The step scores whole pages, and so sooner than it must.
    if scores and not any(scoring):
        q = 2 * (cfg.index_heads * cfg.index_dim * cfg.q_rank + cfg.index_heads * cfg.dim)
        own += csa * q
    own += 4 * cfg.heads * cfg.head_dim * keys
    own += 2 * cfg.index_heads * (cfg.index_dim + 1) * scores
    assert total == own


@pytest.mark.parametrize("tokens", [1, 15, 16, 40, 300])
def test_attended_keys_are_those_that_a_loop_finds(tokens: int) -> None:
    keys = scores = 0
    for t in range(tokens):
        for plan in CFG.plans:
            keys += sum(1 for s in range(tokens) if t - CFG.window < s <= t)
            if not plan.rate:
                continue
            closed = sum(1 for end in range(1, t + 2) if end % plan.rate == 0)
            chosen = min(closed, CFG.index_topk) if plan.kind is Kind.CSA else closed
            keys += chosen
            scores += closed if plan.kind is Kind.CSA and closed > CFG.index_topk else 0
    found = sum(work.attention_flops(CFG, t) for t in range(tokens))
    each = 2 * CFG.index_heads * (CFG.index_dim + 1)
    assert found == 4 * CFG.heads * CFG.head_dim * keys + each * scores


def test_a_prompt_costs_its_tokens_and_one_row_of_logits() -> None:
    case = Case(decode=False, batch=1, tokens=40)
    tokens = sum(
        work.linear_flops(CFG, t) + work.stream_flops(CFG) + work.attention_flops(CFG, t)
        for t in range(40)
    )
    assert work.step_flops(CFG, case) == tokens + work.logits_flops(CFG)
    one = work.step_flops(CFG, decode(1, 32))
    assert work.step_flops(CFG, decode(3, 32)) == 3 * one


def test_experts_touched_is_the_mean_of_drawing_them() -> None:
    generator = torch.Generator().manual_seed(0)
    draws = torch.rand(4000, 5, CFG.experts, generator=generator).topk(CFG.topk).indices
    hit = torch.zeros(4000, CFG.experts).scatter_(1, draws.flatten(1), 1.0).sum(1)
    assert work.touched(CFG, 5) == pytest.approx(hit.mean().item(), rel=0.01)
    assert work.touched(CFG, 1) == pytest.approx(CFG.topk)


def test_weights_of_a_step_that_uses_all_are_the_whole_checkpoint() -> None:
    """With every expert chosen and the indexer scoring, all is read but rows of two tables."""
    cfg = dataclasses.replace(CFG, topk=CFG.experts, index_topk=4)
    case = decode(1, 32)
    spec = table.spec(cfg)
    rows = [p for p in paths(spec) if p == "embed" or p.endswith("tid2eid")]
    params = table.init(cfg, torch.Generator().manual_seed(0), torch.bfloat16)
    held = {p: t.numel() * t.element_size() for p, t in paths(params).items()}
    once = sum(held[p] // paths(params)[p].shape[0] for p in rows)
    expected = sum(held.values()) - sum(held[p] for p in rows) + once
    assert work.weight_bytes(cfg, case, torch.bfloat16, held=True) == expected
    assert table.size_bytes(spec, torch.bfloat16) == sum(held.values())


def test_the_checkpoint_holds_fewer_bytes_than_the_program() -> None:
    case = decode(1, 32)
    stored = work.weight_bytes(CFG, case, torch.bfloat16, held=False)
    held = work.weight_bytes(CFG, case, torch.bfloat16, held=True)
    wider = sum(
        leaf.count * 2
        for path, leaf in paths(table.spec(CFG)).items()
        if leaf.role == "wide" and leaf.stored == "bf16" and not path.startswith("mtp.")
    )
    assert held - stored == wider > 0


def test_cache_bytes_are_those_of_the_rows_that_are_touched() -> None:
    """Mean over four positions, in which each group of CSA closes once and none of HCA's does."""
    cfg = dataclasses.replace(CFG, kinds=(Kind.WINDOW, Kind.CSA), hash_layers=(True, False))
    for start in (16, 32, 64):
        total = 0
        for position in range(start, start + 4):
            seen = (position + 1) // 4
            for csa in (False, True):
                total += min(cfg.window, position + 1) * cfg.head_dim * 2  # keys read
                total += cfg.head_dim * 2  # and written
                if not csa:
                    continue
                total += min(seen, cfg.index_topk) * cfg.head_dim * 2
                total += (seen * cfg.index_dim * 2) if seen > cfg.index_topk else 0
                for width in (cfg.head_dim, cfg.index_dim):
                    total += 4 * width * 4  # this token's k and g of both halves
                    if (position + 1) % 4 == 0:
                        total += 8 * 4 * width * 4 + width * 2
        means = [
            work.cache_bytes(cfg, decode(1, p), torch.bfloat16) for p in range(start, start + 4)
        ]
        assert sum(means) == pytest.approx(total)
        assert work.cache_bytes(cfg, decode(3, start), torch.bfloat16) == pytest.approx(
            3 * means[0]
        )


def test_every_leaf_of_the_backbone_is_counted_once() -> None:
    case = decode(1, 0)
    spec = table.spec(CFG)
    assert len(list(work._leaves(CFG))) == len(leaves(spec)) - len(
        leaves(spec.mtp) if spec.mtp else []
    )
    assert work.weight_bytes(CFG, case, torch.bfloat16, held=True) < table.size_bytes(
        spec, torch.bfloat16
    )


@pytest.mark.parametrize("text", ["prefill:512", "decode:8x512", "decode:32x8192"])
def test_a_case_is_read_as_it_is_written(text: str) -> None:
    assert parse(text).name == text


@pytest.mark.parametrize(
    "text", ["prefill", "decode:512", "decode:0x512", "prefill:x", "decode:1x5"]
)
def test_other_cases_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="case"):
        parse(text)


def test_the_longest_case_leaves_room_for_timed_steps() -> None:
    assert longest([parse("prefill:2048"), parse("decode:1x512")]) == 2048
    assert longest([parse("decode:1x8192")]) == 8192 + 256


def test_agreement_ignores_a_shift_and_sees_a_change() -> None:
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(3, 50, generator=generator)
    assert agree.distance(exact + 7, exact) == pytest.approx(0, abs=1e-6)
    near = exact + 0.01 * torch.randn(3, 50, generator=generator)
    far = exact.roll(1, dims=0)
    assert agree.compare(near, exact, 0.01, False).holds
    assert not agree.compare(far, exact, 0.01, False).holds
    assert not agree.compare(exact * math.nan, exact, 0.01, False).holds
    assert not agree.compare(exact[:2], exact, 0.01, False).holds


def ints(*values: int) -> torch.Tensor:
    """An int32 tensor, as vLLM's are."""
    return torch.tensor(values, dtype=torch.int32)


def test_metadata_given_to_vllm_is_what_loops_find() -> None:
    """Three requests: one token at 9, three from 4 on, five from 0 on; blocks of 4 slots."""
    starts, lengths = ints(0, 1, 4, 9), ints(10, 7, 5)
    where = [(0, 9), (1, 4), (1, 5), (1, 6), (2, 0), (2, 1), (2, 2), (2, 3), (2, 4)]
    blocks = ints(*range(10, 22)).view(3, 4)
    out = ints(*[-7] * 12)
    token_request(starts, out, 3, 9, 11)
    assert out.tolist() == [r for r, _ in where] + [0, 0, -7]
    request = out.clone()

    slots = torch.arange(9)
    entries = torch.full((9,), -9)
    compressed_slots(entries, slots, starts, lengths, blocks, 4, 2, 1, 1, 2, -1, 0)
    assert entries.tolist() == [
        int(blocks[r, p // 2 // 2]) * 2 + p // 2 % 2 if p % 2 else -1 for r, p in where
    ]

    keys, counts = torch.zeros(9, 1, 3, dtype=torch.int32), ints(*[0] * 9)
    none = torch.zeros(3, dtype=torch.int32)
    valid = torch.ones(9, dtype=torch.bool)
    window_slots(
        keys, 3, counts, 3, 3, none, none, starts, lengths, request, valid, blocks, 4, 4, none, 0,
        False, 0,
    )  # fmt: skip
    for (r, p), row, count in zip(where, keys[:, 0].tolist(), counts.tolist(), strict=True):
        seen = [int(blocks[r, s // 4]) * 4 + s % 4 for s in range(max(0, p - 2), p + 1)]
        assert (row, count) == (seen + [-1] * (3 - len(seen)), len(seen))

    owner, first, last = ints(*[-1] * 5), ints(*[-1] * 3), ints(*[-1] * 3)
    cumulative = ints(0, 3, 5)  # of requests 1 and 2, entries of two tokens
    chunk_metadata(
        starts[1:] - 1, lengths[1:], cumulative, cumulative, owner, first, last, 2, 5, 0, 1, 1, 0, 2
    )
    assert owner.tolist() == [0, 0, 0, 1, 1]
    assert first.tolist() == [0, 3, 3]
    assert last.tolist() == [0 + 7 // 2, 3 + 0, 3 + 1]
