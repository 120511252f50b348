"""A limit of the lines of the server's log that clients cause."""

import logging
import time

LINES_A_MINUTE = 20


class FewLines(logging.Filter):
    """A filter for a handler: of the warnings of a minute the first, and later how many were dropped."""

    _since, _lines = 0.0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True if the record is to be written."""
        if record.levelno < logging.WARNING:  # of the server's start and end
            return True
        if (now := time.monotonic()) - self._since > 60:
            dropped = self._lines - LINES_A_MINUTE
            if dropped > 0:
                record.msg, record.args = f"{record.getMessage()} ({dropped} lines before this were dropped)", ()
            self._since, self._lines = now, 0
        self._lines += 1
        return self._lines <= LINES_A_MINUTE
