"""What of vLLM serves variants: its version, and settings under which they would answer wrongly.

Each refusal names the setting, the reason and the way out.
"""

from typing import Any

from soupkit.errors import ServingError

# The minor that the contract tests pass on; private names move between minors.
TESTED = (0, 32)


def check_version(version: str) -> None:
    """Raises ServingError unless vLLM is of the minor that was tested."""
    parts = version.split("+")[0].split(".")
    found = tuple(int(part) for part in parts[:2] if part.isdecimal())
    if found != TESTED:
        wanted = ".".join(map(str, TESTED))
        raise ServingError(
            f"vLLM {version} cannot serve a soupkit family: the plug-in reaches into vLLM's LoRA "
            f"path and was tested with {wanted}.*; install vllm=={wanted}.*, unset SOUPKIT_FAMILY, "
            "or use `soupkit serve` without --engine vllm"
        )


def check_config(config: Any) -> None:
    """Raises ServingError for a setting of vLLM under which variants would answer wrongly.

    Args:
        config: a VllmConfig.
    """
    model, parallel = config.model_config, config.parallel_config
    refusals = (
        (config.use_v2_model_runner,
         "model runner V2 hands on rows in a way that was not tested; set "
         "VLLM_USE_V2_MODEL_RUNNER=0"),
        (_captures(config),
         "compiled or captured graphs would replay the variants of the batch that they were made "
         "of; give --enforce-eager"),
        (config.speculative_config is not None,
         "a draft model's rows belong to no variant; serve without speculative decoding"),
        (getattr(model, "use_mla", False),
         "multi-head latent attention reads weights past the modules that variants act in"),
        (getattr(model, "runner_type", "generate") != "generate",
         "only models that generate are served; give --runner generate"),
        (model.enable_prompt_embeds,
         "prompts given as embeddings are not rows of the batch; serve without "
         "--enable-prompt-embeds"),
        (model.enable_sleep_mode or model.enable_cumem_allocator,
         "a server that slept may wake without what its slots held; serve without "
         "--enable-sleep-mode and --enable-cumem-allocator"),
        (config.weight_transfer_config is not None,
         "variants are changes to one base, which must stay; serve without "
         "--weight-transfer-config"),
        (_offloads(config.offload_config),
         "weights that come and go during a forward are not where variants act; serve without "
         "--cpu-offload-gb and --offload-group-size"),
        (config.kv_transfer_config is not None,
         "what finds cached blocks outside the engine may look at tokens alone, which are alike in "
         "all variants; serve without --kv-transfer-config and --kv-offloading-size"),
        (config.cache_config.kv_sharing_fast_prefill,
         "layers that compute some of a prompt's rows only have other rows than the batch; serve "
         "without --kv-sharing-fast-prefill"),
        (parallel.enable_dbo or parallel.ubatch_size > 1,
         "halves of a batch have other rows than the batch; serve without --enable-dbo and "
         "--ubatch-size"),
        (max(parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size) > 1,
         "ranks that share a context were not tested; give --tensor-parallel-size only"),
        (parallel.pipeline_parallel_size > 1,
         "variants are not split over stages; give --tensor-parallel-size instead of "
         "--pipeline-parallel-size"),
        (parallel.data_parallel_size > 1,
         "replicas inside one server were not tested; start servers side by side"),
        (_head_dtype(model) not in (None, model.dtype),
         "a head in another dtype is computed past the module that variants act in"),
    )  # fmt: skip
    for is_so, reason in refusals:
        if is_so:
            raise ServingError(f"vLLM cannot serve a soupkit family so: {reason}")


def _captures(config: Any) -> bool:
    """Whether forwards would be compiled or captured. vLLM does neither on CPUs with LoRA on."""
    compilation = config.compilation_config
    mode, graphs = int(compilation.mode or 0), compilation.cudagraph_mode
    return mode != 0 or bool(graphs is not None and graphs.value)


def _offloads(offload: Any) -> bool:
    return bool(offload.uva.cpu_offload_gb or offload.prefetch.offload_group_size)


def _head_dtype(model: Any) -> Any:
    return getattr(model, "head_dtype", None)
