#!/usr/bin/env bash
# bash scripts/install_docs.sh: what builds the documentation's site, in .venv-docs: the packages of requirements/docs.lock,
# and Mermaid, which draws the diagrams in a reader's browser. Run it again at any time: it does nothing while the lock is
# unchanged. Apart from .venv, because it shares no package with it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

LOCK=requirements/docs.lock
STAMP=.venv-docs/install.sha256
LOG=$(mktemp "${TMPDIR:-/tmp}/vcpo-install-docs.XXXXXX")
MERMAID=12.3.0
MERMAID_SHA256=336df803d87a38b70a01e736e666c8f7601d2ce42f5e47c8fafe5d721074b9a3 # of dist/mermaid.min.js

source scripts/install_steps.sh

digest() { { pwd -P; echo "$MERMAID_SHA256"; command -v npm >/dev/null && echo npm; cat "$LOCK"; } | sha256sum | cut -d' ' -f1; }

# Mermaid as one file, .venv-docs/mermaid/mermaid.min.js: tests/docs/site.py adds it to the site.
mermaid() {
  local folder=.venv-docs/mermaid
  rm -rf "$folder" && mkdir "$folder"
  (cd "$folder" && npm pack --silent "mermaid@$MERMAID" && tar xzf "mermaid-$MERMAID.tgz" --strip-components=2 package/dist/mermaid.min.js)
  rm "$folder/mermaid-$MERMAID.tgz"
  echo "$MERMAID_SHA256  $folder/mermaid.min.js" | sha256sum --check --quiet
}

if [[ -f "$STAMP" ]] && fits .venv-docs/bin/python && [[ "$(cat "$STAMP")" == "$(digest)" ]]; then
  rm -f "$LOG"
  exit 0
fi

environment .venv-docs
rm -f "$STAMP"
get_uv .venv-docs/bin/python
locked .venv-docs/bin/python "$LOCK" || failed "packages of $LOCK"
if command -v npm >/dev/null; then
  phase "mermaid $MERMAID" mermaid
else
  echo "npm is not installed: the site's diagrams are drawn only where a reader's browser has a network (install npm and run again)" >&2
fi
digest >"$STAMP"
rm -f "$LOG"
echo "install: .venv-docs/bin/python -m tests.docs.site --serve"
