r"""Rates, decays and initial weights that hold for a wider, deeper or longer training.

Each weight is told apart by which of its axes grow with the width of the model:

    fixed     none
    input     its output alone: embeddings, biases, gains
    output    its input alone: heads, routers, keys of a fixed number of heads, latents
    hidden    both

With m_in and m_out the growth of the input and output axis, 1 for an axis that stays:

              initial size   rate: Adam    SGD            Muon
    fixed     the same           1             1              1 (by Adam)
    input     the same           1             m_out          1 (by Adam)
    output    1 / m_in           1 / m_in      1 / m_in       1 / m_in (by Adam)
    hidden    m_in^-1/2          1 / m_in      m_out / m_in   sqrt(m_out / m_in)

The decay grows as the rate falls, so that their product stays. A head that lies as the embedding
does, [vocabulary, width], counts as an input, and its logits are divided by the growth of the width
instead. What a sub-layer adds to a residual stream is divided by the growth of the depth. An update
then moves every activation as far as it did in the small model, which `coordinate_check` measures.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from toolkit._checks import checked

HORIZON = 0.32  # of the rate in the number of tokens, fitted by Bjorck et al.
VECTORS = ("/bias", "_bias", "/scale", "_scale")  # inputs whose last axis may stay: [heads, size]
Optimizer = Literal["adam", "sgd", "muon"]
Axis = Literal["first", "last"]
Roles = Mapping[str, Literal["input", "output"]]


@dataclass(frozen=True)
class Transfer:
    """What changes between a small model, whose rate is tuned, and a large one.

    Attributes:
        roles: "fixed", "input", "output" or "hidden" for each weight; labels for
            `optax.multi_transform`.
        rates: factor of each weight's learning rate.
        decays: factor of each weight's decay where the decay is multiplied by the rate.
        epsilon: factor of Adam's epsilon in sub-layers; 1 / width is that of embeddings and heads,
            whose gradients do not fall with the depth (the authors' code has this one for all).
        logits: factor of the logits of a head that lies as the embedding, [vocabulary, width];
            1 is right for a head [width, vocabulary], whose weights change instead.
        residual: factor of what a sub-layer adds to the residual stream.

    Example:
        >>> small, large = ({"w": jnp.ones((n, n)), "b": jnp.ones(n)} for n in (8, 32))
        >>> moved = transfer(small, large, width=4)
        >>> moved.roles, moved.rates, moved.logits
        ({'b': 'input', 'w': 'hidden'}, {'b': 1.0, 'w': 0.25}, 0.25)
    """

    roles: Any
    rates: Any
    decays: Any
    epsilon: float
    logits: float
    residual: float

    def scale_rates(self) -> optax.GradientTransformation:
        """Multiply each weight's update by its factor of the rate: the last but the rate itself."""
        return optax.stateless(
            lambda updates, _: jax.tree.map(lambda u, rate: u * rate, updates, self.rates)
        )

    def add_decayed_weights(self, weight_decay: float) -> optax.GradientTransformation:
        """Add each weight times its decay to its update, before `scale_rates`."""

        def add(updates: Any, params: Any) -> Any:
            if params is None:
                raise ValueError("params: got None; a decay needs the weights")
            add_one = lambda u, w, decay: u + weight_decay * decay * w  # noqa: E731
            return jax.tree.map(add_one, updates, params, self.decays)

        return optax.stateless(add)


@checked
def transfer(
    small: Any, large: Any, *,
    width: float, depth: float = 1.0, batch: float = 1.0, tokens: float = 1.0,
    optimizer: Optimizer = "adam", input_axis: Axis = "first", roles: Roles | None = None,
) -> Transfer:  # fmt: skip
    r"""Factors that carry the rate of a small model over to a large one.

        rate of a weight = small rate * width factor * batch^b * tokens^-0.32

    where b is 1 for SGD and 1/2 otherwise. The factors of the width follow from the shapes of the
    two models; see the module. The decay of a weight is such that its product with the width's
    factor of the rate stays the same.

        moved = transfer(small, large, width=8, depth=2)
        optimizer = optax.chain(
            optax.scale_by_adam(eps=1e-8 * moved.epsilon),
            moved.add_decayed_weights(0.1),
            moved.scale_rates(),
            optax.scale_by_learning_rate(rate_of_the_small_model),
        )
        LoopedConfig(..., head_scale=moved.logits, residual_scale=moved.residual)

    The size of a head must be the same in both models, so that the wide one has more heads, or its
    scores must be divided by that size instead of its root.

    Args:
        small: the weights of a model of the small width, or their shapes, with the vocabulary,
            number of experts and *depth* of the large one.
        large: those of the large model, a tree of the same structure.
        width: growth of the residual stream; at least one axis must grow by it.
        depth: growth of the number of layers; a loop counts as its layers.
        batch: growth of the number of tokens in a batch, which should stay below the size from
            which larger batches no longer help.
        tokens: growth of the number of tokens trained on.
        optimizer: "adam", "sgd" or "muon"; the last as in `optax.contrib`, with Adam for all but
            hidden weights of two axes.
        input_axis: where the input of a weight stands: "first" as in flax, or "last" as in torch.
        roles: "input" or "output" by path, as "head/weight", or by the end of the paths of several
            weights; the longest decides. All axes of theirs that grow are outputs, or inputs.

    Raises:
        ValueError: where the trees differ in more than sizes, more than two axes of a weight grow,
            or none grows by `width`; for roles of no weight, or none of what in torch may be an
            embedding or a head; for a `depth` with "sgd": it changes the rate in sub-layers alone.

    Source: Yang and Hu, "Tensor Programs V" (arXiv:2203.03466), table 8; for Muon, Yang, Simon and
        Bernstein, "A Spectral Condition for Feature Learning" (arXiv:2310.17813); for depth, Dey et
        al., CompleteP (arXiv:2505.01618), table 1 with alpha 1; for the batch, Malladi et al.
        (arXiv:2205.10287); for the horizon, Bjorck et al. (arXiv:2409.19913).

    Example:
        >>> small, large = ({"up": jnp.ones((n, 4 * n))} for n in (64, 256))
        >>> transfer(small, large, width=4, tokens=16).rates
        {'up': 0.1029...}
    """
    for name, growth in {"width": width, "depth": depth, "batch": batch, "tokens": tokens}.items():
        if not 0 < growth < math.inf:
            raise ValueError(f"{name}: got {growth}, wanted a positive number")
    if depth != 1 and optimizer == "sgd":
        raise ValueError(f"depth: got {depth:g} with 'sgd', wanted 1, or 'adam' or 'muon'")
    leaves, tree = _grown(small, large, input_axis, roles or {})
    every = sorted({growth for pair, *_ in leaves for growth in pair} - {1.0})
    if width != 1 and not any(math.isclose(width, growth) for growth in every):
        shown = ", ".join(f"{growth:g}" for growth in every) or "1"
        raise ValueError(f"width: nothing grows by {width:g}; axes grow by {shown}")
    rates = [_rate(optimizer, pair, old.shape, new.shape) for pair, old, new in leaves]
    common = batch ** (1.0 if optimizer == "sgd" else 0.5) * tokens**-HORIZON
    return Transfer(
        tree.unflatten([_role(pair) for pair, *_ in leaves]),
        tree.unflatten([rate * common for rate in rates]),
        tree.unflatten([1 / rate for rate in rates]),
        epsilon=1 / (width * depth),
        logits=1 / width,
        residual=1 / depth,
    )


@checked
def transferred_weights(
    small: Any, large: Any, *, input_axis: Axis = "first", roles: Roles | None = None
) -> Any:
    """The initial weights of a large model, resized as those of a small one ask.

        rms(w) = rms(small w) times 1 for inputs, m_in^-1/2 for hidden, m_in^-1 for output weights

    Args:
        small: initial weights of the small model, as for `transfer`.
        large: initial weights of the large model, the same tree.
        input_axis: as in `transfer`.
        roles: as in `transfer`.

    Returns:
        `large`, each array of at least two axes times a number; zeros and arrays of one axis, which
        are gains and biases, as they are.

    Source: Yang and Hu, "Tensor Programs V" (arXiv:2203.03466), table 8.

    Example:
        >>> keys = jax.random.split(jax.random.key(0))
        >>> small, large = (jax.random.normal(key, (n, n)) for key, n in zip(keys, (64, 256)))
        >>> float(jnp.std(transferred_weights(small, large)).round(1))
        0.5
    """

    def resized(pair: tuple[float, float], old: Any, new: Any) -> Any:
        if new.ndim < 2:
            return new
        power = {"hidden": -0.5, "output": -1.0}.get(_role(pair), 0.0)
        wanted, found = (jnp.sqrt(jnp.mean(jnp.square(x))) for x in (old, new))
        factor = jnp.where(found > 0, wanted / found, 1) * pair[0] ** power
        return (new * factor).astype(new.dtype)

    leaves, tree = _grown(small, large, input_axis, roles or {})
    return tree.unflatten([resized(*leaf) for leaf in leaves])


def _grown(small: Any, large: Any, input_axis: Axis, roles: Roles) -> tuple[list, Any]:
    """Of each weight its growth, the small one and the large one; and the structure of the tree."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(large)
    before, tree_before = jax.tree.flatten(small)
    if tree != tree_before:
        raise ValueError("small: its tree differs from that of large; give it the large depth")
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    given = {}
    for end in sorted(roles, key=len):
        named = [name for name in names if f"/{name}".endswith(f"/{end}")]
        if not named or roles[end] not in ("input", "output"):
            raise ValueError(f"roles: {end!r} is {roles[end]!r}, wanted input or output of {names}")
        given |= dict.fromkeys(named, roles[end])
    return [
        (_growth(name, old.shape, new.shape, input_axis, given.get(name)), old, new)
        for name, old, (_, new) in zip(names, before, leaves, strict=True)
    ], tree


def _growth(
    name: str, old: tuple[int, ...], new: tuple[int, ...], input_axis: Axis, role: str | None
) -> tuple[float, float]:
    """Of the input and of the output; 1 for one that stays or is not there."""
    if len(old) != len(new):
        raise ValueError(f"small: {name} has {len(old)} axes, in large it has {len(new)}")
    axes = [axis for axis in range(len(old)) if old[axis] != new[axis]]
    if len(axes) > 2:
        raise ValueError(
            f"small: {len(axes)} axes of {name} differ, {list(old)} and {list(new)}; wanted at "
            "most an input and an output, so that layers and experts are as many in both"
        )
    growths = [new[axis] / old[axis] for axis in axes]
    if role or len(axes) < 2:
        # A state of flax.nnx has the array of a weight as its `value`.
        is_vector = len(old) < 2 or f"/{name}".removesuffix("/value").endswith(VECTORS)
        is_last = axes == [len(old) - 1]
        if is_last and input_axis == "last" and not (is_vector or role):
            raise ValueError(f"roles: {name} may be embedding or head; wanted 'input' or 'output'")
        is_input = role == "input" if role else is_vector or is_last == (input_axis == "first")
        growth = math.prod(growths)
        return (1.0, growth) if is_input else (growth, 1.0)
    into, out = growths if input_axis == "first" else growths[::-1]
    return into, out


def _role(growth: tuple[float, float]) -> str:
    into, out = growth
    if into == 1:
        return "fixed" if out == 1 else "input"
    return "output" if out == 1 else "hidden"


def _rate(
    optimizer: Optimizer, growth: tuple[float, float], old: tuple[int, ...], new: tuple[int, ...]
) -> float:
    """The factor of the width."""
    into, out = growth
    if optimizer == "sgd":
        return out / into
    if optimizer == "adam" or _role(growth) != "hidden" or len(new) != 2:
        return 1 / into
    # optax multiplies an orthogonal update by max(1, columns / rows)^1/2 itself.
    before, after = (max(1.0, shape[1] / shape[0]) ** 0.5 for shape in (old, new))
    return math.sqrt(out / into) * before / after
