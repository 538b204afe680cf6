"""Hopper's kernels without a GPU: the interpreter that sees races, lowering, and a chip's name."""

import re

import jax
import numpy as np
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks  # private in every version
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams  # public from 0.11
from jax.experimental.mosaic.gpu import dialect

# jax 0.12 can raise where it sees a race; here all versions note it, and the tests ask.
NOTED = {"on_race": "warn"} if hasattr(InterpretGPUParams, "on_race") else {}
INTERPRETER = InterpretGPUParams(detect_races=True, uninitialized_memory="nan", **NOTED)

# What the compiler must know of the chip.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448 registers_per_core_limit: 65536
  registers_per_block_limit: 65536 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 150000000000 cuda_compute_capability { major: 9 minor: 0 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 patch: 0 }
runtime_version { major: 12 minor: 9 patch: 0 }
device_description_str: "NVIDIA H200"
"""


def assert_no_races() -> None:
    """In the last kernel interpreted."""
    assert not gpu_callbacks.get_races().races_found


def forget_kernels() -> None:
    """The interpreter keeps the memory of a kernel that raised."""
    gpu_callbacks.reset_gpu_interpret_mode_state()


def relative_error(got, want) -> float:
    got, want = np.array(got, np.float64), np.array(want, np.float64)
    return float(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)))


def lowered(function, *arguments) -> str:
    """The program for CUDA. Lowering fails where shared memory does not suffice."""
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def grids(program: str) -> list[tuple[int, ...]]:
    """Thread blocks along x, y and z of every kernel of a program that `lowered` made."""
    found = []
    for match in re.finditer(r'module = "((?:[^"\\]|\\[0-9A-F]{2}|\\\\)*)"', program):
        code = re.sub(
            rb"\\([0-9A-F]{2}|\\)",
            lambda x: b"\\" if x[1] == b"\\" else bytes.fromhex(x[1].decode()),
            match[1].encode("latin1"),
        )
        with mlir.make_ir_context() as context:
            dialect.register_dialect(context)
            context.allow_unregistered_dialects = True
            text = str(ir.Module.parse(code))
        numbers = dict(re.findall(r'(%\w+) = "[\w.]*constant"\(\) \{value = (\d+) : index\}', text))
        operands = re.search(r'gpu\.launch"\(([^)]*)\)', text)[1].split(", ")
        sizes = [numbers.get(x) for x in operands if x in numbers]
        found.append(tuple(map(int, sizes[:3])))
    return found
