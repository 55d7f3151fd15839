#!/usr/bin/env bash
# Try the course beside several versions of torch: for each an environment of its own, the quick tests, the parity tests
# and those of scripts that are watched in it, and one line of what came out. Builds of torch are large (1 to 6 GB each), so that `make test` leaves
# this out.
#
#   ci/matrix.sh                     torch 2.8.0, 2.11.0 and the version of constraints.txt
#   ci/matrix.sh 2.9.1               this one alone
#   PYTHON=python3.12 ci/matrix.sh   with another interpreter
#   MATRIX=/scratch/m ci/matrix.sh   environments and logs there instead of .matrix/; what is built already is kept
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
MATRIX=${MATRIX:-.matrix}
locked=$(sed -n 's/^torch==//p' constraints.txt)

case "${1:-}" in
  -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "$0"; exit 0 ;;
esac
[ $# -gt 0 ] || set -- 2.8.0 2.11.0 "$locked"
for version in "$@"; do
  [[ $version =~ ^[0-9]+\.[0-9]+(\.[0-9]+)?$ ]] || { echo "ci/matrix.sh: '$version' is no version of torch such as 2.11.0" >&2; exit 2; }
done
mkdir -p "$MATRIX"
python_version=$("$PYTHON" -c 'import platform; print(platform.python_version())') || exit 1
failed=0
for version in "$@"; do
  at=$MATRIX/torch-$version-python-$python_version
  log=$at.log
  begun=$SECONDS
  line="torch $version, Python $python_version:"
  if ! [ -e "$at/.ready" ]; then
    # The lock but for what follows torch's version.
    grep -vE '^(torch|torchvision|triton)==' constraints.txt > "$at.constraints"
    { "$PYTHON" -m venv --clear "$at" &&
      "$at/bin/python" -m pip install -c "$at.constraints" "torch==$version" torchvision -e '.[labs,dev]' &&
      touch "$at/.ready"; } > "$log" 2>&1 || {
      echo "$line could not be installed ($(grep -m 1 '^ERROR' "$log" || tail -n 1 "$log"); log: $log)"
      failed=1
      continue
    }
  fi
  # The tests of `make check` without lint, whose types are those of the locked torch, then losses and bytes of every
  # engine of data parallelism beside one process; then what is read off a script of one's own, of which torch's private
  # names are a part.
  touch "$at/.ready"
  make --no-print-directory quick VENV="$at" > "$log" 2>&1 || failed=1
  quick=$(tail -n 1 "$log")
  "$at/bin/python" -m pytest -n 2 tests/train/test_truth.py >> "$log" 2>&1 || failed=1
  parity=$(tail -n 1 "$log")
  "$at/bin/python" -m pytest -n 2 tests/libraries/test_script*.py tests/libraries/test_watch.py >> "$log" 2>&1 || failed=1
  echo "$line quick tests: $quick; parity: $parity; scripts: $(tail -n 1 "$log"); $((SECONDS - begun)) s in all; log: $log"
done
exit "$failed"
