"""A wrong wall clock in each Python process of an hour of chaos: the file in VCPO_CHAOS_CLOCK says how wrong.

Python imports a module of this name at its start where its folder is on PYTHONPATH. Only `time.time` and `time.time_ns`
are shifted: clocks of compiled code, and the date in `datetime.now`, need the right to set the machine's clock.
"""

import mmap
import os
import struct
import time

_file = os.environ.get("VCPO_CHAOS_CLOCK")
if _file:
    with open(_file, "rb") as _opened:
        _offset_s = mmap.mmap(_opened.fileno(), 8, prot=mmap.PROT_READ)
    _time, _time_ns = time.time, time.time_ns

    def shifted_time(*_: object) -> float:
        """Return the shifted `time.time()`, also if a class keeps the function and calls it as a method."""
        return _time() + struct.unpack("d", _offset_s[:8])[0]

    def shifted_time_ns(*_: object) -> int:
        """Return the shifted `time.time_ns()`."""
        return _time_ns() + int(struct.unpack("d", _offset_s[:8])[0] * 1e9)

    time.time, time.time_ns = shifted_time, shifted_time_ns
