"""How many CPU threads calls from Python may use."""

from __future__ import annotations

from kda import _kda
from kda._arguments import as_int, fail

# 0: the library's own default. One value for the process; a call reads it once.
_num_threads = 0


def set_num_threads(num_threads: int | None) -> None:
    """Set how many CPU threads each later call may use, the calling one included. No result depends on it.

    Args:
        num_threads: at least 1, or None for the default: `KDA_NUM_THREADS` if that is set in the environment, else the
            number of CPUs this process may run on.

    Raises:
        TypeError: `num_threads` is no integer.
        ValueError: `num_threads` is below 1.
    """
    global _num_threads
    if num_threads is None:
        _num_threads = 0
        return
    value = as_int("set_num_threads", "num_threads", num_threads)
    if not 1 <= value < 2**31:
        fail(ValueError, "set_num_threads", "num_threads", "at least 1", str(value))
    _num_threads = value


def get_num_threads() -> int:
    """Return how many CPU threads a call may use."""
    return _num_threads or _kda.default_num_threads()


def planned_threads() -> int:
    """Return the number of threads to plan with; 0 leaves it to the library."""
    return _num_threads
