"""Installs the run's rendezvous below torch's (`install`), and then becomes the program that it was started with.

`__main__`, sys.argv and tracebacks are those of `python PROGRAM ARGS...` or `python -m PROGRAM ARGS...`. So this is not
part of `__main__`: the program's names replace the contents of that module.
"""

import runpy
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import TracebackType

from verl_slurm.rendezvous.install import install_on_import
from verl_slurm.wire.lifeline import die_with_launcher

_OURS = (__file__, str(Path(__file__).with_name("__main__.py")), runpy.__file__, "<frozen runpy>")


def start() -> None:
    """Runs the program that sys.argv names."""
    # First: a launcher that dies now must not leave a rank behind.
    die_with_launcher()
    install_on_import()
    sys.excepthook = _show_the_programs_frames
    if sys.argv[1] == "-m":
        del sys.argv[:2]
        # Not run_module: the program has to be `__main__` in sys.modules.
        runpy._run_module_as_main(sys.argv[0])  # type: ignore[attr-defined]
    else:
        del sys.argv[0]
        _become(sys.argv[0])


def _become(path: str) -> None:
    main = vars(sys.modules["__main__"])
    loader = SourceFileLoader("__main__", path)
    code = compile(loader.get_data(path), path, "exec", dont_inherit=True)
    for name in [name for name in main if not (name.startswith("__") and name.endswith("__"))]:
        del main[name]
    main.update(__file__=path, __spec__=None, __loader__=loader, __package__=None, __doc__=None)
    main.pop("__cached__", None)
    exec(code, main)  # noqa: S102 - the program that this process was started for


def _show_the_programs_frames(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Hides the frames above the program's own first line."""
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in _OURS:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)
