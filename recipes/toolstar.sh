# The recipes of the tools world, sourced by run.sh before its first stage.
#   bash run.sh tool-star-0.5b   or 1.5b, 3b, 7b: Tool-Star's recipe, from its published data
#   bash run.sh tool-tiny        the laptop's recipe, from generated facts to the table per family
# Sources: [2] ours   [3] Tool-Star, arXiv:2505.16410   [4] its released code, scripts and README

# critic NAME FOLDER MODEL SEED CYCLE [PROMPT PRINCIPLES]   the self-critic [3 app. B.1]: the model
# plays, and DPO learns from its right and wrong plays
critic() {
    words=("${trial[@]}")
    # the longer prompt gets tokens of its own; DPO does not read it
    [[ -z ${6:-} ]] || change --system-prompt "$6" --max-context $((context + 384))
    # every cycle samples with another seed, but the held-out pairs stay the same
    change --model policy="$3" --seed $(($4 + 1000 * $5)) --out "$2/play"
    stage "play-$1" "$2/play/table.md" "${words[@]}"
    stage "pairs-$1" "$2/pairs/val.jsonl" python -m toolstar pairs --fewer-calls \
        --episodes "$2/play/policy/episodes.jsonl" --seed "$4" ${7:+--principles "$7"} \
        --out "$2/pairs"
    words=("${dpo[@]}")
    change --model "$3" --data "$2/pairs/train.jsonl" --val "$2/pairs/val.jsonl" --seed "$4" \
        --out "$2/dpo"
    stage "dpo-$1" "$2/dpo/config.json" "${words[@]}"
}

# cycles N   self-critic cycles after RL: the policy plays, DPO learns from its right and wrong
# plays, GRPO continues; the last model is evaluated, too
cycles() {
    local cycle here last=$OUT/rl
    for ((cycle = 1; cycle <= $1; cycle++)); do
        here=$OUT/cycle-$cycle
        if [[ $cycle != 1 ]]; then
            stage "rl-$cycle" "$here/rl/config.json" "${rl[@]}" ${FLAGS_rl:-} --model "$last" \
                "${again[@]}" --seed $((SEED + 1000 * cycle)) --out "$here/rl"
            last=$here/rl
        fi
        critic "$cycle" "$here" "$last" "$SEED" "$cycle"
        last=$here/dpo
    done
    [[ $last == "$OUT/rl" ]] || models+=(dpo="$last")
}

if [[ $size == tool-star-* ]]; then
    # prompts of 1,536 and responses of 4,096 tokens, episodes of 15,000 [4]; memory.py: every size
    # fits 8 GPUs of 80 GB, 3b four, 0.5b and 1.5b one [2]
    context=${CONTEXT:-5632} cutoff=${CUTOFF:-15000}
    reward=paper prompts=128 group=8
    SFT_DATA=${SFT_DATA:-$DATA/published/sft.json} RL_DATA=${RL_DATA:-$DATA/published/rl.parquet}
    SETS=${SETS:-$DATA/published/sets} TOOLS=${TOOLS:-database/tool-star}
    # SFT_DATA and RL_DATA are Tool-Star-SFT-54K and Multi-Tool-RL-10K of dongguanting; parquet
    # needs pyarrow, which requirements.txt names. Tasks that occur in a test set are dropped;
    # system.txt is the prompt of the SFT data
    stage convert "$DATA/rl.jsonl" python -m toolstar convert \
        --sft "$SFT_DATA" --rl "$RL_DATA" --sets "$SETS" --out "$DATA"
    # the same number of questions per set as in [3]
    stage sets "$DATA/sets/tasks.jsonl" python -m toolstar sets --sets "$SETS" \
        --out "$DATA/sets"
    # call each tool once before hours are spent
    for part in eval train; do
        words=(python evaluate.py --env tools --database "$TOOLS/$part"
            --tasks "$DATA/rl.jsonl" --check)
        if [[ -n ${DRY:-} ]]; then printf '\n# check\n%s\n' "${words[*]}"; continue; fi
        "${words[@]}" || stop "a tool fails, see above: $TOOLS/$part/tools.json has its settings"
    done
    # 3 calls in training; in evaluation 3 of each tool [4], here 6 of both together [2]. One call
    # over the budget is refused, so there are at most 7 turns and the answer
    tools=(--env tools --system-prompt "$DATA/system.txt")
    world=("${tools[@]}" --database "$TOOLS/train")
    # full fine-tuning, cosine, warm-up 0.1, 4 GPUs x 4 rows [4]; unlike [4], results are masked [2]
    sft=("${torchrun[@]}" "$GPUS" sft.py --model "$base"
        --data "$DATA/sft.jsonl" --epochs 3 --batch 16 --lr $(rate 7e-6) --warmup 0.1
        --cutoff $cutoff --pack-tokens $((keep ? keep : cutoff)) "${how[@]}" --seed "$SEED"
        --save-every 500 --resume --out "$OUT/sft")
    clip=(${clip:+--clip-low 0.2 --clip-high 0.2})
    # 128 prompts x 8, mini-batches of 16 prompts, clip 0.2, no KL, constant rate, 2 epochs [4]; the
    # reward of [3]. No validation: the published file contains questions of the test sets [2]
    rl=("${torchrun[@]}" "$GPUS" $algorithm.py --tasks "$DATA/rl.jsonl" "${world[@]}" --max-turns 7
        --reward $reward --prompts $prompts --group $group --minibatches 8 --lr $(rate 1e-6)
        "${clip[@]}" --temperature 1.0 --context $context --turn-tokens 4096
        --pack-tokens $pack --gpu-memory $share "${how[@]}" --seed "$SEED"
        --save-every 10 --resume)
    preflight
    stage sft "$OUT/sft/config.json" "${sft[@]}"
    first=(--model "$OUT/sft" --epochs 2) models=(base="$base" sft="$OUT/sft" rl="$OUT/rl")
    # responses of 16,384 tokens [4]; a failed program is debugged once, as in the command that [4]
    # recommends, here by the policy itself. [4] plays once, greedily, so that one question of AIME
    # counts 3.3 points: avg@4 instead [2]; FLAGS_eval="--samples 1 --temperature 0" plays as [4]
    held=$TOOLS/eval
    evaluate=(python evaluate.py --tasks "$DATA/sets/tasks.jsonl" "${tools[@]}" --database "$held"
        --max-turns 7 --max-context 17920 --max-tokens 16384 --samples 4 --temperature 0.6
        --top-p 0.95 --seed "$SEED")
    # [3] does not say how many plays, pairs and later updates it has
    again=(--steps 20)
    trial=(python evaluate.py --tasks "$DATA/rl.jsonl" "${world[@]}" --max-turns 7 --limit 1000
        --max-context $context --max-tokens 4096 --samples 8 --temperature 1.0 --top-p 1.0)
    dpo=("${torchrun[@]}" "$GPUS" dpo.py --batch 32 --lr $(rate 5e-7) --nll 0.1
        --cutoff $context "${how[@]}" --seed "$SEED" --save-every 50 --resume)
    [[ $what != axis ]] || source recipes/toolaxes.sh
    stage rl "$OUT/rl/config.json" "${rl[@]}" "${first[@]}" --out "$OUT/rl"
    cycles ${CYCLES:-0}
    names=("${models[@]%%=*}")
    stage eval "$OUT/eval/table.md" "${evaluate[@]}" --model "${models[@]}" --out "$OUT/eval"
    stage scores "$OUT/scores/table.md" python -m toolstar scores --tasks "$DATA/sets/tasks.jsonl" \
        --runs "${names[@]/#/$OUT/eval/}" ${JUDGE:+--judge "$JUDGE"} \
        ${JUDGE_KEY:+--judge-key "$JUDGE_KEY"} --out "$OUT/scores"
    finish "$OUT/scores/table.md"
fi

# tool-tiny. All numbers are ours: docs/results.md. PORT: of the server of web pages, 8123 by
# default; the generated tasks contain it, so keep it for a given OUT.
port=${PORT:-8123} room=640
export HF_HUB_OFFLINE=1
[[ -z ${DRY:-} ]] || echo "export HF_HUB_OFFLINE=1"
train=(--keep-activations 4096 --pack-tokens 4096 --seed "$SEED" --save-every 50 --resume)
play=(--env tools --system-prompt short --max-turns 7)
models=(base="$base" sft="$OUT/sft" rl="$OUT/rl")
rl=("${torchrun[@]}" "$rl_gpus" $algorithm.py --tasks "$DATA/rl.jsonl"
    --database "$DATA/train" "${play[@]}" --reward $reward --keep-overlength --prompts 16
    --group 8 --lr 5e-5 --temperature 0.8 --context $room --turn-tokens 128
    --concurrency 64 "${train[@]}")
first=(--model "$OUT/sft" --steps 80 --decay 0.5)  # RL in the first cycle
again=(--steps 20)  # RL in the later cycles
# --lenient: all numbers in docs/results.md were measured with it
judge=("${play[@]}" --lenient --max-context $room --max-tokens 128 --seed "$SEED")
trial=(python evaluate.py --tasks "$DATA/rl.jsonl" --database "$DATA/train" "${judge[@]}"
    --limit 160 --samples 8 --temperature 0.8 --top-p 1.0)
dpo=("${torchrun[@]}" "$GPUS" dpo.py --batch 16 --lr 3e-5 --nll 0.1 --cutoff $room
     "${train[@]}")
held=$DATA/val
evaluate=(python evaluate.py --tasks "$DATA/val.jsonl" --database "$held" "${judge[@]}" --top-p 0.95
    --temperature 0.6)

# serve_pages   serve the pages that Browse reads, until this script ends
serve_pages() {
    local said serve=(python -m tiny.facts pages --database "$DATA/train" "$DATA/val" --port $port)
    if [[ -n ${DRY:-} ]]; then
        printf '\n# pages, until the end\n%s&\n' "$(printf '%q ' "${serve[@]}")"
        return
    fi
    # a killed run.sh leaves no server behind on the port
    ! command -v setpriv >/dev/null || serve=(setpriv --pdeathsig KILL "${serve[@]}")
    exec {pages}< <(exec "${serve[@]}")
    trap "kill $! 2>/dev/null || true" EXIT
    read -r said <&"$pages" ||
        stop "no pages are served, see above; is port $port taken? PORT=another, with a new OUT"
    say "$said"
}

# held-out tasks ask about a separate world, whose names and numbers occur nowhere else
stage facts "$DATA/val.jsonl" python -m tiny.facts world --seed 0 --port $port --out "$DATA"
serve_pages
stage episodes "$DATA/sft.jsonl" python -m tiny.facts episodes --database "$DATA/train" \
    --tasks "$DATA/sft-tasks.jsonl" --out "$DATA/sft.jsonl"
# a random model, which first learns to copy
stage drills "$DATA/drills.jsonl" python -m tiny.facts drills --n 9000 --seed 5 --port $port \
    --out "$DATA/drills.jsonl"
stage init "$OUT/init/config.json" python -m tiny model --seed "$SEED" \
    --phrases database/words/phrases-tools.txt \
    --corpus "$DATA/drills.jsonl" "$DATA/sft.jsonl" --out "$OUT/init"
stage base "$OUT/base/config.json" "${torchrun[@]}" "$GPUS" sft.py --model "$OUT/init" \
    --data "$DATA/drills.jsonl" --epochs 1 --batch 8 --lr 1e-3 --min-lr 0.3 --warmup 0.03 \
    --cutoff $room "${train[@]}" --out "$OUT/base"
# in a third of the episodes that need a tool the teacher answers from memory; the model copies it
stage sft "$OUT/sft/config.json" "${torchrun[@]}" "$GPUS" sft.py --model "$base" \
    --data "$DATA/sft.jsonl" --steps 800 --batch 4 --lr 1e-3 --min-lr 0.05 --warmup 0.03 \
    --cutoff $room "${train[@]}" --out "$OUT/sft"
[[ $what != axis ]] || source recipes/toolaxes.sh
# RL unlearns that habit. At a rate of 1.5e-4 it would also unlearn what only few tasks need
stage rl "$OUT/rl/config.json" "${rl[@]}" "${first[@]}" --out "$OUT/rl"
cycles ${CYCLES:-1}
stage eval "$OUT/eval/table.md" "${evaluate[@]}" --model "${models[@]}" --out "$OUT/eval"
finish "$OUT/eval/table.md"
