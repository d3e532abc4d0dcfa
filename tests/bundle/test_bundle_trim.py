"""Code without the bodies of compiled fusions: it runs alike, and its readers get all of it."""

from bundles import same_bits
from hypothesis import given, settings, strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd import P, _jax, pjit
from spmd.bundle import _api, _format, _trim


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


_RNG = np.random.default_rng(0)
X = _RNG.standard_normal((64, 32), np.float32)
W = _RNG.standard_normal((32, 32), np.float32)


@pytest.fixture(scope="module")
def mesh():
    """Two axes over all devices."""
    return spmd.make_mesh({"data": 4, "model": 2})


@pytest.fixture(scope="module")
def made(mesh, tmp_path_factory):
    """A program with fusions of every kind, its arguments, its code and its file.

    Both are written before it runs: XLA writes no sort that has run.
    """
    f = pjit(_many_fusions, in_axis_resources=(P("data"), P(None, "model"), P()), mesh=mesh)
    compiled = f.lower(X, W, np.int32(2)).compile()
    path = tmp_path_factory.mktemp("trim") / "f.spmd"
    compiled.save(path)
    return compiled, (X, W), _jax.files.serialized(compiled._executable), path


@pytest.fixture(scope="module")
def loaded(made):
    """The program from its file."""
    return spmd.load(made[3])


def _operations(text):
    return text.count(" = ")


@pytest.mark.slow
def test_it_runs_alike(made, loaded):
    """What runs has fewer operations in its HLO, and the same results to the bit."""
    whole, (x, w), *_ = made
    running = loaded._executable.as_text()
    assert _operations(running) < 0.8 * _operations(whole.as_text())
    for n in map(np.int32, (0, 2)):
        assert same_bits(loaded(x, w, n), whole(x, w, n))


def _loops(x, w):
    """Loops in loops, of lengths that only the data tell, branches inside of them."""

    def inner(state):
        i, y = state
        y = jax.lax.switch(i % 3, [jnp.sin, lambda v: v * 2 + 1, lambda v: v - v.mean()], y)
        return i + 1, y

    def outer(i, y):
        return jax.lax.while_loop(lambda s: s[0] < i, inner, (0, y * w.sum()))[1]

    return jax.lax.fori_loop(0, 5, outer, x @ w), jax.lax.associative_scan(jnp.add, x * 3)


def _in_place(x, w):
    """Updates of parts, in loops and by index, next to readers of what was there."""

    def write(i, table):
        row = jax.lax.dynamic_index_in_dim(table, i, keepdims=False)
        table = table.at[(i * 5) % 64].add(row * 2 + 1)
        return jax.lax.dynamic_update_slice(table, jnp.tanh(row)[None] + i, (i, 0))

    table = jax.lax.fori_loop(0, 9, write, x)
    return table.at[jnp.argsort(x[:, 0])[:7]].max(w[:7] * 4), table[jnp.argmax(x, 0)] - x[:32]


def _trained(x, w):
    """Two steps of a network with softmax, rematerialization and moments."""

    @jax.checkpoint
    def layer(h, w):
        return h + jax.nn.softmax(jax.nn.gelu(h @ w) - h.max(-1, keepdims=True))

    def loss(w):
        return -jnp.log(1e-3 + jax.nn.sigmoid(layer(layer(x, w), w.T))).mean()

    m = v = jnp.zeros_like(w)
    for t in (1, 2):
        value, g = jax.value_and_grad(loss)(w)
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        w = w - 0.1 * (m / (1 - 0.9**t)) / (jnp.sqrt(v / (1 - 0.99**t)) + 1e-8)
    return value, w, m, v


def _collectives(x, w):
    """The collectives of `shard_map`, with operations on elements around each."""

    def local(x, w):
        x = jnp.exp(-jnp.abs(x @ (w @ w.T))) * 2
        x = jax.lax.ppermute(x * 3, "data", [(i, (i + 1) % 4) for i in range(4)]) + x
        x = jax.lax.all_to_all(x - 1, "data", 0, 1, tiled=True) / 2
        x = jax.lax.psum_scatter(x, "model", scatter_dimension=0, tiled=True) + w.sum()
        return jax.lax.all_gather(jnp.sqrt(x * x + 1), "model", axis=0, tiled=True)

    mesh = spmd.make_mesh({"data": 4, "model": 2})
    specs = P("data", None), P(None, "model")
    return jax.shard_map(
        local, mesh=mesh, in_specs=specs, out_specs=P(None, "data"), check_vma=False
    )(x, w)


def _sorts(x, w):
    """Sorts by several keys, the largest of each row, sums along rows, windows."""
    keys, values = jax.lax.sort((jnp.round(x), x * w[:1]), num_keys=2, dimension=1)
    top, where = jax.lax.top_k(x * 2 + 1, 5)
    pooled = jax.lax.reduce_window(x, 0.0, jax.lax.add, (3, 3), (2, 2), "SAME") * x[::2, ::2]
    return keys, values - 1, top / 3, where, jnp.cumsum(x * x, 0), jnp.median(x, 1), pooled


def _types(x, w):
    """Elements of many types, complex and quantized, and their bits."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    z = jnp.fft.fft(jax.lax.complex(x * 3, x @ w), axis=1)
    small = (x * 3).astype(jnp.float8_e4m3fn).astype(jnp.bfloat16) + x.astype(jnp.bfloat16)
    packed = (jnp.clip(x, -1, 1) * 7).astype(jnp.int4)
    return bits >> 3 ^ jax.lax.population_count(bits), z * z.conj(), small, packed, x > w.mean()


def _drawn(x, w):
    """Random numbers of several kinds, from a seed that depends on the data."""
    key = jax.random.fold_in(jax.random.key(3), jnp.abs(x).sum().astype(jnp.int32))
    a, b, c = jax.random.split(key, 3)
    normal = jax.random.normal(a, x.shape) * x
    return normal, jax.random.permutation(b, w, axis=0), jax.random.gamma(c, jnp.abs(w) + 1)


def _algebra(x, w):
    """Factors from LAPACK, convolutions, products of batches."""
    square = w @ w.T + 40 * jnp.eye(32)
    low = jnp.linalg.cholesky(square) * 2
    image = x.reshape(2, 1, 32, 32) * 3
    filtered = jax.lax.conv(image, w[:9].reshape(32, 1, 3, 3), (1, 1), "SAME") + 1
    products = jnp.einsum("bik,bjk->bij", x.reshape(4, 16, 32) * 2, x.reshape(4, 16, 32) + 1)
    return low, jnp.linalg.solve(square, w) - w, jnp.tanh(filtered), jax.nn.relu(products)


@pytest.mark.few(0)  # a compile and a file of each
@pytest.mark.parametrize(
    "f", [_loops, _in_place, _trained, _collectives, _sorts, _types, _drawn, _algebra]
)
def test_programs_of_all_kinds_run_alike(f, mesh, tmp_path):
    """Without what their fusions were made of, the results are the same to the bit."""
    compiled = pjit(f, in_axis_resources=(P("data"), P("model")), mesh=mesh).lower(X, W).compile()
    compiled.save(tmp_path / "f.spmd")
    again = spmd.load(tmp_path / "f.spmd")
    assert _format.unpack((tmp_path / "f.spmd").read_bytes()).sections[1]  # something is taken out
    for x, w in ((X, W), (W[:1] - X, X[:32] * 2)):
        assert same_bits(again(x, w), compiled(x, w))
    assert _operations(again.as_text()) == _operations(compiled.as_text())


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
    assert len(slim) < 0.9 * len(code)
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


@pytest.mark.parametrize("wrong", ["refused by the runtime", "another program"])
def test_what_differs_is_not_written(made, mesh, tmp_path, monkeypatch, wrong):
    """If the runtime refuses what is left, or reads another plan in it, all of it is written."""
    _, (x, w), code, _ = made
    other = code if wrong == "another program" else _trim._with_module(code, b"")
    monkeypatch.setattr(_api, "trim", lambda code: (other, b"taken out"))

    def f(x, w):
        return jnp.tanh(x @ w) * 2

    compiled = pjit(f, in_axis_resources=P("data"), mesh=mesh).lower(x, w).compile()
    compiled.save(tmp_path / "f.spmd")
    assert not _format.unpack((tmp_path / "f.spmd").read_bytes()).sections[1]
    assert same_bits(spmd.load(tmp_path / "f.spmd")(x, w), compiled(x, w))


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
    with pytest.raises(_trim.WireError):
        _trim.untrim(code, b"no such thing")


# Bodies


def _instruction(name, opcode, own, **fields):
    kind, called = fields.get("kind"), fields.get("called", ())
    found = [(1, 2, name), (2, 2, opcode), (3, 2, b"shape of " + name)]
    found += [(11, 2, kind)] if kind else []
    return _trim.build([*found, (35, 0, own), *((38, 0, one) for one in called)])


def _body(own, *instructions):
    rows = [(2, 2, one) for one in instructions]
    return (3, 2, _trim.build([(1, 2, b"body"), *rows, (5, 0, own), (6, 0, 1)]))


def _bodies(module):
    """Instructions of each computation by its number."""
    bodies = [_trim.parse(v) for n, _, v in _trim.parse(module) if n == 3]
    return {
        _trim.number_of(body, 5): [_trim.parse(v) for n, _, v in body if n == 2] for body in bodies
    }


def test_only_compiled_fusions_become_calls():
    """What something else calls too, what the runtime builds, and what both call stay."""
    inner = (_instruction(b"p", b"parameter", 0), _instruction(b"a", b"add", 1))
    reducing = (*inner, _instruction(b"r", b"reduce", 2, called=[8]))
    calls = [
        _instruction(b"f", b"fusion", 30, kind=b"kLoop", called=[1]),
        _instruction(b"g", b"fusion", 31, kind=b"kInput", called=[2]),
        _instruction(b"h", b"call", 32, called=[2]),
        _instruction(b"i", b"fusion", 33, kind=b"kCustom", called=[3]),
        _instruction(b"j", b"while", 34, called=[4, 5]),
    ]
    loop = _instruction(b"k", b"fusion", 40, kind=b"kOutput", called=[6])
    bodies = {
        1: reducing,
        2: inner,
        3: (_instruction(b"m", b"fusion", 3, kind=b"kLoop", called=[10]), *reducing),
        4: inner,
        5: (loop, *inner),
        6: (
            *inner,
            _instruction(b"s", b"sort", 2, called=[9]),
            _instruction(b"n", b"fusion", 3, kind=b"kLoop", called=[11]),
        ),
        7: calls,
        8: inner,  # the library's fusion reduces with it too
        9: inner,  # only a compiled fusion sorts by it, and memory is planned for it
        10: inner,  # in what the runtime builds
        11: inner,
    }
    rows = [_body(own, *instructions) for own, instructions in bodies.items()]
    module = _trim.build([(1, 2, b"module"), *rows, (6, 0, 7), (7, 2, b"schedule")])
    slim = _trim._trim_module(module)
    found = _bodies(slim)
    assert [*found] == [2, 3, 4, 5, 7, 8, 9, 10]
    opcodes = {
        own: [_trim.bytes_of(i, 2).decode() for i in instructions]
        for own, instructions in found.items()
    }
    assert opcodes[5] == ["custom-call", "parameter", "add"]
    assert opcodes[7] == ["custom-call", "custom-call", "call", "fusion", "while"]
    for own in (2, 3, 4, 8, 9, 10):
        assert found[own] == [_trim.parse(i) for i in bodies[own]]
    rest = [field for field in _trim.parse(slim) if field[0] != 3]
    assert rest == [(1, 2, b"module"), (6, 0, 7), (7, 2, b"schedule")]


def test_a_call_keeps_what_others_and_profiles_see():
    """Name, result, metadata, number, operands, what has to come before; not how it is compiled."""
    kept = [(1, 2, b"f"), (3, 2, b"shape"), (7, 2, b"op"), (35, 0, 5), (36, 0, 3), (37, 0, 4)]
    own = [(2, 2, b"fusion"), (11, 2, b"kLoop"), (38, 0, 9), (43, 2, b"{}")]
    call = _trim._opaque([*own, *kept])
    assert call[: len(kept)] == kept
    assert call[len(kept) :] == [(2, 2, b"custom-call"), (28, 2, b"fusion")]


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
    message = _trim.build(fields)
    assert _trim.parse(message) == fields
    assert _trim.parse(message + message) == fields + fields


@given(st.binary(max_size=40))
@settings(max_examples=300)
def test_bytes_that_are_no_message_are_refused(data):
    """Any bytes are fields that give the same fields again, or refused as no message."""
    try:
        fields = _trim.parse(data)
    except _trim.WireError:
        return
    assert _trim.parse(_trim.build(fields)) == fields


def test_the_wire_format():
    """Numbers and texts are written as protobuf's documentation has them."""
    assert _trim.build([(1, 0, 150)]) == bytes.fromhex("089601")
    assert _trim.build([(2, 2, b"testing")]) == bytes.fromhex("120774657374696e67")
    packed = [(6, 2, bytes.fromhex("038e029ea705")), (6, 0, 1)]
    assert _trim.numbers_of(packed, 6) == [3, 270, 86942, 1]
    assert _trim.number_of([], 1) == 0
