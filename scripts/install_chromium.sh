#!/usr/bin/env bash
# bash scripts/install_chromium.sh: Chromium, in which tests open report.html, if not there. From Debian's packages, as
# root. Where that cannot be done it says so: those tests are then skipped.
set -euo pipefail

command -v chromium >/dev/null && exit 0
if [[ $EUID -ne 0 ]] || ! command -v apt-get >/dev/null; then
  echo "chromium is not installed: the tests that open report.html in a browser are skipped (sudo apt-get install chromium)" >&2
  exit 0
fi
LOG=$(mktemp "${TMPDIR:-/tmp}/vcpo-chromium.XXXXXX")
start=$SECONDS
if ! { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends chromium; } >"$LOG" 2>&1; then
  tail -n 5 "$LOG" >&2
  echo "apt-get could not install chromium, so the tests that need it are skipped; the whole output is in $LOG" >&2
  exit 0
fi
rm -f "$LOG"
echo "install: $(chromium --version 2>/dev/null) ($((SECONDS - start)) s)"
