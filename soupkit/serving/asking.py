"""What a front reads of the body of a request: the model, how many sequences, how it begins.

A replica tells what is wrong with a body; here anything passes.
"""

import asyncio
import json
from collections.abc import Iterator, Mapping
from typing import Any

from soupkit.config import BASE_NAME

from .openai import MAX_CHOICES

# A larger body is read in a thread, so that it holds up nobody.
_LARGE_BYTES = 1 << 16
# About a block of the prefix cache: prompts that are alike in less share nothing.
_PROMPT_CHARACTERS = 64
_PROMPT_TOKENS = 16
# Of each message that comes before a conversation's first answer.
_MESSAGE_CHARACTERS = 1024


async def read(body: bytes) -> dict[str, Any]:
    """The fields of a body, none if it is no JSON object."""
    return await asyncio.to_thread(parsed, body) if len(body) > _LARGE_BYTES else parsed(body)


def parsed(body: bytes) -> dict[str, Any]:
    """As `read`, at once."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def model_of(found: Mapping[str, Any]) -> tuple[str, int]:
    """The model that is asked for, and how many sequences."""
    name, count, prompt = found.get("model"), found.get("n"), found.get("prompt")
    count = count if type(count) is int and 1 <= count <= MAX_CHOICES else 1
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        count *= len(prompt)
    return name if isinstance(name, str) else BASE_NAME, count


def beginning_of(found: Mapping[str, Any]) -> bytes:
    """What all requests of one conversation have in common and others have not, if they can be told
    apart: its messages up to the first of a user, or the first characters or tokens of a prompt.
    """
    messages, prompt = found.get("messages"), found.get("prompt")
    if isinstance(messages, list):
        return repr(list(_first_messages(messages))).encode("utf-8", "replace")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt[:_PROMPT_CHARACTERS].encode("utf-8", "replace")
    return repr(prompt[:_PROMPT_TOKENS]).encode() if isinstance(prompt, list) else b""


def _first_messages(messages: list[Any]) -> Iterator[str]:
    for message in messages:
        if not isinstance(message, dict):
            return
        content = message.get("content")
        text = content if isinstance(content, str) else repr(content)
        yield text[:_MESSAGE_CHARACTERS]
        if message.get("role") == "user":
            return
