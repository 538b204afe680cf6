"""Which collectives of a program need not be: each with a change that was tried.

For each collective of the compiled program the modelled one is sought: a textbook layout has those
that no change of one thing lessens. For the others the change that the model likes best is made
and compiled again; what is reported as removed is so in this backend's own program.
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
from toolkit.parallel.dataflow.flow import Machine
from toolkit.parallel.faults.proposals import Proposal, all_proposals, bytes_held, proposals_for
from toolkit.parallel.faults.variant import variant_of

# A small program stands for a large one: its products count as if their sizes were in thousands
# (as many FLOPs as they do per byte), its messages by their bytes.
_RANKING = Machine(latency=0.0, flops=16 * Machine().bandwidth)


@dataclass(frozen=True)
class Trial:
    """A change of the layout and what compiling with it showed.

    Attributes:
        change: in words.
        removes: whether the collective is gone and a device sends less in all.
        bytes_sent: what a device sends with the change, in all.

    Example:
        >>> Trial("lay w as P('data'), not P()", True, 128.0).removes
        True
    """

    change: str
    removes: bool
    bytes_sent: float


@dataclass(frozen=True)
class Finding:
    """One collective and what was tried to remove it.

    Attributes:
        item: the collective with its cause.
        trials: changes tried, the first proposal first; none for one that a textbook layout has.

    Example:
        >>> from toolkit.measure import Collective
        >>> one = Collective("all-reduce", 64, 64, 8, 112.0, 3, True, "psum")
        >>> cause = ("partial sums", "whole", "model.py:12", "loss", "dot", "add")
        >>> Finding(ExplainedCollective(one, ("data",), *cause), ()).is_textbook
        True
    """

    item: ExplainedCollective
    trials: tuple[Trial, ...]

    @property
    def is_textbook(self) -> bool:
        """Whether no change of one thing would lessen it, by the model."""
        return not self.trials


@dataclass(frozen=True)
class Blame:
    """Every collective of a program, with the blame for it: `print` it.

    Attributes:
        explanation: the compiled program as it is.
        findings: one per collective, those that send most first.

    Example:
        >>> str(Blame(Explanation(None, (), ()), ()))
        'nothing to blame: no collectives'
    """

    explanation: Explanation
    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        """One paragraph per collective: its cause, then the changes tried."""
        if not self.findings:
            return "nothing to blame: no collectives"
        sent = self.explanation.bytes_sent
        lines = [f"a device sends {in_words(sent, 'bytes')} (compiled)"]
        for finding in self.findings:
            one = finding.item
            size = in_words(one.collective.total_bytes_sent, "bytes")
            lines.append(f"{size} at {one.source}: {one.sentence}")
            if finding.is_textbook:
                lines.append("    needed: no single change lessens it (modelled)")
            for trial in finding.trials:
                verdict = "removed" if trial.removes else "not removed"
                total = in_words(trial.bytes_sent, "bytes")
                lines.append(f"    {trial.change}: {verdict}, {total} sent in all (compiled)")
        return "\n".join(lines)


@checked
def blame(
    function: Callable, arguments: tuple, *, results: Any = None, most_trials: int = 1
) -> Blame:
    """Finds the collectives that a textbook layout would not have, and tries to remove each.

    A change is to how an argument lies (with the optimiser's moments and the results that go with
    it), to how a result lies, or to a constraint in the program. None makes devices hold more:
    replicating everything communicates nothing.

    Args:
        function: what is jitted, such as a train step; not jitted itself.
        arguments: a tuple of its arguments: trees of arrays or ShapeDtypeStructs on a mesh.
        results: tree of NamedShardings of its results, such as a train step's, which are its next
            arguments; None to let the compiler choose.
        most_trials: changes tried per collective until one removes it.

    Returns:
        A `Blame`.

    Raises:
        ValueError: no argument lies on a mesh, `results` does not fit, or most_trials < 1.
        TypeError: an argument that is not a tree of arrays.

    Cost:
        One compilation of the program, one for each change tried (a change that serves several
        collectives is compiled once), and a modelled pass over it for each change there is.

    Example:
        >>> from jax.sharding import NamedSharding, PartitionSpec as P
        >>> rows = NamedSharding(make_mesh({"data": 8}), P("data"))  # eight devices
        >>> x, w = (jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=rows) for _ in "xw")
        >>> print(blame(lambda x, w: x @ w, (x, w)).findings[0].item.origin)
        argument w P('data',)
    """
    if not 1 <= most_trials <= 100:
        raise ValueError(f"most_trials={most_trials}: want 1 to 100")
    variant = variant_of(function, arguments, results)
    explanation = explain(variant.compile())
    base = Proposal("", variant, variant.flow(_RANKING), bytes_held(variant))
    every = all_proposals(variant, _RANKING)
    before = Counter(map(_key, explanation.collectives))
    compiled: dict[str, Explanation] = {}

    def trial_of(item: ExplainedCollective, words: str) -> Trial:
        after = compiled[words]
        is_gone = Counter(map(_key, after.collectives))[_key(item)] < before[_key(item)]
        is_less = after.bytes_sent < explanation.bytes_sent
        return Trial(words, is_gone and is_less, after.bytes_sent)

    findings = []
    by_size = sorted(explanation.collectives, key=lambda one: -one.collective.total_bytes_sent)
    for item in by_size:
        trials: list[Trial] = []
        for proposal in proposals_for(item, base, every, _RANKING)[:most_trials]:
            if proposal.words not in compiled:
                compiled[proposal.words] = explain(proposal.variant.compile())
            trials.append(trial_of(item, proposal.words))
            if trials[-1].removes:
                break
        findings.append(Finding(item, tuple(trials)))
    # Where the compiler moves what the model does not, a change made for another may remove it.
    for place, finding in enumerate(findings):
        others = (trial_of(finding.item, words) for words in compiled)
        removing = next((trial for trial in others if trial.removes), None)
        if finding.is_textbook and removing is not None:
            findings[place] = Finding(finding.item, (removing,))
    return Blame(explanation, tuple(findings))


def _key(item: ExplainedCollective) -> tuple:
    """What makes two collectives the same one in two programs."""
    return item.collective.kind, item.axes, item.collective.bytes, item.source
