"""Timelines: FLOPs, bytes and order as compiled, durations by the model."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from toolkit.looped import LoopedConfig
from toolkit.measure import collectives, program_cost
from toolkit.parallel import make_mesh
from toolkit.parallel.causes.program_trace import compiled_with_own_lines
from toolkit.planning import Constants, Strategy, cluster, timeline, train_program
from toolkit.planning.time.compiled_work import Compute, Loop, Send, compiled_work

CONFIG = LoopedConfig.tiny("full full full", width=128, heads=4, vocabulary=512)
# The form that libtpu gives an asynchronous collective, with a product between start and end.
ASYNCHRONOUS = """\
HloModule step, is_scheduled=true, num_partitions=4

%start (p: bf16[64,512]) -> bf16[256,512] {
  %p = bf16[64,512]{1,0} parameter(0)
  ROOT %g = bf16[256,512]{1,0} all-gather(%p), channel_id=7, replica_groups={{0,1},{2,3}}
}

%amid (p: bf16[64,512], x: bf16[8,2048,128], y: bf16[8,128,512]) -> bf16[8,2048,512] {
  %p = bf16[64,512]{1,0} parameter(0)
  %x = bf16[8,2048,128]{1,0} parameter(1)
  %y = bf16[8,128,512]{1,0} parameter(2)
  %g = bf16[256,512]{1,0} all-gather(%p), channel_id=7, replica_groups={{0,1},{2,3}}
  ROOT %c = bf16[8,2048,512]{1,0} convolution(%x, %y), window={size=8 lhs_dilate=8}, LABELS
}

%done (p: bf16[64,512]) -> bf16[256,512] {
  %p = bf16[64,512]{1,0} parameter(0)
  ROOT %g = bf16[256,512]{1,0} all-gather(%p), channel_id=7, replica_groups={{0,1},{2,3}}
}

ENTRY %main (p: bf16[64,512], x: bf16[8,2048,128], y: bf16[8,128,512]) -> bf16[256,512] {
  %p = bf16[64,512]{1,0} parameter(0)
  %x = bf16[8,2048,128]{1,0} parameter(1)
  %y = bf16[8,128,512]{1,0} parameter(2)
  %async-start = bf16[256,512]{1,0} fusion(%p), kind=kCustom, calls=%start
  %product = bf16[8,2048,512]{1,0} fusion(%p, %x, %y), kind=kOutput, calls=%amid
  ROOT %async-done = bf16[256,512]{1,0} fusion(%p), kind=kCustom, calls=%done
}
""".replace("LABELS", "dim_labels=0bf_0io->0bf")


class Written:
    """Stands for a compiled program."""

    def __init__(self, text):
        self.as_text = lambda: text


def flat(items, runs=1):
    for item in items:
        if isinstance(item, Loop):
            yield from flat(item.items, runs * item.trips)
        else:
            yield item, runs


@pytest.fixture(scope="module")
def step():
    program = train_program(CONFIG, Strategy(fsdp=4), batch=4, sequence_length=64)
    # A persistent cache could give it back with the names of an older source.
    return compiled_with_own_lines(jax.jit(program.step).lower(*program.arguments))


def test_bytes_are_those_of_the_reader_of_programs(step):
    work = compiled_work(step)
    sent = sum(item.bytes_sent * runs for item, runs in flat(work.items) if isinstance(item, Send))
    assert sent == sum(found.total_bytes_sent for found in collectives(step)) > 0
    assert work.unknown_loops == 0


def test_passes_follow_each_other_and_the_update_is_named(step):
    """Once "other"; a loss computed late is a forward pass between the last two."""
    computing = [
        item.phase
        for item, _ in flat(compiled_work(step).items)
        if isinstance(item, Compute) and item.bytes > 2**14
    ]
    assert {"forward", "backward", "update"} <= set(computing)
    assert computing.index("forward") < computing.index("backward") < computing.index("update")
    assert "update" in computing[-3:]


def test_operations_are_those_of_the_compiler():
    def products(x, w):
        return jnp.einsum("bik,bkj->bij", x, w).sum()

    shapes = (
        jax.ShapeDtypeStruct((4, 32, 64), jnp.float32),
        jax.ShapeDtypeStruct((4, 64, 16), jnp.float32),
    )
    compiled = jax.jit(products).lower(*shapes).compile()
    found = sum(item.flops for item, _ in flat(compiled_work(compiled).items))
    assert found == 2 * 4 * 32 * 64 * 16
    assert found == pytest.approx(program_cost(compiled).flops, rel=0.1)


def test_loops_multiply():
    def run(x):
        return jax.lax.scan(lambda h, _: (jnp.tanh(h @ h), None), x, length=6)[0]

    compiled = jax.jit(run).lower(jax.ShapeDtypeStruct((32, 32), jnp.float32)).compile()
    found = sum(item.flops * runs for item, runs in flat(compiled_work(compiled).items))
    assert found == 6 * 2 * 32**3


def test_of_a_conditional_the_branch_that_sends_most_is_laid_out():
    """As `collectives` counts it; of branches that send alike, the one that computes more."""
    where = make_mesh({"a": 8})

    def either(x):
        def computes():
            return jnp.tanh(x @ x @ x)

        def sends():
            return jax.lax.psum(jnp.sin(x @ x), "a")

        return jax.lax.cond(x[0, 0] > 0, computes, sends)

    mapped = jax.shard_map(either, mesh=where, in_specs=P(), out_specs=P(), check_vma=False)
    compiled = jax.jit(mapped).lower(jax.ShapeDtypeStruct((32, 32), jnp.float32)).compile()
    items = [item for item, _ in flat(compiled_work(compiled).items)]
    sent = sum(item.bytes_sent for item in items if isinstance(item, Send))
    assert sent == sum(found.total_bytes_sent for found in collectives(compiled)) > 0
    assert sum(item.flops for item in items if isinstance(item, Compute)) == 2 * 32**3


PIPELINED = """\
HloModule step, is_scheduled=true, num_partitions=4

ENTRY %main (p: bf16[64,512], x: bf16[1024,1024]) -> bf16[64,512] {
  %p = bf16[64,512]{1,0} parameter(0)
  %x = bf16[1024,1024]{1,0} parameter(1)
  %t = token[] after-all()
  %r = (bf16[64,512]{1,0}, u32[], token[]) recv(%t), channel_id=3, PAIRS
  %s = (bf16[64,512]{1,0}, u32[], token[]) send(%p, %t), channel_id=3, PAIRS
  %y = (bf16[1024,1024]{1,0}, s8[64]{0}) custom-call(%x, %x), PRODUCT
  %k = bf16[1024,1024]{1,0} custom-call(%x), custom_call_target="my_kernel"
  %rd = (bf16[64,512]{1,0}, token[]) recv-done(%r), channel_id=3
  %sd = token[] send-done(%s), channel_id=3
  ROOT %out = bf16[64,512]{1,0} get-tuple-element(%rd), index=0
}
""".replace(
    "PAIRS", "frontend_attributes={_xla_send_recv_source_target_pairs={{0,1},{1,2},{2,3}}}"
).replace(
    "PRODUCT",
    'custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":'
    '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}',
)


def test_a_gpu_multiplies_while_it_sends_to_its_peer():
    """Once it sent nothing and computed nothing."""
    work = compiled_work(Written(PIPELINED))  # pyright: ignore[reportArgumentType]
    (send,) = [item for item in work.items if isinstance(item, Send)]
    assert (send.kind, send.bytes_sent) == ("send", 64 * 512 * 2)
    assert sum(item.flops for item in work.items if isinstance(item, Compute)) == 2 * 1024**3
    found = timeline(work, "h100:4", link_speed=1e-3)
    assert found.hidden == pytest.approx(found.computing)
    assert found.step_seconds == pytest.approx(found.communicating)
    assert "unknown and counted as none: my_kernel" in str(found)


def test_half_the_link_speed_costs_the_bytes_once_more(step):
    constants = Constants(latency=0.0)
    full, half = (
        timeline(step, "v5e:4", constants=constants, link_speed=speed) for speed in (1.0, 0.5)
    )
    # On CPUs nothing is asynchronous, so nothing is hidden.
    assert full.hidden == half.hidden == 0
    assert half.communicating == pytest.approx(2 * full.communicating)
    assert half.step_seconds == pytest.approx(full.step_seconds + full.communicating)
    assert full.step_seconds == pytest.approx(full.computing + full.communicating)


def test_all_wait_for_a_straggler(step):
    usual, slow = (timeline(step, "v5e:4", straggler=times) for times in (1.0, 3.0))
    assert slow.computing == pytest.approx(usual.computing)
    assert slow.step_seconds == pytest.approx(3 * usual.computing + usual.communicating)
    assert {span.lane for span in slow.spans} == {"compute", "straggler", "collectives"}


def test_spans_of_a_lane_do_not_overlap(step):
    found = timeline(step, "h100:4", straggler=1.5)
    for lane in ("compute", "straggler", "collectives"):
        end = 0.0
        for span in (span for span in found.spans if span.lane == lane):
            assert span.start >= end * (1 - 1e-9)
            end = span.start + span.seconds
        assert end <= found.step_seconds * (1 + 1e-9)


def test_what_the_compiler_hides_is_hidden():
    work = compiled_work(Written(ASYNCHRONOUS))  # pyright: ignore[reportArgumentType]
    (send,) = [item for item in work.items if isinstance(item, Send)]
    assert (send.bytes_sent, send.degree, send.inner) == (256 * 512 * 2 / 2, 2, 1)
    (product,) = [item for item in work.items if isinstance(item, Compute)]
    assert product.flops == 2 * 8 * 2048 * 128 * 512
    fast = timeline(work, "v5e:4")
    assert fast.hidden == pytest.approx(fast.communicating)
    assert fast.step_seconds == pytest.approx(fast.computing)
    slow = timeline(work, "v5e:4", link_speed=0.01)
    assert slow.hidden == pytest.approx(slow.computing)
    assert slow.step_seconds == pytest.approx(slow.communicating)


@pytest.mark.parametrize(
    ("changed", "words"),
    [({"link_speed": 0.0}, "link_speed must lie"), ({"straggler": 0.5}, "straggler must lie"),
     ({"chips": "abacus:4"}, "not known")],
)  # fmt: skip
def test_bad_input_is_refused_in_one_line(step, changed, words):
    with pytest.raises(ValueError, match=words) as refused:
        timeline(step, changed.pop("chips", "v5e:4"), **changed)
    assert "\n" not in str(refused.value)


def test_a_program_too_long_to_lay_out_is_refused():
    endless = Loop(10**9, (Send(1, "all-reduce", 8.0, 2, 1),))
    work = compiled_work(Written(ASYNCHRONOUS))._replace(items=(endless,))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="at most 500,000 events"):
        timeline(work, "v5e:4")


def test_clusters_take_the_link_of_the_group():
    found = make_mesh({"a": 2, "b": 4})
    mapped = jax.shard_map(
        lambda x: jax.lax.psum(x, "a"), mesh=found, in_specs=P("a", "b"), out_specs=P(None, "b")
    )
    compiled = jax.jit(mapped).lower(jax.ShapeDtypeStruct((8, 8), jnp.float32)).compile()
    (send,) = [item for item in compiled_work(compiled).items if isinstance(item, Send)]
    assert (send.degree, send.inner) == (2, 4)
    assert cluster("h100:8").link(send.inner, send.degree).name == "NVLink 4"
