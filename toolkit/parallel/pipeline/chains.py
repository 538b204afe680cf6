"""Chains of flax nnx modules as stages."""

from collections.abc import Callable, Sequence
from typing import Any

from toolkit._checks import checked
from toolkit.parallel.pipeline.tasks import Context


@checked
def module_stages(
    modules: Sequence[Any], call: Callable[..., Any] | None = None
) -> tuple[list[Callable[..., Any]], list[Any]]:
    """Stage functions and weights of a chain of flax nnx modules, one module per stage.

    Modules of one structure share a function, so that a `Pipeline` compiles it once.

    Args:
        modules: in order; each takes what the one before it returns. A stage of several layers is
            an `nnx.Sequential`, or a module with a list of layers.
        call: (module, x, context) -> x; None: module(x).

    Returns:
        (stage functions, weights), for `Pipeline`. `nnx.update(module, row)` writes a row back.

    Raises:
        ValueError: a module has state beside its parameters, which a microbatch would change.

    Example:
        >>> from flax import nnx
        >>> layers = [nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(2)]
        >>> stages, weights = module_stages(layers)
        >>> stages[0](weights[0], jnp.ones(4), None).shape
        (4,)
    """
    from flax import nnx

    functions: dict[Any, Callable[..., Any]] = {}
    stages, weights = [], []
    for index, module in enumerate(modules):
        graph, parameters, others = nnx.split(module, nnx.Param, ...)
        if left := [path for path, _ in nnx.to_flat_state(others)]:
            path = ".".join(map(str, left[0]))
            raise ValueError(
                f"modules: {path} of stage {index} is no parameter; a stage must be a function of "
                "its parameters and input"
            )

        def stage(row: Any, x: Any, context: Context, graph: Any = graph) -> Any:
            module = nnx.merge(graph, row)
            return module(x) if call is None else call(module, x, context)

        stages.append(functions.setdefault(graph, stage))
        weights.append(parameters)
    return stages, weights
