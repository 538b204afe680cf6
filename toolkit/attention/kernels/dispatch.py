"""From the mixers to the kernels of this machine: pads time to whole chunks, picks the platform.

The kernels of chunks take [batch, time, heads, ...] as the mixers do, those of a step [rows, ...],
where a row is one head of one sequence. Both take log-decays as `decays.py` does, bounded so that
they are finite.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from toolkit.attention.best_known import warn_experimental
from toolkit.attention.execution.derivatives import gradient_only, no_derivative
from toolkit.attention.execution.platforms import run_on
from toolkit.attention.linear.engine.rule import Rule, act
from toolkit.attention.linear.engine.tokens import Tokens

CHUNK = 64


def over_rows(chunked: Callable[..., Any]) -> Callable[..., Any]:
    """Let a kernel that takes [rows, time, ...] take heads; a row is one head of one sequence."""

    def run(q, k, v, g, beta, state, *, documents=None, **settings):
        batch, time, heads, _ = v.shape

        def rows(x: Array) -> Array:
            return jnp.moveaxis(x, 2, 1).reshape(-1, time, *x.shape[3:])

        if documents is not None:
            documents = jnp.repeat(documents, heads, axis=0)
        tokens = [rows(x) for x in (q, k, v, g)]
        beta = None if beta is None else rows(beta)
        flat = state.reshape(-1, *state.shape[2:])
        out, flat = chunked(*tokens, beta, flat, documents=documents, **settings)
        out = jnp.moveaxis(out.reshape(batch, heads, time, -1), 1, 2)
        return out, flat.reshape(state.shape)

    return run


def _tpu(name: str) -> Callable[..., Any]:
    from toolkit.attention.kernels.tpu import chunked as tpu_chunked
    from toolkit.attention.kernels.tpu import step as tpu_step

    return over_rows(tpu_chunked.chunked) if name == "chunked" else tpu_step.step


def _gpu(name: str) -> Callable[..., Any]:
    from toolkit.attention.kernels.gpu import chunked as gpu_chunked

    if name != "chunked":
        raise NotImplementedError(
            'No kernel makes a step on a GPU, where XLA is faster: use implementation="xla".'
        )
    return gpu_chunked.chunked


def _gpu_latent() -> Callable[..., tuple[Array, Array]]:
    from toolkit.attention.kernels.gpu import latent as gpu_latent

    return gpu_latent.decode


# Platform -> its kernels by name, "chunked" or "step", and that of one step against a latent cache.
KERNELS = {"tpu": _tpu, "cuda": _gpu}
LATENT_KERNELS = {"cuda": _gpu_latent}


@contextmanager
def interpreted(platform: str, interpret: Any = True) -> Iterator[None]:
    """Within it `implementation="pallas"` on a CPU runs a platform's kernels by jax's interpreter.

    They are slow: this is to check kernels where there is no accelerator. `interpret` is what the
    kernels take. Programs that were compiled before, or within, are forgotten at both ends.
    """

    def on_a_cpu(load: Callable[..., Callable[..., Any]]) -> Callable[..., Callable[..., Any]]:
        return lambda *name: partial(load(*name), interpret=interpret)

    found = [table for table in (KERNELS, LATENT_KERNELS) if platform in table]
    jax.clear_caches()
    for table in found:
        table["cpu"] = on_a_cpu(table[platform])
    try:
        yield
    finally:
        for table in found:
            del table["cpu"]
        jax.clear_caches()


def by_platform(name: str, *rows: Any, documents: Array | None = None, **sizes: int) -> Any:
    """Run the kernel of the platform for which the program is lowered, or refuse in one line.

    A platform whose kernel does not take these inputs is treated as one without kernels.
    """
    warn_experimental("recurrent" if name == "chunked" else "step")
    arrays = {} if documents is None else {"documents": documents}

    def branch(kernel):
        def run(rows, arrays):
            out, state = kernel(*rows, **arrays, **sizes)
            return out.astype(rows[2].dtype), state

        return run

    branches, faults = {}, {}
    for platform, kernel in KERNELS.items():
        try:
            run = branch(kernel(name))
            jax.eval_shape(run, rows, arrays)
        except (NotImplementedError, TypeError, ValueError) as fault:
            faults[platform] = fault
        else:
            branches[platform] = run
    here = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    if here in faults or not branches:
        raise faults.get(here) or next(iter(faults.values()))
    needs = 'implementation="pallas" needs a TPU or an NVIDIA GPU of the Hopper generation'
    reasons = [f" ({platform}: {fault})" for platform, fault in faults.items()]
    return run_on(branches, rows, arrays, otherwise=needs + "".join(reasons))


def run_kernels(
    rule: Rule,
    tokens: Tokens,
    state: Float[Array, "batch heads key value"],
    starts: Bool[Array, "batch time"] | None,
    chunk: int | None,
) -> tuple[Float[Array, "batch time heads value"], Float[Array, "batch heads key value"]]:
    """Run tokens through the device's chunked kernel."""
    arrays, g, state = gradient_only((tokens.arrays, tokens.g, state))
    tokens = Tokens(arrays, g, tokens.scale)
    time = g.shape[1]
    if not isinstance(time, int):
        raise ValueError(
            f'implementation="pallas" needs a known number of tokens, got {time}; "xla" runs any.'
        )
    size = CHUNK if chunk is None else chunk
    padding = -time % size

    def whole(x: Array, mode: str = "constant") -> Array:
        return jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2), mode=mode)

    documents = None
    if starts is not None:
        documents = whole(jnp.cumsum(starts.astype(jnp.int32), axis=1), "edge")
    q, k, v, beta = _arguments(rule, tokens)
    beta = None if beta is None else whole(beta)
    arrays = whole(q), whole(k), whole(v), whole(_bounded(g)), beta, state
    out, state = by_platform("chunked", *arrays, documents=documents, chunk=size)
    return out[:, :time], state


def step_kernels(
    rule: Rule, token: Tokens, state: Float[Array, "batch heads key value"]
) -> tuple[Float[Array, "batch heads key value"], Float[Array, "batch heads value"]]:
    """Run one token through the device's decode kernel."""
    arrays, g, state = no_derivative("the step", (token.arrays, token.g, state))
    token = Tokens(arrays, g, token.scale)
    batch, heads = g.shape[:2]
    rows = lambda x: x.reshape(batch * heads, *x.shape[2:])  # noqa: E731
    q, k, v, beta = _arguments(rule, token)
    beta = None if beta is None else rows(beta)
    arrays = rows(q), rows(k), rows(v), rows(_bounded(g)), beta, rows(state)
    out, new_state = by_platform("step", *arrays)
    return new_state.reshape(state.shape), out.reshape(batch, heads, -1)


def attend_latent_slots(*arrays: Array, scale: float) -> tuple[Array, Array]:
    """One query per head against a latent cache; arguments and results of `gpu/latent.decode`."""
    warn_experimental("latent")
    arrays = no_derivative("the step", arrays)
    branches = {name: partial(load(), scale=scale) for name, load in LATENT_KERNELS.items()}
    for attend in branches.values():
        jax.eval_shape(attend, *arrays)  # refuses what it does not take
    needs = 'implementation="pallas" needs an NVIDIA GPU of the Hopper generation'
    return run_on(branches, *arrays, otherwise=needs)


def _arguments(rule: Rule, tokens: Tokens) -> tuple[Array, Array, Array, Array | None]:
    """q, k and v of a rule that adds, and beta too of one that corrects, in the dtype of values."""
    action, dtype = act(rule, tokens.g.dtype, tokens.arrays), tokens.arrays[2].dtype
    if action.addition:
        (k, v), beta = action.addition, None
    else:
        assert action.correction is not None  # rules with kernels add or correct
        _, k, v, beta = action.correction
    assert v is not None
    return action.query.astype(dtype), k.astype(dtype), v.astype(dtype), beta


def _bounded(g: Array) -> Array:
    # e^g below the smallest normal number is zero, and a finite g keeps differences defined.
    return jnp.maximum(g, jnp.log(jnp.finfo(g.dtype).tiny).astype(g.dtype))
