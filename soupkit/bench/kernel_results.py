"""The Triton layers against float64, case by case; on a GPU, or on tiny shapes in the interpreter.

    |y - want| <= eps (|want| + 8 rms(want[t]))      eps: twice the rounding of the dtype

Eight times, because a long run goes through an effective weight in the weight's dtype: its rounding
is a random error of each product. A wrong sign, scale or row is off by about the rms itself. Every
case poisons what torch.empty gives with NaN, has a token of NaN (its row alone may be NaN), runs
three times, bit for bit the same, then once more with the variants on the device.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from soupkit.bench.findings import Finding, failure
from soupkit.bench.kernel_cases import BF16, FP16, FP32, Case, Encoding, gpu_cases, tiny_cases
from soupkit_kernels.arena import DeltaArena, arena_of
from soupkit_kernels.bitpack import packed_width
from soupkit_kernels.delta import Delta
from soupkit_kernels.op import add_delta_, delta_embedding, delta_linear, path_name
from soupkit_kernels.plan import Plan, plan_of

# float32: the order of sums.
EPS = {BF16: 2.0**-8, FP16: 2.0**-10, FP32: 2.0**-18}
ROWS = 8192  # of the reference at a time: a head in float64 would not fit


@dataclass(frozen=True, slots=True)
class Layer:
    """A case's tensors. start: what `add` adds to, or the ids of `embedding`."""

    weight: Tensor
    bias: Tensor | None
    deltas: list[Delta | None]
    arena: DeltaArena
    x: Tensor
    start: Tensor
    index: Tensor  # on the host


def check_all(cases: Sequence[Case], device: torch.device) -> Iterator[Finding]:
    """A finding of each case; an exception is a failure of its case."""
    for seed, case in enumerate(cases):
        try:
            finding = check(case, make(case, device, seed))
        except Exception as error:  # noqa: BLE001  # a kernel that does not compile, say
            finding = failure(case.name, error)
        yield finding


def check_share(first: int, step: int) -> Iterator[Finding]:
    """Every step-th case for the machine from `first` on; after an error of CUDA no other."""
    is_gpu = torch.cuda.is_available()
    cases = (gpu_cases() if is_gpu else tiny_cases())[first::step]
    lost = ""
    for case in cases:
        if lost:
            yield Finding(case.name, "not run", f"an error of CUDA before it, in {lost}")
            continue
        finding = next(check_all([case], torch.device("cuda" if is_gpu else "cpu")))
        if "CUDA error" in finding.detail:
            lost = case.name
        yield finding


def make(case: Case, device: torch.device, seed: int) -> Layer:
    """Random tensors of a case. Deltas are as large as weights: no error of theirs hides."""
    g = torch.Generator(device=device).manual_seed(seed)
    out, width, tokens, dtype = case.out_features, case.in_features, case.tokens, case.dtype

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device=device)

    deltas: list[Delta | None] = [_delta(case, one, g) if any(one) else None for one in case.slots]
    arena = arena_of(deltas, dtype=dtype, device=device, is_lane=case.is_lane)
    count = len(case.slots)
    if case.of == "one":
        index = torch.zeros(tokens, dtype=torch.int64)
    elif case.of == "base":
        index = torch.full((tokens,), -1)
    else:
        # Not sorted, and each variant at several places.
        index = (torch.arange(tokens) * 7 + 1) % (count + 1) - 1
    x = normal(tokens, width).to(dtype)
    if tokens > 2:
        x[1, width // 2] = float("nan")
    start = normal(tokens, out).to(dtype)
    if case.what == "embedding":
        start = torch.randint(0, out, (tokens,), generator=g, device=device)
        start[-1] = out - 1
    return Layer(
        weight=(normal(out, width) / width**0.5).to(dtype),
        bias=normal(out).to(dtype) if case.has_bias else None,
        deltas=deltas,
        arena=arena,
        x=x,
        start=start,
        index=index,
    )


def check(case: Case, layer: Layer) -> Finding:
    """Compare with float64, with itself, and with the plan that the device makes."""
    device, slots = layer.x.device, case.slots
    path = path_name(layer.arena, layer.weight)
    if (path == "triton") != case.is_lane:
        return Finding(case.name, "FAILED", f"took the path {path!r}")
    step = host_plan(layer)
    want = reference(case, layer, layer.index)
    runs = []
    for _ in range(3):
        with poisoned():
            runs.append(call(case, layer, step))
    wrong = compare(runs[0], want)
    if not wrong and not all(same_bits(runs[0], other) for other in runs[1:]):
        wrong = "three equal calls gave different bits"
    if not wrong and layer.x.is_cuda:
        index = layer.index.to(device)
        if case.of == "outside":
            index[::3] = torch.tensor([len(slots), len(slots) + 9, -5], device=device).repeat(
                case.tokens
            )[: index[::3].numel()]
        with poisoned():
            found = call(case, layer, index)
        wrong = compare(found, reference(case, layer, index.cpu()))
        wrong = wrong and f"with the variants on the device: {wrong}"
    if wrong:
        return Finding(case.name, "FAILED", wrong)
    return Finding(case.name, "ok", "" if case.is_lane else path)


def host_plan(layer: Layer) -> Plan:
    """The host's plan of a case's batch."""
    arena = layer.arena
    return plan_of(
        layer.index, slots=arena.slots, planes=arena.planes, device=arena.device,
        is_lane=arena.is_lane,
    )  # fmt: skip


def call(case: Case, layer: Layer, variants: Plan | Tensor) -> Tensor:
    """The layer's output."""
    if case.what == "embedding":
        return delta_embedding(layer.start, layer.weight, layer.arena, variants)
    if case.what == "add":
        return add_delta_(layer.start.clone(), layer.x, layer.arena, variants)
    return delta_linear(layer.x, layer.weight, layer.arena, variants, layer.bias)


def reference(case: Case, layer: Layer, index: Tensor) -> Tensor:
    """The meaning in float64; NaN where no slot has the variant.

    Args:
        index: on the host.
    """
    out, tokens = case.out_features, case.tokens
    groups = {v: (index == v).nonzero().squeeze(1).to(layer.x.device) for v in set(index.tolist())}
    is_embedding = case.what == "embedding"
    width = case.in_features if is_embedding else out
    want = torch.full((tokens, width), torch.nan, dtype=torch.float64, device=layer.x.device)
    for v, rows in groups.items():
        if not -1 <= v < len(layer.deltas):
            continue
        delta = layer.deltas[v] if v >= 0 else None
        if is_embedding:
            for row in rows.tolist():
                at = int(layer.start[row])
                want[row] = _matrix(case, layer, delta, at, at + 1)[0]
            continue
        x = layer.x[rows].double()
        for at in range(0, out, ROWS):
            end = min(out, at + ROWS)
            want[rows, at:end] = x @ _matrix(case, layer, delta, at, end).T
    if case.what == "add":
        want += layer.start.double()
    return want if layer.bias is None else want + layer.bias.double()


def compare(found: Tensor, want: Tensor) -> str:
    """What is wrong, in words; empty if nothing is."""
    if found.shape != want.shape:
        return f"shape {tuple(found.shape)}, not {tuple(want.shape)}"
    nan = want.isnan()
    if not torch.equal(found.isnan(), nan):
        rows = (found.isnan() != nan).any(1).nonzero().squeeze(1).tolist()
        return f"NaN in the wrong places, tokens {rows[:8]}"
    want = want.nan_to_num(0.0)
    error = (found.nan_to_num(0.0).double() - want).abs()
    size = want.abs() + 8 * want.square().mean(1, keepdim=True).sqrt()
    off = error - EPS[found.dtype] * size
    if bool((off > 0).any()):
        token, row = divmod(int(off.argmax()), off.shape[1])
        count = int((off > 0).sum())
        return (
            f"{count} of {off.numel()} off; token {token}, output {row}: "
            f"{float(found[token, row]):.6g}, not {float(want[token, row]):.6g}"
        )
    return ""


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same bytes."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@contextmanager
def poisoned() -> Iterator[None]:
    """Within it torch.empty is full of NaN, or of the largest integer."""
    was = torch.are_deterministic_algorithms_enabled()
    was_warning = torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # operations that have no deterministic form
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(was, warn_only=was_warning)


def is_interpreted() -> bool:
    """Whether Triton's kernels run as Python."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def _delta(case: Case, one: Encoding, g: torch.Generator) -> Delta:
    out, width, device = case.out_features, case.in_features, g.device
    size = width**-0.5
    packed = scale = column_scale = up = down = None
    if one.planes:
        shape = (one.planes, out, packed_width(width))
        packed = torch.randint(0, 256, shape, generator=g, device=device, dtype=torch.uint8)
        # Of either sign, as factors of a search may be.
        scale = torch.randn(one.planes, out, generator=g, device=device) * size
    if one.has_columns:
        # Powers of two: what a 16-bit arena holds of them is exact.
        powers = torch.randint(-3, 1, (one.planes, width), generator=g, device=device)
        column_scale = torch.exp2(powers.float())
    if one.rank:
        up = torch.randn(out, one.rank, generator=g, device=device).to(case.dtype)
        down = (torch.randn(one.rank, width, generator=g, device=device) * size).to(case.dtype)
    return Delta(out, width, packed, scale, column_scale, up, down)


def _matrix(case: Case, layer: Layer, delta: Delta | None, at: int, end: int) -> Tensor:
    """Rows at..end-1 of the effective weight, or of the delta alone."""
    rows = layer.weight[at:end].double()
    if case.what == "add":
        rows = torch.zeros_like(rows)
    if delta is not None:
        rows = rows + delta.narrow(0, at, end - at).dense(torch.float64)
    return rows
