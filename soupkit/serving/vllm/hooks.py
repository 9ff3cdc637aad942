"""The private names of vLLM 0.32 that the plug-in replaces, wraps or relies on, in one table.

tests/test_vllm_hooks.py looks each of them up in the vLLM that is installed; CONTRIBUTING.md shows
the table.
"""

import functools
import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from soupkit.errors import ServingError

logger = logging.getLogger("vllm.soupkit")


@dataclass(frozen=True, slots=True)
class Hook:
    """A private name, what it is used for, and what breaks when it moves or means another thing."""

    name: str  # "package.module:Class.attribute"
    use: str
    breaks: str


HOOKS = (
    Hook(
        "vllm.v1.worker.lora_model_runner_mixin:LRUCacheWorkerLoRAManager",
        "replaced: a bank of variants is the LoRA manager of the model runner",
        "variants are read as PEFT adapters, which they are not: every one is refused",
    ),
    Hook(
        "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin._set_active_loras",
        "relied on: tells the manager of each step's tokens and rows of logits, by number, and "
        "warms up with adapters of the path /not/a/real/path",
        "a module is given other rows than the batch has: an error that stops the engine",
    ),
    Hook(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_prompt_logprobs_dict",
        "wrapped: logits of prompt tokens are those of the tokens' variant",
        "logprobs of prompts are refused, or come from the wrong rows where heads differ",
    ),
    Hook(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.reload_weights",
        "replaced: refused, as variants are changes to the base that was loaded",
        "the engine stops: all variants are forgotten in the workers only",
    ),
    Hook(
        "vllm.v1.engine.core:EngineCore.add_request",
        "wrapped: a request whose variant is not registered is registered, or refused alone",
        "a variant that is gone stops the engine in the middle of a step",
    ),
    Hook(
        "vllm.v1.engine.core:EngineCore.add_lora",
        "wrapped: keeps which variants are registered",
        "as add_request",
    ),
    Hook(
        "vllm.v1.engine.core:EngineCore.remove_lora",
        "wrapped: refuses while an unfinished request has the variant",
        "as add_request",
    ),
    Hook(
        "vllm.v1.engine.core:EngineCoreProc._send_error_outputs_to_client",
        "called: the one request that is refused gets an error",
        "that request is never answered",
    ),
    Hook(
        "vllm.v1.engine.llm_engine:LLMEngine.add_request",
        "wrapped, for vllm.LLM: registers a request's variant before anything knows the request",
        "vllm.LLM waits for ever for a request whose variant is refused",
    ),
    Hook(
        "vllm.v1.core.sched.scheduler:Scheduler.__init__",
        "relied on: `requests` holds all unfinished requests",
        "a variant in use can be removed, and the engine stops",
    ),
    Hook(
        "vllm.v1.core.sched.scheduler:Scheduler.schedule",
        "relied on: no step has more variants than `max_loras`",
        "a step has more variants than slots, and the engine stops",
    ),
    Hook(
        "vllm.v1.core.kv_cache_utils:_gen_lora_extra_hash_keys",
        "relied on: keys cached blocks by the adapter's path, which has the content digest",
        "blocks of one content answer for another: wrong tokens",
    ),
    Hook(
        "vllm.entrypoints.openai.models.serving:OpenAIServingModels.resolve_lora",
        "replaced, with its neighbours: names are those of the family, always its newest content",
        "unknown names, new and removed variants are not noticed",
    ),
    Hook(
        "vllm.entrypoints.serve.engine.serving:BaseServing._check_model",
        "wrapped: loads a request's variant first; then asks `lora_requests`, then `resolve_lora`",
        "variants get 404, or a stream begins before its variant has failed to load",
    ),
    Hook(
        "vllm.v1.engine.async_llm:AsyncLLM.generate",
        "wrapped in the server: a variant in use is not removed",
        "unloading ends requests with an error",
    ),
    Hook(
        "vllm.model_executor.layers.linear:LinearBase.__init__",
        "relied on: modules compute by `quant_method.apply(module, x, bias)`",
        "deltas of linears do not act: wrong tokens",
    ),
    Hook(
        "vllm.model_executor.layers.linear:QKVParallelLinear.__init__",
        "relied on: a rank's heads by `total_num_heads`, `total_num_kv_heads`, `head_size`, "
        "`v_head_size`, `tp_size` and `tp_rank`",
        "a rank holds other heads of a delta than of the base: wrong tokens",
    ),
    Hook(
        "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding.__init__",
        "relied on: a rank's rows by `shard_indices`, `org_vocab_size` and "
        "`num_embeddings_per_partition`",
        "a rank holds other rows of a delta than of the base: wrong tokens",
    ),
    Hook(
        "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding.forward",
        "relied on: looks up by `quant_method.embedding`, or a kernel if `use_fused_embedding`",
        "deltas of embeddings do not act: wrong tokens",
    ),
    Hook(
        "vllm.model_executor.layers.logits_processor:LogitsProcessor._apply_head",
        "relied on: computes logits by the head's `quant_method.apply`",
        "deltas of heads do not act: wrong tokens",
    ),
    Hook(
        "vllm.model_executor.layers.layernorm:RMSNorm.forward_native",
        "called with `pass_weight` and `pass_weight_add` off: the norm without its weight",
        "changed norms do not act: wrong tokens",
    ),
    Hook(
        "vllm.model_executor.layers.attention.attention:Attention.forward",
        "wrapped: keys and values of variants that are not finite are cached as zeros",
        "a variant whose numbers overflow spoils answers of those who get its blocks next",
    ),
    Hook(
        "vllm.model_executor.models.utils:WeightsMapper.get_rename_mapper",
        "called: a checkpoint's names in vLLM's model",
        "tensors are refused: no such parameter",
    ),
    Hook(
        "vllm.model_executor.models.utils:WeightsMapper._map_name",
        "called: one name in vLLM's model",
        "tensors are refused: no such parameter",
    ),
    Hook(
        "vllm.model_executor.custom_op:maybe_get_oot_by_class",
        "called: the class that a platform has in the place of embeddings and heads",
        "changed embeddings and heads are refused by name",
    ),
    Hook(
        "vllm.config.parallel:ParallelConfig._api_process_count",
        "read: more than one API process is refused",
        "a process removes variants that another one's requests have",
    ),
)  # fmt: skip


def install() -> None:
    """Puts the hooks in place, once a process, before an engine is made in it."""
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.entrypoints.serve.engine.serving import BaseServing
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.worker import lora_model_runner_mixin
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from .models import check_first, replace_models
    from .parent import follow
    from .worker import VariantManager

    if lora_model_runner_mixin.LRUCacheWorkerLoRAManager is VariantManager:
        return
    lora_model_runner_mixin.LRUCacheWorkerLoRAManager = VariantManager
    _wrap_prompts(GPUModelRunner)
    GPUModelRunner.reload_weights = _refuse_reload
    _wrap_engine(EngineCore)
    _wrap_offline(LLMEngine)
    replace_models(OpenAIServingModels)
    check_first(BaseServing)
    follow()


def _wrap_prompts(runner_class: Any) -> None:
    original = runner_class._get_prompt_logprobs_dict

    @functools.wraps(original)
    def prompts(self: Any, hidden_states: Any, num_scheduled_tokens: Any) -> Any:
        if not self.num_prompt_logprobs or not hasattr(self, "lora_manager"):
            return original(self, hidden_states, num_scheduled_tokens)
        with _prompt_logits(self.model, self.lora_manager.bank, hidden_states):
            return original(self, hidden_states, num_scheduled_tokens)

    runner_class._get_prompt_logprobs_dict = prompts


def _refuse_reload(self: Any, *args: Any, **named: Any) -> None:
    raise ServingError("variants are changes to the base that was loaded: restart the server")


@contextmanager
def _prompt_logits(model: Any, bank: Any, hidden_states: Any) -> Iterator[None]:
    """Within it `compute_logits` is given slices of `hidden_states`, and acts for their tokens."""
    compute = model.compute_logits
    row_bytes = hidden_states.stride(0) * hidden_states.element_size()

    def compute_logits(states: Any, *args: Any, **named: Any) -> Any:
        start, rest = divmod(states.data_ptr() - hidden_states.data_ptr(), row_bytes)
        assert rest == 0 <= start
        with bank.prompt_rows(start, states.shape[0]):
            return compute(states, *args, **named)

    model.compute_logits = compute_logits
    try:
        yield
    finally:
        del model.compute_logits


def _wrap_engine(engine_class: Any) -> None:
    """Requests are admitted only with their variant registered in all workers, and keep it."""
    add_request, add_lora = engine_class.add_request, engine_class.add_lora
    remove_lora = engine_class.remove_lora

    def numbers(self: Any) -> set[int]:
        found: set[int] = self.__dict__.setdefault("soupkit_numbers", set())
        return found

    # vLLM reads the signature to know what it was sent: the wrappers keep it.
    @functools.wraps(add_lora)
    def adds_lora(self: Any, lora_request: Any) -> Any:
        try:
            done = add_lora(self, lora_request)
        except Exception:
            # Of several ranks some may have it.
            if lora_request.lora_int_id not in numbers(self):
                remove_lora(self, lora_request.lora_int_id)
            raise
        numbers(self).add(lora_request.lora_int_id)
        return done

    @functools.wraps(remove_lora)
    def removes_lora(self: Any, lora_id: int) -> Any:
        users = sum(
            request.lora_request is not None and request.lora_request.lora_int_id == lora_id
            for request in self.scheduler.requests.values()
        )
        if users:
            raise ServingError(f"variant {lora_id} has {users} requests; remove it when they ended")
        numbers(self).discard(lora_id)
        return remove_lora(self, lora_id)

    @functools.wraps(add_request)
    def adds_request(self: Any, request: Any, request_wave: int = 0) -> Any:
        wanted = request.lora_request
        if wanted is not None and wanted.lora_int_id not in numbers(self):
            try:
                self.add_lora(wanted)
            except Exception as error:
                if not hasattr(self, "_send_error_outputs_to_client"):
                    raise  # in the caller's own process
                logger.error("request %s is refused: %s", request.request_id, error)
                self._send_error_outputs_to_client([request.request_id], request.client_index)
                return None
        return add_request(self, request, request_wave)

    engine_class.add_lora, engine_class.remove_lora = adds_lora, removes_lora
    engine_class.add_request = adds_request


def _wrap_offline(engine_class: Any) -> None:
    """vllm.LLM's requests: refused with their variant's reason before the engine knows of them."""
    original = engine_class.add_request
    signature = inspect.signature(original)

    @functools.wraps(original)
    def adds_request(self: Any, *args: Any, **named: Any) -> Any:
        wanted = signature.bind(self, *args, **named).arguments.get("lora_request")
        if wanted is not None:
            self.engine_core.add_lora(wanted)
        return original(self, *args, **named)

    engine_class.add_request = adds_request
