"""Pallas kernels of the linear-time mixers, and of decoding against caches.

One is experimental, and warns so, until a record of a device shows its gain (`best_known.py`).

Nothing is imported here: `dispatch.py` loads the files of the device it finds when a mixer is asked
for "pallas". Both devices offer `chunked(q, k, v, g, beta, initial_state, *, chunk, documents,
interpret)`, and TPUs `step(q_t, k_t, v_t, g_t, beta_t, state, *, interpret)`, for any mixer whose
state decays by e^g, per token or per key channel, with (beta) or without the delta rule. XLA's step
was faster than a kernel on an H100.

Called by the mixers
    dispatch      pads time to whole chunks and picks the device's functions

TPU, in `tpu/` (Mosaic TPU; v5e and v6e)
    chunked       chunked: a grid over rows and chunks, the state in VMEM; and its gradient
    step          step: decode one token, the state updated in place
    rule          one chunk of one row, forward and backward: the equations
    decay         what survives between the tokens of a chunk, and the gradients of that
    call          shared by both calls: rows per program, sharded axes, costs
    blocks        products, masks and the inverse on two-dimensional blocks

NVIDIA Hopper, in `gpu/` (Mosaic GPU; H100, H200, GH200; bfloat16)
    chunked       chunked: the phases below one after another; and their gradient
    prepare       what does not depend on the state, for all chunks, on chip
    channels      the factors alone, where every channel decays on its own
    channel_gradients  gradients of those
    factors       what they are, and by XLA for gradients of wide heads
    solve         the inverse of each chunk's system, on chip
    walk          the walk over chunks with the state in registers, and the walk back
    outputs       what every token reads
    gradients     gradients of queries, keys, values and gates, once the walk back is done
    latent        one query per head against a latent cache
    support       chips, sizes, and how a kernel is launched
"""
