"""One tiny model under every way of training that merges must be right for, behind one face.

Reading goes through the frameworks' own calls and never through soupkit, so that a test compares
what the framework holds with what soupkit says it wrote. DeepSpeed and FSDP are imported where they
are used: the test process imports this file for its plain reference.
"""

import functools
import os
import warnings

import torch
import torch.distributed as dist
from soup_runs import VOCABULARY, tiny_llama
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

LEARNING_RATE = 0.3
MOMENTUM = 0.9


def odd_llama(seed: int = 0) -> LlamaForCausalLM:
    """Untied head, biases, and an odd number of entries in most parameters: no equal halves."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=15,
        intermediate_size=17,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=4,
        max_position_embeddings=16,
        mlp_bias=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


def adapted(model: nn.Module) -> nn.Module:
    """Frozen, with LoRA of rank 3 on two layers of each block."""
    import peft

    options = {"r": 3, "lora_alpha": 60, "target_modules": ["q_proj", "down_proj"]}
    with warnings.catch_warnings():
        # PEFT 0.21.2 reads an attribute that transformers deprecates.
        warnings.simplefilter("ignore", FutureWarning)
        return peft.get_peft_model(model, peft.LoraConfig(**options))


def adapted_llama(seed: int = 0) -> nn.Module:
    return adapted(odd_llama(seed))


MODELS = {"tied": tiny_llama, "odd": odd_llama, "lora": adapted_llama}


def without_compiler() -> None:
    """DeepSpeed's only compiled op on a CPU is an all-reduce for inference: do without it."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM)


class Plain:
    """One process. Subclasses: the same model under a strategy."""

    def __init__(self, inner: nn.Module) -> None:
        self.inner = self.model = inner
        self.optimizer = sgd(p for p in inner.parameters() if p.requires_grad)

    def assert_in_force(self) -> None:
        assert not dist.is_initialized()

    def loss(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, labels=ids).loss

    def step(self, ids: Tensor) -> None:
        self.loss(ids).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def set_learning_rate(self, value: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = value

    def whole(self) -> dict[str, Tensor]:
        """Every parameter whole, the float32 master where there is one."""
        return {name: p.detach().clone() for name, p in self.inner.named_parameters()}

    def copies(self) -> dict[str, Tensor]:
        """Every parameter whole, in the dtype that the next forward uses."""
        return self.whole()


class Ddp(Plain):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.model = DistributedDataParallel(inner)

    def assert_in_force(self) -> None:
        assert dist.get_world_size() == 2
        assert type(self.model) is DistributedDataParallel


class DeepSpeed(Plain):
    def __init__(
        self,
        inner: nn.Module,
        *,
        stage: int,
        optimizer_class: str = "",
        bf16: bool = False,
        float32_accumulation: bool = False,
        checks_overflow: bool = False,
        accumulation: int = 1,
        **zero,
    ) -> None:
        import deepspeed

        self.inner, self.stage, self.zero = inner, stage, zero
        self.is_cut_after_step: set[bool] | None = None
        self.optimizer_class = optimizer_class
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": accumulation,
            # DeepSpeed's own default is 1.0.
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            # Else an offloaded optimizer has to be DeepSpeed's own, which needs a compiler.
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": stage, **zero},
        }
        if bf16:
            config["bf16"] = {"enabled": True, "check_grad_overflow": checks_overflow}
        if float32_accumulation:
            config["data_types"] = {"grad_accum_dtype": "fp32"}
        trained = [p for p in inner.parameters() if p.requires_grad]
        self.model, self.optimizer, *_ = deepspeed.initialize(
            model=inner, model_parameters=trained, optimizer=sgd(trained), config=config
        )

    @classmethod
    def around(cls, engine, **zero) -> "DeepSpeed":
        """Over an engine that a framework has built."""
        self = cls.__new__(cls)
        self.model, self.inner, self.optimizer = engine, engine.module, engine.optimizer
        self.stage, self.zero = engine.zero_optimization_stage(), zero
        self.optimizer_class, self.is_cut_after_step = "", None
        return self

    def assert_in_force(self) -> None:
        import deepspeed

        assert dist.get_world_size() == self.model.world_size == 2
        assert type(self.model) is deepspeed.DeepSpeedEngine
        assert self.model.zero_optimization_stage() == self.stage
        if self.optimizer_class:
            assert type(self.optimizer).__name__ == self.optimizer_class
        parameters = list(self.inner.parameters())
        if self.stage == 3:
            assert all(hasattr(p, "ds_id") for p in parameters)
            # Below the default threshold every parameter stays whole from step to step.
            is_cut_always = self.zero.get("stage3_param_persistence_threshold") == 0
            assert self.is_cut_after_step in (None, {is_cut_always})
        elif self.stage > 0:
            assert all(hasattr(p, "_hp_mapping") for p in parameters if p.requires_grad)

    def step(self, ids: Tensor) -> None:
        self.model.backward(self.loss(ids))
        self.model.step()
        self.is_cut_after_step = {p.numel() == 0 for p in self.inner.parameters()}

    def whole(self) -> dict[str, Tensor]:
        return {name: self._master(p) for name, p in self.inner.named_parameters()}

    def copies(self) -> dict[str, Tensor]:
        return {name: self._copy(p) for name, p in self.inner.named_parameters()}

    def _master(self, parameter: nn.Parameter) -> Tensor:
        from deepspeed.utils import safe_get_full_fp32_param

        if self.stage == 0 and hasattr(self.optimizer, "fp32_groups"):
            return self._master_without_zero(parameter)
        value = safe_get_full_fp32_param(parameter)
        return self._copy(parameter) if value is None else value.detach().clone()

    def _master_without_zero(self, parameter: nn.Parameter) -> Tensor:
        for low, high in zip(self.optimizer.fp16_groups, self.optimizer.fp32_groups, strict=True):
            for copy, master in zip(low, high, strict=True):
                if copy is parameter:
                    return master.detach().clone()
        return self._copy(parameter)

    def _copy(self, parameter: nn.Parameter) -> Tensor:
        from deepspeed.runtime.zero import GatheredParameters

        if self.stage < 3:
            return parameter.detach().clone()
        with GatheredParameters([parameter]):
            return parameter.detach().clone()


class Fsdp2(Plain):
    def __init__(self, inner: nn.Module, *, bf16: bool = False) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        self.policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32
        )
        for layer in [m for m in inner.modules() if isinstance(m, LlamaDecoderLayer)]:
            fully_shard(layer, mp_policy=self.policy)
        fully_shard(inner, mp_policy=self.policy)
        super().__init__(inner)

    @classmethod
    def around(cls, model, optimizer) -> "Fsdp2":
        """Over a model that a framework has sharded."""
        self = cls.__new__(cls)
        self.model = self.inner = model
        self.optimizer = optimizer
        return self

    def assert_in_force(self) -> None:
        from torch.distributed.fsdp import FSDPModule
        from torch.distributed.tensor import DTensor

        assert dist.get_world_size() == 2
        assert isinstance(self.model, FSDPModule)
        self._reshard()
        parameters = list(self.inner.parameters())
        assert all(isinstance(p, DTensor) for p in parameters)
        assert all(p.to_local().numel() < p.numel() for p in parameters)
        assert all(p.dtype == torch.float32 for p in parameters)

    def whole(self) -> dict[str, Tensor]:
        self._reshard()
        return {name: p.detach().full_tensor() for name, p in self.inner.named_parameters()}

    def _reshard(self) -> None:
        """After a forward without backward the root's parameters are plain and whole."""
        from torch.distributed.fsdp import FSDPModule

        for module in self.inner.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


class Fsdp1(Plain):
    def __init__(self, inner: nn.Module, *, use_orig_params: bool, bf16: bool = False) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
        from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

        self.use_orig_params = use_orig_params
        low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = FullyShardedDataParallel(
            inner,
            auto_wrap_policy=functools.partial(
                transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer}
            ),
            use_orig_params=use_orig_params,
            device_id=torch.device("cpu"),
            mixed_precision=low if bf16 else None,
        )
        super().__init__(model)

    def assert_in_force(self) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel

        assert dist.get_world_size() == 2
        assert type(self.model) is FullyShardedDataParallel
        assert all(p.dim() == 1 for p in self.model.parameters())
        names = {name.rsplit(".", 1)[-1] for name, _ in self.model.named_parameters()}
        assert ("_flat_param" in names) != self.use_orig_params

    def whole(self) -> dict[str, Tensor]:
        from torch.distributed.fsdp import FullyShardedDataParallel

        with FullyShardedDataParallel.summon_full_params(self.model, writeback=False):
            return {
                name.replace("_fsdp_wrapped_module.", ""): p.detach().clone()
                for name, p in self.model.named_parameters()
            }


ZERO_1_2, ZERO_3 = "DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3"
CUT = {"stage3_param_persistence_threshold": 0}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


def zero(stage: int, **options):
    kind = ZERO_3 if stage == 3 else ZERO_1_2
    return functools.partial(DeepSpeed, stage=stage, **{"optimizer_class": kind, **options})


STRATEGIES = {
    "DDP": Ddp,
    "ZeRO-1": zero(1),
    "ZeRO-2": zero(2),
    "ZeRO-3": zero(3, **CUT),
    "ZeRO-3 whole": zero(3),
    "ZeRO-2 offload": zero(2, **OFFLOAD),
    "ZeRO-3 offload": zero(3, **CUT, **OFFLOAD),
    "ZeRO-3 offload all": zero(3, **CUT, **OFFLOAD, offload_param={"device": "cpu"}),
    "FSDP2": Fsdp2,
    "FSDP1": functools.partial(Fsdp1, use_orig_params=True),
    "FSDP1 flat": functools.partial(Fsdp1, use_orig_params=False),
    "ZeRO-0 bf16": zero(0, optimizer_class="FP16_UnfusedOptimizer", bf16=True),
    "ZeRO-1 bf16": zero(1, bf16=True),
    "ZeRO-1 bf16 float32 sums": zero(
        1, bf16=True, optimizer_class="BF16_Optimizer", float32_accumulation=True
    ),
    "ZeRO-2 bf16": zero(2, bf16=True),
    "ZeRO-3 bf16": zero(3, bf16=True, **CUT),
    "ZeRO-3 whole bf16": zero(3, bf16=True),
    "FSDP2 bf16": functools.partial(Fsdp2, bf16=True),
    "FSDP1 bf16": functools.partial(Fsdp1, use_orig_params=True, bf16=True),
}  # fmt: skip
