#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Two machines of 8 GPUs, one process each: replicas of an 8-way group, so that tp stays on NVLink.
#   sbatch examples/slurm.sh
#SBATCH --job-name=detjax
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.out

set -euo pipefail

MODEL=${MODEL:-meta-llama/Llama-3.1-70B-Instruct}
PROMPTS=${PROMPTS:-$SLURM_SUBMIT_DIR/prompts.jsonl} # on a file system that both machines see

# Download once, before two machines try to.
HF_HUB_OFFLINE=0 srun --nodes=1 --ntasks=1 hf download "$MODEL" --exclude "original/*"
export HF_HUB_OFFLINE=1

# Coordinator, number and index of processes come from SLURM. --kill-on-bad-exit ends the step when
# one task ends in error; detjax has named the lost process by then.
srun --kill-on-bad-exit=1 python -m detjax.generate \
  --model "$MODEL" --prompts-file "$PROMPTS" --format jsonl \
  --dp 2 --tp 8 --batch-size 64 --max-tokens 512 > "completions-$SLURM_JOB_ID.jsonl"
