"""What every request passes before a route sees it: keys, bounds on its body, HEAD as GET."""

import asyncio
import hashlib
import hmac
import math
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .openai import ApiError

# Room for the longest prompts of a few contexts; parsing more would delay everyone.
MAX_BODY_BYTES = 8 << 20
# A client that is gone without a word would hold its part of a body for ever.
BODY_SECONDS = 120.0
LOAD_PATH, UNLOAD_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ADMIN_PATHS = frozenset({LOAD_PATH, UNLOAD_PATH})


class Gate:
    """What every request passes first: a key under /v1 where keys are set, and a bounded body.

    The routes of the administrator ask for a key of their own, and are closed without one. Plain
    ASGI, as Starlette's own base class would send every answer through one more task.
    """

    def __init__(self, app: ASGIApp, *, keys: Sequence[str], admin_keys: Sequence[str]) -> None:
        self._app = app
        self._digests, self._admin_digests = _digests(keys), _digests(admin_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        refusal = self._refusal(scope)
        if refusal is not None:
            return await error_response(refusal)(scope, receive, send)
        if scope["method"] == "HEAD":
            # The server that sends the answer, whose scope this is not, leaves its body out.
            scope = {**scope, "method": "GET"}
        num_bytes, is_whole = 0, False
        loop = asyncio.get_running_loop()
        deadline = loop.time() + BODY_SECONDS

        async def receive_bounded() -> Message:
            nonlocal num_bytes, is_whole
            if is_whole:
                return await receive()
            try:
                got = await asyncio.wait_for(receive(), deadline - loop.time())
            except TimeoutError:
                message = f"the body did not come within {BODY_SECONDS:g} seconds; send it at once"
                raise HTTPException(408, message, {"connection": "close"}) from None
            is_whole = not got.get("more_body", False)
            num_bytes += len(got.get("body", b""))
            if num_bytes > MAX_BODY_BYTES:
                raise HTTPException(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
            return got

        return await self._app(scope, receive_bounded, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        """Why a request may not pass, if it may not."""
        if scope["path"] in ADMIN_PATHS and scope["method"] == "POST":
            if not self._admin_digests:
                message = "this server takes no changes; start it with --admin-key-file"
                return ApiError(403, message, code="admin_disabled")
            if not _has_key(scope, self._admin_digests):
                return ApiError(401, "the admin key is needed", code="invalid_api_key")
            return None
        asks = self._digests and scope["path"].startswith("/v1/")
        if asks and not _has_key(scope, self._digests):
            return ApiError(401, "a valid API key is needed", code="invalid_api_key")
        return None


def _digests(keys: Sequence[str]) -> list[bytes]:
    return [hashlib.sha256(key.encode()).digest() for key in keys]


def _has_key(scope: Scope, digests: list[bytes]) -> bool:
    scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
    # Digests are of one length, and all are compared: the time tells nothing about a key.
    given = hashlib.sha256(key.encode()).digest()
    fits = [hmac.compare_digest(given, digest) for digest in digests]
    return scheme.lower() == "bearer" and any(fits)


def error_response(error: ApiError) -> Response:
    """The answer that tells a client of an error."""
    headers = dict(error.headers)
    if error.retry_seconds is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_seconds)))
    if "GET" in headers.get("Allow", ""):
        headers["Allow"] = "GET, HEAD"
    return JSONResponse(error.body, error.status, headers)
