"""The draft module's part of a run: which of its rows became computable, and the chain of drafts.

Its row of a token joins the token with the streams of the token before it. So after a step that
made positions start .. end - 1 certain it runs over tokens start + 1 .. end, the last of which was
just sampled (or is the next of the prompt); that last row proposes the token at end + 1, and from
there it goes on from its own streams, one row per draft. Streams of a page's last token are kept
in the pools (`Pools.streams`), and the first row of a page is always computed from them, whether
the page before was computed here, hit or imported.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dsv4 import sample, verify
from runtime.assemble import Ints, Rows
from runtime.draw import draw_of
from runtime.plan import Plan
from runtime.request import Proposal, Sampled


class Chain(NamedTuple):
    """Drafts to make for one work."""

    work: int  # index in the plan
    end: int  # position of its newest token, which has no state yet
    depth: int  # drafts to make


class CatchUp(NamedTuple):
    """What the draft module runs over first."""

    rows: Rows
    source: Ints  # [T] flat index, in the step, of the token before each one
    first: Ints  # [k] rows that begin a page: the token before is not in the step
    page: Ints  # [k] the window page before
    chains: list[Chain]  # in the order of wanted rows


def catch_up(plan: Plan, kept: Sequence[Sequence[Sampled]], page_tokens: int) -> CatchUp | None:
    """The rows that a step has made computable, or None. Host data only."""
    width = plan.window.shape[1]
    tokens, counts, starts, wanted, source, index = [], [], [], [], [], []
    first, page, chains = [], [], []
    flat = 0  # of the work's first token in the step
    for i, (w, new) in enumerate(zip(plan.work, kept, strict=True)):
        known = (
            [*w.tokens[1:], *(s.token for s in new)] if w.wanted else [*w.tokens[1:], w.following]
        )
        end = w.start + len(known)
        del known[max(w.reach - w.start - 1, 0) :]
        begin, before = w.start + 1, flat
        if w.start and w.start % page_tokens == 0:
            first.append(len(tokens))
            page.append(plan.window[i, (w.start // page_tokens - 1) % width])
            known.insert(0, w.tokens[0])
            begin, before = w.start, flat - 1
        flat += len(w.tokens) + len(w.drafts)
        if not known:
            continue
        depth = min(w.propose, w.reach - end)
        if depth > 0:
            chains.append(Chain(i, end, depth))
        index.append(i)
        tokens += known
        counts.append(len(known))
        starts.append(begin)
        wanted.append(int(depth > 0))
        source += range(before, before + len(known))
    if not tokens:
        return None
    rows = Rows(
        tokens=np.array(tokens),
        counts=np.array(counts),
        starts=np.array(starts),
        wanted=np.array(wanted),
        **_places(plan, index),
    )
    lists = (np.array(source).clip(0), np.array(first, np.int64), np.array(page, np.int64))
    return CatchUp(rows, *lists, chains)


def one_more(plan: Plan, chains: Sequence[Chain], drafts: Sequence[int], made: int) -> Rows:
    """A row per chain, for its newest draft, when `made` of them are made."""
    ones = np.ones(len(chains), np.int64)
    return Rows(
        tokens=np.array(drafts),
        counts=ones,
        starts=np.array([c.end + made for c in chains]),
        wanted=ones,
        **_places(plan, [c.work for c in chains]),
    )


def _places(plan: Plan, index: list[int]) -> dict[str, Ints]:
    """Where the draft module's state of these works lives. It keeps no compressed entries."""
    return {
        "slots": np.array([plan.work[i].slot for i in index]),
        "history": np.zeros((len(index), 1), np.int64),
        "window": plan.window[index],
    }


# Logits of wanted rows and streams of all, of rows whose tokens have these streams before them.
Module = Callable[[Tensor, Rows], tuple[Tensor, Tensor]]


def propose(
    plan: Plan, streams_TMD: Tensor, work: CatchUp, module: Module, rule: str
) -> dict[int, Proposal]:
    """Run the module over `work`, then along its chains; the drafts by index of the plan's work."""
    logits, streams = module(streams_TMD, work.rows)
    ends = work.rows.counts.cumsum()[work.rows.wanted > 0] - 1
    streams = streams[torch.from_numpy(ends).to(streams.device)]
    chains = work.chains
    drafts: dict[int, list[int]] = {c.work: [] for c in chains}
    weights: dict[int, list[Tensor]] = {c.work: [] for c in chains}
    made = 0
    while chains:
        made += 1
        found, q = _draft(
            logits[: len(chains)], plan, [(c.work, c.end + made) for c in chains], rule
        )
        for y, c in enumerate(chains):
            drafts[c.work].append(found[y])
            if q is not None:
                weights[c.work].append(q[y])
        going = [y for y, c in enumerate(chains) if c.depth > made]
        chains, found = [chains[y] for y in going], [found[y] for y in going]
        if chains:
            logits, streams = module(streams[going], one_more(plan, chains, found, made))
    return {
        i: Proposal(tuple(d), torch.stack(weights[i]) if weights[i] else None)
        for i, d in drafts.items()
    }


def _draft(
    logits_YV: Tensor, plan: Plan, places: list[tuple[int, int]], rule: str
) -> tuple[list[int], Tensor | None]:
    """A draft per row, for (index of the plan's work, position), and what they were drawn from."""
    asked = [plan.work[i].sampling for i, _ in places]
    if rule == "coupled" and all(s.temperature == 0 for s in asked):
        return sample.greedy(logits_YV).tolist(), None
    draw = draw_of(asked, [position for _, position in places], logits_YV)
    if rule == "coupled":
        return sample.sample(logits_YV, draw).tolist(), None
    found, q = verify.propose(logits_YV, draw)
    return found.tolist(), q
