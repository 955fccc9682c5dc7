#!/usr/bin/env bash
# Record steady decode steps with Nsight Systems: every kernel of the graph replays, on its
# stream, under the engine's nvtx ranges. Capture and warm-up stay out of the recording.
#
#   profiles/nsys.sh --model D8 --batch 8 --adapters mix8 --steps 20
#
# Arguments go on to `python -m profiles.steady`. From the environment: PYTHON (python), and OUTPUT,
# the report's name without .nsys-rep (encore-steady in the current directory).
set -euo pipefail

if ! command -v nsys >/dev/null 2>&1; then
    cat >&2 <<'MESSAGE'
nsys is not on the PATH. It is NVIDIA Nsight Systems: install the package nsight-systems-cli from
NVIDIA's apt or yum repository, or take it from https://developer.nvidia.com/nsight-systems; a full
CUDA toolkit holds it too, often as /usr/local/cuda/bin/nsys.
MESSAGE
    exit 1
fi

output=${OUTPUT:-encore-steady}
[[ $output == /* ]] || output=$PWD/$output
python=${PYTHON:-python}
[[ $python != */* || $python == /* ]] || python=$PWD/$python
script=$(readlink -f -- "${BASH_SOURCE[0]}")
cd -- "${script%/*}/.."

ENCORE_NVTX=1 exec nsys profile \
    --trace=cuda,nvtx \
    --cuda-graph-trace=node \
    --capture-range=cudaProfilerApi \
    --capture-range-end=stop \
    --sample=none \
    --cpuctxsw=none \
    --force-overwrite=true \
    --output="$output" \
    "$python" -m profiles.steady "$@"
