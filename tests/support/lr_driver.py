"""Drives a search with losses made up, as a training loop would with real ones."""

import numpy as np

from toolkit.lr import ask, init, tell


def drive(searcher, losses_of, controller=None, most=None, validation_of=lambda step: 1.0):
    """The controller at the end, or after `most` requests, and (request, is_kept) of each."""
    controller, requests = init(searcher) if controller is None else controller, []
    while (request := ask(searcher, controller)) is not None and len(requests) != most:
        losses = np.array(losses_of(request), float)
        if request.kind == "probe" and not request.validate_every:
            losses[:, 0] = losses[0, 0]  # before the first update candidates are alike
        step = controller.ledger.kept_steps + request.rates.shape[1]
        checked = {"validation": validation_of(step)} if request.is_checked else {}
        controller, is_kept = tell(searcher, controller, request, losses, **checked)
        requests.append((request, is_kept))
    return controller, requests
