"""The sites of a vLLM model: which of its modules can act per slot, and what a rank holds of them.

A module is taken by its class: what is not listed here is refused by name when a variant changed
it. Classes that vLLM derives for one model are refused too, as their forward may be another.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm.model_executor.custom_op import maybe_get_oot_by_class
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from .bank import Bank, Sites
from .places import Layout, Part, qkv_parts, split, whole
from .sites import EmbeddingSite, LinearSite, NormSite, Site

HEAD = "lm_head"
EXPERTS = ("FusedMoE", "MoERunner")


def attach(bank: Bank, model: Any, *, dtype: torch.dtype, ties_head: bool) -> None:
    """Makes a model's modules act for the variants of a bank.

    Args:
        model: loaded, its weights in their final form. ties_head: of the base's config.
    """
    modules: dict[str, list[Site]] = {}
    refused: dict[str, str] = {}
    embeddings, heads = [], []
    has_experts = any(type(module).__name__ in EXPERTS for module in model.modules())
    for module in model.modules():
        if isinstance(module, Attention):
            _keep_finite(bank, module)
    for name, module in model.named_modules():
        kind = type(module)
        if kind is maybe_get_oot_by_class(VocabParallelEmbedding):
            embeddings.append(name)
            modules[name] = [EmbeddingSite(bank, module, bank.slots, _rows(module), dtype=dtype)]
        elif kind is maybe_get_oot_by_class(ParallelLMHead):
            heads.append(name)
            modules[name] = [_head(bank, module, dtype)]
        elif kind is RMSNorm and module.has_weight and module.variance_size_override is None:
            modules[name] = [NormSite(bank, module, bank.slots)]
        elif kind is ReplicatedLinear and has_experts:
            refused[name] = "it may be a router, whose weight is read past its module"
        elif kind in LAYOUTS:
            modules[name] = [_linear(bank, module, LAYOUTS[kind](module), dtype)]
        elif any(True for _ in module.parameters(recurse=False)):
            refused[name] = f"{kind.__name__} is no module that acts per token here"
    if ties_head and not heads and len(embeddings) == 1:
        # One module looks tokens up and computes the logits.
        heads.append(HEAD)
        modules[HEAD] = [_head(bank, model.get_submodule(embeddings[0]), dtype)]
    shared: dict[str, list[str]] = {}
    if ties_head and len(embeddings) == 1 == len(heads):
        shared = {embeddings[0]: heads, heads[0]: embeddings}
    bank.attach(
        Sites(modules, refused, dict(model.packed_modules_mapping), _renamer(model), shared)
    )


def _keep_finite(bank: Bank, module: Any) -> None:
    """Caches no NaN or infinity of a variant's tokens. Blocks are given to others as they are, and
    a kernel may read past the tokens of a block's new owner, with weight 0: 0 * NaN is NaN.
    """
    forward = module.forward

    def act(query: Any, key: Any, value: Any, *args: Any, **named: Any) -> Any:
        if bank.batch is not None and key is not None and value is not None:
            key, value = (torch.nan_to_num(x, 0.0, 0.0, 0.0) for x in (key, value))
        return forward(query, key, value, *args, **named)

    module.forward = act


def _renamer(model: Any) -> Callable[[str], str]:
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return lambda name: name
    mapper = mapper.get_rename_mapper()
    return lambda name: mapper._map_name(name) or name


def _linear(bank: Bank, module: Any, layout: Layout, dtype: torch.dtype) -> Site:
    weight = getattr(module, "weight", None)
    fuses = (
        type(module.quant_method) is UnquantizedLinearMethod
        and isinstance(weight, torch.Tensor)
        and weight.is_cuda
        and weight.dtype == dtype
        and tuple(weight.shape) == (layout.rows, layout.columns.length)
        and weight.is_contiguous()
    )
    return LinearSite(bank, module, bank.slots, layout, dtype=dtype, fuses=fuses)


def _head(bank: Bank, module: Any, dtype: torch.dtype) -> Site:
    weight = module.weight
    fuses = (
        type(module.quant_method) is UnquantizedEmbeddingMethod
        and weight.is_cuda
        and weight.dtype == dtype
        and weight.is_contiguous()
    )
    return LinearSite(
        bank, module, bank.slots, _rows(module), dtype=dtype, is_head=True, fuses=fuses
    )


def _rows(module: Any) -> Layout:
    """Of a vocabulary."""
    shard = module.shard_indices
    start, end = shard.org_vocab_start_index, shard.org_vocab_end_index
    local = module.num_embeddings_per_partition
    part = Part(module.org_vocab_size, start, end - start, local - (end - start))
    return Layout((part,), whole(module.embedding_dim))


def _qkv(module: Any) -> Layout:
    parts = qkv_parts(
        module.total_num_heads,
        module.total_num_kv_heads,
        (module.head_size, module.v_head_size),
        ranks=module.tp_size,
        rank=module.tp_rank,
    )
    return Layout(parts, whole(module.input_size))


def _merged(module: Any) -> Layout:
    parts = tuple(split(size, module.tp_size, module.tp_rank) for size in module.output_sizes)
    return Layout(parts, whole(module.input_size))


def _column(module: Any) -> Layout:
    part = split(module.output_size, module.tp_size, module.tp_rank)
    return Layout((part,), whole(module.input_size))


def _row(module: Any) -> Layout:
    columns = split(module.input_size, module.tp_size, module.tp_rank)
    return Layout((whole(module.output_size),), columns)


def _replicated(module: Any) -> Layout:
    return Layout((whole(module.output_size),), whole(module.input_size))


LAYOUTS: dict[type[nn.Module], Callable[[Any], Layout]] = {
    QKVParallelLinear: _qkv,
    MergedColumnParallelLinear: _merged,
    ColumnParallelLinear: _column,
    RowParallelLinear: _row,
    ReplicatedLinear: _replicated,
}
