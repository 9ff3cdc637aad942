"""The multi-variant one-bit linear and its bit layout. Depends on torch alone, never on soupkit.

y[t] = x[t] W^T + scale_v * (S_v x[t]),   v = variant_index[t]
"""

from soupkit_kernels.bitpack import pack, packed_width, unpack
from soupkit_kernels.op import delta_linear, path_name

__all__ = ["delta_linear", "pack", "packed_width", "path_name", "unpack"]
