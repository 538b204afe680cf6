"""Bytes that each device of a pipeline sends, by its schedule and the compiled program.

The program has a branch for each kind of task. How often a device takes it is in the schedule, not
in the program.
"""

import itertools
import re
from collections import defaultdict

import jax
import numpy as np

from toolkit.looped import LoopedConfig
from toolkit.measure import collectives
from toolkit.measure.programs import Site, collective_sites, read_program
from toolkit.planning.grade.pipelined import FIRST, LAST, ticks_of
from toolkit.planning.strategy import Strategy


def sent_by_device(
    compiled: jax.stages.Compiled, config: LoopedConfig, strategy: Strategy
) -> list[dict[str, float]]:
    """For each device of the pipeline, bytes that one of its chips sends per step, by the
    compiler's kind of collective."""
    if strategy.pipeline == 1:
        whole: dict[str, float] = defaultdict(float)
        for found in collectives(compiled):
            whole[found.kind] += found.total_bytes_sent
        return [whole]
    ticks = ticks_of(config, strategy)
    codes = np.asarray(ticks.columns["code"])
    ends = {FIRST: 0, LAST: strategy.stage_count - 1}
    sent: list[dict[str, float]] = [defaultdict(float) for _ in range(strategy.pipeline)]
    for found, site in collective_sites(*read_program(compiled.as_text() or "")):
        branch = _branch(site, 1 + len(ticks.codes))
        end = next((stage for name, stage in ends.items() if name in found.name), None)
        for device, mine in enumerate(strategy.stages_by_device):
            if branch is None:  # after the last tick, or in each
                runs = found.count * _is_source(site, device, strategy)
            elif end is not None:  # in the branches of every kind, taken in that of its own
                is_own = ticks.codes[branch - 1][1] == ticks.kinds[end]
                runs = strategy.parts * (end in mine and is_own)
            else:
                runs = int((codes[:, device] == branch).sum())
            sent[device][found.kind] += found.bytes_sent * runs
    return sent


def _branch(site: Site, branches: int) -> int | None:
    """The branch of the switch over tasks that an instruction lies in, if any."""
    for (_, around), (computation, _) in itertools.pairwise(site):
        if around.opcode == "conditional" and len(around.callees) == branches:
            return around.callees.index(computation)
    return None


def _is_source(site: Site, device: int, strategy: Strategy) -> bool:
    """Whether a chip of this device has a destination, if the instruction is a permute."""
    listed = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", site[-1][1].attributes)
    if listed is None:
        return True
    sources = {int(pair) for pair in re.findall(r"\{(\d+),", listed[1])}
    return any(source // (strategy.chips // strategy.pipeline) == device for source in sources)
