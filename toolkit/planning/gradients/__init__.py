"""Which gradients to compress, and which to send together, on a modelled timeline.

* `costs.py`: seconds of a message on chips and links
* `lanes.py`: options with their costs, laid out in time
* `search.py`: the optimum by a Pareto programme; Espresso's greedy search; MergeComp's cut
* `tensors.py`: the gradients of a planned step, and when each is ready
* `exchanges.py`: the choice for them, as `toolkit plan --exchange` prints it
* `program.py`: the train step of a plan that exchanges as was chosen, tensor by tensor
"""
