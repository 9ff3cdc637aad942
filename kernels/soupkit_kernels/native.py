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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

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
_VARIANT_FIELDS = 6


@dataclass(frozen=True, slots=True)
class Library:
    """The loaded functions and the best instruction set that they may use here."""

    isa: int
    decode_function: Callable[..., None]
    reconstruct_function: Callable[..., None]
    # GOMP_parallel of the OpenMP runtime that torch loaded; without one everything is one thread.
    parallel: ctypes.c_void_p | None

    def isa_name(self, dtype: torch.dtype) -> str:
        """The instruction set that serves a dtype; only bfloat16 has one of its own."""
        most = "avx512_bf16" if dtype == torch.bfloat16 else "avx512"
        return ISAS[min(self.isa, ISAS.index(most))]

    def supports(self, dtype: torch.dtype) -> bool:
        """float16 needs the conversions of AVX2 machines."""
        return dtype in KINDS and (dtype != torch.float16 or self.isa > 0)

    def decode(
        self,
        x: Tensor,  # [T, K]
        weight: Tensor,  # [N, K], contiguous along K
        packed: Sequence[Tensor],  # uint8 [P, N, ceil(K / 8)], all of one stride from row to row
        scale: Sequence[Tensor],  # float32 [P, N] or [P, 1]
        index: Tensor,  # [T] int64, contiguous; -1 is the base
    ) -> Tensor:  # [T, N] float32
        """The multi-variant linear without bias, fused."""
        isa = self.isa_name(x.dtype)
        x = (x if isa == "avx512_bf16" else x.float()).contiguous()
        num_tokens, width = x.shape
        y = torch.empty(num_tokens, weight.shape[0], dtype=torch.float32)
        self.decode_function(
            ISAS.index(isa), KINDS[weight.dtype], torch.get_num_threads(), self.parallel,
            num_tokens, weight.shape[0], width, x.data_ptr(), x.stride(0) * x.itemsize,
            weight.data_ptr(), weight.stride(0) * weight.itemsize, packed[0].stride(1),
            _variant_table(packed, scale), index.data_ptr(), y.data_ptr(),
        )  # fmt: skip
        return y

    def reconstruct(
        self,
        weight: Tensor,  # [N, K], contiguous along K
        packed: Tensor,  # uint8 [P, N, ceil(K / 8)], contiguous along the last axis
        scale: Tensor,  # float32 [P, N] or [P, 1]
        out: Tensor,  # [N, K] in weight's dtype, contiguous
    ) -> None:
        """Write the effective weight, summed in float32 and rounded once, into `out`."""
        # No products of bfloat16 here: the plain 512-bit code serves all dtypes.
        isa = min(self.isa, ISAS.index("avx512"))
        self.reconstruct_function(
            isa, KINDS[weight.dtype], torch.get_num_threads(), self.parallel, weight.shape[0],
            weight.shape[1], weight.data_ptr(), weight.stride(0) * weight.itemsize,
            packed.stride(1), _variant_table([packed], [scale]), out.data_ptr(),
        )  # fmt: skip


def _variant_table(
    packed: Sequence[Tensor], scale: Sequence[Tensor]
) -> ctypes.Array[ctypes.c_int64]:
    """`struct variant` of delta_linear.c for each; valid while the tensors live."""
    fields: list[int] = []
    for signs, alpha in zip(packed, scale, strict=True):
        scale_row = 0 if alpha.shape[1] == 1 else alpha.stride(1)
        fields += (
            signs.data_ptr(), signs.stride(0),
            alpha.data_ptr(), alpha.stride(0), scale_row, signs.shape[0],
        )  # fmt: skip
    return (ctypes.c_int64 * (_VARIANT_FIELDS * len(packed)))(*fields)


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
    decode, reconstruct = functions.soupkit_decode, functions.soupkit_reconstruct
    # isa, kind, threads, parallel, then what the C signatures say.
    decode.argtypes = (
        number, number, number, pointer, number, number, number, pointer, number, pointer, number,
        number, pointer, pointer, pointer,
    )  # fmt: skip
    reconstruct.argtypes = (
        number, number, number, pointer, number, number, pointer, number, number, pointer, pointer,
    )  # fmt: skip
    decode.restype = reconstruct.restype = None
    try:
        parallel = ctypes.cast(ctypes.CDLL(None).GOMP_parallel, pointer)
    except AttributeError:
        parallel = None
    return Library(isa, decode, reconstruct, parallel)


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
