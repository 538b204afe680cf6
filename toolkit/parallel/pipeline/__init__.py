"""Pipelines: any checked schedule of `toolkit.schedules` run as one SPMD program.

* `Pipeline`: loss and gradients of a chain of stages, in the order of a schedule
* `Context`: what a stage may read beside its weights and its input
* `module_stages`: a chain of flax nnx modules as stages
* `program_of`: a schedule tick by tick, with the places where arrays wait
* `Program`: its result: ticks, permutes, places, and the modelled bubble in lockstep
"""

from toolkit.parallel.pipeline.chains import module_stages
from toolkit.parallel.pipeline.program import Program, program_of
from toolkit.parallel.pipeline.running import Pipeline
from toolkit.parallel.pipeline.tasks import Context

__all__ = ["Context", "Pipeline", "Program", "module_stages", "program_of"]
