"""What replicas tell each other so that they agree on a gradient.

An exchange is a compressor, a pattern and a feedback, each a row of a table; adding one is a row.
`sharded_train_step(..., exchange=)`, `training.prepare` and `toolkit train --exchange` take it.

* `Exchange`: one of each, also by a text such as "int4:two_hop=4:error_feedback"
* `COMPRESSORS`, `Compressor`: a vector in fewer bytes; contraction or variance, bytes, source
* `contracted`: an unbiased compressor made fit for error feedback
* `PATTERNS`, `Pattern`: the collectives, with the bytes that a device sends
* `FEEDBACKS`, `Feedback`: what a sender remembers of what it did not send
* `ExchangePlan`: an exchange on a layout: buffers, bytes, state; `mean` runs it
* `ExchangeState`: what is remembered between steps
"""

from toolkit.parallel.gradients.compressors import COMPRESSORS, Compressor, contracted
from toolkit.parallel.gradients.exchange import Exchange
from toolkit.parallel.gradients.feedback import FEEDBACKS, Feedback
from toolkit.parallel.gradients.patterns import PATTERNS, Pattern
from toolkit.parallel.gradients.plan import ExchangePlan, ExchangeState

__all__ = [
    "COMPRESSORS",
    "FEEDBACKS",
    "PATTERNS",
    "Compressor",
    "Exchange",
    "ExchangePlan",
    "ExchangeState",
    "Feedback",
    "Pattern",
    "contracted",
]
