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

clocked() { # COMMAND...: each line that it prints, after the seconds since its start
  local began=${EPOCHREALTIME/./} line
  "$@" | while IFS= read -r line; do printf '%6d ms  %s\n' $(((${EPOCHREALTIME/./} - began) / 1000)) "$line"; done
}
export -f clocked

first_calls() {
  python3 - "$1" <<'PYTHON'
import sys, time
clock, device, lines = time.perf_counter, sys.argv[1], ["| first calls | s |", "|---|---|"]
def step(name, function):
    began = clock()
    result = function()
    if "torch" in sys.modules and device != "cpu" and name != "import torch": sys.modules["torch"].accelerator.synchronize()
    lines.append(f"| {name} | {clock() - began:.2f} |")
    return result
torch = step("import torch", lambda: __import__("torch"))
images = step("a tensor on the device", lambda: torch.ones(8, 3, 32, 32, device=device))
net = step("a network on the device", lambda: torch.nn.Conv2d(3, 8, 3).to(device))
loss = step("first convolution", lambda: net(images).sum())
step("its backward", loss.backward)
step("fused SGD, made", lambda: torch.optim.SGD(net.parameters(), 0.1, 0.9, fused=True))
step("second convolution", lambda: net(images).sum().backward())
print(*lines, sep="\n")
PYTHON
}
export -f first_calls

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
bench deep 40 --workloads deep --modes single
part tests 130 python3 -m pytest -m gpu tests/test_gpu.py -n 8 -q -p no:cacheprovider
part first-calls 40 bash -c "first_calls $device"
part a-run 60 bash -c "clocked bash run.sh single --epochs 3 --device $device --output-dir '$out/run-single'"
part where-a-run-spends-it 60 bash -c "python3 -m cProfile -s cumtime train_single.py --epochs 1 --device $device --output-dir '$out/run-profile' | grep -A 70 ncalls"
part imports 40 bash -c 'python3 -X importtime -c "import train_single" 2>&1 | sort -t "|" -k 2 -n | tail -n 30'
bench memory 100 --workloads resnet18 --modes single ddp fsdp --nproc 1 --batch-size ${sizes#* } --amp bf16
networks float32
part fsdp-run 40 bash -c "clocked bash run.sh fsdp 1 --epochs 3 --device $device --output-dir '$out/run-fsdp'"
part ddp-run 40 bash -c "clocked bash run.sh ddp 1 --epochs 3 --device $device --output-dir '$out/run-ddp'"
rm -rf "$out"/run-*
echo "$out/figures.md"
