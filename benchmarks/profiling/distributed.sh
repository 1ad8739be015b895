#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Distributed training under the profiler, and what the profiler costs it.
#
#     benchmarks/distributed.sh GPUS OUT [gpt] [llama] [overhead] [overhead_llama] [tests]
#
# OUT gets the ranks' summaries (gpt_ddp.json …), one rank's profile of each, and overhead.json.
set -u
cd "$(dirname "$0")/.."
gpus=$1 out=$2 profiles=$(mktemp -d)
shift 2
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export OMP_NUM_THREADS=4 PYTHONWARNINGS=ignore PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} COLUMNS=160
launch() { timeout 200 python3 -m torch.distributed.run --standalone --nproc-per-node "$gpus" "$@"; }

profiled() {
    local name=$1
    shift
    echo "== $name: $*"
    launch -m opacus_memprof run -o "$profiles/$name" examples/train_distributed.py "$@" 2>&1
    cp "$profiles/$name/ranks.json" "$out/$name.json"
    cp "$profiles/$name/rank_0/profile.json" "$out/${name}_rank_0.json"
}

gpt="--model gpt --length 256"
llama="--model llama-3.1-8b --wrap fsdp2 --batch 4 --length 2048"
overhead() { launch -m benchmarks.profiling.distributed "$@" --output "$out/overhead.json" 2>&1; }

for what in "$@"; do
    case $what in
    gpt)
        profiled gpt_ddp $gpt --batch 8 --wrap ddp --steps 4
        profiled gpt_fsdp2 $gpt --batch 8 --wrap fsdp2 --steps 4
        ;;
    llama) profiled llama $llama --steps 3 ;;
    overhead) # with 8 samples FSDP2's step waits for Python, with 32 for the GPU
        overhead $gpt --batch 8 --wrap dpddp --rounds 10
        overhead $gpt --batch 8 --wrap fsdp2 --rounds 10
        overhead $gpt --batch 32 --wrap fsdp2 --rounds 10
        ;;
    overhead_llama) overhead $llama --rounds 5 ;;
    tests) MEMPROF_REQUIRE_CUDA=1 timeout 300 python3 -m pytest -q -x --durations=3 tests/gpu/test_distributed_cuda.py 2>&1 ;;
    esac
done
