"""The next token of every row of a batch, each row by its own request's settings.

A row's token depends on its logits and its own random numbers only, so the same seed gives the same
text whatever else is in the batch. Order as in transformers: temperature, top-k, top-p.
Log-probabilities are those of the model, before temperature and cuts.
"""

import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

MAX_LOGPROBS = 20
# Below it float32 has no room for the division; sampling is greedy there long before.
_LEAST_TEMPERATURE = 1e-5
# Stands for minus infinity, which JSON lacks; OpenAI's servers write the same.
_LEAST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request chooses its tokens."""

    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 = all
    seed: int | None = None
    choice: int = 0  # with one seed, each choice has numbers of its own
    # How many alternatives to report beside the chosen token; None = nothing.
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 100.0:
            raise ValueError(f"temperature={self.temperature}: use 0 to 100")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p={self.top_p}: use a value above 0 and up to 1")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k}: use 0 (all tokens) or more")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise ValueError(f"logprobs={self.logprobs}: use 0 to {MAX_LOGPROBS}")

    def seeded(self) -> "Sampling":
        """With a seed, a fresh one if it has none: what several ranks draw alike."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(63))


@dataclass(frozen=True, slots=True)
class Token:
    """One generated (or, when echoed, one prompt) token."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # the likeliest (id, logprob), best first


@dataclass(slots=True)
class Chooser:
    """The settings of one request and the state of its random numbers."""

    sampling: Sampling
    numbers: random.Random = field(init=False)

    def __post_init__(self) -> None:
        seed = self.sampling.seed
        # As text, because a negative number would seed like its absolute value.
        self.numbers = random.Random(None if seed is None else f"{seed}/{self.sampling.choice}")

    @property
    def samples(self) -> bool:
        return self.sampling.temperature >= _LEAST_TEMPERATURE

    @property
    def cuts(self) -> bool:
        return self.sampling.top_p < 1.0 or self.sampling.top_k > 0


@torch.no_grad()
def choose(logits: Tensor, choosers: Sequence[Chooser]) -> tuple[Tensor, list[Token | None]]:
    """Chooses one token a row.

    Args:
        logits: [rows, vocabulary] float32.
        choosers: one a row; those that sample draw one number each.

    Returns:
        [rows] int64 on the device of the logits, and the same as tokens with the log-probabilities
        asked for; None for a row whose logits overflowed (its id is 0 and means nothing).
    """
    best, ids = logits.max(dim=-1)
    # Rows without cuts need no sorting; each kind apart, so that a row's method is its own.
    for cuts, method in ((False, _sample_all), (True, _sample_cut)):
        rows = [r for r, c in enumerate(choosers) if c.samples and c.cuts == cuts]
        if rows:
            ids[rows] = method(logits[rows], [choosers[row] for row in rows])
    # NaN anywhere in a row is its maximum, too.
    broken = ~best.isfinite()
    ids = ids.masked_fill(broken, 0)
    tokens: list[Token | None] = [
        None if bad else Token(i) for i, bad in zip(ids.tolist(), broken.tolist(), strict=True)
    ]
    for row, chooser in enumerate(choosers):
        wanted, token = chooser.sampling.logprobs, tokens[row]
        if wanted is not None and token is not None:
            tokens[row] = describe(logits[row], token.id, wanted)
    return ids, tokens


def describe(logits: Tensor, token_id: int, num_top: int) -> Token:
    """A token with its log-probability and the `num_top` likeliest ones; logits is [vocabulary]."""
    logprobs = logits.float().log_softmax(dim=-1).clamp(min=_LEAST_LOGPROB)
    values, ids = logprobs.topk(min(num_top, logprobs.numel()))
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return Token(token_id, float(logprobs[token_id]), top)


def _sample_all(logits: Tensor, choosers: Sequence[Chooser]) -> Tensor:
    """[rows] ids drawn from the whole softmax of [rows, vocabulary]."""
    return _draw(_softmax(logits, choosers), choosers)


def _sample_cut(logits: Tensor, choosers: Sequence[Chooser]) -> Tensor:
    """[rows] ids drawn after top-k, then top-p."""
    vocabulary = logits.shape[-1]
    settings = [chooser.sampling for chooser in choosers]
    probs, order = _softmax(logits, choosers).sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocabulary, device=logits.device)
    top_k = _column([min(s.top_k, vocabulary) or vocabulary for s in settings], like=logits)
    probs = probs.masked_fill(rank >= top_k, 0.0)
    probs = probs / probs.sum(dim=-1, keepdim=True)
    before = probs.cumsum(dim=-1) - probs
    # The likeliest token always stays, whatever rounding says; top_p = 1 cuts nothing.
    top_p = _column([s.top_p if s.top_p < 1.0 else 2.0 for s in settings], like=logits)
    probs = probs.masked_fill((before >= top_p) & (rank > 0), 0.0)
    return order.gather(-1, _draw(probs, choosers).unsqueeze(-1)).squeeze(-1)


def _softmax(logits: Tensor, choosers: Sequence[Chooser]) -> Tensor:
    temperature = _column([chooser.sampling.temperature for chooser in choosers], like=logits)
    # The maximum is taken off first: a tiny temperature must not overflow.
    return ((logits - logits.max(dim=-1, keepdim=True).values) / temperature).softmax(dim=-1)


def _draw(probs: Tensor, choosers: Sequence[Chooser]) -> Tensor:
    """[rows] positions by the inverse of the running sum of [rows, vocabulary] shares."""
    reach = probs.cumsum(dim=-1)
    draw = _column([chooser.numbers.random() for chooser in choosers], like=probs) * reach[:, -1:]
    position = torch.searchsorted(reach, draw, right=True).squeeze(-1)
    # Rounding can put the draw on the total; the last position that has a share takes it then.
    ranks = torch.arange(1, probs.shape[-1] + 1, device=probs.device)
    last = ((probs > 0) * ranks).max(dim=-1).values - 1
    return position.minimum(last.clamp(min=0))


def _column(values: Sequence[float], *, like: Tensor) -> Tensor:
    """[rows, 1] in the dtype and on the device of `like`."""
    return torch.tensor(values, device=like.device, dtype=like.dtype).unsqueeze(-1)
