"""How a step becomes a program, and where programs are kept.

Start at `backend.py`: the record of what a target brings, which is its lowering of each operator
of `dsv4.ops.Ops` and, if it compiles, how programs are built and loaded. `eager` needs nothing
(`segments.py`); `kernels` runs steps with C++ kernels (`cpu_ops.py`, built by `cpu_build.py`, over
weights laid out by `cpu_layout.py`); `inductor.py` compiles steps around them; `torchair*.py` is
the same for an Ascend NPU, proved without one by `tools.graph` as far as that goes.

`ladder.py` says which static shapes steps are padded to; `program.py` seals one function at one
shape; `programs.py` sends each batch to its program. `key.py` and `key_parts.py` say what a program
was made from, `store*.py` keep it on disk.

Imports `dsv4` only: it knows nothing of requests, and `runtime` knows nothing of it. Donation
(pools written in place) happens here and nowhere else.

Decisions
---------
2026-11-30  Programs are saved with their guards and loaded without a trace (`aot_compile`): a start
            with found programs takes seconds, and another shape is an error, never a compile.
2026-11-30  The number of rows of the pools is the one size that is not static: memory budgets
            differ from start to start, and a program must not be compiled anew for each.
2026-11-30  What moves many bytes on a CPU is a C++ kernel, opaque to the capture; inductor fuses
            what lies between. Of a decode step of 3 layers it takes 16.5 ms to 2.6 ms.
2026-11-30  Padding tokens take the experts of the first token: a step reads no weights for them.
"""
