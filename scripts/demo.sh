#!/usr/bin/env bash
# The planner at work on this machine: no GPU, no hub, no network. Leaves its files in demo-out/.
set -euo pipefail
cd "$(dirname "$0")/.."
out=demo-out
mkdir -p "$out"

show() {
    printf '\n\033[1m$ %s\033[0m\n' "$*"
    "$@"
}
# The same for commands whose exit code is part of the demonstration.
show_code() {
    local code=0
    show "$@" || code=$?
    printf '(exit code %s)\n' "$code"
}

show_code tightfit doctor
show python scripts/make_demo_data.py "$out/text_to_sql.jsonl"

printf '\n# Seven billion parameters on four old cards, with real row lengths\n'
show tightfit plan Llama-2-7b --on 4xV100-32GB --data "$out/text_to_sql.jsonl" --save "$out/plan.json"

printf '\n# One configuration, every part of its peak\n'
show tightfit estimate Llama-3.1-8B --method qlora --on "RTX 4090" --micro-batch 4

printf '\n# A model that does not fit, and the hardware that would take it\n'
show_code tightfit plan Llama-2-70b --on T4
show tightfit plan Llama-2-70b --method qlora --buy --chart "$out/memory.html"
show tightfit plan Llama-2-70b --method qlora --buy --chart "$out/memory.png" --json >"$out/offers.json"

printf '\n# The ZeRO-3 table people know, from exact counts\n'
show tightfit estimate t5-3b --zero-table --gpus-per-node 8 --nodes 1

printf '\nWritten: %s\n' "$(ls "$out" | tr '\n' ' ')"
