"""Code without the bodies of compiled fusions: it runs alike, and its readers get all of it."""

from bundles import same_bits
from hypothesis import given, settings, strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd import P, _jax, pjit
from spmd.bundle import _format, _trim, _wire


def _many_fusions(x, w, n):
    """Fusions with several results and that write in place, in loops and branches."""

    def body(carry, row):
        h, table = carry
        h = jnp.tanh(h @ w) + jax.nn.softmax(h * 2, axis=-1)
        table = jax.lax.dynamic_update_slice(table, (h[:1] * row)[None], (n, 0, 0))
        return (h, table), (h.sum(), jnp.where(h > 0, h, -h).max(axis=0))

    carry = (x, jnp.zeros((4, 1, x.shape[1])))
    (h, table), sums = jax.lax.scan(body, carry, jnp.arange(3.0))
    branch = jax.lax.cond(n > 1, lambda: jnp.sort(h, axis=0) * 3, lambda: jnp.cumsum(h, axis=1) - h)
    return h, table, sums, branch, jnp.argmax(h, axis=1), (h.T @ h)[:2].astype(jnp.bfloat16)


@pytest.fixture(scope="module")
def mesh():
    """Two axes over all devices."""
    return spmd.make_mesh({"data": 4, "model": 2})


@pytest.fixture(scope="module")
def made(mesh, tmp_path_factory):
    """A program with fusions of every kind, its arguments, its code and its file.

    Both are written before it runs: XLA writes no sort that has run.
    """
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 32), np.float32)
    w = rng.standard_normal((32, 32), np.float32)
    f = pjit(_many_fusions, in_axis_resources=(P("data"), P(None, "model"), P()), mesh=mesh)
    compiled = f.lower(x, w, np.int32(2)).compile()
    path = tmp_path_factory.mktemp("trim") / "f.spmd"
    compiled.save(path)
    return compiled, (x, w), _jax.serialized(compiled._executable), path


@pytest.fixture(scope="module")
def loaded(made):
    """The program from its file."""
    return spmd.load(made[3])


def _operations(text):
    return text.count(" = ")


def test_it_runs_alike(made, loaded):
    """What runs has fewer operations in its HLO, and the same results to the bit."""
    whole, (x, w), *_ = made
    running = loaded._executable.as_text()
    assert _operations(running) < 0.8 * _operations(whole.as_text())
    for n in map(np.int32, (0, 2)):
        assert same_bits(loaded(x, w, n), whole(x, w, n))


def test_readers_see_all_of_it(made, loaded):
    """Text, costs, JAX's own stage and the runtime's executable are those of the program saved."""
    whole = made[0]
    assert _operations(loaded.as_text()) == _operations(whole.as_text())
    assert loaded.cost_analysis() == whole.cost_analysis()
    assert loaded.jax_stage.as_text() == loaded.as_text()
    (module,) = loaded.runtime_executable().hlo_modules()
    assert _operations(module.to_string()) == _operations(whole.as_text())
    assert loaded.report().cost == whole.report().cost


def test_what_was_taken_out_is_put_back(made):
    """Code and what was taken out of it are the code again, byte by byte, in the file too."""
    _, _, code, path = made
    slim, kept = _trim.trim(code)
    assert len(slim) < len(code)
    assert _trim.untrim(slim, kept) == code
    assert _format.unpack(path.read_bytes()).sections[:2] == (slim, kept)
    assert _trim.trim(slim) is None


def test_a_cheap_program_stays_whole(mesh, tmp_path):
    """A program is not made to look like one that XLA runs in the thread of its caller."""

    def waves(x):
        return jnp.sin(x) + jnp.cos(x * 2) * 3

    for size in (16, 1 << 16):  # all of whose operations are in one fusion
        x = np.zeros(size, np.float32)
        path = tmp_path / f"{size}.spmd"
        pjit(waves, in_axis_resources=P("data"), mesh=mesh).lower(x).compile().save(path)
        assert not _format.unpack(path.read_bytes()).sections[1]


def test_every_cut_and_change_of_code_is_left_as_it_is(made):
    """Code of another form gives nothing, or something whose rest is put back: no exception."""
    code = made[2]
    rng = np.random.default_rng(0)
    for end in rng.integers(0, len(code), 20):
        assert _trim.trim(code[:end]) is None
    for _ in range(20):
        changed = bytearray(code)
        for at in rng.integers(0, 1 << 13, 4):
            changed[at] ^= 1 << rng.integers(8)
        if found := _trim.trim(bytes(changed)):
            assert _trim.untrim(*found)
    with pytest.raises(_wire.WireError):
        _trim.untrim(code, b"no such thing")


# Bodies


def _instruction(name, opcode, own, **fields):
    kind, called = fields.get("kind"), fields.get("called", ())
    found = [(1, 2, name), (2, 2, opcode), (3, 2, b"shape of " + name)]
    found += [(11, 2, kind)] if kind else []
    return _wire.build([*found, (35, 0, own), *((38, 0, one) for one in called)])


def _body(own, root, *instructions):
    rows = [(2, 2, one) for one in instructions]
    return (3, 2, _wire.build([(1, 2, b"body"), *rows, (5, 0, own), (6, 0, root)]))


def _opcodes(module):
    bodies = [_wire.parse(v) for n, _, v in _wire.parse(module) if n == 3]
    return [
        [_wire.bytes_of(_wire.parse(v), 2).decode() for n, _, v in body if n == 2]
        for body in bodies
    ]


def test_only_bodies_of_compiled_fusions_go():
    """One that something else calls too, one that the runtime builds, and a bare parameter stay."""
    inner = (_instruction(b"p", b"parameter", 0), _instruction(b"a", b"add", 1))
    more = (*inner, _instruction(b"b", b"multiply", 2))
    calls = [
        _instruction(b"f", b"fusion", 30, kind=b"kLoop", called=[1]),
        _instruction(b"g", b"fusion", 31, kind=b"kLoop", called=[2]),
        _instruction(b"h", b"call", 32, called=[2]),
        _instruction(b"i", b"fusion", 33, kind=b"kCustom", called=[3]),
        _instruction(b"j", b"fusion", 34, kind=b"kLoop", called=[4]),
    ]
    module = _wire.build(
        [
            _body(1, 2, *more),
            _body(2, 2, *more),
            _body(3, 2, *more),
            _body(4, 0, *inner),
            _body(5, 30, *calls),
        ]
    )
    whole = ["parameter", "add", "multiply"]
    main = ["fusion", "fusion", "call", "fusion", "fusion"]
    stub = ["parameter", "custom-call"]
    assert _opcodes(module) == [whole, whole, whole, whole[:2], main]
    slim = _trim._trim_module(module)
    assert _opcodes(slim) == [stub, whole, whole, whole[:2], main]
    (call,) = [_wire.parse(v) for n, _, v in _wire.parse(_wire.parse(slim)[0][2]) if n == 2][1:]
    assert _wire.bytes_of(call, 3) == b"shape of b"
    assert (_wire.number_of(call, 35), _wire.numbers_of(call, 36)) == (2, [0])


# Messages

_VALUES = st.one_of(
    st.tuples(st.integers(1, 1 << 20), st.just(0), st.integers(0, (1 << 64) - 1)),
    st.tuples(st.integers(1, 1 << 20), st.just(2), st.binary(max_size=300)),
    st.tuples(st.integers(1, 1 << 20), st.just(1), st.binary(min_size=8, max_size=8)),
    st.tuples(st.integers(1, 1 << 20), st.just(5), st.binary(min_size=4, max_size=4)),
)


@given(st.lists(_VALUES))
def test_messages_come_back(fields):
    """What is written is read again; two messages after each other are one with all fields."""
    message = _wire.build(fields)
    assert _wire.parse(message) == fields
    assert _wire.parse(message + message) == fields + fields


@given(st.binary(max_size=40))
@settings(max_examples=300)
def test_bytes_that_are_no_message_are_refused(data):
    """Any bytes are fields that give the same fields again, or refused as no message."""
    try:
        fields = _wire.parse(data)
    except _wire.WireError:
        return
    assert _wire.parse(_wire.build(fields)) == fields


def test_the_wire_format():
    """Numbers and texts are written as protobuf's documentation has them."""
    assert _wire.build([(1, 0, 150)]) == bytes.fromhex("089601")
    assert _wire.build([(2, 2, b"testing")]) == bytes.fromhex("120774657374696e67")
    packed = [(6, 2, bytes.fromhex("038e029ea705")), (6, 0, 1)]
    assert _wire.numbers_of(packed, 6) == [3, 270, 86942, 1]
    assert _wire.number_of([], 1) == 0
