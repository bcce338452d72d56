# The laptop's recipe of the tools world, from facts to the table per family: bash run.sh tool-tiny.
# Sourced by run.sh where nothing is made yet. All numbers are ours: docs/results.md. PORT: of the
# pages, 8123 unless set; the world of facts names it, so it stays the same for a folder OUT.
port=${PORT:-8123} room=640 rate=1e-3 rl_rate=1.5e-4 dpo_rate=3e-5
# a pre-trained model cuts the same text into more tokens, and has something to lose
[[ -z ${MODEL:-} ]] || { room=4096 rate=2e-5 rl_rate=1e-6 dpo_rate=5e-7; }
export HF_HUB_OFFLINE=1
[[ -z ${DRY:-} ]] || echo "export HF_HUB_OFFLINE=1"
tir=(python -m toolstar.tir)
train=(--no-checkpointing --pack-tokens 4096 --seed "$SEED" --save-every 50 --resume)
play=(--env tools --system-prompt short --max-turns 8)
models=(base="$base" sft="$OUT/sft" rl="$OUT/rl")
rl=("${torchrun[@]}" "$rl_gpus" grpo.py --tasks "$DATA/rl.jsonl" --database "$DATA/train" "${play[@]}"
    --reward $reward --keep-overlength --prompts 8 --group 8 --lr $rl_rate --temperature 0.8
    --context $room --turn-tokens 128 --concurrency 64 "${train[@]}")
judge=("${play[@]}" --max-context $room --max-tokens 128 --seed "$SEED")

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
stage rl "$OUT/rl/config.json" "${rl[@]}" --model "$OUT/sft" --steps 100 --decay 0.5 \
    --out "$OUT/rl"
# self-critic cycles: the policy plays, DPO learns from its right and wrong plays, GRPO goes on
last=$OUT/rl
for ((cycle = 1; cycle <= ${CYCLES:-1}; cycle++)); do
    here=$OUT/cycle-$cycle
    if [[ $cycle != 1 ]]; then
        stage "rl-$cycle" "$here/rl/config.json" "${rl[@]}" --model "$last" --steps 20 \
            --seed $((SEED + 1000 * cycle)) --out "$here/rl"
        last=$here/rl
    fi
    # from here on every cycle draws anew, but what is held out of pairs stays so
    stage "play-$cycle" "$here/play/table.md" python evaluate.py --model policy="$last" \
        --tasks "$DATA/rl.jsonl" --database "$DATA/train" "${judge[@]}" --limit 160 --samples 8 \
        --temperature 0.8 --top-p 1.0 --seed $((SEED + 1000 * cycle)) --out "$here/play"
    stage "pairs-$cycle" "$here/pairs/val.jsonl" python -m toolstar.pairs --fewer-calls \
        --episodes "$here/play/policy/episodes.jsonl" --seed "$SEED" --out "$here/pairs"
    stage "dpo-$cycle" "$here/dpo/config.json" "${torchrun[@]}" "$GPUS" dpo.py --model "$last" \
        --data "$here/pairs/train.jsonl" --val "$here/pairs/val.jsonl" --batch 16 \
        --lr $dpo_rate --nll 0.1 --cutoff $room "${train[@]}" --out "$here/dpo"
    last=$here/dpo
done
[[ $last == "$OUT/rl" ]] || models+=(dpo="$last")
stage eval "$OUT/eval/table.md" python evaluate.py --model "${models[@]}" \
    --tasks "$DATA/val.jsonl" --database "$DATA/val" "${judge[@]}" --top-p 0.95 \
    --temperature 0.6 --out "$OUT/eval"
stage curves "$OUT/curves.png" python report.py "$OUT/rl" --curves --out "$OUT"
finish "$OUT/eval/table.md"
