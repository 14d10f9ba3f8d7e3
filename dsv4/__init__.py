"""DeepSeek V4 as pure functions over parameter pytrees.

Start at `model.py` (`step`, `forward`), then `params.py` and `table.py` (every tensor
that exists), `state.py`
(every cache that exists), `batch.py` (what one step is told), `layer.py`, and the layers it calls.

Four invariants
---------------
1. Functions never change an argument. `ops.write_rows` is the only write, and it is functional;
   a backend that owns its pools may lower it in place.
2. Everything that varies between steps is a tensor; everything else stands in `Ctx` or in a type.
3. State is found by absolute position. The length alone says what is valid, so preemption, prefix
   reuse and the rejection of drafts are one operation: set the length.
4. Index 0 belongs to padding: page 0 of every pool, slot 0 of every ring, row 0 of every table.
   Page 0 and slot 0 stay zero, and every invalid read is sent there, so stale memory (even NaN)
   can never reach a result.

Dimension letters
-----------------
T tokens in the step, B table rows (one per sequence, row 0 is padding), Y tokens whose logits are
wanted, U query blocks, Z tokens per query block, S keys gathered per block, E compressed entries
addressable by a table, W compression groups closed in the step, D model, M hyper-connection
streams, H query heads, C head width (the key/value row), R query low rank, G output groups,
O output low rank, I and J indexer heads and width, X experts, L expert slots on this rank,
K experts per token, F expert hidden, V vocabulary, N rows of a pool, Q pages per table row.
"axis" is a mesh axis, "dim" a tensor dimension.

Decisions
---------
2026-11-29  Window keys live in pages, found through a table that is itself a ring (column = page
            index mod table width): a 1M-token sequence needs a table of 3 columns, not 8,192.
2026-11-29  The overlap rows a CSA group needs at a page boundary are read from the page header
            even when the ring still has them: the prefix-cache path is the ordinary path.
2026-11-29  Queries are grouped in blocks aligned to absolute positions (Z tokens share one gather
            of W + Z - 1 keys; Z = 1 is plain decode): tile and order do not depend on chunking.
2026-11-29  Router weights are a softmax over log sqrt(softplus): equal to s / sum(s), and finite
            and exact at logits of -200 where float32 s is 0 (cases E1).
2026-11-29  Stored in float32 whatever the model dtype: router, compressor projections and head.
            They multiply in float32, and widening bfloat16 weights at each step costs more reads.
"""
