"""The table of systems by name, and a system with its budget in one word, such as "tactic:0.9"."""

from typing import NamedTuple

from toolkit._checks import checked
from toolkit.attention._checks import check_choice
from toolkit.attention.sparse.budget import Budget, FixedTokens, MassTarget, Ratio
from toolkit.attention.sparse.decode.baselines import Oracle, Random, Window
from toolkit.attention.sparse.decode.hata import HATA
from toolkit.attention.sparse.decode.pqcache import PQCache
from toolkit.attention.sparse.decode.quest import Quest
from toolkit.attention.sparse.decode.tactic import Tactic
from toolkit.attention.sparse.selector import Selector

SELECTORS: dict[str, type[Selector]] = {
    "quest": Quest,
    "tactic": Tactic,
    "hata": HATA,
    "pqcache": PQCache,
    "oracle": Oracle,
    "window": Window,
    "random": Random,
}


class Choice(NamedTuple):
    """A system and how much it may read.

    Example:
        >>> choose("oracle:0.9").selector
        Oracle(sinks=4, recent=16)
    """

    selector: Selector
    budget: Budget


@checked
def choose(words: str) -> Choice:
    """Read a system and its budget from one word.

    Args:
        words: "name:budget"; a whole number is that of the tokens, one below 1 the share of the
            softmax to recover, one with "%" the share of the tokens.

    Returns:
        The selector with its defaults, and the budget.

    Raises:
        ValueError: no such system, or no such budget.

    Example:
        >>> choose("window:256").budget
        FixedTokens(tokens=256)
    """
    name, _, amount = words.partition(":")
    check_choice("the system in words", name, SELECTORS)
    try:
        if amount.endswith("%"):
            budget: Budget = Ratio(float(amount[:-1]) / 100)
        elif amount.isdecimal():
            budget = FixedTokens(int(amount))
        else:
            budget = MassTarget(float(amount))
    except ValueError as error:
        raise ValueError(
            f'words need a budget of tokens, of mass or in percent, such as "{name}:256"'
            f', "{name}:0.9" or "{name}:10%"; got {words!r} ({error}).'
        ) from None
    if budget.needs_mass and not SELECTORS[name].estimates_mass:
        raise ValueError(f"{name} estimates no mass; give it tokens or percent, not {amount}.")
    return Choice(SELECTORS[name](), budget)
