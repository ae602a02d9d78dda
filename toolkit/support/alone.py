"""Runs a module of this package as a program, so that no file beside the user's script is imported by mistake.

    python .../toolkit/support/alone.py MODULE [ARGUMENTS ...]

It is started by its path: `python -m` would look for modules in the working directory first, where a user may have a
`logging.py`.
"""

import sys


def command(module: str, *arguments: str) -> list[str]:
    """Returns the command line that runs a module in this way."""
    return [sys.executable, __file__, module, *arguments]


if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = __file__.rpartition("/toolkit/")[0]
    import runpy

    sys.argv[:] = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
