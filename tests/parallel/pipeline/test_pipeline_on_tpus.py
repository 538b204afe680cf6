"""Pipelines compiled for TPUs ahead of time: what waits is stored once; messages overlap."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from toolkit.parallel.pipeline import Pipeline
from toolkit.planning import cluster
from toolkit.schedules import gpipe

MEMORY = 0.15
WIDTH, TIME = 512, 16384  # 16 MiB an activation, more than stays on the chip


@pytest.mark.nightly
def test_memory_grows_by_what_waits():
    pytest.importorskip("libtpu")
    mesh = Mesh(np.array(cluster("v5e:2x2").devices()).reshape(4), ("stage",))
    matrix = np.ones((WIDTH, WIDTH), jnp.bfloat16)
    along = NamedSharding(mesh, P("stage"))
    rows = jax.ShapeDtypeStruct((4, *matrix.shape), matrix.dtype, sharding=along)
    found, wanted = [], []
    for m in (8, 16):
        run = Pipeline(
            lambda w, x, _: x + jnp.tanh(x @ w), first=lambda _, data: data,
            last=lambda _, x, data: jnp.sum(x.astype(jnp.float32) ** 2), weights=[matrix] * 4,
            schedule=gpipe(4, m), mesh=mesh, recompute=True,
        )  # fmt: skip
        shape, everywhere = (m, 1, TIME, WIDTH), NamedSharding(mesh, P())
        batch = jax.ShapeDtypeStruct(shape, matrix.dtype, sharding=everywhere)
        compiled = jax.jit(run).lower(rows, (), batch).compile()
        memory = compiled.memory_analysis()
        assert memory is not None
        found.append(memory.temp_size_in_bytes)
        wanted.append(run.bytes_waiting(rows, (), batch))
        text = compiled.as_text() or ""
        starts = re.findall(r"= .* collective-permute-start\(", text)
        assert len(starts) == len(run.program.channels)
    assert abs(np.diff(found) - np.diff(wanted)) < MEMORY * np.diff(wanted)
