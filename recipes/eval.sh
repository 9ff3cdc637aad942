#!/usr/bin/env bash
# lm-evaluation-harness on a full fine-tune and on the dense model of its stored variant.
#
#   recipes/eval.sh FINETUNE FAMILY VARIANT OUT
#
# Needs `pip install "lm_eval[hf,math]"` and its data sets: from the hub, or from the cache with
# HF_HUB_OFFLINE=1. TASKS and LM_EVAL_FLAGS (as in "--device cuda --batch_size 16 --limit 100")
# change what is run. humaneval runs code that the models wrote: use a machine that may break.
set -euo pipefail

if [ $# -ne 4 ]; then
  echo "usage: $0 FINETUNE FAMILY VARIANT OUT" >&2
  exit 2
fi
finetune=$1 family=$2 variant=$3 out=$4
tasks=${TASKS:-humaneval,minerva_math500,gsm8k}
read -ra flags <<< "${LM_EVAL_FLAGS:---batch_size auto}"

for program in lm_eval soupkit; do
  if ! command -v "$program" > /dev/null; then
    echo "$0: $program is not on the PATH: pip install \"lm_eval[hf,math]\" soupkit" >&2
    exit 1
  fi
done

mkdir -p "$out"
dense=$out/$variant-dense
if [ ! -d "$dense" ]; then
  soupkit restore "$family" "$variant" --out "$dense" --dtype float32
fi

# The sum of base and delta is rounded only by a narrower dtype: both models are scored in float32.
evaluate() {
  HF_ALLOW_CODE_EVAL=1 lm_eval --model hf --model_args "pretrained=$1,dtype=float32" \
    --tasks "$tasks" --output_path "$out/$2" --log_samples --confirm_run_unsafe_code "${flags[@]}"
}
evaluate "$finetune" full
evaluate "$dense" "$variant"
