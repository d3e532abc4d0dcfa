"""Layouts of XLA's foreign function interface, read from its header, and handlers that use it."""

import ctypes
import pathlib
import re
import threading

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P
import numpy as np
import pytest

from spmd.host_callback import _ffi
from spmd.host_callback._ffi import Frame, capsule, compile_handler, execute_handler

# The header, as ctypes: offsets and sizes are those that ctypes computes for such fields

_SCALARS = {
    "size_t": ctypes.c_size_t,
    "int64_t": ctypes.c_int64,
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "int": ctypes.c_int,
}


class Header:
    """The structs and enumerations of ``xla/ffi/api/c_api.h`` of the installed JAX."""

    def __init__(self):
        path = pathlib.Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h")
        text = re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
        text = re.sub(r"^\s*#.*?(?<!\\)$", "", text, flags=re.DOTALL | re.MULTILINE)
        self.minor = int(re.search(r"XLA_FFI_API_MINOR (\d+)", path.read_text())[1])
        self.major = int(re.search(r"XLA_FFI_API_MAJOR (\d+)", path.read_text())[1])
        self._bodies = dict(re.findall(r"struct (\w+) \{(.*?)\n\}", text, re.DOTALL))
        self._aliases = {b: a for a, b in re.findall(r"typedef (\w+) (\w+);", text)}
        self.enums = {
            name: {k: int(v) for k, v in re.findall(r"(\w+) = (\d+)", body)}
            for body, name in re.findall(r"typedef enum \{(.*?)\} (\w+);", text, re.DOTALL)
        }
        self._built = {}

    def struct(self, name):
        """A struct as a class of ctypes."""
        if name not in self._built:
            fields = [self._field(f) for f in self._bodies[name].split(";") if f.strip()]
            self._built[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
        return self._built[name]

    def _field(self, text):
        if found := re.fullmatch(r"\s*_XLA_FFI_API_STRUCT_FIELD\((\w+)\)\s*", text):
            return found[1], ctypes.c_void_p
        if found := re.match(r"\s*void \(\*(\w+)\)", text):
            return found[1], ctypes.c_void_p
        kind, name = re.fullmatch(
            r"\s*(?:const )?(?:struct )?([\w\s]+?[\s*]+)(\w+)\s*", text
        ).groups()
        if "*" in kind:
            return name, ctypes.c_void_p
        kind = self._aliases.get(kind.strip(), kind.strip())
        if kind in _SCALARS:
            return name, _SCALARS[kind]
        return name, ctypes.c_int if kind in self.enums else self.struct(kind)

    def word(self, name, *path):
        """At which 8-byte word of a struct a field lies; `path` goes into structs of structs."""
        offset, struct = 0, self.struct(name)
        for field in path:
            offset += getattr(struct, field).offset
            struct = dict(struct._fields_)[field]
        assert offset % 8 == 0
        return offset // 8

    def size(self, name):
        """Bytes of a struct, and bytes up to the end of its last field, as the header counts."""
        struct = self.struct(name)
        last = getattr(struct, struct._fields_[-1][0])
        return ctypes.sizeof(struct), last.offset + last.size

    def words(self, name):
        """The fields of a struct behind its size and extension, each with its word."""
        fields = [f for f, _ in self.struct(name)._fields_]
        assert fields[0] == "struct_size"
        assert fields[1] == "extension_start"
        return {f: self.word(name, f) for f in fields[2:]}


@pytest.fixture(scope="module", name="header")
def _header():
    return Header()


#: Which word of which struct each constant of `_ffi` says.
WORDS = {
    "_EXTENSION": ("XLA_FFI_CallFrame", "extension_start"),
    "_API": ("XLA_FFI_CallFrame", "api"),
    "_CTX": ("XLA_FFI_CallFrame", "ctx"),
    "_STAGE": ("XLA_FFI_CallFrame", "stage"),
    "_ARG_COUNT": ("XLA_FFI_CallFrame", "args", "size"),
    "_ARGS": ("XLA_FFI_CallFrame", "args", "args"),
    "_RESULT_COUNT": ("XLA_FFI_CallFrame", "rets", "size"),
    "_RESULTS": ("XLA_FFI_CallFrame", "rets", "rets"),
    "_ATTRIBUTES": ("XLA_FFI_CallFrame", "attrs", "attrs"),
    "_FUTURE": ("XLA_FFI_CallFrame", "future"),
    "_DATA": ("XLA_FFI_Buffer", "data"),
    "ERROR_CREATE": ("XLA_FFI_Api", "XLA_FFI_Error_Create"),
    "TYPE_REGISTER": ("XLA_FFI_Api", "XLA_FFI_Type_Register"),
    "STATE_SET": ("XLA_FFI_Api", "XLA_FFI_State_Set"),
    "FUTURE_CREATE": ("XLA_FFI_Api", "XLA_FFI_Future_Create"),
    "FUTURE_SET_AVAILABLE": ("XLA_FFI_Api", "XLA_FFI_Future_SetAvailable"),
    "FUTURE_SET_ERROR": ("XLA_FFI_Api", "XLA_FFI_Future_SetError"),
    "RUN_ID_GET": ("XLA_FFI_Api", "XLA_FFI_RunId_Get"),
    "DEVICE_ORDINAL_GET": ("XLA_FFI_Api", "XLA_FFI_DeviceOrdinal_Get"),
}
#: What else the module has in capitals, tested by itself below; None: no part of the interface.
OTHERS = {"_FRAME_WORDS", "_API_WORDS", "_UNKNOWN", "_INTERNAL", "_METADATA", "LARGE"}


def test_every_constant_is_compared():
    """No number of `_ffi` escapes the tests of this file."""
    found = {n for n, v in vars(_ffi).items() if re.fullmatch("_?[A-Z_]+", n) and type(v) is int}
    assert found - OTHERS == set(WORDS)


@pytest.mark.parametrize("constant", WORDS)
def test_word(constant, header):
    """Each field lies where the header of this JAX says."""
    assert getattr(_ffi, constant) == header.word(*WORDS[constant])


def test_sizes(header):
    """As many words are read as the structs have, of those that may grow no more."""
    assert ctypes.sizeof(header.struct("XLA_FFI_CallFrame")) == 8 * _ffi._FRAME_WORDS
    assert ctypes.sizeof(header.struct("XLA_FFI_Api")) >= 8 * _ffi._API_WORDS
    assert ctypes.sizeof(header.struct("XLA_FFI_Buffer")) == 8 * 6


def test_version_is_supported(header):
    """The version that handlers claim is one that the header of this JAX knows."""
    assert _ffi._VERSION[0] == header.major
    assert _ffi._VERSION[1] <= header.minor


def test_enumerations(header):
    """Codes of errors, of the stage that state belongs to, and of the question for metadata."""
    codes = header.enums["XLA_FFI_Error_Code"]
    assert codes["XLA_FFI_Error_Code_UNKNOWN"] == _ffi._UNKNOWN
    assert codes["XLA_FFI_Error_Code_INTERNAL"] == _ffi._INTERNAL
    assert header.enums["XLA_FFI_ExecutionStage"]["XLA_FFI_ExecutionStage_INSTANTIATE"] == 0
    (extensions,) = [v for k, v in header.enums.items() if re.search("Extension_Type$", k)]
    assert extensions == {"XLA_FFI_Extension_Metadata": _ffi._METADATA}


#: The fields of the argument struct of each function, by word, as `Api` passes and reads them.
ARGUMENTS = {
    "Error_Create": {"message": 2, "errc": 3},
    "Type_Register": {"name": 2, "type_id": 4, "type_info": 5},
    "State_Set": {"ctx": 2, "stage": 3, "type_id": 4, "state": 5},
    "Future_Create": {"future": 2},
    "Future_SetAvailable": {"future": 2},
    "Future_SetError": {"future": 2, "error": 3},
    "RunId_Get": {"ctx": 2, "run_id": 3},
    "DeviceOrdinal_Get": {"ctx": 2, "device_ordinal": 3},
}


@pytest.mark.parametrize("function", ARGUMENTS)
def test_argument_struct(function, header):
    """Each function takes the fields that it is passed, in as many bytes as it is told."""
    name = f"XLA_FFI_{function}_Args"
    assert header.words(name) == ARGUMENTS[function]
    whole, used = header.size(name)
    passed = 8 * (max(ARGUMENTS[function].values()) + 1)
    assert used <= passed <= whole


def test_every_function_has_its_arguments_compared():
    """The functions that are called are those whose arguments are compared."""
    called = {w[1].removeprefix("XLA_FFI_") for w in WORDS.values() if w[0] == "XLA_FFI_Api"}
    assert called == set(ARGUMENTS)


def test_small_structs(header):
    """Buffers, attributes, strings and types are read and written where the header says."""
    assert header.words("XLA_FFI_Buffer") | {"dtype": 2} == {
        "dtype": 2,
        "data": 3,
        "rank": 4,
        "dims": 5,
    }
    assert (header.word("XLA_FFI_Scalar", "value"), header.size("XLA_FFI_Scalar")[0]) == (1, 16)
    assert header.word("XLA_FFI_ByteSpan", "ptr") == 0
    assert (header.word("XLA_FFI_ByteSpan", "len"), header.size("XLA_FFI_ByteSpan")[0]) == (1, 16)
    assert header.words("XLA_FFI_TypeInfo") == {"deleter": 2}
    assert ctypes.sizeof(header.struct("XLA_FFI_TypeInfo")) == ctypes.sizeof(_ffi._type_info) == 24
    assert ctypes.sizeof(header.struct("XLA_FFI_TypeId")) == ctypes.sizeof(_ffi._state_type) == 8
    bundle = [name for name, _ in header.struct("XLA_FFI_Handler_Bundle")._fields_]
    assert {"instantiate", "execute"} <= set(bundle)


def test_metadata_is_answered_in_place(header):
    """Asked for its metadata, a handler writes version, traits and type of state, nothing else."""
    frame = header.struct("XLA_FFI_CallFrame")()
    metadata = header.struct("XLA_FFI_Metadata")()
    extension = header.struct("XLA_FFI_Metadata_Extension")()
    ctypes.memset(ctypes.addressof(metadata), 0xAB, ctypes.sizeof(metadata))
    extension.extension_base.type = 1
    extension.metadata = ctypes.addressof(metadata)
    frame.extension_start = ctypes.addressof(extension)
    called = []
    answer = compile_handler(called.append)(ctypes.addressof(frame))
    assert not answer
    assert called == []
    version = metadata.api_version
    assert (version.major_version, version.minor_version) == _ffi._VERSION
    assert metadata.traits == 0
    assert metadata.state_type_id.type_id == _ffi._state_type[0]
    untouched = 0xABABABABABABABAB
    assert (metadata.struct_size, version.struct_size) == (untouched, untouched)
    assert version.extension_start == untouched


# Handlers that run

_handlers = []  # XLA calls them as long as the process lives


def run(stage, *operands, results=(), jit=jax.jit, **attributes):
    """Runs a program that calls a handler; the first operand stands where taps have their token."""
    made = execute_handler(stage)
    _handlers.append(made)
    name = f"spmd_test_handler_{len(_handlers)}"
    jax.ffi.register_ffi_target(name, capsule(made), platform="cpu")
    structs = [jax.ShapeDtypeStruct((), np.float32), *results]
    call = jax.ffi.ffi_call(name, structs, has_side_effect=True)
    fun = jit(lambda *args: call(np.float32(0), *args, **attributes))
    return jax.block_until_ready(fun(*operands))


def test_attributes():
    """Integers of all 64 bits and strings of any length arrive, in the order of their names."""
    seen = []
    numbers = {"a": 0, "b": -1, "c": 2**63 - 1, "d": -(2**63), "e": 2**40 + 1}
    text = "one, 8, {'äx': 8} " * 100

    def stage(frame):
        seen.append([frame.integer(i) for i in range(5)] + [frame.text(5).decode(), frame.text(6)])

    run(stage, **numbers, z=text, zz="")
    assert seen == [[*map(int, numbers.values()), text, b""]]


@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 0, 3), (2, 3, 4), (1,) * 6], ids=str)
def test_operands_and_results(shape):
    """Operands have their shapes and values, in memory of their own; results are written."""
    x = np.arange(np.prod(shape), dtype=np.int16).reshape(shape)
    seen = []

    def stage(frame):
        (buffer,) = frame.arguments()
        (out,) = frame.results()
        assert (buffer.shape, out.shape) == (shape, shape)
        assert buffer.size(x.dtype) == x.nbytes
        value = buffer.copy(x.dtype)
        seen.append(value)
        out.write(value * 2)
        seen.append(buffer.copy(x.dtype))
        value += 1

    _, out = run(stage, x, results=[jax.ShapeDtypeStruct(shape, x.dtype)])
    np.testing.assert_array_equal(out, 2 * x)
    np.testing.assert_array_equal(seen[0], x + 1)
    np.testing.assert_array_equal(seen[1], x)


def test_error_of_a_handler():
    """What a stage returns is the error of the program, and so is what it raises."""
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"UNKNOWN: the host says nö"):
        run(lambda frame: "the host says nö")

    def stage(frame):
        raise ValueError("never mind \udcff")

    with pytest.raises(jax.errors.JaxRuntimeError, match=r"INTERNAL: ValueError: never mind \?"):
        run(stage)


def test_suspended_programs_go_on():
    """A program waits for its future, with its buffers alive, and goes on or fails with it."""
    threads = []

    def later(finish):
        threads.append(threading.Thread(target=finish))
        threads[-1].start()

    def succeed(frame):
        future, (out,) = frame.suspend(), frame.results()

        def finish():
            out.write(np.full(5, 7, np.float32))
            future.set_available()

        later(finish)

    def fail(frame):
        future = frame.suspend()
        later(lambda: future.set_error("gave up: äöü"))

    struct = jax.ShapeDtypeStruct((5,), np.float32)
    np.testing.assert_array_equal(run(succeed, results=[struct])[1], [7] * 5)
    with pytest.raises(jax.errors.JaxRuntimeError, match="gave up: äöü"):
        run(fail, results=[struct])
    for thread in threads:
        thread.join()


def test_ordinals_and_runs():
    """A handler knows its device; devices that run one program together share a number."""
    seen = []

    def stage(frame: Frame):
        seen.append((frame.device_ordinal(), frame.run_id()))

    for number, device in enumerate(jax.devices()):
        run(stage, jax.device_put(jnp.zeros(3), device))
        assert seen.pop()[0] == number
    mesh = Mesh(np.array(jax.devices()[::-1]), ("x",))
    mapped = {"mesh": mesh, "in_specs": P("x"), "out_specs": P(), "check_vma": False}
    runs = set()
    for _ in range(2):
        run(stage, np.zeros(8), jit=lambda f: jax.jit(jax.shard_map(f, **mapped)))
        assert sorted(ordinal for ordinal, _ in seen) == list(range(8))
        (one,) = {run_id for _, run_id in seen}
        runs.add(one)
        seen.clear()
    assert len(runs) == 2


def test_api_refuses():
    """A function of XLA that refuses raises instead of going on."""
    passed = []

    def stage(frame):
        for _ in range(2):
            _ffi.hold(frame, "state can be set once")
            passed.append(1)

    with pytest.raises(jax.errors.JaxRuntimeError, match="RuntimeError: XLA refused function 13"):
        run(stage)
    assert passed == [1]
