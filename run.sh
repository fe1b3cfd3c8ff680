#!/usr/bin/env bash
# bash run.sh MODE [N] [options]    MODE: single, dp, ddp, spawn or fsdp trains on N devices
# bash run.sh plot|bench|test       draws runs; measures speed; runs the tests by pytest
# bash run.sh compare "COMMAND A" "COMMAND B" [options]    are both the same training run?
#
# N defaults to the number of accelerators, or 2 on a CPU. Options: bash run.sh single --help
# It takes the active Python if that has what is needed, else it makes .venv here, once.
set -euo pipefail
here=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")") # the project, also by a link to run.sh
fail() { echo "run.sh: error: $*" >&2; exit 2; }

mode=${1:-help} more=()
needed="torch numpy"
case $mode in
  single | dp | ddp | spawn | fsdp | compare) ;;
  plot) needed=matplotlib ;;
  bench) needed+=" torchvision" ;;
  test) needed+=" torchvision tensorboard matplotlib pytest xdist ruff pycocotools" ;;
  help | -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$here/run.sh" && exit 0 ;; # see above
  *) fail "unknown mode '$mode'; use single, dp, ddp, spawn, fsdp, compare, plot, bench or test" ;;
esac
shift || true

lacks() { # a Python that cannot find a package that is needed
  ! "$1" -c "import importlib.util as u; exit(not all(map(u.find_spec, '$needed'.split())))"
}
python=$(command -v python3) || fail "no python3 found; install Python 3.10 or later"
if lacks "$python"; then
  active=$python python=$here/.venv/bin/python
  if [[ ! -x $python ]] || lacks "$python"; then
    echo "run.sh: installing into $here/.venv, once; PyTorch for CUDA is 5 GB: some minutes." >&2
    echo "run.sh: for a CPU alone first install the small one: https://pytorch.org/get-started" >&2
    "$active" -m venv --system-site-packages "$here/.venv" # an installed torch is taken as it is
    [[ $mode != test ]] || more=("--requirement=$here/tests/requirements.txt")
    "$python" -m pip install "--requirement=$here/requirements.txt" "${more[@]}" >&2
  fi
fi
case $mode in
  compare) exec "$python" "$here/compare/samerun" "$@" ;;
  plot | bench) exec "$python" "$here/tools/$mode.py" "$@" ;;
  test)
    cd -- "$here"
    export PYTHONDONTWRITEBYTECODE=1 # no file is left here
    exec "$python" -m pytest -p no:cacheprovider -n auto --maxprocesses=8 --dist=worksteal "$@" ;;
esac

devices=""
if [[ ${1:-} =~ ^-?[0-9] || ($# -gt 0 && $1 != -*) ]]; then # anything but an option is N
  [[ $1 =~ ^[1-9][0-9]{0,5}$ ]] || fail "N = $1: must be a whole number, as in: run.sh ddp 2"
  [[ $mode != single || $1 == 1 ]] || fail "single trains on one device; use: run.sh ddp $1"
  devices=$1 && shift
fi
case $mode in
  single) exec "$python" "$here/train_single.py" "$@" ;;
  dp) exec "$python" "$here/train_dp.py" ${devices:+--replicas "$devices"} "$@" ;;
  spawn) exec "$python" "$here/train_spawn.py" ${devices:+--nproc "$devices"} "$@" ;;
  ddp | fsdp) exec "$python" "$here/engine/launch.py" "$mode" "${devices:-auto}" "$@" ;;
esac
