"""Which variants an engine has now, seen from the process that takes requests.

    name --family.json--> digest --> one load: copy and check (a thread), then told to the engine
    a request is counted from before the engine sees it to its last token
    unloading: hidden at once, forgotten when its last request has ended

A load touches nothing that generates. The copies of all variants stay within a budget of host
memory: the least recently asked for that no request has goes first. What failed to load is not
tried again for a while; its requests are told why, and nobody else notices. All on one event loop.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from soupkit.errors import BundleError, ServingError
from soupkit.family import VariantRef

from .held import Copy, EngineClient, NoRoom
from .store import Store
from .tally import Tally

logger = logging.getLogger("vllm.soupkit")

AGAIN_SECONDS = 30.0
ROOM_SECONDS = 60.0
DRAIN_SECONDS = 30.0
MAX_LOADS = 2
REMOVALS = 6  # tries, each after twice the time
REMOVAL_SECONDS = 0.05

Key = tuple[str, str]  # name, digest


class Copies:
    """The variants of a family in one engine; see the module."""

    def __init__(
        self,
        store: Store,
        engine: EngineClient,
        make_request: Callable[[str, int, str], Any],
        *,
        pins: frozenset[str] = frozenset(),
        clock: Callable[[], float] = time.monotonic,
        room_seconds: float = ROOM_SECONDS,
    ) -> None:
        """Has none yet.

        Args:
            make_request: a LoRARequest of a name, a number and a path.
            pins: names that stay when others need room.
            room_seconds: how long a load waits for others to be done with their copies.
        """
        self.store, self._seen = store, store.family
        self._engine, self._make_request, self._clock = engine, make_request, clock
        self.pins, self._room_seconds = pins, room_seconds
        self.tally = Tally()
        self._copies: dict[int, Copy] = {}  # by number, least recently asked for first
        self._taken: dict[str, Any] = {}  # by name, the request of the last copy of it
        self._loads: dict[Key, asyncio.Task[Copy]] = {}
        self._loading_bytes: dict[Key, int] = {}
        self._failed: dict[Key, tuple[float, str]] = {}  # until when, and why
        self._hidden: set[str] = set()
        self._number = 0
        self._readers = ThreadPoolExecutor(MAX_LOADS, "soupkit-load")
        self._changed = asyncio.Condition()
        self._ends: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        """Begins nothing more, and removes the copies."""
        self._readers.shutdown(wait=False, cancel_futures=True)
        self.store.close()

    def names(self) -> list[str]:
        """Of the variants that are served, resident or not."""
        return [name for name in self.store.refresh().variants if name not in self._hidden]

    def ref(self, name: str) -> VariantRef | None:
        """The newest content of a name; None if it is not served. Lets go of what is old."""
        family = self.store.refresh()
        if family is not self._seen:
            self._seen = family
            for copy in self.held:
                if family.variants.get(copy.ref.name) != copy.ref:
                    self._let_go(copy)
        return None if name in self._hidden else family.variants.get(name)

    def current(self, name: str) -> Copy | None:
        """The copy of a name's newest content, if the engine has it."""
        ref = self.ref(name)
        for copy in self._copies.values():
            if ref == copy.ref and not copy.is_leaving:
                return copy
        return None

    def known(self, name: str) -> Any:
        """The LoRARequest that was taken last of a name that is served; None if none was. Its copy
        may have gone since: `using` gives another.
        """
        return None if self.ref(name) is None else self._taken.get(name)

    def requests(self) -> dict[str, Any]:
        """The LoRARequest of each name whose newest content the engine has."""
        newest = {name: self.store.family.variants[name].digest for name in self.names()}
        return {
            copy.ref.name: copy.request
            for copy in self._copies.values()
            if not copy.is_leaving and newest.get(copy.ref.name) == copy.ref.digest
        }

    @property
    def held(self) -> list[Copy]:
        """All that the engine has, also what is about to leave. From any thread."""
        return list(self._copies.values())

    def loading(self) -> dict[str, bool]:
        """The names in work, and whether they have room. From any thread."""
        return {key[0]: key in self._loading_bytes for key in list(self._loads)}

    def failing(self) -> set[str]:
        """The names that failed of late and are not tried again yet. From any thread."""
        now = self._clock()
        return {key[0] for key, (until, _) in list(self._failed.items()) if now < until}

    async def take(self, name: str) -> Any:
        """A variant's LoRARequest, once the engine has it; one load however many ask.

        Raises:
            KeyError: there is no such variant. ServingError: it cannot be loaded.
        """
        ref = self.ref(name)
        if ref is None:
            raise KeyError(name)
        found = self.current(name)
        if found is None:
            found = await self._load(ref)
        number = found.request.lora_int_id
        if number in self._copies:
            self._copies[number] = self._copies.pop(number)
        self._taken[name] = found.request
        return found.request

    @asynccontextmanager
    async def using(self, request: Any, request_id: str) -> AsyncIterator[Any]:
        """Keeps a variant for one request; yields the LoRARequest to hand on: another if its copy
        went since `take`.

        Raises:
            ServingError: the variant was unloaded, or cannot be loaded again.
        """
        copy = self._copies.get(request.lora_int_id)
        while copy is None or copy.is_leaving:
            try:
                again = await self.take(request.lora_name)
            except KeyError:
                raise ServingError(f"variant {request.lora_name!r} was unloaded") from None
            copy = self._copies.get(again.lora_int_id)
        copy.users[request_id] += 1
        try:
            yield copy.request
        finally:
            copy.users -= Counter([request_id])
            await self._tell()

    async def load(self, name: str) -> None:
        """Shows a name that was unloaded, and loads it. Raises as `take`."""
        was_hidden = name in self._hidden
        self._hidden.discard(name)
        ref = self.ref(name)
        if ref is not None:
            self._failed.pop((name, ref.digest), None)
        try:
            await self.take(name)
        except BaseException:
            if was_hidden:
                self._hidden.add(name)
            raise

    async def unload(self, name: str, *, drain_seconds: float = DRAIN_SECONDS) -> None:
        """Serves a name no more, and frees what holds it once its loads and requests have ended;
        requests that have not in time are aborted.

        Raises:
            KeyError: there is no such variant.
        """
        if self.ref(name) is None:
            raise KeyError(name)
        self._hidden.add(name)
        for copy in list(self._copies.values()):
            if copy.ref.name == name:
                self._let_go(copy)

        def leaving() -> list[Copy]:
            return [c for c in self._copies.values() if c.is_leaving and c.ref.name == name]

        async def gone() -> None:
            if loads := [task for key, task in self._loads.items() if key[0] == name]:
                await asyncio.wait(loads)
            async with self._changed:
                await self._changed.wait_for(lambda: not leaving())

        try:
            await asyncio.wait_for(gone(), drain_seconds)
        except TimeoutError:
            for copy in leaving():
                await self._engine.abort(sorted(copy.users))
            await gone()

    async def _load(self, ref: VariantRef) -> Copy:
        key = (ref.name, ref.digest)
        until, reason = self._failed.get(key, (0.0, ""))
        if self._clock() < until:
            raise ServingError(reason)
        task = self._loads.get(key)
        if task is None:
            self._forget()
            task = self._loads[key] = asyncio.create_task(self._load_once(ref))
            task.add_done_callback(lambda done: self._loaded(key, done))
        counts = self.tally.of(ref.name)
        counts.waiting += 1
        try:
            # A client that goes away ends its own waiting only.
            return await asyncio.shield(task)
        finally:
            counts.waiting -= 1

    def _forget(self) -> None:
        """What names and contents that the family has no more left."""
        listed = self.store.family.variants
        self.tally.keep(listed)
        self._taken = {name: request for name, request in self._taken.items() if name in listed}
        now = self._clock()
        self._failed = {key: kept for key, kept in self._failed.items() if now < kept[0]}

    def _loaded(self, key: Key, done: "asyncio.Task[Copy]") -> None:
        del self._loads[key]
        self._loading_bytes.pop(key, None)
        if not done.cancelled() and (error := done.exception()) is not None:
            logger.warning("%s", error)
            if not isinstance(error, NoRoom):
                self.tally.failed(key[0])
                self._failed[key] = (self._clock() + AGAIN_SECONDS, str(error))

    async def _load_once(self, ref: VariantRef) -> Copy:
        began = self._clock()
        loop = asyncio.get_running_loop()
        try:
            nbytes = self.store.size(ref)
            await self._make_room(ref, nbytes)
            reads = self._clock()
            path = await loop.run_in_executor(self._readers, self.store.copy, ref)
            self.tally.of(ref.name).seconds = self._clock() - reads
            # Others take numbers while this one waits.
            self._number = number = self._number + 1
            request = self._make_request(ref.name, number, str(path))
            await self._engine.add_lora(request)
        except Exception as error:
            self._drop(ref, unless=self._loads.keys() - {(ref.name, ref.digest)})
            if isinstance(error, ServingError):
                raise
            if not isinstance(error, BundleError | OSError):
                logger.exception("variant %r", ref.name)
            raise ServingError(f"variant {ref.name!r} cannot be loaded: {error}") from error
        copy = self._copies[number] = Copy(ref, nbytes, request)
        seconds = self._clock() - began
        self.tally.loaded(ref.name, seconds)
        logger.info("variant %r: loaded in %.2f s", ref.name, seconds)
        if self.ref(ref.name) != ref:  # unloaded or replaced meanwhile
            self._let_go(copy)
        return copy

    async def _make_room(self, ref: VariantRef, nbytes: int) -> None:
        """Waits until a copy fits in the budget, letting go of what nobody has."""
        budget = self.store.budget
        if nbytes > budget:
            raise ServingError(
                f"variant {ref.name!r} takes {nbytes} bytes of host memory, the budget is "
                f"{budget}: give more with --host-cache-bytes"
            )
        key = (ref.name, ref.digest)

        def fits() -> bool:
            used = sum(copy.nbytes for copy in self._copies.values())
            used += sum(self._loading_bytes.values())
            leaving = sum(c.nbytes for c in self._copies.values() if c.is_leaving)
            over = used + nbytes - budget - leaving
            for copy in self.held:
                if over <= 0:
                    break
                if copy.users or copy.is_leaving or copy.ref.name in self.pins:
                    continue
                over -= copy.nbytes
                self.tally.evicted(copy.ref.name)
                self._let_go(copy)
            return used + nbytes <= budget

        async def room() -> None:
            async with self._changed:
                await self._changed.wait_for(fits)
                self._loading_bytes[key] = nbytes

        try:
            await asyncio.wait_for(room(), self._room_seconds)
        except TimeoutError:
            raise NoRoom(
                f"variant {ref.name!r}: all variants in host memory have requests; try again, or "
                "give more with --host-cache-bytes"
            ) from None

    def _let_go(self, copy: Copy) -> None:
        """Has a copy forgotten when its last request has ended; `using` takes it no more."""
        if not copy.is_leaving:
            copy.is_leaving = True
            task = asyncio.get_running_loop().create_task(self._end(copy))
            self._ends.add(task)
            task.add_done_callback(self._ends.discard)

    async def _end(self, copy: Copy) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: not copy.users)
        number = copy.request.lora_int_id
        for tried in range(REMOVALS):
            try:
                await self._engine.remove_lora(number)
                break
            except Exception as error:  # noqa: BLE001 - a dead engine says so itself
                # A request that ended here (a stop string) may be open there for a moment.
                logger.warning("variant %r cannot be removed: %s", copy.ref.name, error)
                await asyncio.sleep(REMOVAL_SECONDS * 2**tried)
        self._copies.pop(number, None)
        self._drop(copy.ref, unless=self._loads.keys())
        await self._tell()

    def _drop(self, ref: VariantRef, *, unless: Set[Key]) -> None:
        """Removes the copy of a content that nobody has, nor one of these loads will."""
        used = {copy.ref.digest for copy in self._copies.values()}
        used |= {digest for _, digest in unless}
        if ref.digest not in used:
            self.store.drop(ref.digest)

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()
