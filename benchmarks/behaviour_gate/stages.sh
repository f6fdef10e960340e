#!/usr/bin/env bash
# The experiment, stage by stage, in the folder WORK that data.py filled and that holds models/qwen2.5-coder-0.5b-instruct:
#   benchmarks/behaviour_gate/stages.sh WORK ask train certify
# Every stage goes on where it was interrupted. Several runs share the GPU: WIDTH at once (default 6).
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
work=$1
shift
PYTHON=${PYTHON:-python}
WIDTH=${WIDTH:-6}
SEEDS=${SEEDS:-1 2 3}
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
export PYTHONPATH=$here/../../src${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$work/logs" "$work/results"

say() { echo "$(date +%T) $*" | tee -a "$work/logs/stages.log"; }

# Start a script in the background, at most WIDTH at once.
start() {
  while [ "$(jobs -rp | wc -l)" -ge "$WIDTH" ]; do wait -n; done
  say "start $*"
  "$PYTHON" "$here/$1" "$work" "${@:2}" >>"$work/logs/scripts.log" 2>&1 &
}

each() { # each SCRIPT ARGUMENTS...: for both runs and every seed, and wait
  for seed in $SEEDS; do
    for run in sft holdfast; do start "$1" --run "$run" --seed "$seed" "${@:2}"; done
  done
  wait
}

for stage in "$@"; do
  say "stage $stage"
  case $stage in
    ask)
      [ -f "$work/asked.json" ] || "$PYTHON" "$here/ask.py" "$work" --model "$work/models/qwen2.5-coder-0.5b-instruct" ${ASK:-} \
        >"$work/logs/ask.log" 2>&1 || { say "ask failed"; exit 1; }
      ;;
    train)
      [ -f "$work/run.yaml" ] || cp "$here/run.yaml" "$work/run.yaml"
      each train.py ${TRAIN:-}
      ;;
    certify)
      for by in ${WAYS:-behaviour likelihood}; do each certify.py --by "$by"; done
      ;;
    replies) # one model: NAME is its folder in models/
      start replies.py --model "$work/models/$NAME" --name "$NAME" ${REPLIES:-}
      wait
      ;;
    *) say "unknown stage $stage"; exit 2 ;;
  esac
  say "done $stage"
done
