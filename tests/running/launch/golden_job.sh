#!/bin/bash
# One run: vit_tiny, DDP ×8. Read it, change it, send it again from this folder: sbatch job.sh
#SBATCH --job-name=20260131-120000-0123456789ab-cdef
#SBATCH --comment=20260131-120000-0123456789ab-cdef
#SBATCH --chdir="/runs of mine/20260131-120000-0123456789ab-cdef"
#SBATCH --output=logs/slurm.log
#SBATCH --open-mode=append
#SBATCH --partition=gpu
#SBATCH --constraint=v100-32g
#SBATCH --account=abc@v100
#SBATCH --qos=normal
#SBATCH --reservation=course
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:tesla:4
#SBATCH --cpus-per-task=10
#SBATCH --mem=160G
#SBATCH --hint=nomultithread
#SBATCH --time=01:31:00
#SBATCH --signal=USR2@120
#SBATCH --requeue

module purge
source "$WORK"/venv/bin/activate
module load pytorch-gpu/py3/2.8.0
export NCCL_DEBUG=WARN
set -u
export PYTHONPATH=ROOT${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1
PYTHON=python

FOLDER='/runs of mine/20260131-120000-0123456789ab-cdef'

# Cancelled or out of time, this shell gets SIGTERM: it lives on to write down how the run ended.
stopped=0
trap 'stopped=1' TERM

# One task per rank: 8 in all. If one fails, the others are stopped.
srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \
  "$PYTHON" -P -m dlojz.running.slurm.slurm_rank "$FOLDER" dlojz.running.worker
code=$?

# 75: told 120 s before the time limit, the ranks saved a checkpoint. Back into the queue.
# It sends SIGTERM to all that this job runs, scontrol too, which must live to report that it worked.
if [ "$code" -eq 75 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 3 ]; then
  (trap '' TERM; exec scontrol requeue "$SLURM_JOB_ID") && exit 0
fi
"$PYTHON" -P -m dlojz.running.slurm.slurm_finish "$FOLDER" "$code" --stopped "$stopped" --ran-s "$SECONDS"
exit "$code"
