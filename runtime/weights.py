"""A name for parameters, so that state of other weights is not taken for state of these."""

import hashlib

import torch

from dsv4.params import Params
from dsv4.tree import paths

_SAMPLES = 256  # of each tensor, evenly spaced


def weights_digest(params: Params) -> str:
    """Differs between checkpoints. Reads a few numbers of each tensor: a name, not a proof."""
    found = hashlib.sha256()
    for name, leaf in paths(params).items():
        flat = leaf.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // _SAMPLES)].contiguous()
        found.update(f"{name} {tuple(leaf.shape)} {leaf.dtype}".encode())
        found.update(some.view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()
