"""From a body of JSON to requests of the engine, and from tokens to answers.

What is not understood is refused by name: an option that is silently dropped changes the text.
"""

import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.serving.endpoint.text import Words
from toolkit.serving.requests import Request

MOST_CHOICES = 16
MOST_STOPS = 4
# Accepted with these values only, which change nothing.
WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "echo": (None, False),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "logit_bias": (None, {}),
    "tools": (None, []),
    "response_format": (None, {"type": "text"}),
    "store": (None, False),
}
IGNORED = ("user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key")
KNOWN = (
    "model", "stream", "stream_options", "max_tokens", "temperature", "top_p", "n", "stop", "seed",
    "top_k", "min_p", "repetition_penalty", *WITHOUT_EFFECT, *IGNORED,
)  # fmt: skip


class RefusedError(ValueError):
    """A body that cannot be served: the status and the field at fault."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.status = param, status


@dataclass(frozen=True)
class Call:
    """What a body asks for: one request per prompt and choice."""

    requests: tuple[Request, ...]
    choices: int
    stops: tuple[str, ...]
    is_chat: bool
    is_stream: bool
    wants_usage: bool
    model: str
    id: str
    created: int

    def answer(self, choices: list[dict[str, Any]], usage: Any = None) -> dict[str, Any]:
        """The object that OpenAI's clients read."""
        kind = "text_completion"
        if self.is_chat:
            kind = "chat.completion.chunk" if self.is_stream else "chat.completion"
        body = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return body | {"choices": choices} | ({} if usage is None else {"usage": usage})

    def choice(
        self, index: int, text: str, reason: str | None, *, is_first: bool = True
    ) -> dict[str, Any]:
        """One choice, or with `is_stream` a piece of it."""
        about = {"index": index, "finish_reason": reason, "logprobs": None}
        if not self.is_chat:
            return about | {"text": text}
        role = {"role": "assistant"} if is_first or not self.is_stream else {}
        return about | {"delta" if self.is_stream else "message": role | {"content": text}}

    def usage(self, written: int) -> dict[str, int]:
        """Tokens read and written."""
        read = sum(len(request.prompt) for request in self.requests) // self.choices
        counts = {"prompt_tokens": read, "completion_tokens": written}
        return counts | {"total_tokens": read + written}


def parsed(body: bytes, *, is_chat: bool, model: str, words: Words, capacity: int) -> Call:
    """Read a body; `RefusedError` with one line for whatever is wrong with it."""
    fields = _object(body)
    known = (*KNOWN, *(("messages", "max_completion_tokens") if is_chat else ("prompt",)))
    for name, value in fields.items():
        if name not in known:
            raise RefusedError(f"{name[:64]!r} is not supported", name[:64])
        # Compared with their types, since False is 0.
        good = [(x, type(x)) for x in WITHOUT_EFFECT.get(name, (value,))]
        if (value, type(value)) not in good and (value, type(value)) != (0.0, float):
            raise RefusedError(f"{name}: not supported; leave it out", name)
    asked = fields.get("model")
    if not isinstance(asked, str):
        raise RefusedError("model: wanted the name of a model", "model")
    if asked != model:
        raise RefusedError(f"model: {asked[:64]!r} is not served; wanted {model!r}", "model", 404)
    try:
        prompts = [_chat(fields, words)] if is_chat else _prompts(fields, words)
        requests = tuple(_requests(fields, prompts, words, capacity, is_chat=is_chat))
    except RefusedError:
        raise
    except UnicodeEncodeError:
        raise RefusedError("the text holds half of a surrogate pair") from None
    except ValueError as error:
        raise RefusedError(str(error), str(error).partition(":")[0].partition(" ")[0]) from None
    options = _typed(fields, "stream_options", dict, {})
    return Call(
        requests,
        len(requests) // len(prompts),
        _stops(fields),
        is_chat,
        _typed(fields, "stream", bool, False),
        _typed(options, "include_usage", bool, False),
        model,
        ("chatcmpl-" if is_chat else "cmpl-") + secrets.token_hex(12),
        int(time.time()),
    )


def _object(body: bytes) -> dict[str, Any]:
    def refuse(name: str) -> None:
        raise RefusedError(f"the body holds {name}, which is not JSON")

    try:
        fields = json.loads(body.decode("utf-8"), parse_constant=refuse)
    except RefusedError:
        raise
    except RecursionError:
        raise RefusedError("the body is nested too deep") from None
    except ValueError as error:  # also of the encoding, and of numbers of thousands of digits
        raise RefusedError(f"the body is not JSON ({str(error).partition(chr(10))[0]})") from None
    if not isinstance(fields, dict):
        raise RefusedError(f"the body is {type(fields).__name__}; wanted an object")
    return fields


def _typed(fields: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise RefusedError(f"{name}: got {type(value).__name__}, wanted {kind.__name__}", name)
    return value


def _number(
    fields: Mapping[str, Any], name: str, default: Any, is_good: Callable[[Any], bool], wanted: str,
    *, is_whole: bool = False,
) -> Any:  # fmt: skip
    value = fields.get(name)
    if value is None:
        return default
    is_number = isinstance(value, int if is_whole else int | float) and not isinstance(value, bool)
    if not is_number or not is_good(value):
        raise RefusedError(f"{name}: got {str(value)[:32]}, wanted {wanted}", name)
    return value


def _prompts(fields: Mapping[str, Any], words: Words) -> list[list[int]]:
    prompt = fields.get("prompt")
    several = prompt if isinstance(prompt, list) and not _are_tokens(prompt) else [prompt]
    if not 1 <= len(several) <= MOST_CHOICES:
        wanted = f"wanted 1 to {MOST_CHOICES}"
        raise RefusedError(f"prompt: got {len(several)} prompts, {wanted}", "prompt")
    tokens = []
    for entry in several:
        if isinstance(entry, str):
            tokens.append(words.prompt(entry))
        elif _are_tokens(entry):
            tokens.append(entry)
        else:
            raise RefusedError("prompt: wanted a string, tokens, or a list of these", "prompt")
    return tokens


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _chat(fields: Mapping[str, Any], words: Words) -> list[int]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RefusedError("messages: wanted a list of at least one message", "messages")
    plain = []
    for message in messages:
        role, content = (message.get(x) if isinstance(message, dict) else None for x in _MESSAGE)
        if isinstance(content, list) and all(
            isinstance(part, dict) and part.get("type") == "text" for part in content
        ):
            content = "".join(str(part.get("text", "")) for part in content)
        if not isinstance(role, str) or not isinstance(content, str):
            raise RefusedError("messages: wanted objects of role and content, texts", "messages")
        if other := [name for name in message if name not in (*_MESSAGE, "name")]:
            raise RefusedError(f"messages: {other[0][:64]!r} is not supported", "messages")
        plain.append({"role": role, "content": content})
    return words.chat(plain)


_MESSAGE = ("role", "content")


def _stops(fields: Mapping[str, Any]) -> tuple[str, ...]:
    stop = fields.get("stop")
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    is_list = isinstance(stops, list) and len(stops) <= MOST_STOPS
    if not is_list or not all(isinstance(x, str) and 0 < len(x) <= 256 for x in stops):
        raise RefusedError(
            f"stop: wanted a string, or up to {MOST_STOPS}, of 1 to 256 characters", "stop"
        )
    return tuple(stops)


def _requests(fields, prompts, words, capacity, *, is_chat):
    choices = _number(fields, "n", 1, lambda n: 1 <= n <= MOST_CHOICES, "1 to 16", is_whole=True)
    if choices * len(prompts) > MOST_CHOICES:
        raise RefusedError(f"n: wanted at most {MOST_CHOICES} choices of all prompts", "n")
    name = "max_completion_tokens" if fields.get("max_completion_tokens") else "max_tokens"
    most = _number(fields, name, None, lambda n: n >= 1, "at least 1", is_whole=True)
    is_share = lambda x: 0 < x <= 1  # noqa: E731
    temperature = _number(fields, "temperature", 1.0, lambda x: 0 <= x <= 2, "0 to 2")
    # 1 is the default of the protocol: everything is allowed.
    top_p = _number(fields, "top_p", 1.0, is_share, "above 0, at most 1")
    how = {
        "top_p": None if top_p == 1 else float(top_p),
        "top_k": _number(fields, "top_k", None, lambda n: n >= 1, "at least 1", is_whole=True),
        "min_p": _number(fields, "min_p", None, is_share, "above 0, at most 1"),
        "repetition_penalty": _number(
            fields, "repetition_penalty", None, lambda x: 0 < x <= 100, "above 0, at most 100"
        ),
    }
    seed = _number(
        fields, "seed", None, lambda n: -(2**63) <= n < 2**63 - MOST_CHOICES, "64 bits",
        is_whole=True,
    )  # fmt: skip
    seed = secrets.randbits(31) if seed is None else seed
    for place, prompt in enumerate(prompts):
        length = most or (max(1, capacity - len(prompt)) if is_chat else 16)
        for choice in range(choices):
            yield Request(
                tuple(prompt),
                length,
                temperature=float(temperature),
                seed=seed + place * choices + choice,
                stop_tokens=words.special.stops or (),
                **how,
            )
