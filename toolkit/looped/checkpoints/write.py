"""Write a model as Hugging Face transformers reads it: what `load_checkpoint` reads, the other way.

A rule of a family rearranges numbers, and perhaps adds one to them. Applied to the places of the
numbers instead of to the numbers it says where each came from, so no rule needs an inverse of its
own.
"""

import functools
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from toolkit._checks import checked
from toolkit._files import unfinished_beside
from toolkit.looped.checkpoints.families import FAMILIES
from toolkit.looped.checkpoints.files import check_finite
from toolkit.looped.checkpoints.models import parts
from toolkit.looped.checkpoints.rules import WeightRule
from toolkit.looped.checkpoints.settings import ARCHITECTURES, check_settings, settings_of
from toolkit.looped.checkpoints.tensors import INDEX
from toolkit.looped.checkpoints.weights import part_of
from toolkit.looped.model import LoopedLM

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model",
    "vocab.json", "merges.txt", "added_tokens.json", "chat_template.jinja",
)  # fmt: skip
SPELLED_BY = {
    "mixtral": "block_sparse_moe.gate.weight",
    "kimi_linear": "block_sparse_moe.gate.weight",
    "minimax": "block_sparse_moe.gate.weight",
    "granitemoehybrid": "block_sparse_moe.input_linear.weight",
    "inkling2_loop_text": "mlp.experts.gate_up_proj",
}
"""Families whose mixtures are spelled otherwise, and a tensor of a layer by which it is known."""

GENERATION = ("bos_token_id", "eos_token_id", "pad_token_id")


@checked
def save_checkpoint(
    model: LoopedLM, folder: str | Path, *,
    style: str, dtype: Literal["float32", "float16", "bfloat16"] = "float32",
    settings: Mapping[str, Any] | None = None, tokenizer: str | Path | None = None,
    shard_bytes: int = 5 * 10**9,
) -> None:  # fmt: skip
    """Write a model to a folder that Hugging Face transformers reads, and `load_checkpoint` too.

        tensors = rules(parameters), the other way round;   config.json = settings(config)

    The folder appears when it is complete. What was written reads back bit-equal in float32.

    Args:
        model: a model that its family can express, looped ones "ouro" or "huginn_raven".
        folder: a new folder, or an empty one.
        style: the `model_type`, a key of `ARCHITECTURES`, such as "llama" or "qwen3_moe".
        dtype: how numbers are stored.
        settings: further settings of config.json, such as `max_position_embeddings`; the ids of
            special tokens also go to generation_config.json.
        tokenizer: a folder whose tokenizer files are copied, or None.
        shard_bytes: the most that one file of several holds.

    Returns:
        None.

    Raises:
        FileExistsError: the folder has files in it.
        ValueError: the family cannot express the configuration, or the dtype a number.

    Cost: one write of every tensor; memory for one file.

    Source: Hugging Face transformers, the configuration and modelling file of each architecture.

    Example:
        >>> from flax import nnx
        >>> config = LoopedConfig(width=8, heads=2, pattern="full", loops=1, residual_gate=False)
        >>> save_checkpoint(LoopedLM(config, rngs=nnx.Rngs(0)), "small", style="llama")
        >>> load_checkpoint("small").config.width
        8
    """
    folder = Path(folder)
    if (text := f"{style}_text") in ARCHITECTURES:
        raise ValueError(f"style {style!r} is a model of text and images; {text!r} is its text.")
    if style not in ARCHITECTURES:
        known = ", ".join(map(repr, ARCHITECTURES))
        raise ValueError(f"style must be one of {known}; got {style!r}.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} has files in it; wanted a new folder or an empty one.")
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes must be at least 1; got {shard_bytes}")
    written = settings_of(style, model.config)
    check_settings(style, model.config, written)
    written |= {"dtype": dtype, **(settings or {})}
    unfinished = unfinished_beside(folder)
    unfinished.mkdir(parents=True)
    try:
        _write_json(unfinished / "config.json", written)
        ids = {name: written[name] for name in GENERATION if written.get(name) is not None}
        if ids:
            _write_json(unfinished / "generation_config.json", ids)
        for name in TOKENIZER_FILES if tokenizer is not None else ():
            if (file := Path(tokenizer or "") / name).is_file():
                shutil.copy(file, unfinished / name)
        _write_tensors(model, style, unfinished, dtype, shard_bytes)
        _appear(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _appear(complete: Path, folder: Path) -> None:
    """Give a complete folder its name, unless another writer was faster."""
    try:
        if folder.exists():
            folder.rmdir()
        os.replace(complete, folder)
    except OSError as error:
        raise FileExistsError(f"{folder} was written by another process meanwhile.") from error


def _write_tensors(model: LoopedLM, style: str, folder: Path, dtype: str, most: int) -> None:
    from safetensors.flax import save_file

    shards: list[list[tuple]] = [[]]
    size, total, width = 0, 0, jnp.dtype(dtype).itemsize
    for name, shape, make in _tensors(model, style):
        count = math.prod(shape) * width
        if shards[-1] and size + count > most:
            shards.append([])
            size = 0
        shards[-1].append((name, make))
        size, total = size + count, total + count
    places = {}
    for number, shard in enumerate(shards, start=1):
        file = "model.safetensors"
        if len(shards) > 1:
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        arrays = {}
        for name, make in shard:
            made = make()
            arrays[name] = made if jnp.issubdtype(made.dtype, jnp.integer) else made.astype(dtype)
            check_finite(name, arrays[name], dtype)
            places[name] = file
        save_file(arrays, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        _write_json(folder / INDEX, index)


def _tensors(model: LoopedLM, style: str) -> Iterator[tuple[str, tuple[int, ...], Any]]:
    """Name, shape and maker of every tensor of the checkpoint."""
    family, config = FAMILIES[style], model.config
    spelling = {
        f"model.layers.{layer}.{SPELLED_BY[style]}"
        for layer in range(len(config.feed_forward_words))
        if style in SPELLED_BY
    }
    for place in parts(family, config, family.prefix, spelling):
        module = part_of(model, place.module)
        for rule in place.rules:
            ours = [part_of(module, path) for path in rule.ours]
            if rule.is_stacked:
                (parameter,) = ours
                shape = parameter.shape[:0:-1]
                for index, name in enumerate(rule.theirs):
                    make = lambda p=parameter, i=index: jnp.asarray(p[...][i].T)  # noqa: E731
                    yield place.prefix + name, shape, make
                continue
            whole = _shape(module, rule, [parameter.shape for parameter in ours])
            sizes, start = (whole[0],) if rule.rows is None else rule.rows(module), 0
            for name, size in zip(rule.theirs, sizes, strict=True):
                make = functools.partial(_inverted, module, rule, ours, whole, start, size)
                yield place.prefix + name, (size, *whole[1:]), make
                start += size


def _shape(module: Any, rule: WeightRule, ours: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of a tensor of which a rule makes parameters of these shapes."""
    if callable(rule.stored):
        return rule.stored(module)
    first, last = ours[0], sum(shape[-1] for shape in ours)
    candidates = [(*first[:-1], last)]
    if len(first) == 2:
        candidates = [(last, first[0]), *candidates, (first[1], 1, first[0])]
    if len(first) == 3:
        candidates.append((first[0], last, first[1]))
    for shape in candidates:
        try:
            made = jax.eval_shape(
                lambda x: list(rule.convert(module, x)), jax.ShapeDtypeStruct(shape, jnp.int32)
            )
        except (TypeError, ValueError, IndexError):
            continue
        if [array.shape for array in made] == list(ours):
            return shape
    raise ValueError(f"no tensor {rule.theirs[0]!r} makes {', '.join(map(str, ours))}")


def _inverted(
    module: Any, rule: WeightRule, ours: Sequence[Any], shape: tuple[int, ...], start: int,
    rows: int,
) -> jax.Array:  # fmt: skip
    """Some rows of the tensor of which a rule makes these parameters."""
    count = math.prod(shape)
    places = jnp.arange(1, count + 1, dtype=jnp.int32).reshape(shape)
    added = rule.convert(module, jnp.zeros(shape, jnp.int32))
    tensor = np.empty(count, np.float32)
    made = zip(rule.ours, ours, rule.convert(module, places), added, strict=True)
    for path, parameter, source, constant in made:
        # A place of 0 is a number that the rule makes of no tensor.
        source, constant = np.asarray(source - constant).astype(np.int64), np.asarray(constant)
        difference = np.asarray(parameter[...], np.float32) - constant.astype(np.float32)
        if difference[source == 0].any():
            raise ValueError(
                f"{path} is not {constant.flat[0]}, and checkpoints have no tensor of it"
            )
        tensor[source[source > 0] - 1] = difference[source > 0]
    part = tensor.reshape(shape)[start : start + rows]
    part = part.reshape(rule.stored) if isinstance(rule.stored, tuple) else part
    is_whole = jnp.issubdtype(ours[0].dtype, jnp.integer)
    return jnp.asarray(part, jnp.int32 if is_whole else None)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
