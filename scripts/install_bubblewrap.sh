#!/usr/bin/env bash
# bash scripts/install_bubblewrap.sh: bwrap, which the code sandbox isolates programs with, if it is not there yet.
# From Debian's or Ubuntu's packages, as root; otherwise it says what to do.
set -euo pipefail

command -v bwrap >/dev/null && exit 0
if [[ $EUID -ne 0 ]] || ! command -v apt-get >/dev/null; then
  echo "bubblewrap is not installed: install it (sudo apt-get install bubblewrap, 0.8 or newer) and run again" >&2
  exit 2
fi
LOG=$(mktemp "${TMPDIR:-/tmp}/vcpo-bubblewrap.XXXXXX")
if ! { apt-get update && apt-get install -y --no-install-recommends bubblewrap; } >"$LOG" 2>&1; then
  tail -n 20 "$LOG" >&2
  echo "apt-get could not install bubblewrap; the whole output is in $LOG" >&2
  exit 1
fi
rm -f "$LOG"
echo "install: $(bwrap --version)"
