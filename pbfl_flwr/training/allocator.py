"""Keep freed memory in the process, so that the allocator does not request it again for every batch."""

from __future__ import annotations

import ctypes
import platform
from functools import cache

# mallopt(3), <malloc.h>
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
LARGEST_INT = 2**31 - 1
TOP_PAD_BYTES = 64 * 2**20


@cache
def keep_freed_memory() -> bool:
    """Make glibc keep freed memory in this process, for its whole lifetime.

    By default glibc maps every large tensor anew and unmaps it when it is freed, so that each batch pays for zeroed
    pages again. Peak memory is unchanged (that of the largest batch), but freed memory is not returned to the system.

    Returns:
        True if the process runs on glibc and glibc accepted the settings. Elsewhere nothing is changed.
    """
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    options = {M_MMAP_THRESHOLD: LARGEST_INT, M_TRIM_THRESHOLD: LARGEST_INT, M_TOP_PAD: TOP_PAD_BYTES}
    return all(mallopt(parameter, value) == 1 for parameter, value in options.items())
