"""XLA's foreign function interface from pure Python: call frames, buffers, futures and errors.

The layouts are those of ``xla/ffi/api/c_api.h`` below ``jax.ffi.include_dir()``, version 0.3, which
later runtimes accept; `tests/host_callback/test_host_ffi.py` reads the header and compares. Structs
of that interface are read here as arrays of 8-byte words: the index of a field is its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import ctypes
from dataclasses import dataclass
import functools
import gc
import math
import struct
import threading
from typing import Any

import numpy as np

from spmd.host_callback._pools import LARGE, empty, prefer_huge_pages

_VERSION = (0, 3)
_word = ctypes.c_uint64
addressof = ctypes.addressof
# XLA's functions return at once, except those that let a program go on in the calling thread:
# only there the GIL is released.
_Quick = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_Function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_Pending = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)

# XLA_FFI_CallFrame
_FRAME_WORDS = 22
_EXTENSION, _API, _CTX, _STAGE = 1, 2, 3, 4
_ARG_COUNT, _ARGS = 7, 9
_RESULT_COUNT, _RESULTS = 12, 14
_ATTRIBUTES = 20
_FUTURE = 21

# XLA_FFI_Api
_API_WORDS = 24
ERROR_CREATE, TYPE_REGISTER, STATE_SET = 6, 11, 13
FUTURE_CREATE, FUTURE_SET_AVAILABLE, FUTURE_SET_ERROR = 19, 20, 21
RUN_ID_GET, DEVICE_ORDINAL_GET = 22, 23
_RESUMING = (FUTURE_SET_AVAILABLE, FUTURE_SET_ERROR)

# XLA_FFI_Error_Code
_UNKNOWN, _INTERNAL = 2, 13

# XLA_FFI_Buffer
_DATA = 3

_METADATA = 1  # XLA_FFI_Extension_Metadata


def _reader(count: int) -> Callable[[int], tuple[int, ...]]:
    """Returns a function that reads so many words of memory."""
    unpack, memory = struct.Struct(f"{count}Q").unpack_from, (ctypes.c_char * (8 * count))
    at = memory.from_address
    return lambda address: unpack(at(address))


def _words(address: int, count: int) -> Any:
    return (_word * count).from_address(address)


_one, _two = _reader(1), _reader(2)
_Words4 = _word * 4


class Api:
    """The functions that a runtime hands to its handlers."""

    def __init__(self, address: int):
        table = _words(address, _API_WORDS)
        self._functions = {
            i: (_Function if i in _RESUMING else _Quick)(table[i])
            for i in range(ERROR_CREATE, _API_WORDS)
        }

    def __call__(self, function: int, *fields: int) -> Any:
        """Calls a function with the fields of its argument struct; returns that struct."""
        size = 2 + len(fields)
        args = (_word * size)(8 * size, 0, *fields)
        if self._functions[function](addressof(args)):
            raise RuntimeError(f"XLA refused function {function} of its foreign function interface")
        return args

    def get(self, function: int, context: int) -> int:
        """Calls a function that answers a question about a context; such a one does not fail."""
        args = _Words4(32, 0, context, 0)
        self._functions[function](addressof(args))
        return args[3]

    def error(self, message: str, code: int = _UNKNOWN) -> int:
        """Makes an error; who is given it owns it."""
        text = ctypes.create_string_buffer(message.encode(errors="replace"))
        args = (_word * 4)(32, 0, addressof(text), code)
        return self._functions[ERROR_CREATE](addressof(args)) or 0


_apis: dict[int, Api] = {}


_read_frame, _read_buffer = _reader(_FRAME_WORDS), _reader(6)
_cached_reader = functools.cache(_reader)
_bytes = functools.lru_cache(maxsize=1024)(lambda size: ctypes.c_char * size)


class Frame:
    """One execution of one custom call on one device: its words, and the functions of XLA."""

    __slots__ = ("_address", "api", "words")

    def __init__(self, address: int, words: Sequence[int]):
        self._address = address
        self.words = words
        api = words[_API]
        self.api = _apis.get(api) or _apis.setdefault(api, Api(api))

    def integer(self, index: int) -> int:
        """Returns an integer attribute; attributes are sorted by name."""
        scalar = _one(self.words[_ATTRIBUTES] + 8 * index)[0]
        return ctypes.c_int64.from_address(_two(scalar)[1]).value

    def text(self, index: int) -> bytes:
        """Returns a string attribute."""
        span = _one(self.words[_ATTRIBUTES] + 8 * index)[0]
        return ctypes.string_at(*_two(span))

    def arguments(self, first: int = 1) -> list[Buffer]:
        """The operands, by default those behind the token."""
        return _buffers(self.words[_ARGS], self.words[_ARG_COUNT], first)

    def results(self, first: int = 1) -> list[Buffer]:
        """The memory to write the results to, by default what follows the token."""
        return _buffers(self.words[_RESULTS], self.words[_RESULT_COUNT], first)

    def places(self, first: int = 1) -> list[int]:
        """Where the results begin; shapes are read by :meth:`results`, which takes longer."""
        address, count = self.words[_RESULTS], self.words[_RESULT_COUNT]
        return [_one(a + 8 * _DATA)[0] for a in _cached_reader(count)(address)[first:]]

    def numbers(self) -> tuple[int, int]:
        """The first two 64-bit numbers in the memory of the first operand."""
        first, second = _two(_one(_one(self.words[_ARGS])[0] + 8 * _DATA)[0])
        return first, second

    def device_ordinal(self) -> int:
        """Which device of its client executes."""
        return self.api.get(DEVICE_ORDINAL_GET, self.words[_CTX]) & 0xFFFFFFFF

    def run_id(self) -> int:
        """What all devices that execute one program together have in common."""
        return self.api.get(RUN_ID_GET, self.words[_CTX])

    def suspend(self) -> Future:
        """Lets the program wait here, with its buffers alive, until the future is completed."""
        future = self.api(FUTURE_CREATE, 0)[2]
        _word.from_address(self._address + 8 * _FUTURE).value = future
        return Future(self.api, future)


class Buffer:
    """Memory of the device: an operand or the place of a result."""

    __slots__ = ("address", "shape")

    def __init__(self, address: int):
        fields = _read_buffer(address)
        self.address, rank = fields[_DATA], fields[4]
        self.shape = tuple((ctypes.c_int64 * rank).from_address(fields[5])) if rank else ()

    def size(self, dtype: np.dtype) -> int:
        """How many bytes it has."""
        return math.prod(self.shape) * dtype.itemsize

    def copy(self, dtype: np.dtype) -> np.ndarray:
        """Returns the values as an array of its own."""
        size = self.size(dtype)
        if size >= LARGE:
            values = empty(self.shape, dtype)
            ctypes.memmove(values.ctypes.data, self.address, size)  # 6 % quicker than NumPy's copy
            return values
        if not size:
            return np.empty(self.shape, dtype)
        memory: Any = _bytes(size).from_address(self.address)
        return np.array(np.ndarray(self.shape, dtype, memory))

    def write(self, value: np.ndarray) -> None:
        """Writes an array of this shape."""
        write(self.address, value.reshape(self.shape))


def write(address: int, value: np.ndarray) -> None:
    """Writes an array, in the order of its elements, to memory of the device."""
    if value.nbytes:
        if value.nbytes >= LARGE:
            prefer_huge_pages(address, value.nbytes)
        memory: Any = _bytes(value.nbytes).from_address(address)
        np.ndarray(value.shape, value.dtype, memory)[...] = value


def _buffers(address: int, count: int, first: int) -> list[Buffer]:
    return [Buffer(a) for a in _cached_reader(count)(address)[first:]]


@dataclass(slots=True, eq=False)
class Future:
    """What a suspended program waits for; it may be completed from any thread, once."""

    _api: Api
    _future: int

    def set_available(self) -> None:
        """Lets the program go on."""
        self._api(FUTURE_SET_AVAILABLE, self._future)

    def set_error(self, message: str, code: int = _UNKNOWN) -> None:
        """Lets the program fail."""
        self._api(FUTURE_SET_ERROR, self._future, self._api.error(message, code))


def _metadata(words: Any) -> bool:
    """Answers the question for the version of a handler; returns whether it was that one."""
    extension = _words(words[_EXTENSION], 4)
    if extension[1] & 0xFFFFFFFF != _METADATA:
        return False
    version = extension[3] + 3 * 8
    (ctypes.c_int32 * 2).from_address(version)[:] = _VERSION
    _words(version + 8, 2)[:] = (0, _state_type[0])
    return True


def compile_handler(stage: Callable[[Frame], str | None]) -> Any:
    """Makes a handler from a function that returns the text of an error, or None."""

    def handle(address: int) -> int | None:
        words = _read_frame(address)
        if words[_EXTENSION] and _metadata(words):
            return None
        frame = Frame(address, words)
        try:
            message = stage(frame)
        except BaseException as error:
            return frame.api.error(f"{type(error).__name__}: {error}", _INTERNAL)
        return None if message is None else frame.api.error(message)

    return _Function(handle)


def execute_handler(stage: Callable[[Frame], str | None]) -> Any:
    """Makes a handler that runs with a program, from a function as above.

    A signal that came while a program ran is raised at the first line of the handler, before any
    `try`; ctypes would then return to XLA what happens to be in memory, and XLA would free it. So
    what XLA calls is written in C: a function of ctypes that has no result, and so returns zero.
    An error goes by way of a future.
    """

    def handle(address: int) -> None:
        words = _read_frame(address)
        if words[_EXTENSION] and _metadata(words):
            return
        frame = Frame(address, words)
        try:
            if not hasattr(_known, "here"):
                # Keeps Python's state of a thread of XLA: to make it for each call takes 10 µs.
                _known.here = True
                _ensure_thread()
            if (message := stage(frame)) is not None:
                frame.suspend().set_error(message)
        except BaseException as error:
            frame.suspend().set_error(f"{type(error).__name__}: {error}", _INTERNAL)

    inner = _QuickProcedure(handle)
    _kept.append(inner)
    return _Function(inner)


_ensure_thread = ctypes.PYFUNCTYPE(ctypes.c_int)(("PyGILState_Ensure", ctypes.pythonapi))
_known = threading.local()
_QuickProcedure = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
_kept: list[Any] = []


# The state of a custom call: made with its executable, deleted with it
#
# XLA deletes it in the thread that drops the executable last. That may be one of its own while the
# interpreter ends; a thread that asks for the GIL then is ended in the middle of XLA, and with it
# the process. So the deleter is C that needs no GIL: a state is a lock, and is let go.

_new_lock = ctypes.pythonapi.PyThread_allocate_lock
_new_lock.restype, _new_lock.argtypes = ctypes.c_void_p, []
_take_lock = ctypes.pythonapi.PyThread_acquire_lock
_take_lock.argtypes = [ctypes.c_void_p, ctypes.c_int]
_let_go = ctypes.cast(ctypes.pythonapi.PyThread_release_lock, ctypes.c_void_p).value

_state_type = (ctypes.c_int64 * 1)(0)
_type_info = (_word * 3)(24, 0, _let_go)
_type_name = ctypes.create_string_buffer(b"spmd.host_callback")
_states: dict[int, Any] = {}
#: Locks of states that are gone, taken again. None is freed: another thread may be about to look.
_spare: list[int] = []


def bury() -> None:
    """Drops the values of executables that are gone; not to be called in a handler."""
    for lock in [*_states]:
        if _take_lock(lock, 0):  # by one thread only
            _states.pop(lock)  # which may run anything
            _spare.append(lock)


@_Pending
def _bury(_: int) -> int:
    bury()
    return 0


def bury_soon(add: Any = ctypes.pythonapi.Py_AddPendingCall, task: Any = _bury) -> None:
    """Lets the main thread do it between two instructions, when who calls has ended his own."""
    add(task, None)  # the last programs go when this module has no names any more


def _collected(phase: str, info: dict[str, int]) -> None:
    if phase == "stop" and info["generation"]:
        bury_soon()


def hold(frame: Frame, value: Any) -> None:
    """Keeps a value alive as long as the executable that is being made."""
    type_id = addressof(_state_type)
    if not _state_type[0]:
        name, size = addressof(_type_name), len(_type_name.value)
        frame.api(TYPE_REGISTER, name, size, type_id, addressof(_type_info))
        gc.callbacks.append(_collected)
    try:
        lock = _spare.pop()
    except IndexError:
        lock = _new_lock()
        _take_lock(lock, 1)
    _states[lock] = value
    frame.api(STATE_SET, frame.words[_CTX], 0, type_id, lock)


# Registration

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def capsule(handler: Any) -> Any:
    """Wraps a handler as `jax.ffi.register_ffi_target` takes it."""
    address = ctypes.cast(handler, ctypes.c_void_p).value
    return _new_capsule(address, b"xla._CUSTOM_CALL_TARGET", None)
