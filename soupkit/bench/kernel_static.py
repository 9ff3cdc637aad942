"""What the fused kernel costs, read from its compiled code: no GPU, and no time.

A program multiplies a tile of BLOCK_N x BLOCK_K weights, and `terms` tiles of signs, with BLOCK_M
tokens in one turn of its main loop. Per turn it must ask global memory for exactly

    2 BLOCK_N BLOCK_K (weights) + terms BLOCK_N BLOCK_K / 8 (signs) + 2 BLOCK_M BLOCK_K (tokens)

bytes of a 16-bit dtype, so that a layer moves (2 + V / 8) N K + O(N + M K) bytes of V variants, and
must issue few enough instructions to do that at the speed of memory. The bounds are those that an
H100 needs (kernels/README.md, roofline); each is checked per instance of the kernel.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from soupkit.bench.rows import Row
from soupkit.bench.sass import CHIPS, Code, compile_kernel, is_tensor_core
from soupkit_kernels import configs

Relation = Literal["<=", "==", ">="]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Large tensors, whose offsets pass 2^31.
_LARGE = ("x", "w", "y", "words", "partials", "weight", "out", "values", "low")


@dataclass(frozen=True, slots=True)
class Case:
    """One instance of the kernel: its bucket, dtype, target, and what it is compiled with.

    Args:
        block_m: tokens of a group. terms: planes of signs that a group has.
        dtype: of weights, "bf16", "fp16" or "fp32". sm: compute capability.
        is_even_k, is_aligned: K is a multiple of BLOCK_K; rows start at multiples of 16 bytes.
    """

    block_m: int
    terms: int
    dtype: str = "bf16"
    sm: int = 90
    is_even_k: bool = True
    is_aligned: bool = True
    is_split: bool = True
    has_base: bool = True
    has_columns: bool = False
    has_low_rank: bool = False

    @property
    def name(self) -> str:
        """As in "M16 T4 bf16 sm_90"."""
        flags = {
            "ragged K": not self.is_even_k,
            "unaligned": not self.is_aligned,
            "whole K": not self.is_split,
            "signs only": not self.has_base,
            "columns": self.has_columns,
            "low rank": self.has_low_rank,
        }
        parts = [f"M{self.block_m} T{self.terms} {self.dtype} sm_{self.sm}"]
        return " ".join(parts + [flag for flag, is_on in flags.items() if is_on])


@dataclass(frozen=True, slots=True)
class Check:
    """One figure of a case and the bound it is held to."""

    name: str
    value: float
    relation: Relation
    limit: float

    @property
    def ok(self) -> bool:
        """Whether the bound holds."""
        if self.relation == "==":
            return self.value == self.limit
        return self.value <= self.limit if self.relation == "<=" else self.value >= self.limit


@dataclass(frozen=True, slots=True)
class Figures:
    """What a case's code showed."""

    case: str
    registers: int
    checks: tuple[Check, ...]

    @property
    def missed(self) -> list[Check]:
        """The bounds that do not hold."""
        return [check for check in self.checks if not check.ok]

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON types."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Figures:
        """The reverse of to_json."""
        checks = tuple(Check(**check) for check in found["checks"])
        return cls(found["case"], found["registers"], checks)


def cases() -> list[Case]:
    """Every bucket of the decode and tile tables, bfloat16, as a launch on an H100 has them.

    No terms: the base, or variants with low-rank parts only; of many tokens that is cuBLAS's.
    """
    return [
        Case(block_m, terms, is_split=block_m <= configs.DECODE_TOKENS)
        for block_m, most in configs.MAX_TERMS.items()
        for terms in (0, 1, 2, 4, 8)
        if terms <= most and (terms or block_m <= configs.DECODE_TOKENS)
    ]


def measure(case: Case, *, max_registers: int | None = None) -> Figures:
    """Compile a case and hold it to its bounds.

    Raises: as sass.compile_kernel.
    """
    code, tile = compile_case(case, max_registers=max_registers)
    config = configs.config(case.block_m, case.terms, DTYPES[case.dtype].itemsize)
    checks = resource_checks(code, ctas=config.per_sm if case.sm == 90 else 1)
    # Where a chip's tensor memory is too small, Triton leaves a kernel without a body.
    checks.append(Check("no loop", not code.loop, "==", 0))
    if case.sm == 90 and case.dtype != "fp32":
        checks += [*traffic_checks(code, case, tile), *instruction_checks(code, case, tile)]
    return Figures(case.name, code.registers, tuple(checks))


def compile_case(case: Case, *, max_registers: int | None = None) -> tuple[Code, tuple[int, int]]:
    """The code of a case, and its tile (BLOCK_N, BLOCK_K).

    Raises: as sass.compile_kernel.
    """
    from soupkit_kernels.gpu import static_case

    kernel, signature, constants, aligned, num_warps, num_stages = static_case(
        case.block_m,
        case.terms,
        DTYPES[case.dtype],
        is_even_k=case.is_even_k,
        is_split=case.is_split,
        has_base=case.has_base,
        has_columns=case.has_columns,
        has_low_rank=case.has_low_rank,
        capability=case.sm,
    )
    if not case.is_aligned:
        aligned = [name for name in aligned if signature[name].startswith("*")]
    code = compile_kernel(
        kernel,
        signature,
        constants,
        aligned=aligned,
        num_warps=num_warps,
        num_stages=num_stages,
        sm=case.sm,
        max_registers=max_registers,
    )
    return code, (constants["BLOCK_N"], constants["BLOCK_K"])


def resource_checks(code: Code, *, ctas: int = 1) -> list[Check]:
    """Bounds of every instance on every chip; `ctas`: how many an SM must hold at a time."""
    return [
        Check("spills", code.spills, "==", 0),
        Check("stack", code.stack, "==", 0),
        Check("KiB", code.shared / 1024, "<=", CHIPS[code.sm].block_shared / 1024),
        Check("CTAs/SM", code.ctas, ">=", ctas),
        Check("i32 at", len(narrow_offsets(code.texts["ttir"])), "==", 0),
    ]


def traffic_checks(code: Code, case: Case, tile: tuple[int, int]) -> list[Check]:
    """What a turn of the loop loads: all of it once, the weights 16 bytes at a time."""
    block_n, block_k = tile
    weights = block_n * block_k
    packed = case.terms * weights // 8
    tokens = 2 * case.block_m * block_k
    wide = 2 * weights * case.has_base + tokens
    # Few bytes a term; but each thread has an instruction for them, even if it is not needed.
    columns = case.terms * max(2 * block_k, 4 * code.threads) * case.has_columns
    loads = code.loads()
    by_16 = sum(count for (_, width), count in loads.items() if width == 16)
    narrow = sum(count for (_, width), count in loads.items() if width < 4)
    signs = sum(loads.values()) - wide - columns
    return [
        Check("16 B/tile", by_16 / wide, ">=", 1),
        Check("narrow", narrow, "==", 0),
        Check("signs/tile", signs / packed if packed else signs, "==", min(packed, 1)),
        Check(
            "HBM B/wt", (wide - tokens + signs) / weights, "==", 2 * case.has_base + case.terms / 8
        ),
    ]


def instruction_checks(code: Code, case: Case, tile: tuple[int, int]) -> list[Check]:
    """What a turn of the loop issues per weight, and to which units."""
    block_n, block_k = tile
    weights, products = block_n * block_k, case.terms + case.has_base
    # A warp's share: 16 of a warp group's 64 rows, by all tokens, 16 inputs an instruction.
    products *= block_n // (16 * code.num_warps) * (block_k // 16)
    matrices = [one for one in code.instructions if is_tensor_core(one)]
    return [
        Check("HGMMA", code.count("HGMMA"), "==", products),
        Check("not f32", sum(".F32" not in one.opcode for one in matrices), "==", 0),
        # ptxas may let no two wgmma run at once, where registers are short.
        Check("serial", code.is_serialized, "==", 0),
        Check("I2F", code.count("I2F", "I2FP", "F2F", "F2FP"), "==", 0),
        Check("STS/wt", code.per_weight(weights, "STS", "STSM"), "<=", 0.04),
        Check("unpack/wt", unpack(code, weights), "<=", 0.6 + 1.3 * case.terms),
        Check("instr/wt", code.per_weight(weights), "<=", instruction_limit(case)),
    ]


def unpack(code: Code, weights: int) -> float:
    """The instructions that can make signs of bits, per weight."""
    return code.per_weight(weights, "LOP3", "SHF", "IMAD")


def instruction_limit(case: Case) -> float:
    """Instructions per weight at which an H100 would still wait for its memory."""
    stated = {(16, 1): 3.5, (16, 4): 7.7}
    extra = 0.4 * case.terms * case.has_columns + 0.3 * (not case.is_even_k)
    extra += 0.15 * case.has_low_rank  # outside of the loop, but its pointers live through it
    return stated.get((case.block_m, case.terms), 2.9 + 1.3 * case.terms) + extra


def narrow_offsets(ttir: str) -> list[str]:
    """The large tensors whose pointers are offset by less than 64 bits, from Triton's IR."""
    found = []
    for name in _LARGE:
        if f"%{name}: !tt.ptr" not in ttir or len(re.findall(rf"%{name}\b", ttir)) < 2:
            continue  # not an argument of this instance, or one that it does not read
        bases = [name, *re.findall(rf"%(\S+) = tt\.splat %{name} ", ttir)]
        any_base = "|".join(map(re.escape, bases))
        lines = re.findall(rf"tt\.addptr %(?:{any_base}),[^\n]*", ttir)
        if not lines or not all(re.search(r", (tensor<[\dx]+)?i64\b", line) for line in lines):
            found.append(name)
    return found


def show(found: Iterable[Figures]) -> None:
    """Print a line a case, figure/bound and "!" where it does not hold; a table by kernel."""
    tables: dict[tuple[str, ...], Table] = {}
    for one in found:
        names = tuple(check.name for check in one.checks)
        if names not in tables:
            title = "compiled code: figure/bound, ! where it is missed"
            tables[names] = Table("case", title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
            for name in ("registers", *names):
                tables[names].add_column(name, justify="right")
        cells = (_cell(check) for check in one.checks)
        tables[names].add_row(one.case, str(one.registers), *cells)
    for table in tables.values():
        table.columns[0].no_wrap = True
        Console(width=200).print(table)


def _cell(check: Check) -> str:
    value, limit = (
        f"{number:.0f}" if number >= 100 else f"{number:.3g}"
        for number in (check.value, check.limit)
    )
    bound = "" if check.relation == "==" and check.ok else f"/{limit}"
    return f"{value}{bound}{'' if check.ok else ' !'}"


def rows(found: Iterable[Figures]) -> list[Row]:
    """The figures that matter for speed, as rows: each is divided by its bound."""
    kept = ("instr/wt", "unpack/wt", "signs/tile", "spills")
    return [
        Row(
            name=f"{one.case}: {check.name}",
            value=check.value,
            unit="",
            baseline="bound",
            ratio=ratio,
            low=ratio,
            high=ratio,
            goal=1.0,
        )
        for one in found
        for check in one.checks
        if check.name in kept
        for ratio in [check.value / check.limit if check.limit else 1 + check.value]
    ]
