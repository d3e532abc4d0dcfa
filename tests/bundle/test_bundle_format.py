"""Files that are no bundle, were changed, or are for another process: a clear error, never more."""

import hashlib
import json

import bundles
from bundles import Pair, State, forged, header_of
from hypothesis import given, settings, strategies as st
import jax
import numpy as np
import pytest

import spmd
from spmd import P, pjit
from spmd.bundle import _fingerprint, _format, contents

X = np.arange(64, dtype=np.float32).reshape(8, 8)


@pytest.fixture(scope="module")
def mesh():
    """The mesh of the program."""
    return spmd.make_mesh({"data": 4, "model": 2})


@pytest.fixture(scope="module")
def data(mesh, tmp_path_factory):
    """The bytes of a bundle with a tree of most kinds of nodes."""

    def step(state, batch, *, scale=1.0):
        w = state.w - scale * batch.first.mean()
        return {"w": bundles.Box(w, bundles.NOTE), "keys": jax.random.split(batch.second)}

    f = pjit(
        step, in_axis_resources={"state": P("model"), "batch": P()}, mesh=mesh, donate_argnums=0
    )
    args = (State(X, X), Pair(X, jax.random.key(0)))
    path = tmp_path_factory.mktemp("format") / "step.spmd"
    f.lower(*args, scale=0.5).compile().save(path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def file(data, tmp_path_factory):
    """The same bundle as a file: hypothesis shows arguments, and bytes at length."""
    path = tmp_path_factory.mktemp("file") / "step.spmd"
    path.write_bytes(data)
    return path


@pytest.fixture
def path(tmp_path, monkeypatch):
    """Where a file is written; messages have no folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "step.spmd"


def error_of(path, data, **options):
    """The message of a file that is not loaded."""
    path.write_bytes(data)
    with pytest.raises(spmd.BundleError) as error:
        spmd.load(path.name, **options)
    return str(error.value)


# Bytes


def test_what_is_no_bundle(path):
    """An empty file and one of another kind are told as what they are."""
    text = "bundle `step.spmd` is no bundle, or only the beginning of one.\n"
    expected = "  expected  a bundle of spmd, which starts as one\n"
    fix = "\n  fix       give the path that Compiled.save wrote"
    assert error_of(path, b"") == f"{text}{expected}  got       an empty file{fix}"
    got = "  got       the bytes 50 4b 03 04"
    assert error_of(path, b"PK\x03\x04") == f"{text}{expected}{got}{fix}"
    short = f"{text}  expected  at least 48 bytes\n  got       8 bytes{fix}"
    assert error_of(path, _format.MAGIC) == short


def test_a_file_that_is_not_there(path):
    """A missing file is the error that Python has for it."""
    with pytest.raises(FileNotFoundError):
        spmd.load(path)


def test_another_version_of_the_format(path, data):
    """A later format is told by its number, before anything else is read."""
    assert error_of(path, data[:8] + b"\x07\0\0\0" + data[12:]) == (
        "bundle `step.spmd` cannot be read: its format is not what it has to be.\n"
        "  expected  version 1\n"
        "  got       version 7\n"
        "  fix       copy or save it again"
    )


def test_layout(data):
    """The file is what `_format` says, read here by hand."""
    length = int.from_bytes(data[12:16], "little")
    header = json.loads(data[16 : 16 + length])
    assert data[:8] == b"\x93SPMD\r\n\x1a"
    assert data[8:12] == b"\x01\0\0\0"
    assert len(data) == 16 + length + sum(header["sections"]) + 32
    assert hashlib.sha256(data[:-32]).digest() == data[-32:]
    assert b"pickle" not in data
    assert header["program"]["name"] == "step"


def test_truncated_files(path, data):
    """Cut off anywhere, a file is refused by its length or its checksum."""
    for length in (*range(48), *np.linspace(48, len(data) - 1, 60, dtype=int)):
        message = error_of(path, data[:length])
        starts = ("bundle `step.spmd` cannot be read: its ", "bundle `step.spmd` is no bundle, ")
        assert message.startswith(starts)
    assert "its checksum is not what it has to be" in message
    assert "its checksum is not what it has to be" in error_of(path, data + b"\0")


@settings(max_examples=60, deadline=None, database=None)
@given(st.floats(0, 1, exclude_max=True), st.integers(0, 7))
def test_flipped_bits(file, tmp_path_factory, at, bit):
    """One bit anywhere is enough to refuse a file."""
    path = tmp_path_factory.mktemp("flipped") / "f"
    data = file.read_bytes()
    changed = bytearray(data)
    changed[int(at * len(data))] ^= 1 << bit
    path.write_bytes(changed)
    with pytest.raises(spmd.BundleError, match=r"is no bundle|its (format|checksum) is not"):
        spmd.load(path)


# Headers with a right checksum


def places(value, where=()):
    """The path of each value in a header."""
    yield where
    if isinstance(value, (dict, list)):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in pairs:
            yield from places(inner, (*where, key))


WRONG = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.integers(-2, 12),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["", "*", "data", "Auto", "named", "P", "\ud800", "x" * 70000]),
    st.sampled_from([[], {}, [[]], {"tuple": []}, {"custom": []}, [None] * 5, {"float": "1"}]),
)


@pytest.mark.slow
@settings(max_examples=250, deadline=None, database=None)
@given(st.floats(0, 1, exclude_max=True), st.sampled_from(["replace", "repeat", "drop"]), WRONG)
def test_forged_headers(file, tmp_path_factory, at, change, wrong):
    """A header with anything else at any place is loaded or refused, and nothing else happens."""
    data = file.read_bytes()
    header = header_of(data)
    found = [p for p in places(header) if p and p[0] != "sections"]
    *outer, last = found[int(at * len(found))]
    inside = header
    for key in outer:
        inside = inside[key]
    if change == "drop":
        del inside[last]
    elif change == "repeat" and isinstance(inside, list):
        inside.insert(last, inside[last])
    else:
        inside[last] = wrong
    path = tmp_path_factory.mktemp("forged") / "f"
    path.write_bytes(forged(data, header))
    loaded = _or_refused(spmd.load, path)
    assert loaded is None or (loaded.in_avals is not None and loaded.in_specs is not None)
    _or_refused(contents, path)


def _or_refused(read, path):
    """What is read, or None where the file is refused with an error of ours, and no other."""
    try:
        return read(path)
    except spmd.BundleError:
        return None


def packed(text, sections):
    """A bundle of any bytes as its header, with a right checksum."""
    body = _format._PREFIX.pack(_format.MAGIC, 1, len(text)) + text + sections
    return body + hashlib.sha256(body).digest()


@settings(max_examples=60, deadline=None, database=None)
@given(st.binary(max_size=60), st.binary(max_size=20))
def test_headers_of_any_bytes(tmp_path_factory, text, rest):
    """Bytes that are no header, with a right checksum, are refused."""
    path = tmp_path_factory.mktemp("bytes") / "f"
    path.write_bytes(packed(text, rest))
    with pytest.raises(spmd.BundleError, match="cannot be read: its header"):
        spmd.load(path)


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b"1" * 100_000,
        b'{"sections":[NaN]}',
        b'{"sections":[1,1e400]}',
        b'{"sections":' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"sections":[-1,1]}',
    ],
    ids=lambda t: t[:20].decode(),
)
def test_hostile_headers(path, text):
    """Depth, length and numbers that JSON allows and a header does not are refused."""
    assert "cannot be read: its header" in error_of(path, packed(text, b""))


def test_a_prefix_that_promises_too_much(path):
    """A header longer than the file is refused, whatever the checksum."""
    body = _format._PREFIX.pack(_format.MAGIC, 1, 0xFFFFFFFF)
    data = body + hashlib.sha256(body).digest()
    assert "expected  4294967295 bytes\n  got       a file of 48 bytes" in error_of(path, data)


def deep_tree(levels):
    """A tree of so many tuples."""
    tree = "*"
    for _ in range(levels):
        tree = {"tuple": [tree]}
    return tree


def with_program(data, **changes):
    """The bundle with other values in its program."""
    header = header_of(data)
    header["program"] |= changes
    return forged(data, header)


def test_deep_trees(path, data):
    """A tree deeper than any real one is refused before Python runs out of stack."""
    message = error_of(path, with_program(data, out_tree=deep_tree(101)))
    assert "expected  at most 100 levels\n  got       more" in message


def node_of(value, kind):
    """The first node of a kind in a tree, to be changed in place."""
    if isinstance(value, dict) and kind in value:
        return value[kind]
    inner = value.values() if isinstance(value, dict) else value
    if not isinstance(value, (dict, list)):
        return None
    return next((found for v in inner if (found := node_of(v, kind))), None)


def test_classes_that_are_not_registered_here(path, data):
    """A custom node of another program is refused by name, and nothing is imported for it."""
    header = header_of(data)
    node_of(header["program"]["in_tree"], "custom")[0] = ["antigravity", "State"]
    message = error_of(path, forged(data, header))
    assert "expected  the class antigravity.State, imported and registered as a pytree node" in (
        message
    )
    assert "got       no such class in this process" in message
    assert "antigravity" not in __import__("sys").modules
    for module, name in (("builtins", "dict"), ("os", "system"), ("bundles", "header_of")):
        node_of(header["program"]["in_tree"], "custom")[0] = [module, name]
        assert f"the class {module}.{name}, imported" in error_of(path, forged(data, header))


def test_classes_of_another_form(path, data):
    """Fewer children than a class needs crash JAX: they are refused, with the class."""
    for change in (lambda n: n[2].pop(), lambda n: n[2].append("*")):
        header = header_of(data)
        change(node_of(header["program"]["in_tree"], "custom"))
        message = error_of(path, forged(data, header))
        assert "expected  bundles.State with " in message
    header = header_of(data)
    node_of(header["program"]["in_tree"], "namedtuple")[1][0] = "former"
    assert (
        "expected  the fields former, second of bundles.Pair\n  got       first, second"
    ) in error_of(path, forged(data, header))


def test_a_mesh_of_fewer_devices_than_the_code(path, data):
    """A header whose mesh is not that of the code is refused, where the runtime would crash."""
    header = header_of(data)
    axes = [["data", 2, "Auto"], ["model", 2, "Auto"]]
    header["program"]["meshes"][0] = {"axes": axes, "devices": [0, 1, 2, 3]}
    header["fingerprint"]["devices"] = "4"
    message = error_of(path, forged(data, header))
    assert "its header.seal is not what it has to be" in message


def test_types_of_other_sizes_than_those_of_the_code(path, data):
    """A header whose arguments are larger than those of the code is refused: XLA would crash."""
    header = header_of(data)
    index = header["program"]["arguments"][2][1]
    assert header["program"]["avals"][index][0] == [8, 8]
    header["program"]["avals"][index][0] = [8, 16]
    assert error_of(path, forged(data, header)) == (
        "bundle `step.spmd` cannot be read: its header.seal is not what it has to be.\n"
        "  expected  the digest of its code and types\n"
        "  got       another\n"
        "  fix       copy or save it again"
    )


# What the program was compiled for


@pytest.mark.parametrize(
    ("field", "value", "expected", "got"),
    [
        ("jax", "0.9.9", "0.9.9", jax.__version__),
        ("jaxlib", "0.12.77", "0.12.77", __import__("jaxlib.version").version.__version__),
        ("platform version", "PJRT 9", "PJRT 9", jax.devices()[0].client.platform_version),
        ("device kind", "TPU v9", "TPU v9", "cpu"),
        ("processes", "2", "2", "1"),
        ("CPU", "sparc", "sparc", _fingerprint.cpu()[0]),
        ("XLA_FLAGS", ["--xla_a=1", "--xla_b"], "with --xla_a=1 --xla_b", None),
        ("jax_enable_x64", "True", "True", "False"),
        ("jax_default_matmul_precision", "float32", "float32", "None"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_differs_is_named(path, data, field, value, expected, got):
    """Each field in which this process is another is named, with both values."""
    header = header_of(data)
    if field == "XLA_FLAGS":
        value, got = [*header["fingerprint"][field], *value], "without those"
    header["fingerprint"][field] = value
    changed = forged(data, header)
    message = (
        f"bundle `step.spmd` cannot be loaded here: {field} differs.\n"
        f"  expected  {field}: {expected}\n"
        f"  got       {field}: {got}\n"
        "  fix       compile and save it again here, or load it where it was saved"
    )
    assert error_of(path, changed) == message
    differences = contents(path).differences
    assert [(d.field, d.bundle, d.here) for d in differences] == [(field, expected, got)]


def test_both_ends_of_jax(path, data):
    """A bundle of either supported JAX is refused on the other, with both versions named."""
    own = jax.__version__
    other = {"0.10.2": "0.12.0.1"}.get(own, "0.10.2")
    header = header_of(data)
    header["fingerprint"] |= {"jax": other, "jaxlib": other}
    assert error_of(path, forged(data, header)).splitlines() == [
        "bundle `step.spmd` cannot be loaded here: jax and jaxlib differ.",
        f"  expected  jax: {other}",
        f"            jaxlib: {other}",
        f"  got       jax: {own}",
        f"            jaxlib: {own}",
        "  fix       compile and save it again here, or load it where it was saved",
    ]


def test_processors_that_differ(path, data):
    """Of the instructions of two processors, those that only one of them has are named."""
    header = header_of(data)
    features = header["fingerprint"]["CPU features"]
    header["fingerprint"]["CPU features"] = [*features[1:], "amx_x"]
    lines = error_of(path, forged(data, header)).splitlines()
    assert lines[0].endswith("cannot be loaded here: CPU features differs.")
    assert lines[1:3] == [
        "  expected  CPU features: with amx_x",
        f"  got       CPU features: with {features[0]}",
    ]


def test_devices_that_are_missing(path, data):
    """Devices are told by number where this process has not all of them."""
    header = header_of(data)
    header["program"]["meshes"][0]["devices"] = [0, 1, 2, 3, 4, 5, 90, 91]
    assert error_of(path, forged(data, header)).splitlines()[1:3] == [
        "  expected  devices: 8 of the numbers 0..5, 90..91",
        "  got       devices: 8 devices cpu:0..7",
    ]
    header["fingerprint"]["platform"] = "tpu"
    message = error_of(path, forged(data, header))
    assert "cannot be loaded here: platform and devices differ." in message


def test_meshes_that_do_not_fit(path, data):
    """`mesh` has to have the axes of the program, and to be a mesh."""
    assert error_of(path, data, mesh=spmd.make_mesh({"data": 2, "model": 4})) == (
        "bundle `step.spmd` cannot be loaded onto this mesh: it was compiled for another.\n"
        "  given     mesh data=2, model=4\n"
        "  expected  mesh data=4, model=2"
    )
    with pytest.raises(spmd.ArgumentError) as error:
        spmd.load(path, mesh=8)
    assert str(error.value).splitlines()[1:] == [
        "  expected  a spmd.Mesh or jax.sharding.Mesh",
        "  got       int: 8",
    ]


def test_functions_that_are_not_registered(path, data):
    """A program that calls a library of its own names what has to be imported."""
    header = header_of(data)
    header["custom_calls"] = ["my_kernel"]
    assert error_of(path, forged(data, header)) == (
        "bundle `step.spmd` cannot be loaded here: it calls functions that are not registered.\n"
        "  expected  my_kernel\n"
        "  fix       import what registers them with jax.ffi before"
    )


def test_contents(path, data):
    """What a bundle holds is read from its header: names, types, specs, sizes, versions."""
    path.write_bytes(data)
    found = contents(path)
    assert (found.name, dict(found.mesh)) == ("step", {"data": 4, "model": 2})
    assert [(v.name, v.type, v.sharding, v.donated) for v in found.arguments] == [
        ("state.w", "f32[8,8]", "P('model')", True),
        ("state.b", "f32[8,8]", "P('model')", True),
        ("batch.first", "f32[8,8]", "P()", False),
        ("batch.second", "key<fry>[]", "P()", False),
        ("scale", "f32[]", "P()", False),
    ]
    assert [v.type for v in found.results] == ["key<fry>[2]", "f32[8,8]"]
    assert found.compiled_for["jax"] == jax.__version__
    assert found.spmd == spmd.__version__
    assert found.differences == ()
    assert found.total_bytes == len(data)
    assert 0 < found.code_bytes < len(data)
