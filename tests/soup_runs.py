"""Tiny training runs that the tests of soupkit.training share, in this process and in launched
ones.
"""

import random
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

VOCABULARY = 23
LENGTH = 7


def tiny_llama(seed: int = 0, *, tied: bool = True, dropout: float = 0.0) -> LlamaForCausalLM:
    """Odd shapes, tied embeddings; 2 layers."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=12,
        intermediate_size=17,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=4,
        max_position_embeddings=16,
        tie_word_embeddings=tied,
        attention_dropout=dropout,
        bos_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


def rows(count: int, seed: int) -> list[dict[str, list[int]]]:
    """Sequences that can be learned: each token is the one before plus a step, modulo the
    vocabulary.
    """
    generator = random.Random(seed)
    found = []
    for _ in range(count):
        start, step = generator.randrange(VOCABULARY), generator.randrange(1, 4)
        ids = [(start + step * i) % VOCABULARY for i in range(LENGTH)]
        found.append({"input_ids": ids, "labels": ids})
    return found


def saved_base(folder: Path, **kwargs) -> Path:
    tiny_llama(**kwargs).save_pretrained(folder)
    return folder


def load(base: Path, *, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(base, dtype=dtype)


def make_trainer(base: Path, output_dir: Path, callbacks=(), **changes) -> Trainer:
    """7 batches an epoch, accumulation 2: the last window of each epoch is short."""
    settings = {
        "output_dir": str(output_dir),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "max_steps": 8,
        "logging_steps": 1,
        "eval_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 5,
    }
    evaluation = changes.pop("eval_dataset", rows(12, seed=2))
    model = changes.pop("model", None) or load(base)
    trainer_class = changes.pop("trainer_class", Trainer)
    return trainer_class(
        model=model,
        args=TrainingArguments(**{**settings, **changes}),
        train_dataset=rows(changes.get("num_rows", 14), seed=1),
        eval_dataset=evaluation,
        callbacks=list(callbacks),
    )


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_equal_weights(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def optimizer_state(optimizer) -> list[Tensor]:
    """All tensors of an optimizer's state, in its own order."""
    state = optimizer.state_dict()["state"]
    return [state[key][part].clone() for key in sorted(state) for part in sorted(state[key])]


def losses_of(trainer: Trainer) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in trainer.state.log_history if "loss" in row]


def random_states() -> tuple:
    return (
        random.getstate(),
        tuple(map(str, np.random.get_state())),
        torch.get_rng_state().numpy().tobytes(),
    )


def reference_merge(
    base: Tensor, current: Tensor, partner: Tensor, *, rank: int, weight: float
) -> np.ndarray:
    """The documented rule in float64 numpy, sharing no code with soupkit."""
    start, now, best = (value.double().numpy() for value in (base, current, partner))
    if start.ndim < 2:
        return (1 - weight) * now + weight * best

    def cut(delta: np.ndarray) -> np.ndarray:
        left, values, right = np.linalg.svd(delta, full_matrices=False)
        return (left[:, :rank] * values[:rank]) @ right[:rank]

    return start + (1 - weight) * cut(now - start) + weight * cut(best - start)


class AccelerateLoop:
    """An Accelerate loop with accumulation 2, dropout, shuffled data and a Soup in it."""

    def __init__(self, base: Path, folder: Path, config, *, export=None, with_soup: bool = True):
        from accelerate import Accelerator
        from accelerate.utils import ProjectConfiguration, set_seed
        from torch.utils.data import DataLoader

        from soupkit.training import Soup

        set_seed(5)
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=2,
            project_config=ProjectConfiguration(
                project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=2
            ),
        )
        self.export = export
        self.inner = load(base)
        optimizer = torch.optim.AdamW(self.inner.parameters(), lr=1e-2)
        data = [torch.tensor(row["input_ids"]) for row in rows(28, seed=1)]
        generator = torch.Generator().manual_seed(7)
        train = DataLoader(data, batch_size=2, shuffle=True, generator=generator)
        held_out = DataLoader(
            [torch.tensor(row["input_ids"]) for row in rows(8, seed=2)], batch_size=2
        )
        self.model, self.optimizer, self.train_loader, self.held_out = self.accelerator.prepare(
            self.inner, optimizer, train, held_out
        )
        self.seen: list[list[int]] = []
        self.soup = None
        if with_soup:
            self.soup = Soup(
                self.model,
                optimizer=self.optimizer,
                config=config,
                accelerator=self.accelerator,
                evaluate=self.held_out_loss,
            )

    def held_out_loss(self) -> float:
        """Of this rank's share only: Soup takes the mean over ranks."""
        losses = [self.model(input_ids=batch, labels=batch).loss for batch in self.held_out]
        return float(torch.stack(losses).mean())

    def train(self, stop: int, *, start: int = 0, save_at: tuple[int, ...] = ()) -> None:
        """Optimizer steps start + 1 .. stop, whole epochs of them counted from step 0."""
        step = 0
        self.model.train()
        while step < stop:
            for batch in self.train_loader:
                skip = step < start
                with self.accelerator.accumulate(self.model):
                    if not skip:
                        self.seen.append(batch[0].tolist())
                        loss = self.model(input_ids=batch, labels=batch).loss
                        self.accelerator.backward(loss)
                        self.optimizer.step()
                        if self.soup is not None:
                            self.soup.step()
                        self.optimizer.zero_grad()
                if self.accelerator.sync_gradients:
                    step += 1
                    if step in save_at and not skip:
                        self.accelerator.save_state()
                    if step >= stop:
                        break
