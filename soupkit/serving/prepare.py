"""Checked request bodies -> generations ready to submit: prompts to tokens, limits, settings."""

import asyncio
import logging
import time
from typing import Any

from soupkit.bundle import VariantRef
from soupkit.errors import ServingError, SoupkitError

from .answers import Answer, Choice
from .jobs import Generation, Job
from .openai import MAX_CHOICES, ApiError, ChatRequest, CompletionRequest, unknown_model
from .pretrained import TextSetup
from .service import Service
from .states import BASE_DIGEST, QueueFull

logger = logging.getLogger(__name__)

DEFAULT_COMPLETION_TOKENS = 16


async def completion_answer(service: Service, body: CompletionRequest) -> Answer:
    """The answer to a text completion, not yet submitted. Raises ApiError."""
    arrived = time.monotonic()
    body.refuse_unsupported()
    ref, text = await _model(service, body.model)
    _check_counts(body)
    choices: list[Choice] = []
    prompt_tokens = 0
    for prompt in body.prompts:
        tokens = await _encode(text.tokenizer, prompt) if isinstance(prompt, str) else prompt
        prompt_tokens += len(tokens)
        limit = _token_limit(
            service,
            tokens,
            body.max_tokens,
            default=DEFAULT_COMPLETION_TOKENS,
            prompt_param="prompt",
            limit_param="max_tokens",
        )
        echo = None
        if body.echo:
            echo = prompt if isinstance(prompt, str) else text.tokenizer.decode(prompt)
        for number in range(body.num_choices):
            generation = _generation(
                body,
                ref,
                text,
                tokens,
                limit,
                arrived,
                number=number,
                score_prompt=bool(body.echo) and body.logprobs is not None,
            )
            choices.append(
                Choice(
                    len(choices),
                    generation,
                    text.tokenizer,
                    body.stops,
                    body.logprobs is not None,
                    echo,
                )
            )
    return Answer("text_completion", body.model, choices, prompt_tokens)


def _check_counts(body: CompletionRequest) -> None:
    prompts = body.prompts
    if not prompts:
        raise ApiError(400, "prompt: the list is empty; give at least one prompt", param="prompt")
    if len(prompts) * body.num_choices > MAX_CHOICES:
        raise ApiError(
            400,
            f"prompt: {len(prompts)} x n={body.num_choices}, at most {MAX_CHOICES}",
            param="prompt",
        )
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens: 0 needs echo=true; use at least 1", param="max_tokens")


async def chat_answer(service: Service, body: ChatRequest) -> Answer:
    """The answer to a chat completion, not yet submitted. Raises ApiError."""
    arrived = time.monotonic()
    body.refuse_unsupported()
    ref, text = await _model(service, body.model)
    tokens = await _render(text.tokenizer, body)
    limit = _token_limit(
        service,
        tokens,
        body.token_limit,
        default=service.engine.max_context,
        prompt_param="messages",
        limit_param=(
            "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        ),
    )
    choices = []
    for number in range(body.num_choices):
        generation = _generation(body, ref, text, tokens, limit, arrived, number=number)
        choices.append(Choice(number, generation, text.tokenizer, body.stops, bool(body.logprobs)))
    return Answer("chat.completion", body.model, choices, len(tokens))


def _generation(
    body: CompletionRequest | ChatRequest,
    ref: VariantRef | None,
    text: TextSetup,
    tokens: list[int],
    limit: int,
    arrived: float,
    *,
    number: int,
    score_prompt: bool = False,
) -> Generation:
    """The generation of choice `number`: at most `limit` tokens after `tokens`."""
    stop_tokens = frozenset() if body.ignore_eos else text.stop_tokens
    return Generation(
        digest=BASE_DIGEST if ref is None else ref.digest,
        model=body.model,
        job=Job(tuple(tokens), limit, stop_tokens, body.sampling(number)),
        score_prompt=score_prompt,
        created=arrived,
    )


async def _model(service: Service, name: str) -> tuple[VariantRef | None, TextSetup]:
    try:
        try:
            ref = service.resolve(name)
        except KeyError:
            ref = await service.admit(name)
    except KeyError:
        raise unknown_model(name, service.names(), hidden=service.catalog.is_hidden(name)) from None
    except QueueFull:
        raise
    except ServingError as error:
        message = service.reasons.of(error)
        raise ApiError(503, message, code="variant_unavailable") from error
    try:
        return ref, await service.texts.of(ref)
    except (SoupkitError, OSError, ValueError) as error:
        logger.warning("variant %r cannot be served: %s", name, error)
        # transformers says what is wrong with a file of text by ValueError.
        told = ServingError(str(error)) if isinstance(error, ValueError) else error
        message = f"variant {name!r} cannot be served: {service.reasons.of(told)}"
        raise ApiError(503, message, code="variant_unavailable") from error


async def _encode(tokenizer: Any, text: str, *, special: bool = True) -> list[int]:
    # Not on the event loop: a long text would hold up everybody's stream.
    found = await asyncio.to_thread(tokenizer, text, add_special_tokens=special)
    return list(found["input_ids"])


async def _render(tokenizer: Any, body: ChatRequest) -> list[int]:
    if tokenizer.chat_template is None:
        message = f"the model {body.model!r} has no chat template; use /v1/completions"
        raise ApiError(400, message, param="messages")
    messages = [message.as_template_input() for message in body.messages]
    try:
        text = await asyncio.to_thread(
            tokenizer.apply_chat_template, messages, add_generation_prompt=True, tokenize=False
        )
    except Exception as error:  # a template is a program and may raise anything
        message = f"messages: the chat template refuses them: {error}"
        raise ApiError(400, message, param="messages") from error
    # The template writes its special tokens itself.
    return await _encode(tokenizer, text, special=False)


def _token_limit(
    service: Service,
    tokens: list[int],
    asked: int | None,
    *,
    default: int,
    prompt_param: str,
    limit_param: str,
) -> int:
    """How many tokens may follow a prompt. Raises ApiError: no prompt, or no room for it."""
    vocabulary, context = service.engine.vocab_size, service.engine.max_context
    if not tokens:
        message = f"{prompt_param}: no tokens; give at least one"
        raise ApiError(400, message, param=prompt_param)
    if max(tokens) >= vocabulary:
        message = f"{prompt_param}: token id {max(tokens)}, the vocabulary has {vocabulary}"
        raise ApiError(400, message, param=prompt_param)
    # OpenAI's words: gateways tell this error from others by them.
    limit = f"This model's maximum context length is {context} tokens, prompt and answer together"
    room = context - len(tokens)
    if room < 0 or (room == 0 and asked != 0):
        message = f"{prompt_param}: {len(tokens)} tokens. {limit}"
        raise ApiError(400, message, param=prompt_param, code="context_length_exceeded")
    if asked is not None and asked > room:
        message = f"{limit_param}: {asked} after {len(tokens)} prompt tokens. {limit}"
        raise ApiError(400, message, param=limit_param, code="context_length_exceeded")
    return min(room, default if asked is None else asked)
