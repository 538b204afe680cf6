"""Which gradients to compress, and which to send together, on a modelled timeline.

* `costs.py`: seconds of a message on chips and links
* `lanes.py`: options with their costs, laid out in time
* `search.py`: the optimum by a Pareto programme; Espresso's greedy search; MergeComp's cut
* `exchanges.py`: the same for a planned step, as `toolkit plan --exchange` prints it
"""
