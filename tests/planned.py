"""Plans of pools for amounts of memory."""

import torch

from dsv4.config import Config, preset
from runtime.memory import read_memory
from runtime.pools import PoolOptions, PoolPlan, plan_pools

BF16 = torch.bfloat16
FLASH = preset("flash")
MILLION = 1_048_576  # tokens


def gigabytes(cfg: Config, size: str, **options: int) -> PoolPlan:
    """A plan in bfloat16 for so much memory, for example "80GB"."""
    return plan_pools(cfg, BF16, read_memory(size), PoolOptions(**options))
