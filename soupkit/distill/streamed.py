"""A causal language model that has one layer's weights in memory at a time, for models larger than
memory.

Built without weights; each module reads its own just before it runs and drops them right after. A
pass reads the whole model once, so batches should be large. Forward only, float32, on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from soupkit.bundle import Variant
from soupkit.checkpoint import Checkpoint
from soupkit.delta import canonical_name
from soupkit.distill.batches import Batch, check_tokens
from soupkit.encoding import decode
from soupkit.errors import CheckpointError
from soupkit.files import refusing_in_one_line
from soupkit_kernels import Delta

Weights = Callable[[str], Tensor]


class StreamedModel:
    """A model of a folder's configuration whose weights come from a function of their names."""

    def __init__(self, folder: Path, weights: Weights) -> None:
        """Build the model; no weight is read yet.

        Raises:
            CheckpointError: transformers does not know its configuration.
        """
        with refusing_in_one_line(f"{folder}: transformers cannot build it"), _without_weights():
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            self.model: nn.Module = AutoModelForCausalLM.from_config(
                config,
                dtype=torch.float32,
                attn_implementation="sdpa",
                trust_remote_code=False,
            ).eval()
        self._folder, self._weights = folder, weights
        for prefix, module in self.model.named_modules():
            if any(True for _ in module.parameters(recurse=False)):
                self._stream(prefix, module)

    def linears(self) -> dict[str, nn.Module]:
        """Every nn.Linear by the canonical name of its weight, in the order of the model."""
        return {
            canonical_name(f"{prefix}.weight"): module
            for prefix, module in self.model.named_modules()
            if isinstance(module, nn.Linear)
        }

    @torch.no_grad()
    def logits(self, batch: Batch) -> Tensor:
        """float32 [scored positions, vocabulary].

        Raises:
            CheckpointError: the model reads weights of a layer that does not run.
        """
        check_tokens(batch, self.model)
        try:
            out = self.model(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False)
            logits: Tensor = out.logits[batch.scored]
        except (NotImplementedError, RuntimeError) as error:
            if "meta" not in str(error):
                raise
            raise CheckpointError(
                f"{self._folder}: this architecture reads weights beside their layers, so that it "
                "cannot be streamed: use --method kl"
            ) from error
        return logits

    def _stream(self, prefix: str, module: nn.Module) -> None:
        empty = dict(module.named_parameters(recurse=False))

        def load(*_: Any) -> None:
            for name, parameter in empty.items():
                whole = self._weights(canonical_name(f"{prefix}.{name}"))
                if whole.shape != parameter.shape:
                    raise CheckpointError(
                        f"{self._folder}: {prefix}.{name} has shape {tuple(whole.shape)}, its "
                        f"configuration says {tuple(parameter.shape)}"
                    )
                module.register_parameter(name, nn.Parameter(whole.float(), requires_grad=False))

        def drop(*_: Any) -> None:
            for name, parameter in empty.items():
                module.register_parameter(name, parameter)

        module.register_forward_pre_hook(load)
        module.register_forward_hook(drop, always_call=True)


def variant_weights(base: Checkpoint, variant: Variant, deltas: Mapping[str, Delta]) -> Weights:
    """The weights of base + variant, some of its deltas replaced: W_base + delta in float32."""

    def weight(name: str) -> Tensor:
        entry = variant.entry(name)
        if entry.kind == "tied":
            assert entry.source is not None
            return weight(entry.source)
        if entry.kind == "raw":
            return variant.raw(name)
        theirs = base.tensor(name)
        if entry.kind == "same":
            return theirs
        delta = deltas[name] if name in deltas else variant.delta(name)
        return decode(delta).reshape(entry.shape).add_(theirs)

    return weight


@contextmanager
def _without_weights() -> Iterator[None]:
    """Put every parameter that is registered meanwhile on the meta device; buffers are real."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
