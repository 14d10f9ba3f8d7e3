"""How a step becomes a program.

A pure function `(params, pools, batch) -> (out, pools)` goes in, one sealed program per bucket
comes out. `program.py` donates the pools and seals; `ladder.py` holds the buckets; `backend.py` is
the record of what a target brings (compile arguments, `Ops`, device), filled by `inductor.py` for
the CPU and `torchair.py` with `torchair_ops.py` for the NPU; `warm.py` compiles every bucket and
refuses a recompile; `cache.py` says where artifacts live. Imports `dsv4` only: it knows nothing of
requests, and `runtime` knows nothing of it. Donation happens here and nowhere else, and after
warm-up nothing compiles.
"""
