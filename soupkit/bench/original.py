"""The fused kernel beside the original BitDelta's binary_bmm, by their compiled code alone.

    git clone https://github.com/FasterDecoding/BitDelta
    python -c "from soupkit.bench import original; original.compare('BitDelta')"

Theirs multiplies signs only, beside a matrix product for the base, so ours is shown with and
without the base. No code of theirs is part of soupkit.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from soupkit.bench.kernel_static import Case, compile_case, unpack
from soupkit.bench.sass import Code, compile_kernel


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel's code of one turn of its loop, over a tile [block_n, block_k] of weights.

    Args:
        repeats: lanes of a load that ask for the same word, which is then fetched once.
    """

    name: str
    code: Code
    block_n: int
    block_k: int
    repeats: int = 1

    @property
    def l2_bytes(self) -> float:
        """Bytes asked of L2 per weight: of signs, tokens, and the base where there is one."""
        tokens = 2 * 16 * self.block_k
        asked = sum(self.code.loads().values()) - tokens
        return (asked / self.repeats + tokens) / (self.block_n * self.block_k)


def compare(path: str | Path) -> list[Kernel]:
    """Compile both for 16 tokens on sm_90, one variant, and print a table.

    Args:
        path: a checkout of BitDelta; its kernel's module is imported from there.
    Raises: as sass.compile_kernel; FileNotFoundError.
    """
    found = originals(Path(path) / "bitdelta" / "binary_gemm_kernel.py")
    for name, has_base in (("soupkit, signs only", False), ("soupkit, base and signs", True)):
        code, tile = compile_case(Case(16, 1, "fp16", has_base=has_base))
        found.append(Kernel(f"{name} 16x{tile[0]}x{tile[1]}", code, *tile))
    table = Table(title="per weight, 16 tokens, sm_90", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("tokens x BLOCK_N x BLOCK_K", no_wrap=True)
    for column in ("instructions", "LOP3+SHF+IMAD", "I2F", "STS", "L2 bytes", "registers"):
        table.add_column(column, justify="right")
    for column in ("spills", "CTAs/SM", "mma"):
        table.add_column(column)
    for one in found:
        code, weights = one.code, one.block_n * one.block_k
        figures = [code.per_weight(weights), unpack(code, weights)]
        figures += [code.per_weight(weights, "I2F"), code.per_weight(weights, "STS"), one.l2_bytes]
        resources = (code.registers, code.spills, code.ctas, " ".join(code.mma()))
        table.add_row(one.name, *(f"{n:.2f}" for n in figures), *map(str, resources))
    Console(width=160).print(table)
    return found


def originals(file: Path) -> list[Kernel]:
    """Their kernel in each of its autotune configurations, as a launch would compile it."""
    spec = importlib.util.spec_from_file_location("binary_gemm_kernel", file)
    if spec is None or spec.loader is None or not file.exists():
        raise FileNotFoundError(f"{file} is not there: give the folder of a clone of BitDelta")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tuned: Any = module.binary_bmm_kernel
    # A launch makes constants of strides of 1.
    ones = dict.fromkeys(("stride_ak", "stride_bn", "stride_cn"), 1)
    types = {"a_ptr": "*fp16", "b_ptr": "*i32", "c_ptr": "*fp16"}
    found = []
    for config in tuned.configs:
        constants = {**ones, **config.kwargs, "ACTIVATION": ""}
        names = [name for name in tuned.fn.arg_names if name not in constants]
        code = compile_kernel(
            tuned.fn,
            {name: types.get(name, "i32") for name in names},
            constants,
            aligned=[name for name in names if name != "M"],
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        tile = config.kwargs["BLOCK_SIZE_N"], config.kwargs["BLOCK_SIZE_K"]
        name = f"BitDelta binary_bmm 16x{tile[0]}x{tile[1]}"
        found.append(Kernel(name, code, *tile, repeats=_repeats(code.texts["ttgir"])))
    return found


def _repeats(ttgir: str) -> int:
    """Lanes along K of a load of packed words: within 32 inputs they ask for the same word."""
    layout = re.search(r"async_copy_global_to_local.*!tt\.ptr<i32>, #(\w+)>", ttgir)
    assert layout is not None, "no asynchronous copy of int32 in Triton's IR"
    lanes = re.search(rf"#{layout.group(1)} = .*threadsPerWarp = \[(\d+), \d+\]", ttgir)
    assert lanes is not None, f"no layout {layout.group(1)} in Triton's IR"
    return int(lanes.group(1))
