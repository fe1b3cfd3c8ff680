#!/usr/bin/env bash
# What one GPU settles in eight minutes: bash tools/gpu.sh [FOLDER]     results in FOLDER (./gpu-results), figures.md sums them up
#
# Each part has a time limit of its own: if one fails, the others go on. Without an accelerator it tries itself at small sizes.
set -uo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
out=$(mkdir -p -- "${1:-gpu-results}" && cd -- "${1:-gpu-results}" && pwd) || exit 2
device=$(python3 -c 'import torch; a = torch.accelerator; print(a.current_accelerator().type if a.is_available() else "cpu")') || exit 2
turns="--steps 16 --repeats 6" sizes="128 512"
[[ $device != cpu ]] || turns="--steps 1 --repeats 1" sizes="2 4"
printf '%s\n' "# On $device, $(date -u '+%Y-%m-%d %H:%M') UTC" "" >"$out/figures.md"

part() { # NAME SECONDS COMMAND...: what it prints is $out/NAME.txt, with what it says on stderr if it fails
  local name=$1 limit=$(($2 < 470 - SECONDS ? $2 : 470 - SECONDS)) began=$SECONDS code=124
  shift 2
  ((limit < 5)) || { timeout --kill-after 5 "$limit" "$@" >"$out/$name.txt" 2>"$out/$name.err" && code=0 || code=$?; }
  {
    echo "## $name: exit code $code after $((SECONDS - began)) of at most $limit s"
    grep -q '^|' "$out/$name.txt" && echo && cat "$out/$name.txt"
    grep -q '^|' "$out/$name.txt" || { echo '```' && tail -n 75 "$out/$name.txt" && echo '```'; }
    ((code == 0)) || { echo '```' && tail -n 30 "$out/$name.err" && echo '```'; }
    echo
  } >>"$out/figures.md" 2>/dev/null
  echo "$name: exit code $code, $SECONDS s since the start"
}

bench() { # NAME SECONDS OPTIONS...
  part "$1" "$2" python3 tools/bench.py --json "$out/$1.json" --device "$device" $turns "${@:3}"
}

networks() { # NAME OPTIONS...: each network at each size by itself, so that a time limit takes no other
  for network in resnet18 resnet9; do
    for size in $sizes; do
      bench "$1-$network-$size" 45 --workloads "$network" --modes single --batch-size "$size" "${@:2}"
    done
  done
}

part versions 20 bash -c 'python3 -VV; python3 -m pip list 2>/dev/null | grep -i "^torch\|^nvidia\|^triton\|^numpy"; nproc; nvidia-smi'
networks half --amp bf16 --channels-last
bench tiny 40 --workloads tiny --modes single
part tests 130 python3 -m pytest -m gpu tests/test_gpu.py -n 8 -q -p no:cacheprovider
part a-run 60 bash run.sh single --epochs 3 --device "$device" --output-dir "$out/run-single"
networks float32
part fsdp-run 40 bash run.sh fsdp 1 --epochs 3 --device "$device" --output-dir "$out/run-fsdp"
part ddp-run 40 bash run.sh ddp 1 --epochs 3 --device "$device" --output-dir "$out/run-ddp"
rm -rf "$out"/run-*
echo "$out/figures.md"
