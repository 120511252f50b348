#!/usr/bin/env bash
# bash requirements/lock.sh: writes into each lock of the environments the hashes of all files that PyPI has of the
# versions there. To change a version: edit it in its lock, and run this. uv is that of scripts/install.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

new=$(mktemp)
trap 'rm -f "$new"' EXIT
for lock in cpu torch-pypi gpu te flash-attn installer; do
  sed '/^[^#]/,$d' "$lock.lock" >"$new" # the comment above the packages
  sed -n 's/^\([^# ][^ ]*\).*/\1/p' "$lock.lock" |
    ../.venv/uv/bin/uv pip compile --quiet --no-deps --generate-hashes --python-version 3.12 --no-header --no-annotate - >>"$new"
  cp "$new" "$lock.lock"
done
