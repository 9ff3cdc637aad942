"""What an administrator does to a server that runs: a variant made resident, or let go.

The routes and fields are vLLM's, `lora_name` being a variant of the family. Letting go hides the
name at once, so that new requests get 404; those that are open may end until the deadline and are
told why if they do not; then every tier is free of it. Nothing of this is on disk: family.json is
the registry, and a restart serves all of it again.
"""

import asyncio
import os
import time
from typing import Annotated, Any
from weakref import WeakValueDictionary

from pydantic import Field

from soupkit.bundle import VariantRef
from soupkit.errors import ServingError

from .jobs import End, Generation, Job
from .openai import ApiError, Body, Text, unknown_model
from .sampling import Sampling
from .service import Service
from .states import NotServed

DEFAULT_DEADLINE_SECONDS = 30.0
# After the deadline only the engine's current step and a read from the disk are still to end.
LAST_SECONDS = 30.0
_LOOK_SECONDS = 0.01


class LoadRequest(Body):
    """Body of POST /v1/load_lora_adapter."""

    lora_name: Annotated[Text, Field(description="A variant of the family.")]
    lora_path: Annotated[
        Text | None,
        Field(description="Its folder, as in variants/NAME; no other path is taken."),
    ] = None
    pinned: Annotated[
        bool | None, Field(description="Whether it may be evicted; left as it is by default.")
    ] = None


class UnloadRequest(Body):
    """Body of POST /v1/unload_lora_adapter."""

    lora_name: Annotated[Text, Field(description="A variant of the family.")]
    deadline_seconds: Annotated[
        float,
        Field(ge=0, le=3600, description="How long open requests may go on; then they are ended."),
    ] = DEFAULT_DEADLINE_SECONDS


class Admin:
    """Loads and unloads variants of a service, one change of a name at a time."""

    def __init__(self, service: Service) -> None:
        self._service = service
        # A name's lock is gone when nobody holds it or waits for it.
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def load(self, body: LoadRequest) -> dict[str, Any]:
        """Makes a variant resident, and visible if it was unloaded; an adapter that may come into
        the pool comes first.

        Raises:
            ApiError: no such variant, a path that is not its folder.
            ServingError: it cannot be loaded now.
        """
        service, name = self._service, body.lora_name
        if body.lora_path is None:
            await self._admit(name)
        self._check_path(self._ref(name), body.lora_path)
        async with self._turn(name):
            ref = self._ref(name)  # as it is now, after the changes before this one
            began, was_hidden = time.monotonic(), service.catalog.is_hidden(name)
            service.catalog.show(name)
            service.follow_family()
            try:
                await self._make_resident(ref)
                if service.catalog.variants.get(name) != ref:
                    raise NotServed(f"{name!r} left the family or was exported anew; try again")
                if body.pinned is not None:
                    self._pin(ref, pinned=body.pinned)
            except BaseException:
                if was_hidden:
                    self._hide(name)
                raise
            return {
                "object": "variant",
                "id": name,
                "digest": ref.digest,
                "phase": service.router.phase(ref.digest).value,
                "pinned": service.router.stats()[ref.digest].pinned,
                "bytes": service.held_bytes(ref.digest),
                "seconds": round(time.monotonic() - began, 6),
            }

    async def unload(self, body: UnloadRequest) -> dict[str, Any]:
        """Hides a variant, waits for its open requests, frees its memory.

        Raises:
            ApiError: no such variant, or it still cannot go long after the deadline.
        """
        service, name = self._service, body.lora_name
        self._ref(name)
        async with self._turn(name):
            ref = self._ref(name)
            if service.catalog.is_hidden(name):
                raise unknown_model(name, service.names(), hidden=True)
            began, held = time.monotonic(), service.held_bytes(ref.digest)
            self._hide(name)
            ended = await self._drain(ref, seconds=body.deadline_seconds)
            left = service.held_bytes(ref.digest)
            return {
                "object": "variant.unloaded",
                "id": name,
                "digest": ref.digest,
                "freed_bytes": {tier: held[tier] - left[tier] for tier in held},
                "shared_with": self._twins(ref),
                "requests_ended": ended,
                "seconds": round(time.monotonic() - began, 6),
            }

    def _turn(self, name: str) -> asyncio.Lock:
        return self._turns.setdefault(name, asyncio.Lock())

    def _ref(self, name: str) -> VariantRef:
        names = self._service.names()
        if name == names[0]:
            raise ApiError(
                400, f"lora_name: {name!r} is the base, which stays loaded", param="lora_name"
            )
        try:
            return self._service.catalog.refs[name]
        except KeyError:
            # One that waits for its first request is listed, and nothing can be let go of it.
            error = unknown_model(name, [one for one in names if one != name])
            error.param = "lora_name"
            raise error from None

    async def _admit(self, name: str) -> None:
        service = self._service
        if name in service.names() and name not in (service.base_name, *service.catalog.refs):
            try:
                await service.admit(name)
            except ServingError as error:
                reason = service.reasons.of(error)
                raise ApiError(503, reason, code="variant_unavailable") from error

    def _check_path(self, ref: VariantRef, given: str | None) -> None:
        """Compares texts only: a path of a request is never looked up."""
        if given is None:
            return
        family = self._service.catalog.family
        folders = {
            ref.path,
            os.path.abspath(family.path / ref.path),
            os.path.join(os.path.realpath(family.path), ref.path),
        }
        if os.path.normpath(given) not in folders:
            message = f"lora_path: not the folder of {ref.name!r}; leave it out or say {ref.path}"
            raise ApiError(400, message, param="lora_path")

    async def _make_resident(self, ref: VariantRef) -> None:
        """By a request that asks for no token: it waits, fails and is bounded like any other."""
        service = self._service
        generation = Generation(
            digest=ref.digest,
            model=ref.name,
            job=Job((), 0, frozenset(), Sampling()),
            score_prompt=False,
        )
        service.enter([generation])
        try:
            event = await generation.events.get()
        finally:
            service.cancel(generation)
        if not isinstance(event, End):
            assert isinstance(event, ServingError)
            raise event

    def _pin(self, ref: VariantRef, *, pinned: bool) -> None:
        service = self._service
        was_asked = ref.name in service.pins
        service.pin(ref.name, pinned=pinned)
        if pinned and not service.router.stats()[ref.digest].pinned:
            service.pin(ref.name, pinned=was_asked)
            message = (
                f"pinned: of {service.router.cache.num_slots} slots one is for those that are not; "
                "let another variant go or raise --cache-bytes"
            )
            raise ApiError(400, message, param="pinned")

    def _hide(self, name: str) -> None:
        self._service.catalog.hide(name)
        self._service.pin(name, pinned=False)

    def _twins(self, ref: VariantRef) -> list[str]:
        """Names that are served now and have the content of a hidden one."""
        served = self._service.catalog.variants.items()
        return [name for name, twin in served if twin.digest == ref.digest]

    async def _drain(self, ref: VariantRef, *, seconds: float) -> int:
        """Waits until nobody uses the name and no tier holds it; how many requests were ended."""
        service, began, ended = self._service, time.monotonic(), set[Generation]()

        def open_ones() -> list[Generation]:
            """Those for the name, whatever its content was then, and for its content unless a twin
            is served. A twin may come or go meanwhile, by a load, an unload or an export.
            """
            shared = bool(self._twins(ref))
            return [
                one
                for one in service.open
                if one.model == ref.name or (one.digest == ref.digest and not shared)
            ]

        while open_ones() or not (self._twins(ref) or ref.digest not in service.router.stats()):
            past = time.monotonic() - began
            if past >= seconds:
                ended.update(open_ones())
                if not self._twins(ref):
                    service.router.unload(ref.digest, deadline_seconds=0.0)
                for generation in open_ones():  # those that are left: of a twin or another content
                    service.abort(generation, NotServed("the variant was unloaded"))
            if past >= seconds + LAST_SECONDS:
                message = f"{ref.name!r} is hidden, but still in use; it is freed when that ends"
                raise ApiError(503, message, code="unload_pending")
            await asyncio.sleep(_LOOK_SECONDS)
        return len(ended)
