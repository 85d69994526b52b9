#!/usr/bin/env bash
# The main job on this machine's CPU: data, model, LoRA, merge, fewer bits, right answers after each.
# No GPU, no hub. Leaves its files in demo-out/; of these only the model is kept for the next time.
# DEMO_FULL=1 asks harder questions, trains longer, and makes and checks more formats.
# DEMO_SHORT=1 runs every command on fewer steps, tokens and rows: the scores say nothing then.
set -euo pipefail
cd "$(dirname "$0")/.."
out=demo-out
model=$out/SmolLM2-135M-Instruct.gguf
recipe=examples/text_to_sql/recipe.yaml
run=$out/runs/text_to_sql
# Idle threads sleep instead of spinning: beside other work, 3 to 6 s a step instead of 2 to 37 s.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
# Without bytecode each command compiles torch's and transformers' 2,400 files anew: 11 s of CPU.
unset PYTHONDONTWRITEBYTECODE

if [ -t 1 ]; then bold=$'\033[1m' blue=$'\033[1;36m' faint=$'\033[2m' plain=$'\033[0m'; fi
title() { printf '\n\n%s== %s ==%s\n' "${blue-}" "$1" "${plain-}"; }
# A command and its output; in stages.tsv its seconds, and the CPU time of all commands so far.
show() {
    local stage=$1 start=$SECONDS
    shift
    printf '\n%s$ %s%s\n' "${bold-}" "$*" "${plain-}"
    "$@"
    times >"$out/.times"
    printf '%s\t%s\t%s\n' "$stage" $((SECONDS - start)) "$(tail -n 1 "$out/.times")" >>"$out/stages.tsv"
    printf '%s(%s s)%s\n' "${faint-}" $((SECONDS - start)) "${plain-}"
}

kind=() formats=(q4_k_m) beside=() length=() tokens=256 limit=() scored=test
if [ "${DEMO_FULL:-0}" = 1 ]; then
    kind=(--full) formats=(q8_0 q4_k_m gptq-8) beside=(--beside "$run/merged")
    length=(--epochs 2) tokens=1024
fi
if [ "${DEMO_SHORT:-0}" = 1 ]; then length=(--max-steps 4) tokens=256 limit=(--limit 4) scored=test-first-4; fi
to=()
for format in "${formats[@]}"; do
    case $format in gptq*) ending= ;; *) ending=.gguf ;; esac
    to+=(--to "$format") beside+=(--beside "$run/quantized/text_to_sql-$format$ending")
done
small=$run/quantized/text_to_sql-q4_k_m.gguf

mkdir -p "$out"
rm -rf "$out/text_to_sql" "$run" "$out/report.png" "$out/stages.tsv"

title "1. Questions, gold queries, and databases to run them on"
show data python scripts/make_demo_data.py "$out/text_to_sql" "${kind[@]}"

title "2. A small chat model"
show model python scripts/fetch_demo_model.py "$model"

title "3. Plan and tune: LoRA on this CPU"
show train tightfit train "$recipe" "${length[@]}"

title "4. The adapter into the model, and the check that nothing was lost"
show merge tightfit merge "$run"

title "5. Fewer bits, held against the merged model"
show quantize tightfit quantize "$run" "${to[@]}" --rows 4 --tokens $tokens

title "6. Right answers before and after, about tables that were never trained on"
show eval tightfit eval "$run" --data "$out/text_to_sql/test.jsonl" "${limit[@]}" --batch 60 \
    --metric execution "${beside[@]}"
show answers python examples/text_to_sql/show_answers.py "$run/eval/$scored-answers.jsonl" 3

title "7. The run in one picture"
show report tightfit runs "$run" --plot "$out/report.png"

rm -f "$out/.times"
printf '\n%sDone in %s min %s s.%s Loss, memory and predictions: %s\nTo go on:\n' \
    "${bold-}" $((SECONDS / 60)) $((SECONDS % 60)) "${plain-}" "$out/report.png"
printf '  %s\n' "tightfit chat $small" "tightfit plan Llama-3.1-8B --on RTX-4090" \
    "tightfit train $recipe --data YOUR.jsonl --eval 0.05 --output runs/mine"
