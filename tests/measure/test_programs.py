"""The reader of compiled programs against programs whose communication is known in closed form."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from toolkit.measure import collective_table, collectives, program_cost
from toolkit.parallel import make_mesh

DEVICES = 8
ROWS, COLUMNS = 64, 32
GLOBAL = ROWS * COLUMNS * 4  # bytes of the float32 array
LOCAL = GLOBAL // DEVICES
SHARE = (DEVICES - 1) / DEVICES
NEIGHBOURS = [(device, (device + 1) % DEVICES) for device in range(DEVICES)]


def compile_on(mesh, function, in_spec, out_spec, dtype=jnp.float32):
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=in_spec, out_specs=out_spec, check_vma=False
    )
    argument = jax.ShapeDtypeStruct((ROWS, COLUMNS), dtype)
    return jax.jit(mapped).lower(argument).compile()


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"data": DEVICES})


# kind, function, in_spec, out_spec, result bytes, operand bytes, bytes sent
CLOSED_FORMS = {
    "psum": (
        "all-reduce",
        lambda x: jax.lax.psum(x, "data"),
        P("data"),
        P(),
        LOCAL,
        LOCAL,
        2 * SHARE * LOCAL,
    ),
    "all_gather": (
        "all-gather",
        lambda x: jax.lax.all_gather(x, "data", tiled=True),
        P("data"),
        P(),
        GLOBAL,
        LOCAL,
        SHARE * GLOBAL,
    ),
    "psum_scatter": (
        "reduce-scatter",
        lambda x: jax.lax.psum_scatter(x, "data", tiled=True),
        P(),
        P("data"),
        LOCAL,
        GLOBAL,
        SHARE * GLOBAL,
    ),
    "all_to_all": (
        "all-to-all",
        lambda x: jax.lax.all_to_all(x, "data", 1, 0, tiled=True),
        P("data"),
        P(None, "data"),
        LOCAL,
        LOCAL,
        SHARE * LOCAL,
    ),
    "ppermute": (
        "collective-permute",
        lambda x: jax.lax.ppermute(x, "data", NEIGHBOURS),
        P("data"),
        P("data"),
        LOCAL,
        LOCAL,
        LOCAL,
    ),
}


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_bytes_are_those_of_the_closed_form(mesh, name):
    kind, function, in_spec, out_spec, result, operand, sent = CLOSED_FORMS[name]
    (found,) = collectives(compile_on(mesh, function, in_spec, out_spec))
    assert (found.kind, found.bytes, found.operand_bytes) == (kind, result, operand)
    assert (found.bytes_sent, found.group_size) == (sent, DEVICES)
    assert (found.count, found.is_count_exact) == (1, True)
    assert found.total_bytes_sent == sent


def test_groups_smaller_than_the_mesh():
    grid = make_mesh({"data": 2, "model": 4})
    for axis, size in (("data", 2), ("model", 4)):
        compiled = compile_on(
            grid, lambda x, axis=axis: jax.lax.psum(x, axis), P("data", "model"), P()
        )
        (found,) = collectives(compiled)
        assert found.group_size == size
        assert found.bytes_sent == 2 * (size - 1) / size * LOCAL


def test_combined_tensors_are_summed(mesh):
    compiled = compile_on(
        mesh, lambda x: jax.lax.psum((x, x[:, :8] + 1), "data"), P("data"), (P(), P())
    )
    found = collectives(compiled)
    assert {item.kind for item in found} == {"all-reduce"}
    assert sum(item.bytes for item in found) == LOCAL + LOCAL // 4
    assert sum(item.bytes_sent for item in found) == 2 * SHARE * (LOCAL + LOCAL // 4)


def test_loops_multiply_counts(mesh):
    def nested(x):
        def inner(carry, _):
            return jnp.sin(jax.lax.psum(carry, "data")), None

        def outer(_, carry):
            return jax.lax.scan(inner, carry, length=5)[0]

        return jax.lax.ppermute(jax.lax.fori_loop(0, 3, outer, x), "data", NEIGHBOURS)

    found = {item.kind: item for item in collectives(compile_on(mesh, nested, P(None), P("data")))}
    assert found["all-reduce"].count == 15
    assert found["all-reduce"].is_count_exact
    assert found["all-reduce"].total_bytes_sent == 15 * 2 * SHARE * GLOBAL
    assert found["collective-permute"].count == 1


def test_unknown_trip_counts_are_said(mesh):
    def until_large(x):
        return jax.lax.while_loop(
            lambda carry: carry.sum() < 100, lambda carry: jax.lax.psum(carry, "data") + 1, x
        )

    (found,) = collectives(compile_on(mesh, until_large, P(None), P(None)))
    assert (found.count, found.is_count_exact) == (1, False)
    assert "~1" in collective_table([found])


def test_of_a_conditional_the_branch_that_sends_most_counts_and_it_is_said(mesh):
    """Once both were summed."""

    def either(x):
        def little():
            return jax.lax.ppermute(jnp.sin(x), "data", NEIGHBOURS)

        def much():
            return jax.lax.scan(lambda h, _: (jax.lax.psum(jnp.sin(h), "data"), None), x, length=3)[
                0
            ]

        return jax.lax.cond(x[0, 0] > 0, little, much)

    found = collectives(compile_on(mesh, either, P(None), P(None)))
    assert {item.kind: item.count for item in found} == {"collective-permute": 0, "all-reduce": 3}
    assert not any(item.is_count_exact for item in found)
    assert sum(item.total_bytes_sent for item in found) == 3 * 2 * SHARE * GLOBAL


def test_a_program_without_communication(mesh):
    compiled = compile_on(mesh, jnp.sin, P("data"), P("data"))
    assert collectives(compiled) == []
    assert "total" in collective_table([])


def test_table_adds_up(mesh):
    def two(x):
        gathered = jax.lax.all_gather(x, "data", tiled=True)
        return jax.lax.psum_scatter(jnp.sin(gathered), "data", tiled=True)

    table = collective_table(collectives(compile_on(mesh, two, P("data"), P("data"))))
    lines = table.splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[-1].split()[-1] == f"{2 * SHARE * GLOBAL:,.0f}"


class FakeCompiled:
    """Stands for programs of backends that are not here; only the text is read."""

    def __init__(self, *lines, header="num_partitions=8"):
        body = "\n".join(f"  {line}" for line in lines)
        self.text = (
            f"HloModule m, {header}\n\nENTRY %main (p: f32[2,4]) -> f32[] {{\n"
            f"  %p = bf16[2,4]{{1,0:T(8,128)(2,1)}} parameter(0)\n{body}\n}}\n"
        )

    def as_text(self):
        return self.text


@pytest.mark.parametrize(
    ("line", "kind", "result", "operand", "group"),
    [
        (
            "%s = (bf16[2,4]{1,0}, bf16[16,4]{1,0:T(8,128)(2,1)S(1)}) all-gather-start(%p), "
            "replica_groups=[1,8]<=[8], dimensions={0}",
            "all-gather",
            128,
            16,
            8,
        ),
        (
            "%s = bf16[2,4]{1,0} all-reduce-start(bf16[2,4]{1,0} %p), "
            "replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add",
            "all-reduce",
            16,
            16,
            2,
        ),
        (  # as XLA for GPUs writes it since jax 0.11
            "%s = ((bf16[2,4]{1,0}), bf16[2,4]{1,0}) all-reduce-start(%p), "
            "replica_groups=mesh['data'=8] {'data'}, to_apply=%add",
            "all-reduce",
            16,
            16,
            8,
        ),
        (
            "%s = ((bf16[2,4]{1,0}, bf16[2,4]{1,0}), (bf16[1,4]{1,0}, bf16[1,4]{1,0}), u32[]) "
            "reduce-scatter-start(%p, %p), replica_groups={{0,1},{2,3},{4,5},{6,7}}",
            "reduce-scatter",
            16,
            32,
            2,
        ),
        (
            "%s = (bf16[2,4]{1,0}, bf16[2,4]{1,0}, u32[], u32[]) collective-permute-start(%p), "
            "source_target_pairs={{0,1},{1,0}}",
            "collective-permute",
            16,
            16,
            2,
        ),
        (
            "%s = bf16[2,4] all-reduce(%p), replica_groups=mesh['a'=4,'b'=2] {'a':(2)2,'b'}, "
            "use_global_device_ids=true",
            "all-reduce",
            16,
            16,
            4,
        ),
        ("%s = bf16[2,4] all-reduce(%p), replica_groups={}", "all-reduce", 16, 16, 8),
        (
            "%s = bf16[4,4] ragged-all-to-all(%p, %p, %p, %p), replica_groups={{0,1},{2,3}}",
            "ragged-all-to-all",
            32,
            16,
            2,
        ),
        (
            "%s = bf16[2,4] collective-broadcast(%p), replica_groups={{0,1,2,3}}",
            "collective-broadcast",
            16,
            16,
            4,
        ),
    ],
)
def test_notations_of_other_backends(line, kind, result, operand, group):
    (found,) = collectives(FakeCompiled(line, "%d = bf16[2,4] all-gather-done(%s)"))
    assert (found.kind, found.bytes, found.operand_bytes) == (kind, result, operand)
    assert found.group_size == group


PEER = "channel_id=1, frontend_attributes={_xla_send_recv_source_target_pairs={{0, 1},{1,2}}}"
CONTEXT = "(bf16[2,4]{1,0}, u32[], token[])"


def test_what_is_sent_to_a_peer_counts_once():
    """Once 0 bytes."""
    sent, received = collectives(
        FakeCompiled(
            "%t = token[] after-all()",
            f"%s = {CONTEXT} send(%p, %t), {PEER}",
            f"%r = {CONTEXT} recv(%t), {PEER}",
            "%d = token[] send-done(%s), channel_id=1",
            "%e = (bf16[2,4], token[]) recv-done(%r), channel_id=1",
        )
    )
    assert (sent.kind, sent.bytes_sent, sent.group_size) == ("send", 16.0, 3)
    assert (received.kind, received.bytes, received.bytes_sent) == ("recv", 16, 0.0)


def test_what_goes_to_the_host_is_no_communication_of_devices():
    line = f"%s = {CONTEXT} send(%p, %p), channel_id=1, is_host_transfer=true"
    assert collectives(FakeCompiled(line)) == []


def test_a_ragged_exchange_counts_as_full_and_is_said():
    """Once 0 bytes."""
    line = "%s = bf16[4,4] ragged-all-to-all(%p, %p, %p, %p), replica_groups={{0,1,2,3}}"
    (found,) = collectives(FakeCompiled(line))
    assert (found.bytes_sent, found.is_size_exact) == (3 / 4 * 16, False)
    assert "~12" in collective_table([found])


def test_unknown_group_notation_is_refused():
    with pytest.raises(ValueError, match="unknown notation"):
        collectives(FakeCompiled("%s = bf16[2,4] all-reduce(%p), replica_groups=?x"))


def test_program_cost_counts_a_matmul():
    left, right = jnp.zeros((64, 128)), jnp.zeros((128, 32))
    cost = program_cost(jax.jit(jnp.matmul).lower(left, right).compile())
    assert cost.flops == pytest.approx(2 * 64 * 128 * 32, rel=0.01)
    assert cost.argument_bytes == 4 * (64 * 128 + 128 * 32)
    assert cost.output_bytes == 4 * 64 * 32
    assert cost.resident_bytes >= cost.argument_bytes + cost.output_bytes
    assert cost.bytes_accessed >= cost.argument_bytes


def test_a_loop_body_counts_once():
    def looped(x):
        return jax.lax.fori_loop(0, 6, lambda _, carry: carry @ carry, x)

    cost = program_cost(jax.jit(looped).lower(jnp.zeros((64, 64))).compile())
    assert cost.flops == pytest.approx(2 * 64**3, rel=0.01)


def test_program_cost_is_per_device(mesh):
    cost = program_cost(compile_on(mesh, jnp.sin, P("data"), P("data")))
    assert cost.argument_bytes == cost.output_bytes == LOCAL


def test_donated_arguments_are_not_counted_twice():
    array = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    compiled = jax.jit(lambda x: x + 1, donate_argnums=0).lower(array).compile()
    cost = program_cost(compiled)
    assert cost.alias_bytes == 256 * 256 * 4
    assert cost.resident_bytes == 256 * 256 * 4 + cost.temp_bytes
