# The laptop's recipe of the tools world, from facts to the table per family: bash run.sh tool-tiny.
# Sourced by run.sh where nothing is made yet. All numbers are ours: docs/results.md. PORT: of the
# pages, 8123 unless set; the world of facts names it, so it stays the same for a folder OUT.
port=${PORT:-8123} room=640 rate=1e-3 rl_rate=1.5e-4
# a pre-trained model cuts the same text into more tokens, and has something to lose
[[ -z ${MODEL:-} ]] || { room=4096 rate=2e-5 rl_rate=1e-6; }
export HF_HUB_OFFLINE=1
[[ -z ${DRY:-} ]] || echo "export HF_HUB_OFFLINE=1"
tir=(python -m toolstar.tir)
train=(--no-checkpointing --pack-tokens 4096 --seed "$SEED" --save-every 50 --resume)
play=(--env tools --system-prompt short --max-turns 8)
models=(base="$base" sft="$OUT/sft" rl="$OUT/rl")

# serve_pages   the pages that Browse reads, until this script ends
serve_pages() {
    local said serve=("${tir[@]}" pages --database "$DATA/train" "$DATA/val" --port $port)
    if [[ -n ${DRY:-} ]]; then
        printf '\n# pages, until the end\n%s&\n' "$(print "${serve[@]}")"
        return
    fi
    exec {pages}< <(exec "${serve[@]}")
    trap "kill $! 2>/dev/null || true" EXIT
    read -r said <&"$pages" || stop "no pages are served, see above; is port $port taken?"
    say "$said"
}

# held-out tasks ask about a world of its own, of names and numbers that occur nowhere else
stage facts "$DATA/val.jsonl" "${tir[@]}" facts --seed 0 --port $port --out "$DATA"
serve_pages
stage episodes "$DATA/sft.jsonl" "${tir[@]}" episodes --database "$DATA/train" \
    --tasks "$DATA/sft-tasks.jsonl" --out "$DATA/sft.jsonl"
if [[ -z ${MODEL:-} ]]; then  # a random one, taught to copy what it is shown
    stage drills "$DATA/drills.jsonl" "${tir[@]}" drills --n 6000 --seed 5 --port $port \
        --out "$DATA/drills.jsonl"
    stage init "$OUT/init/config.json" python tiny.py model --seed "$SEED" \
        --phrases database/words/phrases-tools.txt \
        --corpus "$DATA/drills.jsonl" "$DATA/sft.jsonl" --out "$OUT/init"
    stage base "$OUT/base/config.json" "${torchrun[@]}" "$GPUS" sft.py --model "$OUT/init" \
        --data "$DATA/drills.jsonl" --epochs 1 --batch 8 --lr 1e-3 --min-lr 0.3 --warmup 0.03 \
        --cutoff $room "${train[@]}" --out "$OUT/base"
fi
# stopped early: RL is to have something left to learn
stage sft "$OUT/sft/config.json" "${torchrun[@]}" "$GPUS" sft.py --model "$base" \
    --data "$DATA/sft.jsonl" --steps 200 --batch 4 --lr $rate --min-lr 0.05 --warmup 0.03 \
    --cutoff $room "${train[@]}" --out "$OUT/sft"
stage rl "$OUT/rl/config.json" "${torchrun[@]}" "$rl_gpus" grpo.py --model "$OUT/sft" \
    --tasks "$DATA/rl.jsonl" --database "$DATA/train" "${play[@]}" --reward $reward \
    --keep-overlength --prompts 8 --group 8 --steps 100 --lr $rl_rate --decay 0.5 \
    --temperature 0.8 --context $room --turn-tokens 128 --concurrency 64 "${train[@]}" \
    --out "$OUT/rl"
stage eval "$OUT/eval/table.md" python evaluate.py --model "${models[@]}" \
    --tasks "$DATA/val.jsonl" --database "$DATA/val" "${play[@]}" --max-context $room \
    --max-tokens 128 --top-p 0.95 --temperature 0.6 --seed "$SEED" --out "$OUT/eval"
stage curves "$OUT/curves.png" python report.py "$OUT/rl" --curves --out "$OUT"
finish "$OUT/eval/table.md"
