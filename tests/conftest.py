"""Every test runs on eight simulated CPU devices, with warnings as errors and a hard time limit.

Most programs of the tests run once, so that compiling them is most of what the suite costs. They
are compiled as cheaply as XLA can, five times cheaper than without optimisation alone, and kept in
pytest's cache for the next run, the other worker and the other Pythons (`--cache-clear` forgets
them). `JAX_DISABLE_MOST_OPTIMIZATIONS=0` compiles them as for a user.
"""

import gc
import os
import sys
from collections import Counter
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

# Of a quiet machine. A test that takes ten is marked `slow`.
MOST_PROCESSOR_SECONDS = 30
# A file that takes longer is named at the end of the run.
MOST_SECONDS_OF_A_FILE = 20
COMPILE_FAST = os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS", "1") != "0"
# jax 0.12 no longer knows them, and ends without a word.
FAST_FLAGS = (
    " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    if jax.__version_info__ < (0, 11)
    else ""
)

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (FAST_FLAGS if COMPILE_FAST else "")
jax.config.update("jax_num_cpu_devices", 8)
# The lines of Python that a program came from: a tenth of what the suite costs.
LINES = jax.config.jax_traceback_in_locations_limit
jax.config.update("jax_traceback_in_locations_limit", 0)
jax.devices()  # reads the flags, which notebooks and commands in processes of their own do without
os.environ["XLA_FLAGS"] = os.environ["XLA_FLAGS"].removesuffix(FAST_FLAGS)


def pytest_configure(config):
    if hasattr(config, "cache") and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir("programs")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)  # writing takes 8 ms
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_collection_finish():
    """What was imported and collected stays, so that no collection of garbage walks it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)  # tracing makes many objects, nearly all of which go by themselves


# What a mixer's own equation decides is tested on every mixer in the first tier. What follows from
# the engine that it shares, marked `by_family`, is tested there on one mixer per family: softmax,
# decay per head and per channel, delta rule per head and per channel; on the others every night.
FAMILIES = {"full", "mamba2", "gla", "gdn", "kda"}


# What a test costs decides its tier too, by a measured list.
LISTED = (Path(__file__).parent / "costly.txt").read_text(encoding="utf-8").splitlines()
TIER_OF = {line[8:]: line[:8].strip() for line in LISTED if not line.startswith("#")}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if (name := TIER_OF.get(item.nodeid)) and not item.get_closest_marker("nightly"):
            item.add_marker(name)
        if item.get_closest_marker("by_family"):
            words = {value for value in item.callspec.params.values() if isinstance(value, str)}
            if not words & FAMILIES:
                item.add_marker(pytest.mark.nightly)


def is_timed(item):
    return item.get_closest_marker("timed") is not None


@pytest.fixture(autouse=True, scope="module")
def programs(request):
    """Those of a file are compiled without optimisation, as most run once, unless it judges
    durations or JAX_DISABLE_MOST_OPTIMIZATIONS=0. Notebooks and commands run in processes of their
    own, optimised. The next file uses none of them, and they would add up to gigabytes.
    """
    here = (item for item in request.session.items if item.path == request.path)
    jax.config.update(
        "jax_disable_most_optimizations", COMPILE_FAST and not any(map(is_timed, here))
    )
    yield
    jax.clear_caches()


@pytest.fixture(scope="module")
def not_cached():
    """XLA for CPUs (jax 0.10) does not order the collectives of a program that it loads, and aborts
    where two of them meet: a pipeline's are compiled anew in every run."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, float("inf"))
    yield
    jax.config.update(name, before)


@pytest.fixture(scope="module")
def source_lines():
    """From here to the end of a file programs know their lines, as outside of the tests."""
    jax.config.update("jax_traceback_in_locations_limit", LINES)
    yield
    jax.config.update("jax_traceback_in_locations_limit", 0)


@pytest.fixture(autouse=True)
def one_core():
    """What `parallel.use_cores` says in one test is no business of the next."""
    yield
    if cores := sys.modules.get("toolkit.attention.execution.cores"):
        cores.set_cores(None)


@pytest.fixture(autouse=True)
def tier(request):
    """The first tier stays quick: a test in it that computes for long fails."""
    start = sum(os.times()[:4])
    yield
    seconds = sum(os.times()[:4]) - start
    markers = {marker.name for marker in request.node.iter_markers()}
    is_free = not COMPILE_FAST or markers & {"slow", "nightly", "browser", "timed"}
    if seconds > MOST_PROCESSOR_SECONDS and not is_free:
        from yardstick import slowness  # draws a figure, which few tests need

        limit = max(1, slowness()) * MOST_PROCESSOR_SECONDS
        assert seconds < limit, "mark it `slow`, or make it smaller"


def pytest_terminal_summary(terminalreporter):
    """The files that take longest, so that one that grew is seen."""
    seconds = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.location[0]] += report.duration
    for path, total in seconds.most_common():
        if total >= MOST_SECONDS_OF_A_FILE:
            terminalreporter.write_line(f"slow file: {path} {total:.0f} s")
