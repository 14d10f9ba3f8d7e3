"""The small model that the checkpoint tests save and load, each with its own sizes."""

import dataclasses

from dsv4.config import Yarn, hashed, kinds_of, preset

BASE = dataclasses.replace(
    preset("tiny"),
    vocab=48,
    dim=160,
    heads=4,
    head_dim=32,
    rope_dim=8,
    q_rank=32,
    o_groups=2,
    o_rank=16,
    kinds=kinds_of("wch"),
    hash_layers=hashed(1, 3),
    window=8,
    index_heads=4,
    index_dim=32,
    index_topk=8,
    experts=3,
    expert_dim=160,
    yarn=Yarn(factor=16.0, original=256),
)
