# shellcheck shell=bash
# Functions of the scripts that install, which source this file. LOG: where the output of a phase goes; PYTHONS: the
# versions of Python that the environment may have.
PYTHONS=${PYTHONS:-3.11 3.12}

# shellcheck disable=SC2086 # a list of versions
fits() { "$1" -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] not in sys.argv)' $PYTHONS >/dev/null 2>&1; }

find_python() {
  local candidate
  if [[ -n "${PYTHON:-}" ]]; then
    fits "$PYTHON" && { echo "$PYTHON"; return; }
    echo "install: PYTHON=$PYTHON is not Python ${PYTHONS/ / or }: set PYTHON to such an interpreter and run again" >&2
    exit 2
  fi
  # shellcheck disable=SC2086 # a list of versions
  for candidate in $(printf 'python%s ' $PYTHONS) python3; do
    fits "$candidate" && { echo "$candidate"; return; }
  done
  echo "install: no Python ${PYTHONS/ / or } found: install one, or set PYTHON=/path/to/python, and run again" >&2
  exit 2
}

# attempt LABEL COMMAND...: the output goes to the log.
attempt() {
  local label=$1 start=$SECONDS
  shift
  printf 'install: %s ...' "$label"
  if ! "$@" >"$LOG" 2>&1; then
    echo " not possible"
    return 1
  fi
  echo " $((SECONDS - start)) s"
}

failed() {
  tail -n 20 "$LOG" >&2
  echo "install: '$1' failed; the whole output is in $LOG" >&2
  exit 1
}

# phase LABEL COMMAND...: ends the script if the command fails.
phase() { attempt "$@" || failed "$1"; }

# environment FOLDER: a virtual environment with pip, made anew unless a usable one is there.
environment() {
  local python
  if ! fits "$1/bin/python" || ! "$1/bin/python" -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    phase "environment $1, $("$python" --version 2>&1)" "$python" -m venv --clear "$1"
  fi
}

# by_pip LABEL PYTHON ARGUMENTS...: what pip installs, and nothing that it requires. Code runs only of files whose hash
# is known: a package that comes as source is built with what the environment has.
by_pip() { attempt "$1, by pip" "$2" -m pip install --disable-pip-version-check --no-deps --no-build-isolation "${@:3}"; }

# get_uv PYTHON: uv installs the same files in a fraction of the time. It is in a folder of its own, so that an environment
# has the same packages with and without it.
get_uv() {
  local to
  to=$(dirname "$(dirname "$1")")/uv
  by_pip "uv" "$1" --require-hashes --upgrade --target "$to" -r requirements/installer.lock || {
    rm -rf "$to"
    echo "install: uv is not to be had ($(tail -n 1 "$LOG")), so pip installs: the same packages, in more time"
  }
}

# add LABEL PYTHON ARGUMENTS...: by uv, or by pip where uv is missing or fails.
add() {
  if [[ -d $(dirname "$(dirname "$2")")/uv ]]; then
    attempt "$1, by uv" "$2" -m scripts.uv_pip --no-build-isolation "${@:3}" && return
  fi
  by_pip "$@"
}

# locked PYTHON FILE [ARGUMENTS...]: the packages of a file of requirements/ that have the hashes there.
locked() { add "packages of $2" "$1" --require-hashes -r "$2" "${@:3}"; }

# packages PYTHON LOCK: those of an environment. setuptools comes first, which builds what comes as source.
packages() {
  local setuptools
  setuptools=$(mktemp)
  entries "$2" setuptools >"$setuptools"
  add "setuptools" "$1" --require-hashes -r "$setuptools" || failed "setuptools"
  rm "$setuptools"
  locked "$@" || failed "packages of $2"
}

# entries LOCK NAME...: the lines of a lock for these packages, with their hashes.
entries() { awk -v names="${*:2}" 'BEGIN { gsub(" ", "|", names) } /^[^ ]/ { wanted = $0 ~ "^(" names ")==" } wanted' "$1"; }

# project PYTHON: this project, editable, whose import hook comes after the folders of the caller. A folder `vcpo` there,
# such as a clone, would hide the package; an entry of sys.path does not let it.
project() {
  add "this project, editable" "$1" -e . -e verl -e sandbox || failed "this project, editable"
  pwd -P >"$("$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vcpo-checkout.pth"
}
