"""That something is going on, on the standard error: for people, not for logs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import time

from rich.console import Console


@contextlib.contextmanager
def showing(what: str, *, lines: bool = False) -> Iterator[Callable[[str], None]]:
    """Shows what is going on, and gives a function to say more.

    A terminal has one line that moves and is gone in the end. Elsewhere there is a line each time
    with `lines`, else nothing.
    """
    console = Console(stderr=True, highlight=False, emoji=False)
    start = time.monotonic()
    if console.is_terminal and not console.is_jupyter:
        with console.status(what) as status:
            yield lambda text: status.update(f"{what}, {time.monotonic() - start:.0f} s: {text}")
        return
    say = console.print if lines else _nothing
    say(f"{what} ...", markup=False)
    yield lambda text: say(text, markup=False)
    say(f"{what}: {time.monotonic() - start:.1f} s", markup=False)


@contextlib.contextmanager
def quiet() -> Iterator[Callable[[str], None]]:
    """In the place of `showing`, where nothing is to be seen."""
    yield _nothing


def _nothing(*_: object, **__: object) -> None:
    pass
