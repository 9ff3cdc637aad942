"""Shared by the serving tests: a tiny random family with a tokenizer, dense oracles, a server."""

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import delta_kit
import httpx
import openai
import torch
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from soupkit.bundle import LoadedVariant, open_family, open_variant
from soupkit.checkpoint import open_checkpoint
from soupkit.export import export_variant
from soupkit.quality import Reference, score
from soupkit.serving.server import Server, build_service, make_server

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]
CONTEXT = 192

# name -> (which parameters a fine-tune moved, their encoding)
VARIANTS: dict[str, tuple[Callable[[str], bool], str]] = {
    "linear": (lambda name: "_proj" in name, "row"),
    "norms": (lambda name: "_proj" in name or "norm" in name, "row"),
    "embed": (lambda name: "_proj" in name or "embed" in name, "row-x2"),
    "matrix": (lambda name: True, "matrix-x3"),
    "rich": (lambda name: "norm" not in name, "lowrank-2+rank1-x2"),
}


def make_tokenizer(*, chat: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level, no merges: any text is its bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(SPECIAL + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=SPECIAL[2:],
    )
    if chat:
        fast.chat_template = CHAT_TEMPLATE
    return fast


def make_base(
    folder: Path, *, kind: str = "llama", tied: bool = True, seed: int = 0, **changes: Any
) -> Path:
    """A random model whose greedy texts are varied, saved with its tokenizer.

    Args:
        kind: "llama", "qwen2" or "qwen3" (with biases). changes: of its config.
    """
    tokenizer = make_tokenizer()
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 40,
        "intermediate_size": 52,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": tied,
        "initializer_range": 0.25,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
    } | changes
    torch.manual_seed(seed)
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**settings))
    elif kind == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**settings))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**({"attention_bias": True} | settings)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                center = 1.0 if "norm" in name else 0.0
                parameter.copy_(center + 0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_finetune(
    base: Path, folder: Path, moved: Callable[[str], bool], *, seed: int, size: float = 0.12
) -> Path:
    """The base with Gaussian noise on the named parameters."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if moved(name):
                parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def add_to_family(
    root: Path, name: str, moved: Callable[[str], bool], *, encoding: str, seed: int
) -> str:
    """Exports one more variant of root/base to root/family; returns its digest."""
    finetune = make_finetune(root / "base", root / f"ft-{name}-{seed}", moved, seed=seed)
    report = export_variant(
        open_checkpoint(root / "base"),
        open_checkpoint(finetune),
        family=root / "family",
        name=name,
        encoding=encoding,
        companions=finetune,
    )
    return report.digest


def make_family(
    root: Path,
    *,
    kind: str = "llama",
    tied: bool = True,
    names: Iterable[str] = tuple(VARIANTS),
    **changes: Any,
) -> Path:
    """root/base and root/family with the named variants; returns root. See `make_base`."""
    make_base(root / "base", kind=kind, tied=tied, **changes)
    for seed, name in enumerate(names, start=1):
        moved, encoding = VARIANTS[name]
        add_to_family(root, name, moved, encoding=encoding, seed=seed)
    return root


def load_variant(root: Path, name: str) -> LoadedVariant:
    return open_variant(open_family(root / "family").folder(name)).load()


def dense(root: Path, name: str | None) -> Any:
    """The oracle: a plain model that holds W_base + delta, summed in float64, in float32."""
    model = AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32).eval()
    if name is None:
        return model
    variant = load_variant(root, name)
    with torch.no_grad():
        for parameter, delta in variant.deltas.items():
            weight = model.get_parameter(parameter)
            moved = torch.from_numpy(delta_kit.dense(delta, tuple(weight.shape)))
            weight.copy_(weight.double() + moved)
        for parameter, tensor in variant.raw.items():
            model.get_parameter(parameter).copy_(tensor)
    return model


def greedy(model: Any, tokens: list[int], count: int, *, stop: int | None = 1) -> list[int]:
    """Generated ids of plain `generate`, without the stop token."""
    ids = torch.tensor([tokens])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=stop,
        pad_token_id=1,
    )[0, len(tokens) :].tolist()
    return [token for token in out if token != stop]


WAIT = 60
TOKENIZER = make_tokenizer()


def wait_for(condition: Any, what: str) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.005)


def start_python(code: str) -> tuple[subprocess.Popen[str], IO[str]]:
    """A process that runs code of this tree, and its stderr, to be read by whoever asked for it."""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([".", "kernels"])},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    return process, process.stderr


@contextmanager
def serving(
    root: Path, *, keys: tuple[str, ...] = (), admin_keys: tuple[str, ...] = (), **settings: Any
) -> Iterator[tuple[Server, str]]:
    """A real server on a free port, in a thread."""
    service = build_service(root / "family", **({"max_running": 8} | settings))
    server = make_server(service, host="127.0.0.1", port=0, keys=keys, admin_keys=admin_keys)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_for(lambda: server.started or not thread.is_alive(), "the server starts")
        host, port = server.address
        yield server, f"http://{host}:{port}"
    finally:
        server.should_exit = True
        thread.join(WAIT)
        assert not thread.is_alive()


def client_of(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=WAIT)


class Oracle:
    """Texts of the dense models."""

    def __init__(self, root: Path, *, names: Iterable[str] = tuple(VARIANTS)) -> None:
        self._models = {name: dense(root, name) for name in names} | {"base": dense(root, None)}

    def __call__(self, model: str, prompt: str, count: int, *, special: bool = True) -> str:
        ids = TOKENIZER(prompt, add_special_tokens=special)["input_ids"]
        return str(
            TOKENIZER.decode(greedy(self._models[model], ids, count), skip_special_tokens=True)
        )


def chat_text(question: str) -> str:
    return f"<|user|>{question}</s><|assistant|>"


def metrics_of(url: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        for sample in family.samples:
            if "le" not in sample.labels:
                found[",".join([sample.name, *sample.labels.values()])] = sample.value
    return found


def reference_of(model: Any, rows: Sequence[Any], folder: Path) -> Reference:
    """The logits of a model on rows, for `score`; in a new file of the folder."""
    found = Reference(
        Path(tempfile.mkdtemp(dir=folder)) / "logits", sum(len(row.ids) - row.start for row in rows)
    )
    score(model, rows, keep=found)
    return found
