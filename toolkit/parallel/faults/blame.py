"""Avoidable collectives of a program, each with the changes that were tried.

Each collective of the compiled program is matched with a modelled one. If no single change reduces
it in the model, it counts as needed. Otherwise the most promising change is compiled; a collective
reported as removed is absent from this backend's program.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from toolkit._checks import checked
from toolkit.measure import in_words
from toolkit.parallel.causes.cause import ExplainedCollective
from toolkit.parallel.causes.explanation import Explanation
from toolkit.parallel.causes.reading import explain
from toolkit.parallel.dataflow.flow import RANKING
from toolkit.parallel.faults.proposals import Proposal, all_proposals, bytes_held, proposals_for
from toolkit.parallel.faults.search import best_changes
from toolkit.parallel.faults.variant import variant_of


@dataclass(frozen=True)
class Trial:
    """A change of the layout and its compiled effect.

    Attributes:
        change: description.
        removes: whether the collective is gone and the total sent per device is lower.
        bytes_sent: total bytes sent per device with the change.
        flops: modelled FLOPs per device with the change, as a multiple of those without.

    Example:
        >>> Trial("lay w as P('data'), not P()", True, 128.0).removes
        True
    """

    change: str
    removes: bool
    bytes_sent: float
    flops: float = 1.0


@dataclass(frozen=True)
class Finding:
    """One collective and the attempts to remove it.

    Attributes:
        item: the collective with its cause.
        trials: changes tried, in order; empty if it is needed.

    Example:
        >>> from toolkit.measure import Collective
        >>> collective = Collective("all-reduce", 64, 64, 8, 112.0, 3, True, "psum")
        >>> cause = ("partial sums", "whole", "model.py:12", "loss", "dot", "add")
        >>> Finding(ExplainedCollective(collective, ("data",), *cause), ()).is_textbook
        True
    """

    item: ExplainedCollective
    trials: tuple[Trial, ...]

    @property
    def is_textbook(self) -> bool:
        """Whether no single change would reduce it in the model."""
        return not self.trials


@dataclass(frozen=True)
class Blame:
    """Every collective of a program with its cause; `print` it.

    Attributes:
        explanation: the explanation of the unchanged program.
        findings: one per collective, largest first.
        together: changes one on top of another, by modelled time, each with the total compiled so
            far; empty if none sends less.

    Example:
        >>> str(Blame(Explanation(None, (), ()), ()))
        'nothing to blame: no collectives'
    """

    explanation: Explanation
    findings: tuple[Finding, ...]
    together: tuple[Trial, ...] = ()

    def __str__(self) -> str:
        """One paragraph per collective: its cause, then the changes tried; last all together."""
        if not self.findings:
            return "nothing to blame: no collectives"
        sent = self.explanation.bytes_sent
        lines = [f"a device sends {in_words(sent, 'bytes')} (compiled)"]
        for finding in self.findings:
            item = finding.item
            size = in_words(item.collective.total_bytes_sent, "bytes")
            lines.append(f"{size} at {item.source}: {item.sentence}")
            if finding.is_textbook:
                lines.append("    needed: no single change lessens it (modelled)")
            for trial in finding.trials:
                verdict = "removed" if trial.removes else "not removed"
                lines.append(f"    {trial.change}: {verdict}, {_effect(trial)}")
        if self.together:
            lines.append("together, one on top of another:")
            lines += [f"    {trial.change}: {_effect(trial)}" for trial in self.together]
        return "\n".join(lines)


def _effect(trial: Trial) -> str:
    work = f", {trial.flops:.3g} times the FLOPs (modelled)" if trial.flops > 1.001 else ""
    return f"{in_words(trial.bytes_sent, 'bytes')} sent in all (compiled){work}"


@checked
def blame(
    function: Callable, arguments: tuple, *,
    results: Any = None, most_trials: int = 1, most_changes: int = 4,
) -> Blame:  # fmt: skip
    """Find avoidable collectives and try to remove each.

    A change affects the sharding of an argument (with its optimiser moments and corresponding
    results), of a result, or of a constraint in the program, or the reshapes that make
    microbatches, which then consist of other rows. No change may increase the memory held per
    device, as replicating everything would remove all communication.

    Arguments on explicit axes are traced under `jax.set_mesh`. What the program decides by
    `jax.sharding.reshard` or `out_sharding` counts as a constraint, and its results have the
    shardings of their types unless `results` gives others.

    Args:
        function: the function to compile, such as a train step, not jitted.
        arguments: a tuple of its arguments: trees of arrays or ShapeDtypeStructs on a mesh.
        results: tree of NamedShardings of its results, as of a train step whose results are its
            next arguments; None lets the compiler choose.
        most_trials: most changes to try per collective.
        most_changes: most changes to try one on top of another; 0 tries none.

    Raises:
        ValueError: when no argument is on a mesh, or `results` does not fit.
        TypeError: when an argument is not a tree of arrays.

    Cost: One compilation of the program, one for each change tried (a change that serves several
        collectives is compiled once), and a modelled pass over it for each change there is, once
        more after each of `most_changes`.

    Example:
        >>> from jax.sharding import NamedSharding, PartitionSpec as P
        >>> rows = NamedSharding(make_mesh({"data": 8}), P("data"))  # eight devices
        >>> x, w = (jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=rows) for _ in "xw")
        >>> print(blame(lambda x, w: x @ w, (x, w)).findings[0].item.origin)
        argument w P('data',)
    """
    if not 1 <= most_trials <= 100:
        raise ValueError(f"most_trials={most_trials}: want 1 to 100")
    if not 0 <= most_changes <= 20:
        raise ValueError(f"most_changes={most_changes}: want 0 to 20")
    variant = variant_of(function, arguments, results)
    explanation = explain(variant.compile())
    base = Proposal("", variant, variant.flow(RANKING), bytes_held(variant))
    every = all_proposals(variant, RANKING)
    before = Counter(map(_key, explanation.collectives))
    compiled: dict[str, Explanation] = {}
    flops: dict[str, float] = {}

    def compile_it(proposal: Proposal) -> Explanation:
        flops[proposal.words] = proposal.flow.flops / base.flow.flops if base.flow.flops else 1.0
        return explain(proposal.variant.compile())

    def trial_of(item: ExplainedCollective, words: str) -> Trial:
        after = compiled[words]
        is_gone = Counter(map(_key, after.collectives))[_key(item)] < before[_key(item)]
        is_less = after.bytes_sent < explanation.bytes_sent
        return Trial(words, is_gone and is_less, after.bytes_sent, flops[words])

    findings = []
    by_size = sorted(explanation.collectives, key=lambda item: -item.collective.total_bytes_sent)
    for item in by_size:
        trials: list[Trial] = []
        for proposal in proposals_for(item, base, every, RANKING)[:most_trials]:
            if proposal.words not in compiled:
                compiled[proposal.words] = compile_it(proposal)
            trials.append(trial_of(item, proposal.words))
            if trials[-1].removes:
                break
        findings.append(Finding(item, tuple(trials)))
    together: list[Trial] = []
    for proposal in best_changes(base, RANKING, most_changes) if findings else ():
        sent = (after := compile_it(proposal)).bytes_sent
        together.append(Trial(proposal.words, True, sent, flops[proposal.words]))
        if len(together) == 1:
            compiled.setdefault(proposal.words, after)
    # What sends no less in the compiled program is left away.
    totals = [explanation.bytes_sent, *(change.bytes_sent for change in together)]
    together = together[: totals.index(min(totals))]
    # If the compiler moves what the model does not, a change made for another may remove it.
    for place, finding in enumerate(findings):
        others = (trial_of(finding.item, words) for words in compiled)
        removing = min(
            (trial for trial in others if trial.removes),
            key=lambda trial: trial.bytes_sent,
            default=None,
        )
        if finding.is_textbook and removing is not None:
            findings[place] = Finding(finding.item, (removing,))
    return Blame(explanation, tuple(findings), tuple(together))


def _key(item: ExplainedCollective) -> tuple:
    """Identifies a collective across two programs."""
    return item.collective.kind, item.axes, item.collective.bytes, item.source
