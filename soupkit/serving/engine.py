"""Requests of several variants -> tokens, on transformers' continuous batching.

What continuous batching lacks is added at some seams of its manager, found on transformers 5.24
(`generation/continuous_batching`) and held by tests:

    prepare_batch_tensors       the slot of every row is set beside the batch's tensors
    ModelRunner._sample         the next token by each request's own settings (sampling.py)
    clear_cancelled_requests    a cancelled request is told so once nothing computes for it
    mark_as_stopped             if the thread ends, every open request is told
    PagedAttentionCache.update  what is not finite stays out of other sequences (guard.py)
    its search_prefix_match, mark_complete_blocks and the scheduler's waiting candidates
                                what prompts have in common is computed once a variant (prefix.py)

On several ranks (transformers' tensor parallelism) each has an engine of the same settings. The
first is used; the others `start` and `follow`. Requests, with what each is for, travel as the
manager's do (tp_broadcast_object_from_rank_0), slots by ranks.py.

CUDA graphs are off: a replay would skip the first two seams.
Not here: queues in front (router.py), which slots hold what (cache.py), text (text.py).
"""

import itertools
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import RequestStatus

from soupkit.errors import ServingError

from .guard import KeyValueGuard
from .jobs import Deliver, End, Job, Record, check_job
from .layers import VariantBank
from .memory import KVPlan
from .patches import BASE_SLOT
from .prefix import PrefixCache
from .ranks import Ranks
from .sampling import Token, choose, describe
from .slots import EngineSlots

PAGE_TOKENS = 16
NOT_FINITE = "the model's numbers overflowed; this variant or its dtype cannot answer this prompt"


def bank_of(model: Any) -> VariantBank:
    """A bank for the variants of a causal LM."""
    words = model.config.get_text_config().vocab_size
    return VariantBank(model, vocab_size=words, head=model.get_output_embeddings())


class Engine(EngineSlots):
    """One model, its variant slots and the thread that generates.

    `load`, `free` and `reserve` are for one loader thread; `submit`, `cancel` and `score` for any.
    Events of a job are delivered on the engine's thread, in order, `End` last and exactly once; a
    deliverer must not block.
    """

    def __init__(
        self, model: Any, *, max_running: int, plan: KVPlan, bank: VariantBank | None = None
    ) -> None:
        """Nothing runs before `start`.

        Args:
            model: a causal LM in eval mode on its device; it is the engine's until `close`.
            bank: the model's, if there is one already; see `bank_of`.
            max_running: sequences in one batch.
            plan: how many tokens the key-value cache and one batch hold.
        """
        config = model.config.get_text_config()
        self.max_running = max_running
        self.vocab_size: int = config.vocab_size
        positions = getattr(config, "max_position_embeddings", None) or plan.kv_tokens
        self.max_context: int = min(positions, plan.kv_tokens)
        self._model = model
        self._records: dict[str, Record] = {}
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._batch: list[Record] = []  # those of the current batch that get a token, in order
        self._owners: list[Record] = []  # of each token of the current batch
        self._stopped = False
        self._manager = self._make_manager(plan)
        super().__init__(bank or bank_of(model), Ranks(self._manager.distributed_helper))
        self._ranks.works |= {"score": self._logits, "close": self._close}

    def _make_manager(self, plan: KVPlan) -> Any:
        manager = self._model.init_continuous_batching(
            # Stop tokens travel with each request; sampling is ours, so no processor may act first.
            generation_config=GenerationConfig(eos_token_id=-1, do_sample=False),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE_TOKENS,
                num_blocks=-(-plan.kv_tokens // PAGE_TOKENS),
                max_batch_tokens=max(plan.batch_tokens, self.max_running),
                max_requests_per_batch=self.max_running,
                max_blocks_per_request=0,
                allow_block_sharing=True,
                use_async_batching=False,
                use_cuda_graph=False,
                auto_switch_to_flash=False,
                max_queue_size=0,
            ),
        )
        manager.output_router = SimpleNamespace(
            deliver=self._on_output,
            deliver_batch=self._on_outputs,
            fail_and_deliver=self._on_failure,
        )
        with torch.no_grad():
            processor = manager.batch_processor = manager._create_batch_processor()
        inputs, scheduler = processor.inputs_and_outputs, processor.scheduler
        self._guard = KeyValueGuard(processor.cache)
        self.prefixes = PrefixCache(
            processor.cache, scheduler, page_tokens=PAGE_TOKENS, salt_of=self._salt_of
        )
        self._prepare, inputs.prepare_batch_tensors = inputs.prepare_batch_tensors, self._on_prepare
        processor.model_runner._sample = self._on_sample
        helper = manager.distributed_helper
        self._broadcast, helper.tp_broadcast_object_from_rank_0 = (
            helper.tp_broadcast_object_from_rank_0,
            self._on_broadcast,
        )
        self._clear, scheduler.clear_cancelled_requests = (
            scheduler.clear_cancelled_requests,
            self._on_clear,
        )
        self._scheduler, status = scheduler, manager.background_thread_status
        self._mark_stopped, status.mark_as_stopped = status.mark_as_stopped, self._on_stopped
        return manager

    def start(self) -> None:
        self._manager.start()

    def follow(self) -> None:
        """On every rank but the first, after `start`: does as the first does, until its `close`."""
        self._ranks.follow()

    def close(self) -> None:
        """Ends the thread (open jobs get an error) and leaves the model as the plain base."""
        self._ranks.everywhere("close")

    def _close(self) -> None:
        if self._manager.is_running():
            self._manager.stop(block=True, hard_stop=True)
        self._bank.close()

    @property
    def alive(self) -> bool:
        """Whether it can generate."""
        return self._manager.is_running() and not self._stopped

    @property
    def num_open(self) -> int:
        return len(self._records)

    def free(self, slot: int) -> None:
        """Empties a slot. Raises ServingError while a job still uses it."""
        with self._lock:
            users = [key for key, record in self._records.items() if record.slot == slot]
        if users:
            raise ServingError(f"slot {slot} is used by {len(users)} jobs; free it after their end")
        super().free(slot)

    def submit(self, job: Job, slot: int, deliver: Deliver) -> str:
        """Starts a job; its events go to `deliver`, and its slot stays loaded until its end.

        Returns:
            The job's id, for `cancel`.

        Raises:
            ValueError: a token, the length or the slot is not one the engine has.
            ServingError: the engine's thread has ended.
        """
        check_job(job, vocab_size=self.vocab_size, max_context=self.max_context)
        if slot != BASE_SLOT and slot not in self._bank.slots:
            raise ValueError(f"slot {slot} holds no variant")
        if not self._ranks.alone:
            job = replace(job, sampling=job.sampling.seeded())
        key = f"job-{next(self._ids)}"
        with self._lock:
            self._records[key] = Record(job, slot, self.salts[slot], deliver)
        accepted = None
        try:
            accepted = self._manager.add_request(
                list(job.tokens),
                request_id=key,
                max_new_tokens=job.max_tokens,
                streaming=True,
                eos_token_id=sorted(job.stop_tokens),
            )
        finally:
            if accepted is None:
                with self._lock:
                    self._records.pop(key, None)
        if accepted is None:
            raise ServingError("the engine has stopped; restart the server")
        if self._stopped:
            self._fail_open("the engine stopped")
        return key

    def cancel(self, key: str) -> None:
        """Ends a job early: `End("cancelled")` follows unless it ends by itself first."""
        self._end_early(key, End("cancelled"))

    def score(self, tokens: tuple[int, ...], slot: int, *, num_top: int) -> list[Token]:
        """Log-probabilities of a prompt's own tokens, by one forward while generation waits.

        Returns:
            One token per prompt token; the first has no log-probability, as nothing precedes it.

        Raises:
            ServingError: the engine has ended, or the model's numbers overflowed.
        """
        if self._model.config._attn_implementation != "sdpa":
            raise ServingError(
                "prompt log-probabilities need sdpa attention, which this model lacks"
            )
        if not self.alive:
            raise ServingError("the engine has stopped; restart the server")
        logits = self._ranks.everywhere("score", tokens, slot)
        if not bool(logits.amax(dim=-1).isfinite().all()):
            raise ServingError(NOT_FINITE)
        scored = [describe(logits[i], token, num_top) for i, token in enumerate(tokens[1:])]
        return [Token(tokens[0]), *scored]

    def _logits(self, tokens: tuple[int, ...], slot: int) -> Tensor:
        ids = torch.tensor([tokens], device=self._model.device)
        with self._manager.pause(), torch.no_grad():
            self.pulse.beat()
            self._bank.set_batch([slot] * len(tokens), [slot] * len(tokens))
            try:
                logits: Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
            finally:
                self._bank.batch = None
        return logits

    def _end_early(self, key: str, fate: End) -> None:
        with self._lock:
            record = self._records.get(key)
            if record is None:
                return
            record.fate = record.fate or fate
        self._manager.cancel_request(key)

    # On the engine's thread from here on.

    def _salt_of(self, key: str) -> bytes | None:
        record = self._records.get(key)
        return None if record is None or record.has_failed else record.salt

    def _on_broadcast(self, payload: Any) -> Any:
        """New requests, and what they are for: the other ranks get records of them."""
        known = self._records
        jobs = {s.request_id: known[s.request_id] for s in payload[0] if s.request_id in known}
        tickets = {key: (record.job, record.slot, record.salt) for key, record in jobs.items()}
        payload, tickets = self._broadcast((payload, tickets))
        if not self._ranks.is_first:
            for key, (job, slot, salt) in tickets.items():
                known[key] = Record(job, slot, salt, lambda _: None)
        return payload

    def _on_prepare(self, requests_in_batch: list[Any], **rest: Any) -> None:
        self._prepare(requests_in_batch=requests_in_batch, **rest)
        records = [self._records[future.state.request_id] for future in requests_in_batch]
        pairs = list(zip(records, requests_in_batch, strict=True))
        self._owners = [record for record, future in pairs for _ in range(future.query_length)]
        self._batch = [record for record, future in pairs if future.has_new_token]
        # The head is given a row per request; those past the ones with a new token read token 0.
        heads = self._batch + [self._owners[0]] * (len(records) - len(self._batch))
        self._bank.set_batch(
            [record.slot for record in self._owners], [record.slot for record in heads]
        )
        self._guard.begin()

    def _on_sample(self, scores: Tensor, output_ids: Tensor) -> None:
        count = len(self._owners)
        for position in self._guard.broken_tokens(self._ranks, count, scores.device):
            self._owners[position].fail(NOT_FINITE)
        batch = self._batch
        if not batch:
            return
        ids, tokens = choose(scores[0, : len(batch)], [record.chooser for record in batch])
        output_ids[0, : len(batch)].copy_(ids)
        for record, token in zip(batch, tokens, strict=True):
            if token is None:
                record.fail(NOT_FINITE)
            else:
                record.fresh.append(token)

    def _on_clear(self) -> list[Any]:
        self.pulse.beat()
        with self._lock:
            doomed = {
                key: record for key, record in self._records.items() if record.fate is not None
            }
        for key in doomed:
            # Asked for again each time: a cancel can overtake its own request on the way in.
            if self._ranks.alone:
                self._scheduler.set_request_cancellation(key)
            elif self._ranks.is_first:
                self._manager.cancel_request(key)  # all ranks hear of it with the next batch
        cleared: list[Any] = self._clear()
        for state in cleared:
            self._finish(state.request_id, End("cancelled"))
        return cleared

    def _on_stopped(self) -> None:
        self._stopped = True
        self._mark_stopped()
        self._fail_open("the engine stopped")

    def _on_outputs(self, outputs: list[Any]) -> None:
        for output in outputs:
            self._on_output(output)

    def _on_failure(self, state: Any, error: Exception) -> None:
        state.status, state.error = RequestStatus.FAILED, str(error)
        self._on_output(state.to_generation_output())

    def _on_output(self, output: Any) -> None:
        record = self._records.get(output.request_id)
        if record is None:
            return
        if record.fate is None:
            self._send(record, output.generated_tokens)
        if output.status == RequestStatus.FINISHED:
            stopped = output.generated_tokens[-1] in record.job.stop_tokens
            self._finish(output.request_id, End("stop" if stopped else "length"))
        elif output.status == RequestStatus.FAILED:
            self._finish(output.request_id, End("error", output.error or "generation failed"))

    def _send(self, record: Record, generated: list[int]) -> None:
        for token in record.fresh[: len(generated) - record.num_sent]:
            record.num_sent += 1
            if token.id not in record.job.stop_tokens:
                record.deliver(token)
        record.fresh.clear()

    def _finish(self, key: str, end: End) -> None:
        with self._lock:
            record = self._records.pop(key, None)
        if record is not None:
            record.deliver(record.fate or end)

    def _fail_open(self, reason: str) -> None:
        for key in list(self._records):
            self._finish(key, End("error", reason))
