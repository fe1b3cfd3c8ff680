#!/usr/bin/env bash
# bash run.sh MODE [N] [options]     MODE: single, dp, ddp, spawn (train on N devices) or test (options go to pytest)
#
# The whole set-up: uses the active Python if it has what requirements.txt names, else makes .venv and installs it there, once.
# N defaults to the number of accelerators, or 2 on CPU. Options: bash run.sh single --help
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)

fail() { echo "run.sh: error: $*" >&2 && exit 2; }

mode=${1:-}
case $mode in
  single | dp | ddp | spawn | test) shift ;;
  *) fail "unknown mode '$mode'; use: bash run.sh single|dp|ddp|spawn [N] [options], or bash run.sh test" ;;
esac

has_requirements() { # the installed packages satisfy the files given, asked of their metadata alone: importing torch would take seconds
  "$1" - "${@:2}" <<'PYTHON' 2>/dev/null
import sys
from importlib.metadata import version
for path in sys.argv[1:]:
    for name, _, floor in (line.split("#")[0].strip().partition(">=") for line in open(path)):
        if name and [int(part) for part in version(name).split("+")[0].split(".")[:2]] < [int(part) for part in (floor or "0").split(".")]:
            sys.exit(1)
PYTHON
}

needed=("$here/requirements.txt")
[[ $mode == test ]] && needed+=("$here/tests/requirements.txt")
python=$(command -v python3 || command -v python || true)
if [[ -z $python ]] || ! has_requirements "$python" "${needed[@]}"; then
  python=$here/.venv/bin/python
  if ! { [[ -x $python ]] && has_requirements "$python" "${needed[@]}"; }; then
    echo "run.sh: the active Python lacks something that is needed; setting up $here/.venv, once" >&2
    python3 -m venv "$here/.venv"
    "$python" -m pip install --quiet "${needed[@]/#/--requirement=}" >&2
  fi
fi

if [[ $mode == test ]]; then
  cd -- "$here"
  exec "$python" -m pytest --numprocesses=2 "$@"
fi

if [[ ${1:-} =~ ^-?[0-9]+$ ]]; then
  devices=$1
  shift
  [[ $devices -ge 1 ]] || fail "N = $devices: a run needs at least one device, as in: bash run.sh $mode 2"
  [[ $mode != single || $devices == 1 ]] || fail "N = $devices: single trains on one device; use: bash run.sh ddp $devices"
elif [[ $mode == single ]]; then
  devices=1
else
  devices=$("$python" -c 'import torch; print(torch.accelerator.device_count() or 2)')
fi

for argument in "$@"; do
  case $argument in -h | --help) exec "$python" "$here/options.py" "$mode" "$devices" --help ;; esac
done
"$python" "$here/options.py" "$mode" "$devices" "$@" # refuses bad input before any process of the run is started
cores=$(nproc) # processes with all the cores each would fight for them
[[ $mode != ddp && $mode != spawn ]] || cores=$((cores / devices))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > 0 ? cores : 1))}

case $mode in
  single) exec "$python" "$here/train_single.py" "$@" ;;
  dp) exec "$python" "$here/train_dp.py" --replicas "$devices" "$@" ;;
  spawn) exec "$python" "$here/train_spawn.py" --nproc "$devices" "$@" ;;
  ddp) exec "$python" -m torch.distributed.run --standalone --nproc-per-node "$devices" "$here/train_ddp.py" "$@" ;;
esac
