# shellcheck shell=bash disable=SC2034  # the script that sources it reads the variables
# What users of the published repository bring: its environment variables, and the files of its data set,
# `hf download lukhuang/vcpo --repo-type dataset --local-dir data`, where those of prepare_data are not there.
TRAIN=$DATA/train.parquet TEST=$DATA/val.parquet
case $TASK in
  gsm8k) theirs=(data/gsm8k/train.parquet data/gsm8k/test.parquet) ;;
  math) theirs=(data/math-500/math-train.parquet data/math-500/math-500.parquet) ;;
  tool_use) theirs=(data/dapo_filter/train/dapo_filter_with_tool.parquet data/aime/aime25_with_tool.parquet) ;;
  *) theirs=("$TRAIN" "$TEST") ;;
esac
if [[ ! -f $TEST && -f ${theirs[0]} && -f ${theirs[1]} ]]; then TRAIN=${theirs[0]} TEST=${theirs[1]}; fi
MODEL=${MODEL_PATH:-$MODEL} TRAIN=${TRAIN_FILE:-$TRAIN} TEST=${TEST_FILE:-$TEST}
if [[ -n ${NNODES:-} ]]; then LAYOUT+=(trainer.nnodes="$NNODES" actor_rollout_ref.rollout.nnodes="$NNODES"); fi
if [[ -n ${NGPUS_PER_NODE:-} ]]; then
  for setting in "${LAYOUT[@]}" "$@"; do
    if [[ $setting == actor_rollout_ref.rollout.n_gpus_per_node=* ]]; then samplers=${setting#*=}; fi
  done
  if [[ ! $NGPUS_PER_NODE =~ ^[0-9]+$ || $NGPUS_PER_NODE -le $samplers ]]; then
    echo "error: NGPUS_PER_NODE=$NGPUS_PER_NODE: the samplers take $samplers, and the trainer needs one at the least" >&2
    exit 2
  fi
  LAYOUT+=(trainer.n_gpus_per_node="$((NGPUS_PER_NODE - samplers))")
fi
if [[ $TASK == tool_use && -n ${SANDBOX_PORT:-} ]]; then
  LAYOUT+=("tool_use.sandbox_url=http://127.0.0.1:$SANDBOX_PORT")
fi
