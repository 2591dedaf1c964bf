#!/usr/bin/env bash
#SBATCH --job-name=rollouts
#SBATCH --nodes=1
#SBATCH --gpus=1
#SBATCH --time=04:00:00
#
# One node: an engine, the gateway and the agents. The database lies on the node's own disk, since a shared file
# system is refused; rows and a copy of the evidence go to the shared one before the job ends.
#
# For a trainer on another node, add --host 0.0.0.0 --api-key-file gateway.key --hand-off-key-file hand-off.key, and
# --operator-key-file operator.key to change engines; all three keys differ, and their files have mode 0600.
set -euo pipefail
: "${MODEL:?}" "${TASKS:?}" "${RESULTS:?a directory on the shared file system}"

local=${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/rollouts-$SLURM_JOB_ID
mkdir -p "$local" "$RESULTS"

vllm serve "$MODEL" --port 8000 --logprobs-mode processed_logprobs &
tokcap serve --upstream http://127.0.0.1:8000 --database "$local/captures.db" --workers 4 \
    --log-probs-mode processed_logprobs --continuity exact &
gateway=$!

until curl --silent --fail http://127.0.0.1:8400/readyz >/dev/null; do
    kill -0 "$gateway"
    sleep 2
done

# Yours: runs the agents against http://127.0.0.1:8400/ng-rollout/ID/training-token-capture/v1, and writes one
# JSON object a rollout.
run-agents --tasks "$TASKS" --output "$local/rollouts.jsonl"

tokcap finalize "$local/rollouts.jsonl" --database "$local/captures.db" --output "$local/rows.jsonl" --format trajectory
tokcap backup --database "$local/captures.db" "$local/captures-backup.db"
cp "$local/rows.jsonl" "$local/captures-backup.db" "$RESULTS/"
