#!/usr/bin/env bash
# bash run.sh MODE [N] [options]     MODE: single, dp, ddp, spawn or fsdp trains on N devices; plot draws runs; bench measures
#                                    speed; test (options go to pytest), equivalence, faults and fuzz prove
# bash run.sh compare "COMMAND A" "COMMAND B" [options]    says whether two commands are the same training run: docs/compare.md
#
# The whole set-up: uses the active Python if it has what requirements.txt names, else makes .venv and installs it there, once.
# Several machines: torchrun or srun, see docs/multinode.md
# N defaults to the number of accelerators, or 2 on CPU. Options: bash run.sh single --help
set -euo pipefail && trap 'exit 130' INT # which bash would forget if what it waits for ends well
here=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")") # the project, also if run.sh is called by a link to it
unset PYTHONSAFEPATH # the scripts import what lies beside them
fail() { echo "run.sh: error: $*" >&2 || true; exit 2; } # stderr may be closed
usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$here/run.sh"; } # the comment above

mode=${1:-}
needed=("$here/requirements.txt")
case $mode in
  single | dp | ddp | spawn | fsdp | plot | bench) ;;
  compare) needed=() ;; # torch and NumPy of the active Python, which is that of the commands
  test | equivalence | faults | fuzz)
    needed+=("$here/tests/requirements-gpu.txt") # a machine with a GPU may reach no registry: it is asked for little
    [[ " $* " == *" -m gpu"* ]] || needed+=("$here/tests/requirements.txt")
    ;;
  -h | --help | help) usage || true; exit 0 ;; # stdout may be closed
  "") usage >&2 || true; exit 2 ;;
  *)
    near=$(python3 -I -c 'import difflib, sys; print(*difflib.get_close_matches(sys.argv[1].lower(), sys.argv[2:], 1))' "$mode" \
      single dp ddp spawn fsdp plot bench compare test equivalence faults fuzz 2>/dev/null || true)
    fail "unknown mode '$mode'${near:+ (did you mean $near?)}; use: bash run.sh single|dp|ddp|spawn|fsdp [N] [options], or bash run.sh plot|bench|compare|test|equivalence|faults|fuzz"
    ;;
esac
shift

in_here() { (cd -- "$here" && "$python" "$@"); } # Python looks for modules in the current folder first, which may be anyone's

has_requirements() { # asks the metadata of the installed packages: importing them would take seconds. Says what is missing
  missing=$(
    in_here - "${needed[@]}" <<'PYTHON' 2>/dev/null
import importlib.metadata, re, sys
def is_here(name, floor):
    try: installed, wanted = ([int(part) for part in re.findall(r"\d+", text)[:2]] for text in (importlib.metadata.version(name), floor))
    except importlib.metadata.PackageNotFoundError: return False
    return installed >= wanted
needed = re.findall(r"^([\w-]+)>=([\d.]+)", "".join(open(path).read() for path in sys.argv[1:]), re.MULTILINE)
missing = [f"{name}>={floor}" for name, floor in needed if not is_here(name, floor)]
print(*missing, sep=", ")
sys.exit(1 if missing else 0)
PYTHON
  )
}

set_up() {
  ! has_requirements || return 0 # another call has done it meanwhile
  echo "run.sh: the active Python lacks ${lacking:-all that is needed}; setting up $here/.venv, once" >&2 || true
  # Made anew unless pip was put there to the last file: to make it may have been interrupted
  if ! in_here -c 'import importlib.metadata as m; raise SystemExit(not m.files("pip"))' 2>/dev/null; then
    python=$active in_here -c 'import ensurepip, venv' 2>/dev/null ||
      fail "$active cannot make a virtual environment; install python3-venv, as in: sudo apt install python3-venv"
    python=$active in_here -m venv --clear "$here/.venv"
  fi
  in_here -m pip install --quiet "${needed[@]/#/--requirement=}" >&2
}

found=$(command -v python3 || command -v python || fail "no Python found; install Python 3.10 or later")
# Asked once, here: what pyenv or asdf put on PATH starts one Python in this folder and maybe another one in the project's
python=$("$found" -I -c 'import sys; sys.version_info < (3, 10) and sys.exit(1); print(sys.executable)') ||
  fail "$found does not start, or is older than 3.10; activate Python 3.10 or later"
if ! has_requirements; then
  active=$python lacking=$missing python=$here/.venv/bin/python
  has_requirements || (flock 9 2>/dev/null || true && set_up) 9<"$here" # one call at a time
fi

[[ $mode != compare ]] || exec "$python" "$here/tools/compare" "$@" # in an environment that is left as it is

# By itself glibc gives the memory of gradients and convolutions back to the system in every step on a CPU, and takes it again
export MALLOC_MMAP_MAX_=${MALLOC_MMAP_MAX_:-0} MALLOC_TRIM_THRESHOLD_=${MALLOC_TRIM_THRESHOLD_:-1073741824}
export PYTHONHASHSEED=${PYTHONHASHSEED:-0} # a task that numbers the classes of a set() does so alike in every process
case $mode in # what is proved is said of CPUs; tests marked gpu need the accelerator
  test | equivalence | faults | fuzz) [[ " $* " == *" -m gpu"* ]] || export CUDA_VISIBLE_DEVICES="" ;;
esac
case $mode in
  test) cd -- "$here" && exec "$python" -m pytest --numprocesses=auto --maxprocesses=8 "$@" ;;
  equivalence) cd -- "$here" && exec "$python" tools/equivalence.py "$@" ;;
  faults | fuzz) cd -- "$here" && exec "$python" "tests/campaigns/$mode.py" "$@" ;;
  plot | bench) exec "$python" "$here/tools/$mode.py" "$@" ;;
esac

help=""
for option; do [[ $option != --help && $option != -h ]] || help=yes; done
if [[ $help ]]; then
  [[ $1 == -* ]] || shift # N
  exec "$python" "$here/train_$mode.py" "$@"
fi
devices="" # not given: train_dp.py and train_spawn.py have an option for it, and a default
if [[ $# -gt 0 && ! $1 =~ ^-[^0-9] ]]; then # anything but an option is meant to be N
  [[ $1 =~ ^0*([1-9][0-9]{0,8})$ ]] || fail "N = $1: must be a whole number, at least 1, as in: bash run.sh ddp 2"
  devices=${BASH_REMATCH[1]} && shift # 08 is 8
  [[ $mode != single || $devices == 1 ]] || fail "N = $devices: single trains on one device; use: bash run.sh ddp $devices"
elif [[ $mode == ddp || $mode == fsdp ]]; then
  devices=$(in_here -c 'import signal; signal.signal(2, signal.SIG_DFL); import torch; print(torch.accelerator.device_count() or 2)')
fi
case $mode in
  single) exec "$python" "$here/train_single.py" "$@" ;;
  dp) exec "$python" "$here/train_dp.py" ${devices:+--replicas "$devices"} "$@" ;;
  spawn) exec "$python" "$here/train_spawn.py" ${devices:+--nproc "$devices"} "$@" ;;
esac
cores=$(($(nproc) / devices)) # processes with all the cores each would fight for them, and torchrun would let each use one
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > 0 ? cores : 1))}
exec "$python" "$here/machinery/launch.py" "$mode" "$devices" "$@"
