"""What the pages say of `pjit` is what jax does: a deprecated name that can be imported still."""

import importlib
import re
from contextlib import nullcontext
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from toolkit.parallel import make_mesh

ROOT = Path(__file__).parents[2]
PAGES = ("docs/sharding.md", "tutorials/06_shard_transformer.ipynb")
GONE = re.compile(r"pjit\W[^.]*\b(?:gone|removed)\b|name is gone")


def test_pjit_is_jit_with_shardings_under_a_deprecated_name():
    module = importlib.import_module("jax.experimental.pjit")
    is_deprecated = jax.__version_info__ >= (0, 8)  # 0.8
    with pytest.warns(DeprecationWarning, match="jax.jit") if is_deprecated else nullcontext():
        pjit = module.pjit
    rows = NamedSharding(make_mesh({"data": 8}), P("data"))
    x = np.arange(16.0, dtype=np.float32)
    programs = [
        make(lambda x: x * 2, in_shardings=rows, out_shardings=rows).lower(x).as_text()
        for make in (pjit, jax.jit)
    ]
    assert programs[0] == programs[1]


@pytest.mark.parametrize("page", PAGES)
def test_no_page_says_that_it_is_gone(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert "pjit" in text
    assert not GONE.search(text)
    assert "deprecated" in text
