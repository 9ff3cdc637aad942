"""The C library of delta_linear.c: built on first use, loaded through ctypes.

The system's C compiler ($CC, else cc, gcc or clang on PATH) builds it into a folder of the user's
cache, under a name that holds a hash of the sources, the flags and the compiler, so that a new one
never meets an old library. It is made aside and renamed: processes that build at once do not harm
each other, and a killed build leaves nothing that the next one waits for. Instruction sets are
chosen as the library runs, not as it is built. Without a compiler there is no library, and `load`
says why.

SOUPKIT_KERNEL=torch forces plain torch; the name of an instruction set is the most to use.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from soupkit_kernels.arena import DeltaArena
from soupkit_kernels.bitpack import packed_width

ENVIRONMENT = "SOUPKIT_KERNEL"
# Numbered as `isas` of delta_linear.c.
ISAS = ("portable", "avx2", "avx512", "avx512_bf16")
# Numbered as `enum kind` there.
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MAX_PLANES = 8

_SOURCES = Path(__file__).parent
_FLAGS = ("-O2", "-std=gnu11", "-fPIC", "-shared", "-Wno-psabi")
_BUILD_SECONDS = 300
# With SSE2 it is up to three times slower than plain torch; on other machines it is not measured.
_PORTABLE_ONLY = f"only the portable C code runs; {ENVIRONMENT}=portable takes it"


@dataclass(frozen=True, slots=True)
class Library:
    """The loaded functions and the best instruction set that they may use here."""

    isa: int
    decode_function: Callable[..., None]
    signs_function: Callable[..., None]
    reconstruct_function: Callable[..., None]
    # GOMP_parallel of the OpenMP runtime that torch loaded; without one everything is one thread.
    parallel: ctypes.c_void_p | None

    def isa_name(self, dtype: torch.dtype) -> str:
        """The instruction set that serves a dtype; only bfloat16 has one of its own."""
        return ISAS[_isa(self.isa, dtype)]

    def supports(self, dtype: torch.dtype) -> bool:
        """float16 needs the conversions of AVX2 machines."""
        return dtype in KINDS and (dtype != torch.float16 or self.isa > 0)

    def input_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What inputs are turned into: float32 but for products of bfloat16."""
        return dtype if ISAS[_isa(self.isa, dtype)] == "avx512_bf16" else torch.float32

    def decode(
        self,
        x: Tensor,  # [T, K]
        weight: Tensor,  # [N, K], contiguous along K
        arena: DeltaArena,
        index: Tensor,  # [T] int64, contiguous, within the arena; -1 is the base
    ) -> Tensor:  # [T, N] float32
        """The base and the signs of each token, fused; no bias, no low-rank part.

        A variant with column scales gives the base alone here: `signs` takes them.
        """
        x = x.to(self.input_dtype(arena.dtype)).contiguous()
        y = torch.empty(x.shape[0], arena.out_features, dtype=torch.float32)
        self.decode_function(
            _isa(self.isa, arena.dtype), KINDS[arena.dtype], torch.get_num_threads(),
            self.parallel, _arena_struct(arena), x.shape[0], x.data_ptr(),
            x.stride(0) * x.itemsize, weight.data_ptr(), weight.stride(0) * weight.itemsize,
            index.data_ptr(), y.data_ptr(),
        )  # fmt: skip
        return y

    def signs(
        self,
        x: Tensor,  # [T, K] in `input_dtype`
        arena: DeltaArena,
        index: Tensor,  # [T] int64, contiguous, within the arena
        plane: Tensor,  # [T] int64, contiguous
    ) -> Tensor:  # [T, N] float32
        """scale_p (S_p x) for a plane of a variant a row; zeros where there is no such plane."""
        x = x.contiguous()
        y = torch.empty(x.shape[0], arena.out_features, dtype=torch.float32)
        self.signs_function(
            _isa(self.isa, arena.dtype), KINDS[arena.dtype], torch.get_num_threads(),
            self.parallel, _arena_struct(arena), x.shape[0], x.data_ptr(),
            x.stride(0) * x.itemsize, index.data_ptr(), plane.data_ptr(), y.data_ptr(),
        )  # fmt: skip
        return y

    def reconstruct(
        self,
        weight: Tensor,  # [N, K], contiguous along K
        arena: DeltaArena,
        slot: int,
        out: Tensor,  # [n, K] in weight's dtype, contiguous
        *,
        first_row: int = 0,
    ) -> None:
        """Write rows first_row .. of weight + signs times row and column scales into `out`.

        Summed in float32 and rounded once; no low-rank part.
        """
        # No products of bfloat16 here: the plain 512-bit code serves all dtypes.
        isa = min(self.isa, ISAS.index("avx512"))
        self.reconstruct_function(
            isa, KINDS[weight.dtype], torch.get_num_threads(), self.parallel,
            _arena_struct(arena), slot, first_row, out.shape[0],
            weight[first_row:].data_ptr(), weight.stride(0) * weight.itemsize,
            out.data_ptr(),
        )  # fmt: skip


@functools.cache
def _isa(best: int, dtype: torch.dtype) -> int:
    """The number of the instruction set that serves a dtype."""
    most = "avx512_bf16" if dtype == torch.bfloat16 else "avx512"
    return min(best, ISAS.index(most))


def _arena_struct(arena: DeltaArena) -> ctypes.Array[ctypes.c_int64]:
    """`struct arena` of delta_linear.c, made once; valid while the arena lives."""
    if arena.native_struct is None:
        arena.native_struct = (ctypes.c_int64 * 5)(
            arena.data.data_ptr(), arena.table.data_ptr(), arena.out_features, arena.in_features,
            packed_width(arena.in_features),
        )  # fmt: skip
    struct: ctypes.Array[ctypes.c_int64] = arena.native_struct
    return struct


@functools.cache
def load() -> Library | str:
    """The library, built if need be, or why there is none."""
    wanted = os.environ.get(ENVIRONMENT, "")
    if wanted not in ("", "torch", *ISAS):
        raise ValueError(f"{ENVIRONMENT}={wanted}: must be torch or one of {', '.join(ISAS)}")
    if wanted == "torch":
        return f"{ENVIRONMENT}=torch"
    if ctypes.sizeof(ctypes.c_void_p) != 8 or sys.byteorder != "little":
        return f"{platform.machine()}: the C kernel needs a 64-bit little-endian machine"
    if not wanted and platform.machine() not in ("x86_64", "AMD64"):
        return f"{platform.machine()}: {_PORTABLE_ONLY}"
    try:
        functions = ctypes.CDLL(str(build()))
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        sys.stderr.write(f"soupkit: no CPU kernel, plain torch instead: {error}\n")
        return str(error)
    best = functions.soupkit_start()
    if not wanted and not best:
        return f"neither AVX2 nor AVX-512: {_PORTABLE_ONLY}"
    isa = min(best, ISAS.index(wanted)) if wanted else best
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    # isa, kind, threads, parallel, arena, then what the C signatures say.
    common = (number, number, number, pointer, pointer)
    decode, signs = functions.soupkit_decode, functions.soupkit_signs
    reconstruct = functions.soupkit_reconstruct
    decode.argtypes = (*common, number, pointer, number, pointer, number, pointer, pointer)
    signs.argtypes = (*common, number, pointer, number, pointer, pointer, pointer)
    reconstruct.argtypes = (*common, number, number, number, pointer, number, pointer)
    decode.restype = signs.restype = reconstruct.restype = None
    try:
        parallel = ctypes.cast(ctypes.CDLL(None).GOMP_parallel, pointer)
    except AttributeError:
        parallel = None
    return Library(isa, decode, signs, reconstruct, parallel)


def build() -> Path:
    """The shared library of these sources, from the cache or built now.

    Raises:
        OSError: no compiler, it failed, or the cache cannot be written; the message says which.
    """
    compiler = find_compiler()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "soupkit"
    sources = sorted(_SOURCES.glob("*.[ch]"))
    version = _run([*compiler, "--version"]).stdout
    facts = [platform.machine(), *compiler, version, *_FLAGS]
    key = hashlib.sha256("\0".join([*facts, *(path.read_text() for path in sources)]).encode())
    library = folder / f"delta_linear-{key.hexdigest()[:16]}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    sys.stderr.write(f"soupkit: building the CPU kernel with {compiler[0]}, once\n")
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as aside:
        made = Path(aside) / library.name
        _run([*compiler, *_FLAGS, str(_SOURCES / "delta_linear.c"), "-o", str(made)])
        made.replace(library)
    return library


def find_compiler() -> list[str]:
    """The words of $CC, or the first of the usual names on PATH.

    Raises:
        OSError: there is none.
    """
    named = shlex.split(os.environ.get("CC", ""))
    for words in [named] if named else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(words[0]):
            return words
    raise OSError(
        f"no C compiler: {named[0]} of $CC is not on PATH; install it or unset CC"
        if named
        else "no C compiler: none of cc, gcc, clang is on PATH; install one or set CC"
    )


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """A compiler's run; OSError with its last words where it fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_BUILD_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{command[0]} took more than {_BUILD_SECONDS} s") from error
    if done.returncode:
        last = done.stderr.strip()[-300:]
        raise OSError(f"{shlex.join(command)} exited {done.returncode}: {last}")
    return done
