"""Which step to run next, and what a checkpoint on disk becomes.

Requests go in, tokens come out, through three verbs: plan, run, commit. Start at `engine.py`.

Decide, with host ints only: `request.py` what is asked and how far it has come; `queue.py` who
waits; `scheduler.py` who runs, with `admission.py` (can it begin), `filling.py` (what goes into the
step), `trials.py` (who makes steps fail) and the limits of `rules.py`; `plan.py` is the result.
Own: `pages.py` says which sequence has which page of the three pools of `page_pool.py`; `prefix.py`
which pages a new one can begin with; `cache.py` moves their rows, `parcel.py` to other engines.
Run: `assemble.py` turns a plan into one `Batch`, `runner.py` steps it, `draw.py` samples and
verifies, `propose.py` drafts, `drafts.py` judges whether it pays, `text.py` makes text.

Before a start: `memory.py` reads how many bytes there are, `layout.py` knows what a page of each
group costs, `pools.py` plans pool sizes and what they serve, `pools_report.py` tells it.
Many at once: `async_engine.py` for asyncio, `balance_dp.py` for ranks in lock step.

Checkpoints: `headers.py` reads what files claim, `match.py` holds it against the table, `report.py`
tells, `load.py` streams, `save.py` and `quantise.py` write.

Imports `dsv4` only: programs arrive as callables. Decisions are frozen values, `commit` is the only
writer of request state, and state is found by absolute position.

Decisions
---------
2026-11-30  A prefix hit is zero-copy at multiples of a page (128 tokens): the page carries window
            keys, overlap rows and the streams of its last token, and no group is open there.
2026-11-30  The draft module's row of a token lives where the token lives, and is computed before
            the commit: a full page is final when it is published, drafts or not.
2026-11-30  Drafts are verified by shared noise by default ("coupled"): any depth gives the tokens
            of undrafted decoding. "ratio" (min(1, p/q)) accepts more and depends on drafts.
2026-11-30  Pages are taken as sequences grow, and the least urgent request is preempted, keeping
            its tokens and drafts: nothing is set aside for answers that end early.
2026-11-30  A failed step starts its requests over, one by one, since a step may write its pools in
            place; who fails alone a second time is the cause and ends with the error.
2026-11-30  Window pages behind the window stay cached until their place is needed: two prompts
            that share k tokens hit floor(k / 128) * 128 wherever k lies, at no extra memory.
"""
