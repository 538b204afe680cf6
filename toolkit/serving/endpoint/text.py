"""Between text and tokens: prompts, chat templates of checkpoints, stop strings."""

import codecs
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit._files import json_object
from toolkit.language import SpecialTokens
from toolkit.language.tokens import encoded


class TextStream:
    """Tokens of one answer as text, up to a stop string; what may begin one is held back."""

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self.stops, self.is_stopped, self._rest = tuple(stops), False, ""
        if tokenizer is None:
            decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
            self._decode = lambda token: decoder.decode(bytes([token]))
            self._last = lambda: decoder.decode(b"", final=True)
        else:
            from tokenizers.decoders import DecodeStream

            stream = DecodeStream(skip_special_tokens=True)
            self._decode = lambda token: stream.step(tokenizer, token) or ""
            self._last = str

    def push(self, token: int) -> str:
        """The text that is certain after one more token."""
        return self._certain(self._decode(token))

    def finish(self) -> str:
        """The rest, when no token follows."""
        if self.is_stopped:
            return ""
        text = self._certain(self._last())
        return text if self.is_stopped else text + self._rest

    def _certain(self, new: str) -> str:
        text = self._rest + new
        found = [place for stop in self.stops if (place := text.find(stop)) >= 0]
        if found:
            self.is_stopped = True
            return text[: min(found)]
        beginnings = (
            size
            for stop in self.stops
            for size in range(1, len(stop))
            if text.endswith(stop[:size])
        )
        kept = len(text) - max(beginnings, default=0)
        self._rest = text[kept:]
        return text[:kept]


class Words:
    """Text of a model to tokens: a tokenizer or bytes, special tokens, a chat template.

    The template is the checkpoint's own; it runs in Jinja's sandbox, and what a client sends is
    only ever data for it.
    """

    def __init__(
        self, tokenizer: Any, special: SpecialTokens, template: str | None, names: Mapping[str, str]
    ) -> None:
        self.tokenizer, self.special, self._template = tokenizer, special, None
        if template is not None:
            from jinja2.sandbox import ImmutableSandboxedEnvironment

            environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
            environment.filters["tojson"] = _json
            environment.globals["raise_exception"] = _refuse
            self._template = environment.from_string(template)
        self._names = dict(names)

    def prompt(self, text: str) -> list[int]:
        """Tokens of a prompt for completion."""
        if self.tokenizer is not None:
            return encoded(self.tokenizer, text, self.special.start)
        return list(text.encode())

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Tokens of a conversation, up to where the assistant's answer begins."""
        if self._template is None:
            raise ValueError("messages: the model has no chat template; use /v1/completions")
        from jinja2 import TemplateError

        how = {"messages": messages, "add_generation_prompt": True, **self._names}
        try:
            text = self._template.render(**how)
        except (TemplateError, TypeError) as error:
            raise ValueError(f"messages: the chat template refuses them ({error})") from None
        if self.tokenizer is None:
            return list(text.encode())
        return self.tokenizer.encode(text, add_special_tokens=False).ids


def _json(value: Any, indent: int | None = None) -> str:
    # Jinja's own form escapes for HTML.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def find_template(directory: Path) -> tuple[str | None, dict[str, str]]:
    """The chat template of a checkpoint and the special tokens that it may name."""
    settings: dict[str, Any] = {}
    if (file := Path(directory) / "tokenizer_config.json").is_file():
        settings = json_object(file.read_bytes(), str(file))
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    if (file := Path(directory) / "chat_template.jinja").is_file():
        template = file.read_text(encoding="utf-8")
    names = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = settings.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            names[name] = token
    return template, names
