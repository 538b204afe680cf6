"""Pallas kernels of the linear-time mixers: `gpu_*` for NVIDIA Hopper, `tpu_*` for TPUs."""
