"""`colocated_python_class`: objects on the hosts, whose methods are colocated functions."""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import functools
import inspect
import threading
import types
from typing import Any
import weakref

from spmd.colocated_python._api import ColocatedFunction, Specialization
from spmd.colocated_python._specs import cannot_wrap
from spmd.host_callback._pools import Reaper


def colocated_python_class(cls: type) -> type:
    """Wraps a class to have its objects on the hosts of the devices that methods are called with.

    To make an object keeps its arguments. Its constructor runs on a host before the first method
    that is called there, once however many threads call. Every method is a colocated function and
    can be specialized: ``obj.method.specialize(...)``. When the object here goes, that on the
    hosts goes, too, later and after the calls that were made.

    Args:
        cls: A class whose methods take and return pytrees of arrays.

    Returns:
        A class with the name, text and methods of `cls`.

    Raises:
        ArgumentError: `cls` is not a class.
    """
    if not isinstance(cls, type):
        raise cannot_wrap("colocated_python_class", "a class", cls)
    body: dict[str, Any] = {
        name: _Method(name, member)
        for name, member in inspect.getmembers_static(cls)
        if _is_method(name, member)
    }
    body |= {"_colocated_class": cls, "__init__": _Init(cls), "__getattr__": _no_attribute}
    body |= {"__doc__": cls.__doc__, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    body |= {"__reduce__": _no_pickle}
    return type(cls.__name__, (), body)


def _is_method(name: str, member: Any) -> bool:
    # What else Python looks for by such names is for the wrapper to answer.
    mine = name.startswith("__") and name.endswith("__") and name != "__call__"
    return not mine and (
        inspect.isfunction(member) or isinstance(member, staticmethod | classmethod)
    )


class _Method:
    """A method of a wrapper class: of each object a colocated function."""

    def __init__(self, name: str, member: Any):
        self._name = name
        self._function = getattr(member, "__func__", member)
        self._binds = not isinstance(member, staticmethod)
        self.__doc__ = member.__doc__

    def __get__(self, wrapper: Any, owner: Any = None) -> Any:
        if wrapper is None:
            return self
        methods = wrapper._colocated_methods
        found = methods.get(self._name)
        if found is None:
            made = ColocatedFunction(self._on_host(wrapper._colocated_instance), Specialization())
            found = methods.setdefault(self._name, made)
        return found

    def _on_host(self, instance: _Instance) -> Callable:
        name = self._name

        def method(*args: Any, **kwargs: Any) -> Any:
            return instance.call(name, args, kwargs)

        functools.update_wrapper(method, self._function, updated=())
        method.__name__ = f"{instance.cls.__name__}.{name}"
        with contextlib.suppress(TypeError, ValueError):  # a function written in C may have none
            signature = inspect.signature(self._function)
            parameters = [*signature.parameters.values()][self._binds :]
            method.__dict__["__signature__"] = signature.replace(parameters=parameters)
        return method

    def __call__(self, wrapper: Any, /, *args: Any, **kwargs: Any) -> Any:
        """What `Class.method(obj, x)` and Python's own operators do."""
        return self.__get__(wrapper)(*args, **kwargs)


class _Instance:
    """An object of a class on this host, made by the first method that is called."""

    __slots__ = ("__weakref__", "_arguments", "_lock", "_object", "cls")

    def __init__(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.cls = cls
        self._arguments: Any = (args, kwargs)  # None once the object is made
        self._lock = threading.Lock()
        self._object: Any = None

    def __reduce__(self) -> Any:
        raise _no_pickle_of(self.cls)

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a method of the object."""
        return getattr(self._get(), name)(*args, **kwargs)

    def _get(self) -> Any:
        with self._lock:
            if self._arguments is not None:
                args, kwargs = self._arguments
                self._object = self.cls(*args, **kwargs)
                self._arguments = None
            return self._object


class _Init:
    """The constructor of a wrapper class; an object, so that it travels with the class."""

    def __init__(self, cls: type):
        functools.update_wrapper(self, cls.__init__, updated=())
        self._cls = cls
        self._signature = None
        with contextlib.suppress(TypeError, ValueError):  # a class written in C may have none
            self._signature = inspect.signature(cls)

    def __get__(self, wrapper: Any, owner: Any = None) -> Any:
        return self if wrapper is None else types.MethodType(self, wrapper)

    def __call__(self, wrapper: Any, /, *args: Any, **kwargs: Any) -> None:
        if self._signature is not None:
            self._signature.bind(*args, **kwargs)  # a mistake is told where it is made
        instance = _Instance(self._cls, args, kwargs)
        wrapper._colocated_instance = instance
        wrapper._colocated_methods = {}
        _reaper.prepare()
        weakref.finalize(wrapper, _reaper.take, instance).atexit = False

    def __reduce__(self) -> Any:
        return _Init, (self._cls,)


def _let_go(instance: _Instance) -> None:
    """Calls in flight hold it as well: then it goes in the thread of the last of them."""


# In whose thread objects on the hosts go, when nothing but it holds them.
_reaper = Reaper("spmd.colocated_python destroy", _let_go)


def _no_attribute(self: Any, name: str) -> Any:
    cls = type(self)._colocated_class
    if name.startswith("_colocated"):
        raise AttributeError(name)
    raise AttributeError(
        f"{cls.__name__!r} object has no method {name!r} here: its attributes are on the hosts, "
        "where its methods can return them"
    )


def _no_pickle(self: Any) -> Any:
    raise _no_pickle_of(type(self))


def _no_pickle_of(cls: type) -> TypeError:
    return TypeError(f"cannot pickle {cls.__name__!r} object: what it stands for is on the hosts")
