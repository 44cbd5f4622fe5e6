#!/usr/bin/env bash
# Makes a virtual environment with vLLM's KV cache manager, to measure kvcore against: on the CPU, without vLLM's kernels.
# Called again for the same versions, it does nothing.
set -euo pipefail

usage="usage: setup_peer.sh DIR    (PYTHON=python3 to choose another interpreter, 3.10 to 3.13)"
case "${1:-}" in
  "") echo "$usage" >&2; exit 2 ;;
  -h | --help) echo "$usage"; exit 0 ;;
esac

vllm=0.33.0
torch=2.13.0
dir=$1
root=$(cd "$(dirname "$0")/../.." && pwd)
requirements=$root/tests/bench/requirements-vllm.txt
python=${PYTHON:-python3}

stamp=$dir/.peer-stamp
wanted="vllm $vllm, torch $torch, $(cksum < "$requirements")"
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
  exit 0
fi

echo "setting up vLLM $vllm in $dir (a few minutes)" >&2
"$python" -m venv "$dir" || {
  echo "this Python cannot make a virtual environment (on Debian: apt-get install python3-venv)" >&2
  exit 1
}
dir=$(cd "$dir" && pwd)
pip() { "$dir/bin/python" -m pip --disable-pip-version-check install --quiet "$@"; }
# torch first and on its own: all that it requires comes with it, and an index with a CPU build serves that one.
pip "torch==$torch"
# vLLM's own requirements would bring CUDA kernels, none of which its KV cache manager calls.
pip --no-deps --requirement "$requirements"
pip --no-deps "vllm==$vllm"

(cd "$root" && "$dir/bin/python" -m tests.bench.on_vllm --only hash32k --reps 1 > /dev/null) || {
  echo "vLLM was installed in $dir, but its KV cache manager does not start; see above" >&2
  exit 1
}
echo "$wanted" > "$dir/.peer-stamp"
