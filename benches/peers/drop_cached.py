"""Puts files on the disk and drops their cached pages: `drop_cached.py FILE...`.

A file that was just written is cached in the pieces in which it was written. Measurements begin as after a reboot,
for every peer alike: the first read caches the file anew, as each program asks for it.
"""

import os
import sys

for path in sys.argv[1:]:
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)
