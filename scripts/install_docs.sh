#!/usr/bin/env bash
# bash scripts/install_docs.sh: what builds the documentation's site, in .venv-docs, from requirements/docs.lock. Run it
# again at any time: it does nothing while the lock is unchanged. Apart from .venv, because it shares no package with it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

LOCK=requirements/docs.lock
STAMP=.venv-docs/install.sha256
LOG=$(mktemp "${TMPDIR:-/tmp}/vcpo-install-docs.XXXXXX")

source scripts/install_steps.sh

digest() { { pwd -P; cat "$LOCK"; } | sha256sum | cut -d' ' -f1; }

if [[ -f "$STAMP" ]] && fits .venv-docs/bin/python && [[ "$(cat "$STAMP")" == "$(digest)" ]]; then
  rm -f "$LOG"
  exit 0
fi

environment .venv-docs
rm -f "$STAMP"
phase "packages of $LOCK" .venv-docs/bin/python -m pip install --disable-pip-version-check --no-deps --require-hashes -r "$LOCK"
digest >"$STAMP"
rm -f "$LOG"
echo "install: .venv-docs/bin/mkdocs serve"
