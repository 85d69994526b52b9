#!/usr/bin/env bash
# The main job on this machine's CPU: data, model, plan, LoRA, merge, fewer bits, scores after each.
# No GPU, no hub. Leaves its files in demo-out/; of these only the model is kept for the next time.
# DEMO_SHORT=1 runs every command on fewer steps, tokens and rows: the scores say nothing then.
set -euo pipefail
cd "$(dirname "$0")/.."
out=demo-out
model=$out/SmolLM2-135M-Instruct.gguf
recipe=examples/text_to_sql/recipe.yaml
run=$out/runs/text_to_sql
# Idle threads sleep instead of spinning: beside other work, 3 to 6 s a step instead of 2 to 37 s.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}

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

most_steps=() tokens=1024 rows=24
if [ "${DEMO_SHORT:-0}" = 1 ]; then most_steps=(--max-steps 4) tokens=256 rows=4; fi

mkdir -p "$out"
rm -rf "$out/text_to_sql" "$run" "$out/report.html" "$out/stages.tsv"

title "What would fit a card you do not have here?"
show plan tightfit plan Llama-3.1-8B --on RTX-4090 --top 1

title "1. Questions, gold queries, and databases to run them on"
show data python scripts/make_demo_data.py "$out/text_to_sql"

title "2. A small chat model"
show model python scripts/fetch_demo_model.py "$model"

title "3. What will be learnt, and what will not"
show prepare tightfit prepare "$recipe" --show 2

title "4. Plan and tune: LoRA on this CPU, a few minutes"
show train tightfit train "$recipe" "${most_steps[@]}"

title "5. The adapter into the model, and the check that nothing was lost"
show merge tightfit merge "$run"

title "6. Fewer bits, each held against the merged model"
show quantize tightfit quantize "$run" --to q8_0 --to q4_k_m --to gptq-8 --rows 8 --tokens $tokens

title "7. The whole run on one page"
show report tightfit runs "$run" --html "$out/report.html"

title "8. Right answers after each step, on tables and phrasings that were never trained on"
small=$run/quantized/text_to_sql
show eval tightfit eval "$run" --data "$out/text_to_sql/test.jsonl" --limit $rows --batch $rows \
    --metric execution --metric exact --beside "$run/merged" \
    --beside "$small-q8_0.gguf" --beside "$small-q4_k_m.gguf" --beside "$small-gptq-8"
show answers python examples/text_to_sql/show_answers.py "$run/eval/test-first-$rows-answers.jsonl" 2

rm -f "$out/.times"
printf '\n%sDone in %s min %s s.%s Curves and figures: %s; to talk to it:\n  tightfit chat %s\n' \
    "${bold-}" $((SECONDS / 60)) $((SECONDS % 60)) "${plain-}" "$out/report.html" "$small-q4_k_m.gguf"
