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

# phase LABEL COMMAND...: the output goes to the log; it is shown only if the command fails.
phase() {
  local label=$1 start=$SECONDS
  shift
  printf 'install: %s ...' "$label"
  if ! "$@" >"$LOG" 2>&1; then
    echo
    if grep -q 'No matching distribution found for torch==2\.13\.0+cpu' "$LOG"; then
      echo "torch 2.13.0+cpu is not in your package index: set PIP_EXTRA_INDEX_URL to PyTorch's CPU wheel index (see 'Get Started' on pytorch.org) and run again" >&2
    else
      tail -n 20 "$LOG" >&2
      echo "install: '$label' failed; the whole output is in $LOG" >&2
    fi
    exit 1
  fi
  echo " $((SECONDS - start)) s"
}

# environment FOLDER: a virtual environment with pip, made anew unless a usable one is there.
environment() {
  local python
  if ! fits "$1/bin/python" || ! "$1/bin/python" -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    phase "environment $1, $("$python" --version 2>&1)" "$python" -m venv --clear "$1"
  fi
}

# project PYTHON: this project, editable, whose import hook comes after the folders of the caller. A folder `vcpo` there,
# such as a clone, would hide the package; an entry of sys.path does not let it.
project() {
  phase "this project, editable" "$1" -m pip install --disable-pip-version-check --no-deps --no-build-isolation -e . -e verl -e sandbox
  pwd -P >"$("$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vcpo-checkout.pth"
}
