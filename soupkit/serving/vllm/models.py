"""The models of vLLM's OpenAI server: the base, and the variants of a family by name.

Methods of vLLM's class are replaced, so that `vllm serve` has them too. A name is looked up in
family.json at each request, a variant that is not there yet is loaded beside what runs (copies.py),
and the routes that load and unload act on the family's variants, if they are allowed to at all.
"""

import atexit
import functools
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, ValuesView
from http import HTTPStatus
from typing import Any

from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ModelCard, ModelPermission
from vllm.exceptions import GracefulHTTPError
from vllm.lora.request import LoRARequest
from vllm.lora.resolver import LoRAResolver

from soupkit.errors import ServingError
from soupkit.family import open_base
from soupkit.serving.reasons import Reasons

from .copies import Copies
from .metrics import show
from .settings import CHANGES, Settings, settings
from .store import Store

logger = logging.getLogger("vllm.soupkit")


class FamilyResolver(LoRAResolver):  # type: ignore[misc]  # vLLM may be absent
    """A name of the family -> its variant, once the engine has it."""

    def __init__(self, copies: Copies, told: Settings) -> None:
        self.copies, self.told = copies, told
        self._reasons = Reasons([told.family, copies.store.folder])

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """None if there is no such variant; an HTTP error 503 if it cannot be loaded."""
        try:
            found: LoRARequest = await self.copies.take(lora_name)
            return found
        except KeyError:
            return None
        except ServingError as error:
            raise self.unavailable(error) from error

    def unavailable(self, error: ServingError) -> GracefulHTTPError:
        """What a client is told."""
        return GracefulHTTPError(self._reasons.of(error), HTTPStatus.SERVICE_UNAVAILABLE)


class Served(Mapping[str, LoRARequest]):
    """The variants that were asked for, by name. The engine may have let go of one since vLLM
    checked its request: its name is known none the less, and `generate` brings it back.
    """

    def __init__(self, copies: Copies) -> None:
        self._copies = copies

    def __getitem__(self, name: str) -> LoRARequest:
        found: LoRARequest | None = self._copies.known(name)
        if found is None:
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._copies.requests())

    def __len__(self) -> int:
        return len(self._copies.requests())

    def values(self) -> ValuesView[LoRARequest]:
        """All at once: vLLM looks through them for requests of the base."""
        return self._copies.requests().values()


def make_resolver(engine_client: Any, told: Settings) -> FamilyResolver:
    """The family in front of an engine, whose base is checked to be the family's.

    Raises:
        ServingError, BundleError: they do not fit.
    """
    config = engine_client.vllm_config
    if config.lora_config is None:
        raise ServingError("variants travel on vLLM's LoRA path: give --enable-lora")
    if getattr(config.parallel_config, "_api_process_count", 1) > 1:
        raise ServingError("--api-server-count: one API process must know who has which variant")
    store = Store(told.family, folder=told.store, budget=told.host_bytes)
    atexit.register(store.close)
    open_base(store.family, config.model_config.model)
    unknown = [name for name in told.pins if name not in store.family.variants]
    if unknown:
        known = ", ".join(store.family.variants) or "none"
        raise ServingError(f"--pin {unknown[0]}: there is no such variant, only {known}")
    copies = Copies(store, engine_client, LoRARequest, pins=frozenset(told.pins))
    return FamilyResolver(copies, told)


def replace_models(models_class: Any) -> None:
    """Gives vLLM's class of served models the family's."""
    make = models_class.__init__

    @functools.wraps(make)
    def init(self: Any, engine_client: Any, *args: Any, **named: Any) -> None:
        make(self, engine_client, *args, **named)
        told = settings()
        assert told is not None
        self.soupkit = make_resolver(engine_client, told)
        for name in self.soupkit.copies.names():
            if self.is_base_model(name):
                raise ServingError(
                    f"the base is served as {name!r}, so the variant of that name would never "
                    "answer: give the base another with --served-model-name"
                )
        show(self.soupkit.copies)
        self.lora_requests = Served(self.soupkit.copies)
        engine_client.generate = _keeping(engine_client.generate, self.soupkit)

    models_class.__init__ = init
    for method in (
        init_static_loras,
        resolve_lora,
        show_available_models,
        load_lora_adapter,
        unload_lora_adapter,
    ):
        setattr(models_class, method.__name__, method)


def check_first(serving_class: Any) -> None:
    """Has a variant in the engine before a request of it is looked at any further, so that one
    that cannot be loaded is told as a status, whether or not its name was known already.
    """
    check = serving_class._check_model

    @functools.wraps(check)
    async def checks(self: Any, request: Any) -> Any:
        resolver: FamilyResolver | None = getattr(self.models, "soupkit", None)
        if resolver is not None and request.model and not self.models.is_base_model(request.model):
            await resolver.resolve_lora("", request.model)
        return await check(self, request)

    serving_class._check_model = checks


def _keeping(generate: Callable[..., Any], resolver: FamilyResolver) -> Callable[..., Any]:
    """`generate` of an engine that keeps a request's variant until the request has ended."""

    @functools.wraps(generate)
    async def kept(
        prompt: Any,
        sampling_params: Any,
        request_id: str,
        *,
        lora_request: Any = None,
        **named: Any,
    ) -> AsyncGenerator[Any, None]:
        if lora_request is None:
            async for out in generate(prompt, sampling_params, request_id, **named):
                yield out
            return
        try:
            async with resolver.copies.using(lora_request, request_id) as current:
                async for out in generate(
                    prompt, sampling_params, request_id, lora_request=current, **named
                ):
                    yield out
        except ServingError as error:
            raise resolver.unavailable(error) from error

    return kept


async def init_static_loras(self: Any) -> None:
    """At the start: loads what is pinned. Adapters of `--lora-modules` are refused."""
    if self.static_lora_modules:
        raise ServingError("--lora-modules: adapters from elsewhere are not served beside a family")
    resolver: FamilyResolver = self.soupkit
    for name in resolver.told.pins:
        request = await resolver.copies.take(name)
        await self.engine_client.pin_lora(request.lora_int_id)
    logger.info("soupkit serves %s", ", ".join(resolver.copies.names()) or "no variant yet")


async def resolve_lora(self: Any, lora_name: str) -> Any:
    """A variant's LoRARequest, or the error 404."""
    found = await self.soupkit.resolve_lora(self.model_config.model, lora_name)
    return found or _error(f"The model `{lora_name}` does not exist.", HTTPStatus.NOT_FOUND)


async def show_available_models(self: Any) -> Any:
    """The base and all variants, resident or not."""
    listed = await self.registry.show_available_models()
    copies: Copies = self.soupkit.copies
    for name in copies.names():
        ref = copies.ref(name)
        if ref is None or self.is_base_model(name):
            continue
        parent = self.base_model_paths[0].name
        card = ModelCard(id=name, root=ref.digest, parent=parent, permission=[ModelPermission()])
        listed.data.append(card)
    return listed


async def load_lora_adapter(self: Any, request: Any, base_model_name: str | None = None) -> Any:
    """Loads a variant of the family, also one that was unloaded; `lora_path` is its name again."""
    resolver: FamilyResolver = self.soupkit
    refusal = _refusal(resolver)
    if refusal is not None:
        return refusal
    name = request.lora_name
    if request.lora_path not in (name, str(resolver.told.family)):
        return _error(
            f"lora_path {request.lora_path!r}: only variants of the family are served; give the "
            "variant's name there too",
            HTTPStatus.BAD_REQUEST,
        )
    try:
        await resolver.copies.load(name)
    except KeyError:
        return _error(f"The family has no variant {name!r}.", HTTPStatus.NOT_FOUND)
    except ServingError as error:
        raise resolver.unavailable(error) from error
    return f"Success: variant '{name}' is loaded."


async def unload_lora_adapter(self: Any, request: Any) -> Any:
    """Serves a variant no more until it is loaded again, and frees what holds it."""
    resolver: FamilyResolver = self.soupkit
    refusal = _refusal(resolver)
    if refusal is not None:
        return refusal
    try:
        await resolver.copies.unload(request.lora_name)
    except KeyError:
        return _error(f"The family has no variant {request.lora_name!r}.", HTTPStatus.NOT_FOUND)
    return f"Success: variant '{request.lora_name}' is unloaded."


def _refusal(resolver: FamilyResolver) -> Any:
    if resolver.told.changes:
        return None
    return _error(
        f"variants are loaded by asking for them; start with {CHANGES}=1 to load and unload over "
        "HTTP, which whoever may ask for tokens may do then",
        HTTPStatus.FORBIDDEN,
    )


def _error(message: str, status: HTTPStatus) -> Any:
    kind = {HTTPStatus.NOT_FOUND: "NotFoundError", HTTPStatus.FORBIDDEN: "PermissionDeniedError"}
    return create_error_response(
        message=message, err_type=kind.get(status, "BadRequestError"), status_code=status
    )
