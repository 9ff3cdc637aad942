"""The kernels beside the fused one, compiled: effective weights, embedding rows, low-rank products.

An effective weight is bound by memory: (4 + P / 8) bytes a weight of 16 bits for P planes, so its
loads and stores must be 16 bytes a thread wide, and a weight must be stored once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from soupkit.bench.kernel_static import DTYPES, Check, Figures, resource_checks
from soupkit.bench.sass import compile_kernel


@dataclass(frozen=True, slots=True)
class WeightsCase:
    """One instance: what = "reconstruct", "embedding", "rank rows" or "rank tiles"."""

    what: str
    dtype: str = "bf16"
    sm: int = 90
    has_columns: bool = False
    has_low_rank: bool = False

    @property
    def name(self) -> str:
        """As in "reconstruct bf16 sm_90 columns"."""
        flags = {"columns": self.has_columns, "low rank": self.has_low_rank}
        parts = [f"{self.what} {self.dtype} sm_{self.sm}"]
        return " ".join(parts + [flag for flag, is_on in flags.items() if is_on])


def cases() -> list[WeightsCase]:
    """Every kernel in bfloat16 on an H100; effective weights in every dtype."""
    return [
        *(WeightsCase("reconstruct", dtype) for dtype in DTYPES),
        WeightsCase("reconstruct", has_columns=True, has_low_rank=True),
        WeightsCase("embedding", has_columns=True, has_low_rank=True),
        WeightsCase("rank rows"),
        WeightsCase("rank tiles"),
    ]


def measure(case: WeightsCase) -> Figures:
    """Compile a case and hold it to its bounds.

    Raises: as sass.compile_kernel.
    """
    kernel, constants, is_fused, num_stages = _launch(case)
    own = f"*{case.dtype}"
    types = dict.fromkeys(("weight", "out", "values", "x"), own)
    types |= dict.fromkeys(("floats", "low"), "*fp32") | {"table": "*i64", "ids": "*i64"}
    types |= dict.fromkeys(("words", "order", "variants"), "*i32")
    names = [name for name in kernel.arg_names if name not in constants]
    code = compile_kernel(
        kernel,
        {name: types.get(name, "i32") for name in names},
        constants,
        aligned=[name for name in names if name not in ("slot", "slots", "rank", "count")],
        num_warps=4,
        num_stages=num_stages,
        sm=case.sm,
        fused_multiply_add=is_fused,
    )
    checks = resource_checks(code, ctas=2)
    if case.what == "reconstruct":
        size = constants["BLOCK_N"] * constants["BLOCK_K"] * DTYPES[case.dtype].itemsize
        moved = code.accesses()
        stored = sum(count for (name, _), count in moved.items() if name == "STG")
        checks += [
            Check("stored/tile", stored / size, "==", 1),
            Check("STG 16 B/tile", moved.get(("STG", 16), 0) / size, "==", 1),
            Check("LDG 16 B/tile", moved.get(("LDG", 16), 0) / size, ">=", 1),
        ]
    return Figures(case.name, code.registers, tuple(checks))


def _launch(case: WeightsCase) -> tuple[Any, dict[str, Any], bool, int]:
    """(kernel, constants, whether multiply-adds are fused, stages) of triton_weights' launches."""
    from soupkit_kernels import triton_weights as weights

    parts = {
        "HAS_SIGNS": True, "HAS_COLUMNS": case.has_columns, "HAS_LOW_RANK": case.has_low_rank,
    }  # fmt: skip
    if case.what == "reconstruct":
        tile = {
            "BLOCK_N": weights._ROWS,
            "BLOCK_K": weights._COLUMNS,
            "BLOCK_R": weights._RANK_TILE,
        }
        return weights.reconstruct_kernel, {**parts, **tile}, False, 3
    if case.what == "embedding":
        return weights.embedding_rows_kernel, {**parts, "BLOCK_K": weights._ROW_COLUMNS}, False, 3
    if case.what == "rank rows":
        tile = {"BLOCK_R": weights._RANK_ROWS, "BLOCK_K": weights._RANK_COLUMNS}
        return weights.low_rank_rows_kernel, tile, True, 3
    assert case.what == "rank tiles", case.what
    tile = {"BLOCK_R": weights._RANK_TILE, "BLOCK_M": weights._TOKEN_TILE}
    return weights.low_rank_tiles_kernel, {**tile, "BLOCK_K": weights._INPUT_TILE}, True, 3
