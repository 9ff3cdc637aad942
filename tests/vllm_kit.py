"""Shared by the tests that run vLLM: they need the venv of `make test-vllm`, which has no GPU."""

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from serving_kit import TOKENIZER

# vLLM's attention on CPUs has no kernel for the odd head sizes of other tests.
HEAD_DIM = 32
# vLLM and what it imports warn a lot; their warnings are not ours to mend.
NEEDS_VLLM = [
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="vLLM has a venv of its own: make test-vllm"
    ),
    pytest.mark.filterwarnings("ignore"),
]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    # vLLM compiles some of its sampling with the C++ compiler when it is first used: minutes.
    "TORCHDYNAMO_DISABLE": "1",
}


@contextmanager
def offline_engine(root: Path, *, slots: int, **settings: Any) -> Iterator[Any]:
    """A vllm.LLM of root/base that serves root/family, in this process."""
    environment = {**ENVIRONMENT, "SOUPKIT_FAMILY": str(root / "family")}
    with pytest.MonkeyPatch.context() as patch:
        for key, value in {**environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}.items():
            patch.setenv(key, os.environ.get(key, value) if key == "OMP_NUM_THREADS" else value)
        from vllm import LLM
        from vllm.distributed import cleanup_dist_env_and_memory

        engine = LLM(
            model=str(root / "base"),
            **{
                "dtype": "float32",
                "enable_lora": True,
                "max_loras": slots,
                "max_lora_rank": 1,
                "enforce_eager": True,
                "max_model_len": 128,
                "max_num_seqs": 8,
                # Prompts are computed in pieces, of several requests at a time.
                "max_num_batched_tokens": 24,
                "enable_chunked_prefill": True,
                "enable_prefix_caching": True,
                "distributed_executor_backend": "uni",
                "seed": 0,
            }
            | settings,
        )  # fmt: skip
        try:
            yield engine
        finally:
            engine.llm_engine.engine_core.shutdown()
            del engine
            cleanup_dist_env_and_memory()
            gc.collect()


def prompts(count: int) -> list[list[int]]:
    """Token ids of texts of different lengths that begin alike."""
    texts = [
        "A common beginning, longer than a block of the cache: " + "abc" * n for n in range(count)
    ]
    return [TOKENIZER(text)["input_ids"] for text in texts]


def bank_of(engine: Any) -> Any:
    """The bank in the worker of an engine in this process."""
    core = engine.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker.model_runner.lora_manager.bank


def ask(
    engine: Any, jobs: Sequence[tuple[Any, list[int]]], count: int, **sampling: Any
) -> list[Any]:
    """Greedy outputs of (LoRARequest or None, prompt ids), all in one call."""
    from vllm import SamplingParams

    return list(
        engine.generate(
            [{"prompt_token_ids": ids} for _, ids in jobs],
            SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, **sampling),
            lora_request=[request for request, _ in jobs],
            use_tqdm=False,
        )
    )
