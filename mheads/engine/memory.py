"""Keeps freed memory in the process.

A step allocates and frees the same activations again and again. glibc gives large blocks back to the system at once,
and every page that is taken anew costs a fault: on CIFAR10-Quick that is a fifth of the step, and shows up as slow
convolutions and slow pooling. Told to keep freed memory, it hands the same warm blocks out again.
"""

from __future__ import annotations

import ctypes
import functools
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc takes no more


@functools.cache
def keep_freed_memory() -> bool:
    """Tells glibc's malloc so, once per process; returns False for another malloc, or one that the user has set up."""
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ) or "malloc" in os.environ.get(
        "LD_PRELOAD", ""
    ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    # One arena for all threads: what one worker frees another may use, and only the main arena grows without bound.
    settings = ((_TRIM_THRESHOLD, 2**31 - 1), (_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD), (_ARENA_MAX, 1))
    return [mallopt(option, value) for option, value in settings] == [1, 1, 1]
