"""Between HTTP and the engine: runs what the router decides, on the event loop and a few threads.

Threads: the event loop owns router and cache; loader.py has those that move variants; one scorer
thread computes prompt log-probabilities; the engine has its own.
"""

import asyncio
import contextlib
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from soupkit.bundle import VariantRef
from soupkit.checkpoint import Checkpoint
from soupkit.config import BASE_NAME
from soupkit.errors import ServingError

from .cache import DeltaCache
from .catalog import Catalog
from .engine import Engine
from .jobs import End, Generation, Scored
from .loader import Loader, run_in
from .metrics import Metrics
from .patches import BASE_SLOT
from .policy import RateWeighted
from .pretrained import Texts
from .reasons import Reasons
from .router import Router
from .sampling import Token
from .states import BASE_DIGEST, Limits, NotServed, Phase, Ticket, VariantStats

TICK_SECONDS = 0.5

logger = logging.getLogger(__name__)


class Service:
    """Serves a family, on the event loop it was started on. The router's Runner."""

    def __init__(
        self,
        catalog: Catalog,
        base: Checkpoint,
        engine: Engine,
        *,
        cache_bytes: int,
        host_bytes: int = 0,
        limits: Limits,
        pin: tuple[str, ...] = (),
    ) -> None:
        self.catalog, self.engine = catalog, engine
        self._folder_name = Path(base.source).name
        self.metrics = Metrics(self.residents, lambda: engine.prefixes.reused_tokens)
        shelf = () if catalog.shelf is None else catalog.shelf.folders
        self.reasons = Reasons((catalog.path, base.source, base.path, *shelf))
        self.loader = Loader(
            catalog, engine, self.metrics, self.reasons, max_loads=limits.max_loads
        )
        cache = DeltaCache(cache_bytes, RateWeighted(), host_bytes=host_bytes)
        self.router = Router(cache, self, self.loader, clock=time.monotonic, limits=limits)
        self.loader.router = self.router
        self.draining = False
        self.texts = Texts(catalog, base)
        # Names, the most important first; those without a variant now keep their place.
        self.pins = dict.fromkeys(pin)
        self._open: set[Generation] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._scorer = ThreadPoolExecutor(1, "soupkit-score")

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.engine.start()
        self.loader.reserve()
        self.follow_family()
        self._tell_pins_too_many()
        self._ticker = asyncio.create_task(self._tick())

    async def stop(self) -> None:
        """Ends everything; open requests get an error."""
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
        self.draining = True
        self.end_open()
        await asyncio.to_thread(self.engine.close)
        self.loader.close()
        if self.catalog.shelf is not None:
            self.catalog.shelf.close()
        self._scorer.shutdown(wait=False, cancel_futures=True)

    @property
    def ready(self) -> bool:
        return self.engine.alive and not self.draining

    @property
    def base_name(self) -> str:
        """The base's folder name, unless a variant has it, even if unloaded; it is that one's."""
        shelf, name = self.catalog.shelf, self._folder_name
        taken = name in self.catalog.refs or (shelf is not None and shelf.has(name))
        return BASE_NAME if taken else name

    def names(self) -> list[str]:
        """Model ids, the base's own first, those last that come into the pool when asked for."""
        self._refresh()
        shelf = self.catalog.shelf
        waiting = set() if shelf is None else {*shelf.waiting()} - self.catalog.refs.keys()
        return [self.base_name, *self.catalog.variants, *sorted(waiting)]

    def resolve(self, model: str) -> VariantRef | None:
        """The variant of a model id, None for the base. Raises KeyError for an unknown id."""
        self._refresh()
        # No variant may be called BASE_NAME.
        if model in (self.base_name, BASE_NAME):
            return None
        return self.catalog.variants[model]

    async def admit(self, model: str) -> VariantRef:
        """The variant of a model id that `resolve` does not know: an adapter that may come.

        Raises:
            KeyError: there is none. QueueFull: too many wait. ServingError: the pool refuses it, or
                takes too long.
        """
        shelf, limits = self.catalog.shelf, self.router.limits
        if shelf is None or self.catalog.is_hidden(model):
            raise KeyError(model)
        try:
            admission = shelf.admit(model, most=limits.max_queue)
            await asyncio.wait_for(admission, limits.max_wait_seconds)
        except TimeoutError:
            raise ServingError(f"adapter {model!r} still waits for the pool; ask again") from None
        self._refresh()
        if (ref := self.catalog.variants.get(model)) is None:
            raise ServingError(f"adapter {model!r} has left the pool again; ask again")
        return ref

    def residents(self) -> dict[str, VariantStats]:
        """Where each variant is, by name."""
        self._refresh()
        stats = self.router.stats()
        variants = self.catalog.variants.items()
        return {name: stats[ref.digest] for name, ref in variants if ref.digest in stats}

    def render_metrics(self) -> bytes:
        """The Prometheus page, gauges as they are now."""
        self._refresh()
        metrics, cache = self.metrics, self.router.cache
        metrics.used_bytes.set(cache.used_bytes)
        metrics.budget_bytes.set(cache.budget_bytes)
        metrics.slots.set(cache.num_slots)
        metrics.host_used_bytes.set(cache.host_used_bytes)
        metrics.host_budget_bytes.set(cache.host_bytes)
        metrics.arena_bytes.set(self.engine.arena_bytes)
        metrics.waiting.set(self.router.num_waiting)
        metrics.running.set(self.router.num_running)
        metrics.ready.set(self.ready)
        return metrics.render()

    def submit(self, generations: list[Generation]) -> None:
        """Starts requests, all or none. Raises QueueFull, VariantUnavailable, ServingError."""
        resident = [self.router.phase(g.digest) is Phase.RESIDENT for g in generations]
        self.enter(generations)
        for generation, hit in zip(generations, resident, strict=True):
            self.metrics.count_request(
                self._label(generation), prompt_tokens=len(generation.job.tokens)
            )
            if generation.digest != BASE_DIGEST:
                if self.catalog.shelf is not None:
                    self.catalog.shelf.count(generation.model)
                (self.metrics.hits if hit else self.metrics.misses).inc()

    def enter(self, generations: list[Generation]) -> None:
        """As `submit`, but not counted as requests of clients."""
        if not self.ready:
            raise ServingError(
                "the server is stopping" if self.draining else "the engine has stopped"
            )
        for generation in generations:
            # It was resolved before its prompt was encoded, and this is the last look.
            if self.catalog.is_hidden(generation.model):
                raise NotServed(f"the model {generation.model!r} was unloaded")
        self._open.update(generations)
        try:
            self.router.submit(generations)
        except ServingError:
            self._open.difference_update(generations)
            raise

    def held_bytes(self, digest: str) -> dict[str, int]:
        """Bytes a variant holds, by tier."""
        cache = self.router.cache
        device_bytes = cache.slot_bytes if digest in cache else 0
        return {"device": device_bytes, "host": cache.hosted_bytes(digest)}

    def cancel(self, generation: Generation) -> None:
        """The client is gone: nothing more is computed for it."""
        if generation.over or generation.cancelled:
            return
        generation.cancelled = True
        if self.router.cancel(generation):
            self._close(generation)
        elif generation.engine_key is not None:
            self.engine.cancel(generation.engine_key)

    @property
    def open(self) -> tuple[Generation, ...]:
        """The requests that are not over, waiting or running."""
        return tuple(self._open)

    def abort(self, generation: Generation, error: ServingError) -> None:
        """Ends a request early; its client is told why."""
        if not generation.over and not generation.cancelled:
            generation.events.put_nowait(error)
            self.cancel(generation)

    def end_open(self) -> None:
        """Ends all that is open; its clients are told that the server stops."""
        for generation in list(self._open):
            self.abort(generation, ServingError("the server is stopping; ask again later"))
        if self.catalog.shelf is not None:
            self.catalog.shelf.stop()

    # The router's Runner. It must not call back, so results come through the event loop.

    def halt(self, ticket: Ticket, error: ServingError) -> None:
        assert isinstance(ticket, Generation)
        self._the_loop.call_soon(self.abort, ticket, error)

    def run(self, ticket: Ticket, slot: int | None) -> None:
        assert isinstance(ticket, Generation)
        slot = BASE_SLOT if slot is None else slot
        if ticket.score_prompt:
            work = partial(self._score, ticket, slot)
            run_in(self._scorer, work, partial(self._after_score, ticket, slot))
        else:
            self._the_loop.call_soon(self._begin, ticket, slot)

    def fail(self, ticket: Ticket, error: ServingError) -> None:
        assert isinstance(ticket, Generation)
        self._close(ticket)
        ticket.events.put_nowait(error)

    def _score(self, generation: Generation, slot: int) -> list[Token]:
        """On the scorer's thread."""
        if generation.cancelled:
            return []
        job, num_top = generation.job, generation.job.sampling.logprobs or 0
        return self.engine.score(job.tokens, slot, num_top=num_top)

    def _begin(self, generation: Generation, slot: int) -> None:
        if generation.cancelled:
            return self._end(generation, End("cancelled"))
        if generation.job.max_tokens == 0:
            return self._end(generation, End("length"))
        deliver = partial(self._deliver, generation)
        try:
            generation.engine_key = self.engine.submit(generation.job, slot, deliver)
        except (ServingError, ValueError) as error:
            self._end(generation, ServingError(str(error)))
        except Exception as error:  # noqa: BLE001  # no fault may leave a request without an end
            self._end(generation, ServingError(self.reasons.of(error)))

    def _deliver(self, generation: Generation, event: Token | End) -> None:
        """On the engine's thread."""
        # A closed loop has nobody left to tell.
        with contextlib.suppress(RuntimeError):
            self._the_loop.call_soon_threadsafe(self._on_event, generation, event)

    def _on_event(self, generation: Generation, event: Token | End) -> None:
        if isinstance(event, End):
            return self._end(generation, event)
        now, before = time.monotonic(), generation.last_token
        since = generation.created if before is None else before
        label = self._label(generation)
        self.metrics.count_token(label, seconds=now - since, first=before is None)
        generation.last_token = now
        generation.events.put_nowait(event)

    def _end(self, generation: Generation, event: End | ServingError) -> None:
        if not generation.over:
            self._close(generation)
            generation.events.put_nowait(event)
            self.router.finished(generation)

    def _close(self, generation: Generation) -> None:
        generation.over = True
        self._open.discard(generation)

    def _after_score(
        self, generation: Generation, slot: int, scored: "asyncio.Future[list[Token]]"
    ) -> None:
        error = scored.exception()
        if error is not None:
            return self._end(generation, ServingError(self.reasons.of(error)))
        generation.events.put_nowait(Scored(scored.result()))
        self._begin(generation, slot)

    def _refresh(self) -> None:
        if self.catalog.refresh():
            self.follow_family()

    def pin(self, name: str, *, pinned: bool) -> None:
        """Pins a variant, behind those that are pinned already, or lets it be evicted."""
        if pinned:
            self.pins.setdefault(name)
        else:
            self.pins.pop(name, None)
        self.follow_family()

    def follow_family(self) -> None:
        """Tells the router which variants are served and pinned now."""
        variants = self.catalog.variants
        self.metrics.keep([self.base_name, *variants])
        self.loader.follow(variants.values())
        pinned = [variants[name].digest for name in self.pins if name in variants]
        self.router.set_family((ref.digest for ref in variants.values()), pinned)

    def _tell_pins_too_many(self) -> None:
        residents = self.residents()
        left = [name for name in self.pins if name in residents and not residents[name].pinned]
        if left:
            logger.warning(
                "not pinned, as one of %d slots is for the others: %s; raise --cache-bytes",
                self.router.cache.num_slots,
                ", ".join(left),
            )

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            try:
                self._refresh()
            except Exception:
                logger.exception("the family could not be looked at")
            self.router.tick()
            if self.catalog.shelf is not None:
                self.catalog.shelf.tell_uses()

    def _label(self, generation: Generation) -> str:
        """A model id as a metric label: only names of the family, so that labels stay few."""
        return self.base_name if generation.digest == BASE_DIGEST else generation.model

    @property
    def _the_loop(self) -> asyncio.AbstractEventLoop:
        assert self._loop is not None, "start the service first"
        return self._loop
