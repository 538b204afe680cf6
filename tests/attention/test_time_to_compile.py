"""What the gradient of a mixer costs to trace and compile, beside the plainest form of it.

The aim is 1.5 times. Softmax attention reaches it where it is dense; in tiles, and Gated DeltaNet
in chunks, are programs of two and one and a half times as many kernels. The limits keep them from
growing.
"""

import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from toolkit.attention import gated_delta_net, gated_delta_net_reference, softmax_attention

BATCH, HEADS, SIZE = 2, 4, 64
CASES = {"softmax, dense": 128, "softmax, in tiles": 256, "gdn": 256}  # tokens
MOST = {"softmax, dense": 1.2, "softmax, in tiles": 2.1, "gdn": 1.6}  # kernels: 1.1, 2.1 and 1.5
# Measured: 1.9, 3.4 and 2.5 with the suite's flags; 1.4, 2.2 and 1.8 without.
MOST_TIME = {"softmax, dense": 2.3, "softmax, in tiles": 4.0, "gdn": 3.0}


@pytest.fixture(autouse=True)
def _no_program_from_disk():
    is_enabled = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", is_enabled)
    reset_cache()


def kernels(program):
    """How many LLVM compiles: XLA's CPU backend compiles equal ones once, and products never."""
    text = re.sub(r", metadata=\{[^}]*\}", "", program.as_text())
    bodies = dict(re.findall(r"^(%\S+) \(.*?\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL))
    calls = re.findall(r"kind=kLoop, calls=([^\s,]+)", text)

    def without_names(body):
        names = {}
        return re.sub(r"%[\w.\-]+", lambda found: names.setdefault(found[0], str(len(names))), body)

    return len({without_names(bodies[name]) for name in calls})


def inputs_and_forms(name):
    shape = (BATCH, CASES[name], HEADS)
    q, k, v = jax.random.normal(jax.random.key(0), (3, *shape, SIZE)) / SIZE**0.5
    if name == "gdn":
        gates = jnp.full(shape, -0.1), jnp.full(shape, 0.5)
        forms = gated_delta_net, gated_delta_net_reference
        return (q, k, v, *gates), [lambda *x, form=form: form(*x)[0] for form in forms]
    ours = lambda *x: softmax_attention(*x)[0]  # noqa: E731
    return (q, k, v), [ours, lambda *x: jax.nn.dot_product_attention(*x, is_causal=True)]


def gradient_of(function, inputs):
    return jax.jit(
        jax.grad(lambda *x: (function(*x) ** 2).sum(), argnums=tuple(range(len(inputs))))
    )


def seconds(function, inputs):
    """Processor time to trace and compile the gradient; the least of two."""
    found = []
    for _ in range(2):
        jax.clear_caches()
        start = time.process_time()
        gradient_of(function, inputs).lower(*inputs).compile()
        found.append(time.process_time() - start)
    return min(found)


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[pytest.mark.nightly] if x == "gdn" else []) for x in CASES],
)
def test_a_gradient_has_few_kernels_beside_the_plain_form(name):
    inputs, forms = inputs_and_forms(name)
    ours, plain = (gradient_of(form, inputs).lower(*inputs).compile() for form in forms)
    for found, expected in zip(ours(*inputs), plain(*inputs), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
    assert kernels(plain) > 10
    assert kernels(ours) <= MOST[name] * kernels(plain)


@pytest.mark.nightly
@pytest.mark.timed
@pytest.mark.parametrize("name", CASES)
def test_a_gradient_compiles_within_a_few_times_the_plain_form(name):
    inputs, forms = inputs_and_forms(name)
    ours, plain = (seconds(form, inputs) for form in forms)
    assert ours < MOST_TIME[name] * plain
