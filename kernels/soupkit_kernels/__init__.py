"""The multi-variant one-bit linear and its bit layout. Depends on torch alone, never on soupkit.

y[t] = x[t] (W + D_v)^T,   D_v = sum_p diag(scale_p) S_p diag(column_scale_p) + up down,
v = variants[t];   -1 is the base
"""

from soupkit_kernels.arena import DeltaArena, arena_of
from soupkit_kernels.bitpack import pack, packed_width, unpack
from soupkit_kernels.delta import Delta
from soupkit_kernels.op import add_delta_, delta_embedding, delta_linear, path_name
from soupkit_kernels.plan import Plan, plan_of

__all__ = [
    "Delta",
    "DeltaArena",
    "Plan",
    "add_delta_",
    "arena_of",
    "delta_embedding",
    "delta_linear",
    "pack",
    "packed_width",
    "path_name",
    "plan_of",
    "unpack",
]
