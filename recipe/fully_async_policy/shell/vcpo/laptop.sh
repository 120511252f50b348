# shellcheck shell=bash disable=SC2034  # the script that sources it reads the variables
# CPU=1: a small model, its data and small sizes take the place of the launch script's; everything else is the script's.
for given in MODEL_PATH TRAIN_FILE TEST_FILE NNODES NGPUS_PER_NODE SANDBOX_PORT; do
  if [[ -n ${!given:-} ]]; then echo "error: $given=${!given}: CPU=1 has its own; unset it" >&2 && exit 2; fi
done
MODEL=models/laptop DATA=data/laptop/$TASK RUN=outputs/laptop/${RUN#outputs/}
TRAIN=$DATA/train.parquet TEST=$DATA/val.parquet
LAYOUT=(
  hardware=cpu
  data.max_prompt_length=448 data.max_response_length=48 data.train_batch_size=4
  actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.max_model_len=512
  trainer.total_training_steps=2 trainer.test_freq=2
)
# The script's own lag, the first of the settings, is cut to the number of steps: more would be refused.
if [[ $1 == async.lag=* && ${1#*=} -gt 2 ]]; then set -- async.lag=2 "${@:2}"; fi
if [[ ! -f data/laptop/countdown/meta.json ]]; then
  python -m scripts.prepare_data countdown --train 64 --val 16 --out data/laptop/countdown
fi
if [[ ! -f $MODEL/config.json ]]; then
  python -m recipe.warm_start.train --data data/laptop/countdown --out "$MODEL" --steps 20
fi
if [[ ! -f $DATA/meta.json ]]; then
  sums=$(for a in {1..8}; do for b in {1..10}; do echo "What is $a + $b?,$((a + b))"; done; done)
  mkdir -p "${DATA%/*}"
  printf 'question,answer\n%s\n' "$sums" >"$DATA.csv"
  python -m scripts.prepare_data rows --from "$DATA.csv" --question question --answer answer --val-fraction 0.2 \
    --name "${TASK/tool_use/dapo}" --out "$DATA"
fi
if [[ $TASK == tool_use && ${DRY_RUN:-} != 1 ]]; then
  # This run starts its own sandbox: the sandbox of another run ends with that run.
  port=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  # shellcheck disable=SC2086  # several options: SANDBOX_OPTIONS=--allow-unbounded-memory, where only root could bound it
  # It ends with the run, to which exec gives this process's id.
  setpriv --pdeathsig TERM python -m code_sandbox --port "$port" --warm 0 ${SANDBOX_OPTIONS:-} &
  sandbox=$!
  until curl --noproxy '*' -sf "127.0.0.1:$port/v1/ping" >/dev/null; do kill -0 "$sandbox" || exit 3; sleep 1; done
  LAYOUT+=("tool_use.sandbox_url=http://127.0.0.1:$port")
fi
