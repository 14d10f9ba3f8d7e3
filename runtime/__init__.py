"""Which step to run next.

Requests go in, tokens come out, through three verbs: plan, run, commit. `request.py`, `pages.py`,
`prefix.py`, `plan.py` and `scheduler.py` decide, with host ints only; `assemble.py` turns a plan
into one `Batch`; `pools.py` and `load.py` bring device memory and weights; `runner.py` owns device
state and calls the program it was handed; `drafts.py` keeps the book on speculation; `balance.py`
and `swap.py` plan and move experts; `engine.py` ties them. Imports `dsv4` only: programs arrive as
callables. Decisions are frozen values, `commit` is the only writer of request state, and state is
found by absolute position, so that rejecting, preempting and resuming all just set a length.
"""
