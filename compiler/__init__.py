"""How a step becomes a program.

`backend.py` is the record of what a target brings: its lowerings of `dsv4.ops.Ops`, and how a step
function is turned into a program. `torchair*.py` are the same for an Ascend NPU, proved without one
by `tools.graph` as far as that goes. There is one so far, `eager`: pools are donated (written in
place) and experts run by `segments.py`. Imports `dsv4` only: it knows nothing of requests, and
`runtime` knows nothing of it. Donation happens here and nowhere else.
"""
