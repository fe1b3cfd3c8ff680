#!/usr/bin/env bash
# bash run.sh MODE [N] [options]     MODE: single, dp, ddp, spawn (train on N devices) or test (options go to pytest), equivalence, mutants
#
# The whole set-up: uses the active Python if it has what requirements.txt names, else makes .venv and installs it there, once.
# N defaults to the number of accelerators, or 2 on CPU. Options: bash run.sh single --help
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
fail() { echo "run.sh: error: $*" >&2 && exit 2; }

mode=${1:-}
needed=("$here/requirements.txt")
case $mode in
  single | dp | ddp | spawn) ;;
  test | equivalence | mutants) needed+=("$here/tests/requirements.txt") ;;
  *) fail "unknown mode '$mode'; use: bash run.sh single|dp|ddp|spawn [N] [options], or bash run.sh test|equivalence|mutants" ;;
esac
shift

has_requirements() { # asks the metadata of the installed packages: importing them would take seconds
  "$1" - "${needed[@]}" <<'PYTHON' 2>/dev/null
import importlib.metadata, re, sys
for name, floor in re.findall(r"^([\w-]+)>=([\d.]+)", "".join(open(path).read() for path in sys.argv[1:]), re.MULTILINE):
    installed, wanted = ([int(part) for part in re.findall(r"\d+", text)[:2]] for text in (importlib.metadata.version(name), floor))
    sys.exit(1) if installed < wanted else None
PYTHON
}

python=$(command -v python3 || command -v python || fail "no Python found; install Python 3.10 or later")
if ! has_requirements "$python"; then
  [[ -x $here/.venv/bin/python ]] || "$python" -m venv "$here/.venv"
  python=$here/.venv/bin/python
  if ! has_requirements "$python"; then
    echo "run.sh: the active Python lacks something that is needed; setting up $here/.venv, once" >&2
    "$python" -m pip install --quiet "${needed[@]/#/--requirement=}" >&2
  fi
fi

case $mode in
  test) cd -- "$here" && exec "$python" -m pytest --numprocesses=auto --maxprocesses=8 "$@" ;;
  equivalence | mutants) cd -- "$here" && exec "$python" "tests/$mode.py" "$@" ;;
esac

devices=1
if [[ ${1:-} =~ ^-?[0-9]+$ ]]; then
  devices=$1 && shift
  [[ $devices -ge 1 ]] || fail "N = $devices: a run needs at least one device, as in: bash run.sh $mode 2"
  [[ $mode != single || $devices == 1 ]] || fail "N = $devices: single trains on one device; use: bash run.sh ddp $devices"
elif [[ $mode != single ]]; then
  devices=$("$python" -c 'import torch; print(torch.accelerator.device_count() or 2)')
fi
[[ " $* " != *" --help "* && " $* " != *" -h "* ]] || exec "$python" "$here/options.py" "$mode" "$devices" --help
"$python" "$here/options.py" "$mode" "$devices" "$@" # refuses bad input before any process of the run is started

cores=$(nproc) # processes with all the cores each would fight for them
[[ $mode == single || $mode == dp ]] || cores=$((cores / devices))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > 0 ? cores : 1))}
case $mode in
  single) exec "$python" "$here/train_single.py" "$@" ;;
  dp) exec "$python" "$here/train_dp.py" --replicas "$devices" "$@" ;;
  spawn) exec "$python" "$here/train_spawn.py" --nproc "$devices" "$@" ;;
  ddp) exec "$python" "$here/launch.py" --max-restarts 3 --nproc-per-node "$devices" "$here/train_ddp.py" "$@" ;;
esac
