"""Pallas kernels of the linear-time mixers, one row (a head of a sequence) beside another.

Nothing is imported here: a mixer imports the file of its device when it is asked for "pallas".
All files offer `chunked(q, k, v, g, beta, initial_state, *, chunk, documents, interpret)` and
`step(q_t, k_t, v_t, g_t, beta_t, state, *, interpret)`, for any mixer whose state fades by e^g, one
number a token or one a key channel, with (beta) or without the delta rule.

TPU (Mosaic TPU; v5e and v6e)
    tpu_chunked   chunked: a grid over rows and chunks, the state in VMEM; and its gradient
    tpu_step      step: decode one token, the state updated in place
    tpu_rule      one chunk of one row, forward and backward: the equations
    tpu_decay     what survives between the tokens of a chunk, and the gradients of that
    tpu_call      what the calls of both share: rows of a program, sharded axes, costs
    tpu_blocks    products, masks and the inverse on two-dimensional blocks
"""
