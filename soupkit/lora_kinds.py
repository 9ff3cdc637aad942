"""How PEFT keeps the two LoRA factors of each kind of layer, and which kinds of LoRA are more.

    W = W_base + scale * B A,   scale = lora_alpha / r, or lora_alpha / sqrt(r) for rslora

    linear          A [r, in], B [out, r]                     W [out, in]
    fan_in_fan_out  the same                                  W [in, out], transformers' Conv1D
    conv            A [r, in, kernel...], B [out, r, 1...]    W [out, in, kernel...]
    embedding       A [r, rows], B [columns, r]               W [rows, columns]
    experts         A [experts r, in], B [out, r experts]     W [experts, out, in] or [experts, in,
                    by expert        by rank, then expert       out]: LoRA on a bare parameter

Written for PEFT 0.21, which is not imported. Not here: files, names and live models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from soupkit.factored import Pair

Kind = Literal["linear", "fan_in_fan_out", "conv", "embedding"]

# Fields of LoraConfig that make a weight change by more than scale * B A, in words.
VARIANTS = {
    "use_dora": "DoRA (use_dora=True)",
    "alora_invocation_tokens": "aLoRA (alora_invocation_tokens)",
    "use_qalora": "QALoRA (use_qalora=True)",
    "arrow_config": "Arrow (arrow_config)",
    "use_bdlora": "block-diagonal LoRA (use_bdlora)",
    "velora_config": "VeLoRA (velora_config)",
    "monteclora_config": "MonteCLoRA (monteclora_config)",
    "kasa_config": "KaSA (kasa_config)",
    "lora_bias": "a bias on lora_B (lora_bias=True)",
}
MICA = "MiCA (init_lora_weights='mica')"


def scaling(alpha: float, rank: int, *, is_rslora: bool) -> float:
    """What PEFT multiplies B A with."""
    return alpha / (math.sqrt(rank) if is_rslora else rank)


def pair_of(kind: Kind, a: Tensor, b: Tensor, scale: float) -> Pair:
    """PEFT's factors as a pair whose matrix is the weight's delta: [out, in * kernel] for a
    convolution, the weight's own two axes for all else. Views of a and b.
    """
    if kind in ("embedding", "fan_in_fan_out"):
        return Pair(b.T, a.T, scale)
    return Pair(a.reshape(a.shape[0], -1), b.reshape(b.shape[0], -1), scale)


def factors_of(kind: Kind, pair: Pair, *, kernel: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """PEFT's (A, B); the inverse of `pair_of`. `kernel`: of a convolution."""
    if kind in ("embedding", "fan_in_fan_out"):
        return pair.b.T.contiguous(), pair.a.T.contiguous()
    if kind == "conv":
        a = pair.a.reshape(pair.rank, -1, *kernel)
        return a, pair.b.reshape(*pair.b.shape, *(1,) * len(kernel))
    return pair.a, pair.b


def expert_pairs(a: Tensor, b: Tensor, scale: float, *, rank: int) -> tuple[Pair, ...]:
    """One pair [out, in] an expert, of the factors of a bare parameter; a is viewed, b copied."""
    downs = a.reshape(-1, rank, a.shape[1])
    ups = b.reshape(b.shape[0], rank, -1).permute(2, 0, 1).contiguous()
    return tuple(Pair(down, up, scale) for down, up in zip(downs, ups, strict=True))


def expert_factors(pairs: Sequence[Pair]) -> tuple[Tensor, Tensor]:
    """PEFT's (A, B) of pairs of one rank; the inverse of `expert_pairs`."""
    b = torch.stack([pair.b for pair in pairs], dim=2)
    return torch.cat([pair.a for pair in pairs]), b.reshape(b.shape[0], -1)
