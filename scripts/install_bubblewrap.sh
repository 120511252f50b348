#!/usr/bin/env bash
# bash scripts/install_bubblewrap.sh: bwrap and libseccomp, which the code sandbox isolates programs with, if not there.
# From Debian's or Ubuntu's packages, as root; otherwise it says what to do.
set -euo pipefail

command -v bwrap >/dev/null && /sbin/ldconfig -p | grep libseccomp.so.2 >/dev/null && exit 0
if [[ $EUID -ne 0 ]] || ! command -v apt-get >/dev/null; then
  echo "bubblewrap is not installed: install it (sudo apt-get install bubblewrap libseccomp2, 0.8 or newer) and run again" >&2
  exit 2
fi
LOG=$(mktemp "${TMPDIR:-/tmp}/vcpo-bubblewrap.XXXXXX")
if ! { apt-get update && apt-get install -y --no-install-recommends bubblewrap libseccomp2; } >"$LOG" 2>&1; then
  tail -n 20 "$LOG" >&2
  echo "apt-get could not install bubblewrap; the whole output is in $LOG" >&2
  exit 1
fi
rm -f "$LOG"
echo "install: $(bwrap --version)"
