"""A Triton kernel as a GPU's own instructions (SASS), with no GPU and no driver.

    code = compile_kernel(kernel, signature, constants, aligned=names, num_warps=4, num_stages=4)
    code.registers, code.spills, code.count("HGMMA"), code.per_weight(64 * 128)

Triton compiles for any target; the ptxas and nvdisasm of its wheel say what came of it. What is
counted is the main loop: the innermost backward branch whose body multiplies matrices. In it, a
program of `threads` threads works on one tile, so that

    instructions per weight = instructions of the loop * threads / weights of the tile.

No time is known from this: bank conflicts, latencies and races need a GPU.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WARP = 32
# One line of nvdisasm: /*0a40*/ @!P0 LDGSTS.E.BYPASS.128 [R3], desc[UR4][R8.64] ;
_LINE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P[T\d]+)\s+)?([A-Z][\w.]*)([^;]*);")
_LABEL = re.compile(r"(\.L_[\w$.]+):")
_TENSOR_CORE = re.compile(r"(HGMMA|HMMA|UTC\w*MMA)\b")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_WIDTH = re.compile(r"\.[US]?(8|16|32|64|128)\b")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction, as in @!P0 LDGSTS.E.BYPASS.128 [R3], desc[UR4][R8.64]."""

    opcode: str
    operands: str
    predicate: str

    @property
    def name(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.split(".")[0]

    @property
    def width(self) -> int:
        """Bytes a thread moves; 4 where a load or store names no width."""
        found = _WIDTH.search(self.opcode)
        return int(found.group(1)) // 8 if found else 4


@dataclass(frozen=True, slots=True)
class Chip:
    """What an SM of one compute capability has.

    Args:
        shared: bytes of shared memory. block_shared: the most that one CTA may take of them.
        warps, registers: the most that live at a time.
    """

    shared: int
    block_shared: int
    warps: int
    registers: int = 65536


CHIPS = {
    80: Chip(164 << 10, 163 << 10, 64),
    89: Chip(100 << 10, 99 << 10, 48),
    90: Chip(228 << 10, 227 << 10, 64),
    100: Chip(228 << 10, 227 << 10, 64),
    120: Chip(100 << 10, 99 << 10, 48),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Code:
    """One compiled kernel.

    Args:
        sm: compute capability, as in 90. num_warps: of a CTA.
        registers: of a thread. stack, spill_stores, spill_loads: bytes of a thread.
        shared: bytes of a CTA.
        is_serialized: ptxas made each wgmma wait for the one before.
        instructions: all of them. loop: those of the main loop, empty if none multiplies.
        texts: "ttir", "ttgir", "llir", "ptx", "sass".
    """

    sm: int
    num_warps: int
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int
    is_serialized: bool
    instructions: tuple[Instruction, ...]
    loop: tuple[Instruction, ...]
    texts: Mapping[str, str] = field(repr=False)

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return WARP * self.num_warps

    @property
    def spills(self) -> int:
        """Bytes of a thread that went to local memory for want of registers."""
        return self.spill_stores + self.spill_loads

    @property
    def ctas(self) -> int:
        """CTAs that fit on an SM at a time (a CTA costs 1 KiB of shared memory by itself)."""
        chip = CHIPS[self.sm]
        registers = -(-self.registers // 8) * 8 * self.threads
        by_shared = chip.shared // (self.shared + 1024)
        return min(chip.registers // registers, by_shared, chip.warps // self.num_warps, 32)

    def count(self, *names: str) -> int:
        """Instructions of the loop of these names ("LOP3" counts ULOP3 too)."""
        wanted = {*names, *("U" + name for name in names)}
        return sum(one.name in wanted for one in self.loop)

    def per_weight(self, weights: int, *names: str) -> float:
        """Instructions of the loop per weight of a tile of `weights`; of these names, or all."""
        found = self.count(*names) if names else len(self.loop)
        return found * self.threads / weights

    def loads(self) -> dict[tuple[str, int], int]:
        """Bytes a program asks of global memory in one turn of the loop, by (name, width)."""
        return self._moved(self.loop, ("LDG", "LDGSTS"))

    def accesses(self) -> dict[tuple[str, int], int]:
        """Bytes of all loads and stores of global memory that the code has, by (name, width)."""
        return self._moved(self.instructions, ("LDG", "LDGSTS", "STG"))

    def _moved(
        self, code: Sequence[Instruction], names: Collection[str]
    ) -> dict[tuple[str, int], int]:
        total: Counter[tuple[str, int]] = Counter()
        for one in code:
            if one.name in names:
                total[one.name, one.width] += one.width * self.threads
        return dict(total)

    def mma(self) -> dict[str, int]:
        """Tensor-core instructions of the whole kernel by full opcode, as in HGMMA.64x16x16..."""
        return dict(Counter(one.opcode for one in self.instructions if is_tensor_core(one)))


def is_tensor_core(one: Instruction) -> bool:
    """Whether an instruction multiplies matrices."""
    return _TENSOR_CORE.match(one.opcode) is not None


def compile_kernel(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    aligned: Collection[str] = (),
    num_warps: int,
    num_stages: int,
    sm: int = 90,
    max_registers: int | None = None,
    fused_multiply_add: bool = True,
) -> Code:
    """Compile a `@triton.jit` function and read the result.

    Args:
        signature: Triton type of every run-time argument, as in {"x": "*bf16", "N": "i32"}.
        constants: value of every tl.constexpr argument.
        aligned: arguments that a launch would find divisible by 16. Without them the code is
            another, slow one.
        sm: compute capability, a key of CHIPS.
        max_registers: limit of ptxas; None for the hardware's 255.
        fused_multiply_add: a x b + c in one rounding. Said outright, for triton 3.9 warns where it
            is left to the environment, and 3.10 turns it off.

    Raises:
        ModuleNotFoundError: triton is not installed.
        RuntimeError: TRITON_INTERPRET is set, or a tool of the wheel failed.
        ValueError: unknown sm.
    """
    if sm not in CHIPS:
        raise ValueError(f"sm {sm} is not known; give one of {', '.join(map(str, CHIPS))}")
    triton = compiler()
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    places = {name: (index,) for index, name in enumerate(kernel.arg_names)}
    source = ASTSource(
        fn=kernel,
        signature={name: signature.get(name, "constexpr") for name in places},
        constexprs={places[name]: value for name, value in constants.items()},
        attrs={places[name]: [["tt.divisibility", 16]] for name in aligned},
    )
    options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages}
    options["enable_fp_fusion"] = fused_multiply_add
    if max_registers is not None:
        options["maxnreg"] = max_registers
    done = triton.compile(source, target=GPUTarget("cuda", sm, WARP), options=options)
    texts = {key: text for key, text in done.asm.items() if isinstance(text, str)}
    texts["sass"] = disassemble(done.asm["cubin"])
    program = parse(texts["sass"])
    log = _resources(texts["ptx"], sm)
    registers, spills = re.search(r"Used (\d+) registers", log), _SPILLS.search(log)
    if registers is None or spills is None:
        raise RuntimeError(f"ptxas -v printed no resources for sm_{sm}; it said: {log[-500:]}")
    stack, stores, loads = map(int, spills.groups())
    return Code(
        sm=sm,
        num_warps=num_warps,
        registers=int(registers.group(1)),
        stack=stack,
        spill_stores=stores,
        spill_loads=loads,
        shared=done.metadata.shared,
        is_serialized="wgmma.mma_async instructions are serialized" in log,
        instructions=tuple(one for one in program if isinstance(one, Instruction)),
        loop=main_loop(program),
        texts=texts,
    )


def compiler() -> Any:
    """The module triton, fit to compile with.

    Raises:
        ModuleNotFoundError, RuntimeError: see compile_kernel.
    """
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise RuntimeError(
            f"TRITON_INTERPRET={os.environ['TRITON_INTERPRET']} is set, and makes every kernel "
            "Python: start a process without it to compile"
        )
    try:
        import triton
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "triton is not installed; compiling its kernels needs no GPU: pip install triton"
        ) from error
    return triton


def disassemble(cubin: bytes) -> str:
    """SASS of a cubin, with labels, by the nvdisasm of triton's wheel."""
    import triton.backends.nvidia as backend

    tool = Path(backend.__path__[0]) / "bin" / "nvdisasm"
    return _run_on(cubin, [str(tool), "-c"])


def parse(sass: str) -> list[Instruction | str]:
    """Instructions of a disassembly in order, and its labels as plain strings."""
    program: list[Instruction | str] = []
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            program.append(label.group(1))
        elif found := _LINE.match(line):
            _, predicate, opcode, operands = found.groups()
            program.append(Instruction(opcode, operands.strip(), predicate or ""))
    return program


def main_loop(program: Sequence[Instruction | str]) -> tuple[Instruction, ...]:
    """The shortest backward branch around a multiplication: of matrices, else of floats."""
    labels = {one: place for place, one in enumerate(program) if isinstance(one, str)}
    bodies = []
    for place, one in enumerate(program):
        if isinstance(one, str) or one.name != "BRA":
            continue
        target = re.search(r"\.L_[\w$.]+", one.operands)
        start = labels.get(target.group(0), place) if target else place
        body = (item for item in program[start : place + 1] if isinstance(item, Instruction))
        if start < place:
            bodies.append(tuple(body))
    bodies.sort(key=len)
    with_matrices = [body for body in bodies if any(map(is_tensor_core, body))]
    with_floats = [body for body in bodies if any(one.name in ("FFMA", "FFMA2") for one in body)]
    return next(iter(with_matrices or with_floats), ())


def _resources(ptx: str, sm: int) -> str:
    """What the very ptxas that triton runs says of registers, spills and performance."""
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    command = [get_ptxas(sm).path, "-v", f"--gpu-name={sm_arch_from_capability(sm)}"]
    return _run_on(ptx.encode(), [*command, "-o", os.devnull])


def _run_on(content: bytes, command: Sequence[str]) -> str:
    """What a command says about a file of this content."""
    with tempfile.NamedTemporaryFile(prefix="soupkit-sass-") as file:
        file.write(content)
        file.flush()
        done = subprocess.run([*command, file.name], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name} failed: {(done.stderr or done.stdout)[-500:]}")
    return done.stdout + done.stderr
