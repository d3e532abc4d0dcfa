"""How files are named for people."""

from __future__ import annotations

import os
import sys


def short_path(file: str) -> str:
    """A path relative to the working directory where the file is below it.

    A cell of the notebook that is running is named as IPython does: ``In[5]``.
    """
    if cell := _notebook_cell(file):
        return cell
    try:
        here = os.path.join(os.getcwd(), "")
    except OSError:  # the directory is gone
        return file
    return file[len(here) :] if file.startswith(here) and len(file) > len(here) else file


def _notebook_cell(file: str) -> str | None:
    # Outside of IPython there is none, and it need not be installed.
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is None or not hasattr(shell.compile, "format_code_name"):
        return None
    found = shell.compile.format_code_name(file)
    return found[1] if found else None
