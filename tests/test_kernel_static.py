"""The fused kernel's compiled code: registers, loads and instructions within their bounds, no GPU.

Kernels compile in one process of their own: this one may have TRITON_INTERPRET set.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from soupkit.bench import kernel_static, original, rows, sass, weights_static
from soupkit.bench.kernel_static import Case, Check, Figures
from soupkit.bench.roofline import BANDWIDTH, layer_bytes
from soupkit.bench.roofline import rows as roofline
from soupkit.bench.weights_static import WeightsCase
from soupkit_kernels import configs
from soupkit_kernels.configs import MAX_TERMS

ROOT = Path(__file__).resolve().parents[1]
OLD_TRITON = ROOT / ".triton-3.6"
COMPILE = """
import json, sys
from soupkit.bench import kernel_static, weights_static
found = []
for case, options in json.load(sys.stdin):
    if "what" in case:
        found.append(weights_static.measure(weights_static.WeightsCase(**case)))
    else:
        found.append(kernel_static.measure(kernel_static.Case(**case), **options))
print(json.dumps([one.to_json() for one in found]))
"""

needs_triton = pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"),
    reason="triton has no wheel for this platform",
)

# All of few tokens, and the worst of more.
TABLE = [
    case
    for case in kernel_static.cases()
    if case.block_m <= 16 or case.terms == MAX_TERMS[case.block_m]
]
VARIATIONS = [
    Case(16, 1, "fp16"),
    Case(16, 1, is_even_k=False),
    Case(16, 2, has_base=False),
    Case(16, 4, has_columns=True),
    Case(16, 1, has_low_rank=True),
    Case(16, 1, "fp32"),
]
ELSEWHERE = [Case(16, 1, sm=sm) for sm in (80, 89, 100, 120)]
WEIGHTS = weights_static.cases()
FAST: list[Case | WeightsCase] = [*TABLE, *VARIATIONS, *ELSEWHERE, *WEIGHTS]
UNALIGNED = Case(16, 1, is_even_k=False, is_aligned=False)
STARVED = Case(16, 4)
STARVED_REGISTERS = 64


def by_name(cases: Iterable[Case | WeightsCase]) -> list[object]:
    return [pytest.param(case, id=case.name.replace(" ", "-")) for case in cases]


def environment(cache: Path, old: bool) -> dict[str, str]:
    """Of a process that compiles or interprets with the newest triton, or the oldest."""
    if old and not (OLD_TRITON / ".installed").exists():
        pytest.fail(f"{OLD_TRITON.name} is not there: run `make old-triton`")
    paths = [str(OLD_TRITON)] * old + [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests")]
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), "TRITON_CACHE_DIR": str(cache)}


def compile_all(
    cases: Sequence[Case | WeightsCase], cache: Path, *, old: bool = False, starved: bool = False
) -> list[Figures]:
    """Figures of the cases; `starved`: after them, those of STARVED with too few registers."""
    asked = [(asdict(case), {}) for case in cases]
    if starved:
        asked.append((asdict(STARVED), {"max_registers": STARVED_REGISTERS}))
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        input=json.dumps(asked),
        env=environment(cache, old),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [Figures.from_json(one) for one in json.loads(done.stdout.splitlines()[-1])]


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Figures]:
    """By name: FAST, UNALIGNED, and STARVED as "starved"."""
    cache = tmp_path_factory.mktemp("triton")
    *found, starved = compile_all([*FAST, UNALIGNED], cache, starved=True)
    return {**{one.case: one for one in found}, "starved": starved}


def value(found: Figures, name: str) -> float:
    return next(check.value for check in found.checks if check.name == name)


@needs_triton
@pytest.mark.parametrize("case", by_name(FAST))
def test_the_code_is_within_its_bounds(
    case: Case | WeightsCase, figures: dict[str, Figures]
) -> None:
    kernel_static.show([figures[case.name]])
    assert not figures[case.name].missed


@needs_triton
def test_the_table_of_bounds(figures: dict[str, Figures]) -> None:
    """Prints it whole (pytest -rP)."""
    kernel_static.show([figures[case.name] for case in FAST])
    assert list(figures) == [*(case.name for case in FAST), UNALIGNED.name, "starved"]


@needs_triton
def test_the_limits_of_the_issue(figures: dict[str, Figures]) -> None:
    assert value(figures[Case(16, 1).name], "instr/wt") <= 3.9
    assert value(figures[Case(16, 4).name], "instr/wt") <= 8.5
    assert value(figures[Case(16, 1).name], "HBM B/wt") == 2 + 1 / 8
    assert value(figures[Case(16, 8).name], "HBM B/wt") == 2 + 8 / 8


def test_enough_bytes_are_on_their_way() -> None:
    """On an SM of an H100, while a tile is multiplied: 3.35 TB/s and 700 ns ask for 18 KB."""
    for (block_m, terms, size), one in configs._TABLE.items():
        if size == 2:
            row = 2 * one.block_n + terms * one.block_n // 8 + 2 * block_m
            assert (one.num_stages - 2) * one.per_sm * row * one.block_k >= 40 << 10


@needs_triton
def test_rows_that_are_not_aligned_are_seen_to_be_slow(figures: dict[str, Figures]) -> None:
    missed = {check.name for check in figures[UNALIGNED.name].missed}
    assert {"16 B/tile", "narrow", "STS/wt", "instr/wt"} <= missed


@needs_triton
def test_a_kernel_without_registers_is_seen_to_spill(figures: dict[str, Figures]) -> None:
    assert figures["starved"].registers <= STARVED_REGISTERS
    assert {"spills", "stack"} <= {check.name for check in figures["starved"].missed}


# Elsewhere than on an H100 ptxas may leave registers unused and yet spill a few words.
FEW_BYTES = 40


def elsewhere() -> list[Case | WeightsCase]:
    every = [*kernel_static.cases(), *VARIATIONS, *WEIGHTS]
    return [replace(case, sm=sm) for sm in sass.CHIPS if sm != 90 for case in every]


def missed_of(found: Iterable[Figures]) -> dict[str, list[Check]]:
    return {one.case: one.missed for one in found if one.missed}


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("old", [False, True], ids=["newest", "oldest"])
def test_every_bucket_of_an_h100(old: bool, tmp_path: Path) -> None:
    cases = [*kernel_static.cases(), *VARIATIONS, *WEIGHTS]
    found = compile_all(cases, tmp_path, old=old)
    kernel_static.show(found)
    assert missed_of(found) == {}


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("old", [False, True], ids=["newest", "oldest"])
def test_every_bucket_elsewhere(old: bool, tmp_path: Path) -> None:
    found = compile_all(elsewhere(), tmp_path, old=old)
    kernel_static.show(found)
    missed = {
        name: [
            one for one in checks if one.name not in ("spills", "stack") or one.value > FEW_BYTES
        ]
        for name, checks in missed_of(found).items()
    }
    assert {name: checks for name, checks in missed.items() if checks} == {}


@needs_triton
@pytest.mark.slow
def test_slice_of_the_buckets_on_the_oldest_triton(tmp_path: Path) -> None:
    cases = [Case(16, 1), Case(16, 4), Case(16, 8), WeightsCase("reconstruct")]
    found = compile_all(cases, tmp_path, old=True)
    kernel_static.show(found)
    assert missed_of(found) == {}


@needs_triton
@pytest.mark.slow
def test_the_kernels_are_right_on_the_oldest_triton(tmp_path: Path) -> None:
    """The interpreter's tests, with 3.6.0 and a numpy that it can work with."""
    files = sorted(str(path) for path in (ROOT / "tests").glob("test_triton_*.py"))
    assert files
    tolerated = "ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", tolerated, *files],
        env=environment(tmp_path, old=True),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]


# In the shape of the original's file: a name, strides of 1, words that 32 inputs share.
LIKE_THE_ORIGINAL = """
import triton
import triton.language as tl


@triton.autotune(
    [triton.Config({"BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32}, num_stages=3, num_warps=2)],
    key=["K"],
)
@triton.jit
def binary_bmm_kernel(
    a_ptr, b_ptr, c_ptr, M, K, n_bits, stride_am, stride_ak, stride_bk, stride_bn, stride_cn,
    BLOCK_SIZE_N: tl.constexpr, BLOCK_SIZE_K: tl.constexpr, ACTIVATION: tl.constexpr,
):
    m, n, k = tl.arange(0, 16), tl.arange(0, BLOCK_SIZE_N), tl.arange(0, BLOCK_SIZE_K)
    a = a_ptr + m[:, None] * stride_am + k[None, :] * stride_ak
    b = b_ptr + (k[:, None] // n_bits) * stride_bk + n[None, :] * stride_bn
    total = tl.zeros((16, BLOCK_SIZE_N), tl.float32)
    for _ in range(0, K, BLOCK_SIZE_K):
        signs = 2 * ((tl.load(b) >> (k % n_bits)[:, None]) & 1) - 1
        total += tl.dot(tl.load(a), signs.to(tl.float16))
        a += BLOCK_SIZE_K
        b += BLOCK_SIZE_K // n_bits * stride_bk
    c = c_ptr + m[:, None] * BLOCK_SIZE_N + n[None, :] * stride_cn
    tl.store(c, total.to(tl.float16), mask=m[:, None] < M)
"""


@needs_triton
@pytest.mark.slow
def test_the_original_is_compared_by_the_same_measures(tmp_path: Path) -> None:
    """SV39: its author calls it far from optimal and asks for comparisons."""
    (tmp_path / "bitdelta").mkdir()
    (tmp_path / "bitdelta" / "binary_gemm_kernel.py").write_text(LIKE_THE_ORIGINAL)
    code = (
        "from soupkit.bench.original import compare\n"
        f"print(*(one.l2_bytes for one in compare({str(tmp_path)!r})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(tmp_path / "cache", old=False),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "binary_bmm 16x64x32" in done.stdout
    theirs, signs, fused = map(float, done.stdout.splitlines()[-1].split())
    # A lane loads 16 bytes of words for 4 signs, half of the lanes the same; 16 tokens of 2 bytes.
    assert theirs == 4 / 2 + 2 * 16 / 64
    assert (signs, fused) == (1 / 8 + 2 * 16 / 64, 2 + 1 / 8 + 2 * 16 / 64)


def test_the_original_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="give the folder of a clone of BitDelta"):
        original.originals(tmp_path / "binary_gemm_kernel.py")


SASS = """
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   IADD3 R2, R2, 0x1, RZ ;
.L_x_1:
        /*0020*/              @!P0 LDGSTS.E.BYPASS.128 [R3], desc[UR4][R8.64] ;
        /*0030*/                   LDG.E.U8 R7, desc[UR4][R8.64] ;
        /*0040*/                   HGMMA.64x16x16.F32.BF16 R24, R4, gdesc[UR8], R24, gsb0 ;
        /*0050*/                   ULOP3.LUT UR4, UR4, 0x3f, URZ, 0xc0, !UPT ;
        /*0060*/               @P1 BRA `(.L_x_1) ;
        /*0070*/                   STG.E desc[UR4][R8.64], R7 ;
        /*0080*/               @P2 BRA `(.L_x_0) ;
        /*0090*/                   BRA `(.L_x_2) ;
.L_x_2:
        /*00a0*/                   EXIT ;
"""


def code(**changes: object) -> sass.Code:
    program = sass.parse(SASS)
    fields: dict[str, object] = {
        "sm": 90, "num_warps": 4, "registers": 96, "stack": 0, "spill_stores": 0,
        "spill_loads": 0, "shared": 84992, "is_serialized": False, "texts": {},
        "instructions": tuple(one for one in program if isinstance(one, sass.Instruction)),
        "loop": sass.main_loop(program),
    }  # fmt: skip
    return sass.Code(**{**fields, **changes})  # type: ignore[arg-type]


def test_the_main_loop_is_the_innermost_that_multiplies() -> None:
    names = [one.name for one in code().loop]
    assert names == ["LDGSTS", "LDG", "HGMMA", "ULOP3", "BRA"]
    assert [one.predicate for one in code().loop] == ["!P0", "", "", "", "P1"]
    assert sass.main_loop(sass.parse("/*0000*/ EXIT ;")) == ()


def test_instructions_are_counted_a_weight() -> None:
    assert code().count("LOP3") == 1
    assert code().per_weight(64 * 128) == 5 * 128 / (64 * 128)
    assert code().loads() == {("LDGSTS", 16): 16 * 128, ("LDG", 1): 128}
    assert code().mma() == {"HGMMA.64x16x16.F32.BF16": 1}


@pytest.mark.parametrize(
    ("changes", "ctas"),
    [
        ({}, 2),  # shared memory
        ({"shared": 1024}, 5),  # registers
        ({"shared": 0, "registers": 32}, 16),  # warps
        ({"shared": 84992, "sm": 89}, 1),
    ],
)
def test_how_many_ctas_fit(changes: dict[str, object], ctas: int) -> None:
    assert code(**changes).ctas == ctas


def test_offsets_of_32_bits_are_found() -> None:
    ttir = """tt.func public @k(%x: !tt.ptr<bf16> , %w: !tt.ptr<bf16> , %y: !tt.ptr<bf16> ) {
      %a = tt.splat %x : !tt.ptr<bf16> -> tensor<16x!tt.ptr<bf16>>
      %b = tt.addptr %a, %o : tensor<16x!tt.ptr<bf16>>, tensor<16xi64>
      %c = tt.splat %w : !tt.ptr<bf16> -> tensor<16x!tt.ptr<bf16>>
      %d = tt.addptr %c, %o : tensor<16x!tt.ptr<bf16>>, tensor<16xi32>
      %e = tt.addptr %w, %p : !tt.ptr<bf16>, i64
    """
    assert kernel_static.narrow_offsets(ttir) == ["w"]


@pytest.mark.parametrize(
    ("relation", "held"), [("<=", (True, True, False)), ("==", (False, True, False)),
                           (">=", (False, True, True))],
)  # fmt: skip
def test_a_bound_holds_or_not(relation: str, held: tuple[bool, ...]) -> None:
    checks = [Check("n", number, relation, 2) for number in (1, 2, 3)]  # type: ignore[arg-type]
    assert tuple(check.ok for check in checks) == held
    found = Figures("M16", 96, tuple(checks))
    assert [row.ok for row in kernel_static.rows([found])] == []
    assert Figures.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_figures_are_rows_of_the_bench(capsys: pytest.CaptureFixture[str]) -> None:
    checks = (Check("instr/wt", 4.0, "<=", 2.0), Check("spills", 0, "==", 0))
    found = kernel_static.rows([Figures("M16 T1", 96, checks)])
    assert [(row.ratio, row.ok) for row in found] == [(2.0, False), (1.0, True)]
    kernel_static.show([Figures("M16 T1", 96, checks)])
    printed = capsys.readouterr().out
    for wanted in ("M16 T1", "registers", "96", "instr/wt", "4/2 !"):
        assert wanted in printed


def test_compiling_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="sm 75 is not known; give one of 80, 89"):
        sass.compile_kernel(None, {}, {}, num_warps=4, num_stages=1, sm=75)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ModuleNotFoundError, match="pip install triton"):
        sass.compiler()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1 is set"):
        sass.compiler()


def test_the_least_time_is_that_of_the_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    n, k, m, v = 4096, 14336, 16, 4
    wanted = (2 + v / 8) * n * k + 4 * v * n + 2 * m * (n + k)
    assert layer_bytes(n, k, variants=v, tokens=m) == wanted
    # Rows of signs are whole 16 bytes.
    assert layer_bytes(3, 1, variants=1, tokens=0) == 3 * (2 + 16 + 4)
    found = {row.name: row for row in roofline(tokens=1)}
    one = found["4096x4096 bf16 M=1 V=1 H100 (model)"]
    assert one.value == pytest.approx(10.6, abs=0.1)
    assert one.ratio == pytest.approx(1.0625, abs=1e-3)
    assert len(found) == 3 * 6 * len(BANDWIDTH)
    rows.show("kernel", roofline())
    assert "(model)" in capsys.readouterr().out
