"""The pytest plugin: goldens of the ledger and `--spmd-update`.

pytest loads this file at the start of every run in an environment that has spmd: it imports pytest
and the standard library, and the rest with the first golden.
"""

from __future__ import annotations

from collections.abc import Callable
import os
from pathlib import Path
import re
import sys
from typing import Any
import zlib

import pytest

# pytest shows the user's line and the message, and no frame of this file.
__tracebackhide__ = True

_GOLDENS = "spmd.testing._goldens"
_UPDATE = "--spmd-update"
#: By path what workers of pytest-xdist wrote: checksums, and whether the file changed.
_written = pytest.StashKey[dict[str, list[tuple[int, bool]]]]()
_session = pytest.StashKey[Any]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds ``--spmd-update``."""
    parser.getgroup("spmd").addoption(
        _UPDATE,
        action="store_true",
        default=False,
        help="write the goldens of spmd.testing instead of comparing with them; in CI only where "
        "it stands on the command line",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Starts a session of goldens, where one could be needed."""
    config.stash[_written] = {}
    update = bool(config.getoption(_UPDATE))
    in_ci = os.environ.get("CI", "").lower() not in ("", "0", "false", "no")
    # From `addopts` it would make every golden of a CI run pass for ever.
    if update and in_ci and _UPDATE not in config.invocation_params.args:
        raise pytest.UsageError(
            f"{_UPDATE} comes from addopts or PYTEST_ADDOPTS, and this is CI (the environment "
            "variable CI is set): there it has to stand on the command line"
        )
    # Inside of another run, as with pytester, the outer one's goldens are loaded already.
    if update or _GOLDENS in sys.modules:
        from spmd.testing import _goldens

        config.stash[_session] = _goldens.Session(update=update)
        _goldens.sessions.append(config.stash[_session])


def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends the session of goldens."""
    if _session in config.stash and _GOLDENS in sys.modules:
        from spmd.testing import _goldens

        _goldens.sessions.remove(config.stash[_session])


# Fixture


@pytest.fixture
def spmd_golden(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Compares the collectives of a program with the golden file of this test.

    Call it as ``spmd_golden(f, *args, name=None, mesh=None, **kwargs)``, where `f` is what
    `spmd.report` takes, or a `Report`, which it returns. The file is
    ``goldens/<test file>/<test>.ledger`` beside the test file; a test with several goldens gives
    all but one a `name`.
    """
    taken: set[str | None] = set()

    def golden(f: Any, /, *args: Any, name: str | None = None, **kwargs: Any) -> Any:
        from spmd.testing import _goldens

        if name in taken:
            raise _goldens.refusal(
                "is called twice in one test for one file",
                subject="spmd_golden",
                given="no name" if name is None else f"name={name!r}",
                fix="spmd_golden(f, ..., name='another'), which is a file of its own",
            )
        taken.add(name)
        return _goldens.assert_golden(f, _golden_path(request, name), *args, **kwargs)

    return golden


def _golden_path(request: pytest.FixtureRequest, name: str | None) -> Path:
    test, node = request.path, request.node
    outer = [node.cls.__name__] if getattr(node, "cls", None) else []
    parts = [*outer, node.name, *([] if name is None else [name])]
    return test.parent / "goldens" / test.stem / f"{_file_name('.'.join(parts))}.ledger"


def _file_name(text: str) -> str:
    """A name that every file system takes; another one for another text."""
    plain = re.sub(r"[^\w.\-\[\]=,+]", "_", text)[:120]
    if plain == text:
        return plain
    import hashlib

    return f"{plain}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


# Summary


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hands what was written to the process that prints the summary; fails on a conflict."""
    config, goldens = session.config, session.config.stash.get(_session, None)
    is_worker = hasattr(config, "workerinput")  # of pytest-xdist
    if is_worker and goldens is not None:
        # A checksum of each text that was to be written, and whether the file changed by it.
        config.workeroutput["spmd_goldens"] = {  # pyright: ignore
            str(path): (zlib.crc32(text.encode()), path in goldens.updated)
            for path, text in goldens.texts.items()
        }
    elif _conflicts(config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Takes what a worker of pytest-xdist has written."""
    written = node.config.stash[_written]
    for path, one in getattr(node, "workeroutput", {}).get("spmd_goldens", {}).items():
        written.setdefault(path, []).append(one)


def _conflicts(config: pytest.Config) -> list[str]:
    """Files that two workers wrote differently; within one process that is an error at once."""
    return [p for p, texts in config.stash[_written].items() if len({c for c, _ in texts}) > 1]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Lists the goldens that were updated, and those that several tests write differently."""
    goldens = config.stash.get(_session, None)
    updated = {str(path) for path in (goldens.updated if goldens else ())}
    updated |= {p for p, texts in config.stash[_written].items() if any(u for _, u in texts)}
    for title, paths in (
        ("spmd goldens updated", updated),
        ("spmd goldens that two tests write differently", _conflicts(config)),
    ):
        if paths:
            terminalreporter.section(title)
        for path in sorted(paths):
            terminalreporter.line(os.path.relpath(path, config.invocation_params.dir))
