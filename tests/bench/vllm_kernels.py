"""What vLLM 0.32.0 lacks to run DeepSeek V4 on a CPU without AMX, supplied from outside.

Five of its metadata kernels exist in Triton only, which has no CPU backend, and are missing from
the table of C++ replacements that its CPU platform registers; `register_kernels` is vLLM's own hook
for such replacements. And the CPU's `build_tile_scheduler` leaves out two keys that the shared
builder reads. None of it takes part in a layer's work: the clock of the benchmark runs from the
model's forward to its logits.

Arguments follow the kernels' own, in order; strides and Triton block sizes are not needed.
"""

import importlib
from typing import Any

import torch
from torch import Tensor


def token_request(
    query_start: Tensor, out: Tensor, reqs: int, mapped: int, tokens: int, **_
) -> None:
    """Request of each token."""
    t = torch.arange(tokens, dtype=query_start.dtype)
    req = torch.searchsorted(query_start[1 : reqs + 1].contiguous(), t, right=True)
    out[:tokens] = torch.where(t < mapped, req.clamp(max=reqs - 1), 0)


def _tokens(query_start: Tensor, seq_lens: Tensor, reqs: int) -> tuple[Tensor, Tensor]:
    """Request and position of each token of `reqs` requests."""
    start = query_start[: reqs + 1].long()
    counts = start.diff()
    req = torch.repeat_interleave(torch.arange(reqs), counts)
    first = seq_lens[:reqs].long() - counts
    return req, torch.arange(len(req)) - (start[:-1] - start[0])[req] + first[req]


def compressed_slots(
    out: Tensor,
    slots: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    table: Tensor,
    _stride: int,
    block: int,
    ranks: int,
    _interleave: int,
    rate: int,
    pad: int,
    _triton: int,
) -> None:
    """Slot of the compressed entry that each token closes, or `pad`."""
    assert ranks == 1
    req, pos = _tokens(query_start, seq_lens, table.shape[0])
    closes = ((pos + 1) % rate == 0) & (slots[: len(req)] != pad)
    entry = torch.where(closes, pos // rate, 0)
    slot = table[req, entry // block].long() * block + entry % block
    out[: len(req)] = torch.where(closes, slot, pad)


def window_slots(
    out: Tensor,
    _stride: int,
    lengths: Tensor,
    window: int,
    width: int,
    _left: Tensor,
    _right: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    request: Tensor,
    valid: Tensor,
    table: Tensor,
    _table_stride: int,
    block: int,
    replay: Tensor,
    offset: int,
    has_image: bool,
    _triton: int,
) -> None:
    """Window slots of the tokens from `offset` on, and how many each has."""
    assert not has_image
    count = min(len(valid) - offset, len(out))
    token = torch.arange(offset, offset + count)
    req = request[offset : offset + count].long()
    start, end = query_start[req].long(), query_start[req + 1].long()
    pos = seq_lens[req].long() - (end - start) + token - start
    first = torch.maximum((pos - window + 1).clamp(min=0), replay[req].long())
    real = valid[offset : offset + count]
    length = torch.where(real, pos + 1 - first, 0)
    lengths[:count] = length.to(lengths.dtype)
    step = torch.arange(width)
    seen = step < length[:, None]
    at = torch.where(seen, first[:, None] + step, 0)
    slot = table[req[:, None], at // block].long() * block + at % block
    out.view(len(out), -1)[:count, :width] = torch.where(seen, slot, -1).to(out.dtype)


def gather_lengths(
    out: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    replay: Tensor,
    prefills: int,
    decodes: int,
    window: int,
    _triton: int,
) -> None:
    """Keys each prompt gathers: its tokens, and what the window holds of those before."""
    rows = slice(decodes, decodes + prefills)
    query = query_start[decodes : decodes + prefills + 1].diff()
    before = (seq_lens[rows] - query - replay[rows]).clamp(min=0, max=window - 1)
    out[:prefills] = query + before


def chunk_metadata(
    query_start: Tensor,
    seq_lens: Tensor,
    entries_start: Tensor,
    row_start: Tensor,
    request: Tensor,
    first_entry: Tensor,
    last_entry: Tensor,
    begin: int,
    stop: int,
    _rank: int,
    ranks: int,
    _interleave: int,
    _triton: int,
    rate: int,
) -> None:
    """Which entries each token of a prompt chunk may see, and whose each entry is."""
    assert ranks == 1
    reqs = len(seq_lens)
    req, pos = _tokens(query_start, seq_lens, reqs)
    req, pos = req[begin:stop], pos[begin:stop]
    start = row_start[req].long()
    first_entry[: len(req)] = start.to(first_entry.dtype)
    last_entry[: len(req)] = (start + (pos + 1) // rate).to(last_entry.dtype)
    owner = torch.repeat_interleave(torch.arange(reqs), entries_start[: reqs + 1].diff())
    request[: len(owner)] = owner.to(request.dtype)


def apply() -> list[str]:
    """Supply what is missing; what was done, for the benchmark's output."""
    backends = "vllm.v1.attention.backends.mla"
    dispatcher: Any = importlib.import_module("vllm.triton_utils.dispatcher")
    cpu: Any = importlib.import_module("vllm.models.deepseek_v4.cpu.cpu_mla")
    shared: Any = importlib.import_module(f"{backends}.sparse_swa")
    kernels = {
        "vllm.v1.attention.ops.metadata._token_request_mapping_kernel": token_request,
        f"{backends}.compressor_utils.CompressedSlotMappingKernel.kernel": compressed_slots,
        f"{backends}.sparse_swa.ComputeSWAIndicesAndLensKernel.kernel": window_slots,
        f"{backends}.sparse_swa.ComputePrefillMetadataKernel.kernel": gather_lengths,
        f"{backends}.indexer.BuildPrefillChunkMetadataKernel.kernel": chunk_metadata,
    }
    dispatcher.register_kernels(kernels)
    builder = cpu.DeepseekV4CPUSparseSWAMetadataBuilder
    lacking = builder.build_tile_scheduler

    def complete(self: Any, num_decode_tokens: int) -> dict[str, Any]:
        keys = (shared._LAYER_TYPE_C1A, shared._LAYER_TYPE_C2A)
        return {**dict.fromkeys(keys), **lacking(self, num_decode_tokens)}

    builder.build_tile_scheduler = complete
    return [
        f"{len(kernels)} metadata kernels that exist in Triton only were given to vLLM's "
        "register_kernels as torch code: " + ", ".join(n.split(".")[-2:][0] for n in kernels),
        "DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler got the keys c1a and c2a",
    ]
