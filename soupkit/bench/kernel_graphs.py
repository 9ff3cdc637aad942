"""CUDA graphs, streams and torch.compile around the layers: what a serving engine does with them.

A captured step is replayed with other variants in the same slots and other tokens' variants in the
same tensor, its plan made by the GPU inside the graph or by the host outside. Two streams run at a
time, each with a plan of its own. Results are compared as in kernel_results.py, and with an eager
call bit for bit where both launch the same kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from soupkit.bench.findings import Finding
from soupkit.bench.kernel_cases import BF16, EMPTY, FP32, ONE, TWO, Case
from soupkit.bench.kernel_results import Layer, call, compare, host_plan, make, reference, same_bits
from soupkit_kernels.op import add_delta_, delta_embedding, delta_linear
from soupkit_kernels.plan import plan_of

SIZES = (1, 5, 16, 64, 200)
SLOTS = (ONE, TWO, EMPTY, ONE)
ROUNDS = 50


def check_graphs(device: torch.device, *, out: int = 1024, width: int = 4096) -> Iterator[Finding]:
    """Capture and replay of two layers of a step."""
    for tokens in SIZES:
        case = Case(out, width, tokens, SLOTS)
        layers = [make(case, device, seed) for seed in (1, 2)]
        yield _told(f"plan inside the graph, M={tokens}", _plan_inside(case, layers))
    case = Case(out, width, 16, SLOTS)
    yield _told("plan of the host, M=16", _plan_outside(case, make(case, device, 3)))


def check_streams(device: torch.device, *, out: int = 4096, width: int = 4096) -> Iterator[Finding]:
    """Two streams at a time, with plans of their own; split sums must not meet."""
    case = Case(out, width, 8, SLOTS)
    layers = [make(case, device, seed) for seed in (4, 5)]
    plans = [host_plan(one) for one in layers]
    alone = [call(case, one, step) for one, step in zip(layers, plans, strict=True)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in layers]  # type: ignore[no-untyped-call]
    found: list[list[Tensor]] = [[], []]
    for _ in range(ROUNDS):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[i].append(call(case, layers[i], plans[i]))
    torch.cuda.synchronize()
    wrong = sum(not same_bits(one, alone[i]) for i, results in enumerate(found) for one in results)
    said = f"{wrong} of {2 * ROUNDS} results differ from those of one stream" if wrong else ""
    yield _told("two streams", said)
    locks = [step.groups.locks for step in plans if step.groups is not None]
    dirty = sum(int(one.count_nonzero()) for one in locks)
    yield _told("locks are left zero", f"{dirty} locks are not" if dirty else "")


def check_compile(device: torch.device, *, out: int = 1024, width: int = 2048) -> Iterator[Finding]:
    """torch.compile with fullgraph=True: the three layers, between operations that it fuses.

    Without CUDA nothing is generated: a graph is made and run as it is.
    """
    is_cuda = device.type == "cuda"
    for tokens in (1, 16, 80) if is_cuda else (1, 5):
        dtype = BF16 if is_cuda else FP32
        case = Case(out, width, tokens, SLOTS, dtype=dtype)
        layer = make(case, device, 6)
        ids = torch.arange(tokens, device=device) * 5 % out
        step = host_plan(layer)

        def model(x: Tensor, layer: Layer = layer, ids=ids, step=step) -> Tensor:  # type: ignore[no-untyped-def]
            x = x * 2 + delta_embedding(ids, layer.weight, layer.arena, step)
            y = delta_linear(x, layer.weight, layer.arena, step)
            return add_delta_(y, x, layer.arena, step) * 2

        torch.compiler.reset()
        compiled = torch.compile(
            model, fullgraph=True, backend="inductor" if is_cuda else "aot_eager"
        )
        with torch.no_grad():
            found, want = compiled(layer.x), model(layer.x)
        yield _told(f"torch.compile fullgraph, M={tokens}", compare(found, want.double()))


def _plan_inside(case: Case, layers: list[Layer]) -> str:
    """Capture plan and layers; replay with slots and variants changed. What went wrong, or ""."""
    device, slots = layers[0].x.device, len(case.slots)
    index = layers[0].index.to(device)
    planes = max(one.arena.planes for one in layers)

    def run() -> list[Tensor]:
        there = plan_of(index, slots=slots, planes=planes, is_lane=layers[0].arena.is_lane)
        return [call(case, one, there) for one in layers]

    graph, outputs = _captured(run)
    for turn in range(3):
        if turn:
            _swap(layers, turn)
            index.copy_((index + turn + 1) % (slots + 1) - 1)
        for output in outputs:
            output.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        for one, output in zip(layers, outputs, strict=True):
            wrong = compare(output, reference(case, one, index.cpu()))
            if wrong:
                return f"replay {turn}: {wrong}"
            if not same_bits(output, call(case, one, index)):
                return f"replay {turn}: other bits than an eager call"
    return ""


def _plan_outside(case: Case, layer: Layer) -> str:
    """Capture a layer with the host's plan; replay with its slots changed."""
    step = host_plan(layer)
    graph, outputs = _captured(lambda: [call(case, layer, step)])
    for turn in range(3):
        if turn:
            _swap([layer], turn)
        outputs[0].fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        wrong = compare(outputs[0], reference(case, layer, layer.index))
        if wrong:
            return f"replay {turn}: {wrong}"
    return ""


def _captured(run: Callable[[], list[Tensor]]) -> tuple[Any, list[Tensor]]:
    """The graph of a call, and what the call returned in it."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    return graph, outputs


def _swap(layers: list[Layer], turn: int) -> None:
    """Put each delta into another slot; slot `turn` becomes empty."""
    for layer in layers:
        layer.deltas[:] = [layer.deltas[-1], *layer.deltas[:-1]]
        layer.deltas[turn] = None
        for slot, delta in enumerate(layer.deltas):
            if delta is None:
                layer.arena.clear(slot)
            else:
                layer.arena.put(slot, delta)


def _told(name: str, wrong: str) -> Finding:
    return Finding(name, "FAILED" if wrong else "ok", wrong)
