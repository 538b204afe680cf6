"""What replicas tell each other so that they agree on a gradient.

An exchange is a compressor, a pattern and a feedback, each a row of a table; adding one is a row.
`sharded_train_step(..., exchange=)`, `training.prepare` and `toolkit train --exchange` take it.

* `Exchange`: one of each, also by a text such as "int4:two_hop=4:error_feedback", and some tensors
  otherwise
* `COMPRESSORS`, `Compressor`: a vector in fewer bytes; contraction or variance, bytes, source
* `contracted`: an unbiased compressor made fit for error feedback
* `PATTERNS`, `Pattern`: the collectives, with the bytes that a device sends
* `FEEDBACKS`, `Feedback`: what a sender remembers of what it did not send
* `ExchangePlan`: an exchange on a layout: buffers, bytes, state; `mean` runs it
* `ExchangeState`: what is remembered between steps
* `exchange_rows`: rows of embeddings, pushed to owners and pulled (Zen)
* `RowOwners`, `RowReport`, `row_capacity`: who adds which row; what did not fit; what to allow
* `row_bytes`, `dense_crossover`: bytes of the ways to add sparse rows; when dense sends less
* `local_steps`, `LocalSteps`, `LocalState`: islands that agree every H steps (DiLoCo, streaming)
* `zeroth_order_step`: training without gradients, one number per replica and step
* `repetition_code`, `cyclic_code`, `decoding_weights`, `coded_load`: gradients despite stragglers
* `recovery_rounds`, `multiplexed_rounds`: the same over rounds (sequential gradient coding)
"""

from toolkit.parallel.gradients.apart.coding import (
    coded_load,
    cyclic_code,
    decoding_weights,
    multiplexed_rounds,
    recovery_rounds,
    repetition_code,
)
from toolkit.parallel.gradients.apart.local_steps import LocalState, LocalSteps, local_steps
from toolkit.parallel.gradients.apart.zeroth_order import zeroth_order_step
from toolkit.parallel.gradients.compression.compressor import Compressor
from toolkit.parallel.gradients.compression.compressors import COMPRESSORS, contracted
from toolkit.parallel.gradients.compression.feedback import FEEDBACKS, Feedback
from toolkit.parallel.gradients.exchange import Exchange
from toolkit.parallel.gradients.patterns import PATTERNS, Pattern
from toolkit.parallel.gradients.plan import ExchangePlan, ExchangeState
from toolkit.parallel.gradients.rows.row_bytes import dense_crossover, row_bytes
from toolkit.parallel.gradients.rows.sparse_rows import (
    RowOwners,
    RowReport,
    exchange_rows,
    row_capacity,
)

__all__ = [
    "COMPRESSORS", "FEEDBACKS", "PATTERNS", "Compressor", "Exchange", "ExchangePlan",
    "ExchangeState", "Feedback", "LocalState", "LocalSteps", "Pattern", "RowOwners", "RowReport",
    "coded_load", "contracted", "cyclic_code", "decoding_weights", "dense_crossover",
    "exchange_rows", "local_steps", "multiplexed_rounds", "recovery_rounds", "repetition_code",
    "row_bytes", "row_capacity", "zeroth_order_step",
]  # fmt: skip
