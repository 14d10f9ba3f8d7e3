"""Which step to run next, and what a checkpoint on disk becomes.

Requests go in, tokens come out, through three verbs: plan, run, commit. `request.py`, `pages.py`,
`plan.py` and `scheduler.py` decide, with host ints only; `assemble.py` turns a plan into one
`Batch`; `runner.py` owns parameters and pools and calls the step it was handed; `text.py` turns
tokens to text and finds stop strings; `engine.py` ties them.

Checkpoints: `headers.py` reads what files claim, `match.py` holds it against the table, `report.py`
tells, `load.py` streams, `save.py` and `quantise.py` write.

Imports `dsv4` only: programs arrive as callables. Decisions are frozen values, `commit` is the only
writer of request state, and state is found by absolute position.
"""
