"""The table of systems by name, and both in one word, such as "tactic:mass=0.9"."""

from typing import NamedTuple

from toolkit._checks import checked
from toolkit.attention._checks import check_choice
from toolkit.attention.sparse.budget import Budget, FixedTokens, MassTarget, Ratio
from toolkit.attention.sparse.decode.baselines import Oracle, Random, Window
from toolkit.attention.sparse.decode.hata import HATA
from toolkit.attention.sparse.decode.infllm import InfLLM
from toolkit.attention.sparse.decode.pqcache import PQCache
from toolkit.attention.sparse.decode.quest import Quest
from toolkit.attention.sparse.decode.tactic import Tactic
from toolkit.attention.sparse.evict.h2o import H2O
from toolkit.attention.sparse.evict.knorm import Knorm
from toolkit.attention.sparse.evict.kvzip import KVzip
from toolkit.attention.sparse.evict.snapkv import SnapKV
from toolkit.attention.sparse.evict.tova import TOVA
from toolkit.attention.sparse.selector import Selector

SELECTORS: dict[str, type[Selector]] = {
    "quest": Quest,
    "tactic": Tactic,
    "hata": HATA,
    "pqcache": PQCache,
    "infllm": InfLLM,
    "snapkv": SnapKV,
    "h2o": H2O,
    "tova": TOVA,
    "knorm": Knorm,
    "kvzip": KVzip,
    "oracle": Oracle,
    "window": Window,
    "random": Random,
}

MASS = "mass="  # before a share of the softmax, so that 1 token and all of the mass differ


class Choice(NamedTuple):
    """A system and how much it may read.

    Example:
        >>> choose("oracle:mass=0.9").selector
        Oracle(sinks=4, recent=16)
    """

    selector: Selector
    budget: Budget


@checked
def choose(words: str) -> Choice:
    """Read a system and its budget from one word.

    Args:
        words: "name:budget", the budget a number of tokens, "10%" of the tokens, or "mass=0.9",
            the share of the softmax to recover.

    Returns:
        The selector with its defaults, and the budget.

    Example:
        >>> choose("window:256").budget
        FixedTokens(tokens=256)
    """
    name, _, amount = words.partition(":")
    check_choice("the system in words", name, SELECTORS)
    try:
        if amount.endswith("%"):
            budget: Budget = Ratio(float(amount[:-1]) / 100)
        elif amount.startswith(MASS):
            budget = MassTarget(float(amount.removeprefix(MASS)))
        else:
            budget = FixedTokens(int(amount))
    except ValueError as error:
        raise ValueError(
            f'words need a budget of tokens, of mass or in percent, such as "{name}:256"'
            f', "{name}:{MASS}0.9" or "{name}:10%"; got {words!r} ({error}).'
        ) from None
    if budget.needs_mass and not SELECTORS[name].estimates_mass:
        raise ValueError(f"{name} estimates no mass; give it tokens or percent, not {amount!r}.")
    return Choice(SELECTORS[name](), budget)
