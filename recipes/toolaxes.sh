# The axes of the tools world: bash run.sh SIZE axis NAME. Tool-Star's ablation [3] as runs.
#   reward    RL with each reward of toolstar/verdict.py; the table also has the hack gauge
#   masking   RL that also learns from the tokens that tools wrote (variants/train-results.diff)
#   noise     RL with failing tools; all checkpoints are evaluated with tools that work
#   dpo       RL alone; then one cycle of the self-critic, two cycles; one cycle straight from SFT;
#             and, except at tiny size, one whose plays had the reward's principles in their prompt
#   helpers   the recipe's RL checkpoint, played without helpers, with each alone, with all
# toolstar.sh sources this file once the SFT checkpoint is made. Axes share runs: the one with the
# recipe's reward is made once. AXIS_STEPS: updates of the first cycle of RL. AXIS_TASKS: number of
# held-out tasks that judge a run. Both default to the recipe's.
runs=() scored=() plays=$OUT/axis/runs

# judged LABEL FOLDER NAME=MODEL SEED [FLAG VALUE...]   a model plays the held-out tasks: a row
judged() {
    words=("${evaluate[@]}" ${FLAGS_eval:-})
    change --model "$3" ${AXIS_TASKS:+--limit "$AXIS_TASKS"} --seed "$4" "${@:5}" --out "$2/eval"
    stage "eval-${2##*/}" "$2/eval/table.md" "${words[@]}"
    [[ -n ${DRY:-} || $node != 0 || $3 != *"=$plays/"* ]] || rm -rf "${3#*=}/checkpoints"
    local name=${1//%/}  # toolstar.scores allows fewer characters in a name
    runs+=("$1=$2/eval/${3%%=*}") scored+=("${name//+/-}-s$4=$2/eval/${3%%=*}")
}

# Print a line per setting of the axis: its name, then the parts of its run: reward, masked results
# or not, per cent of tool calls that fail
settings() {
    local x
    case $axis in
        reward)  for x in strict paper released needed answer; do echo "$x $x masked 00"; done ;;
        masking) echo "masked $reward masked 00"
                 echo "trained-on $reward results 00" ;;
        noise)   for x in 00 05 10; do echo "${x#0}% $reward masked $x"; done ;;
        dpo)     echo "rl $reward masked 00" ;;
    esac
}

# train FOLDER SEED REWARD RESULTS FAIL   RL of one setting, from the SFT checkpoint
train() {
    words=("${rl[@]}" "${first[@]}" ${FLAGS_rl:-})
    if [[ $4 == results ]]; then
        variant train-results
        words=("${words[@]/#grpo.py/grpo_train_results.py}")
    fi
    change --reward "$3" --failure-rate "0.$5" ${AXIS_STEPS:+--steps "$AXIS_STEPS"} \
        --seed "$2" --save-every 10 --out "$1/rl"
    stage "rl-${1##*/}" "$1/rl/config.json" "${words[@]}"
}

# critics SEED MODEL   the settings of dpo that follow RL alone
critics() {
    local one=$plays/dpo-rl-s$1 two=$plays/dpo-rl-2-s$1 told=$OUT/axis/principles.txt
    local principles=database/prompts/principles.txt
    critic "rl-s$1" "$one" "$2" "$1" 1
    judged rl+dpo "$one" dpo="$one/dpo" "$1"
    words=("${rl[@]}" ${FLAGS_rl:-})
    change --model "$one/dpo" "${again[@]}" --seed $(($1 + 2000)) --out "$two/rl"
    stage "rl-2-s$1" "$two/rl/config.json" "${words[@]}"
    critic "rl-2-s$1" "$two" "$two/rl" "$1" 2
    judged two-cycles "$two" dpo="$two/dpo" "$1"
    critic "sft-s$1" "$plays/dpo-sft-s$1" "$OUT/sft" "$1" 1
    judged sft+dpo "$plays/dpo-sft-s$1" dpo="$plays/dpo-sft-s$1/dpo" "$1"
    # tiny knows only its own system prompt: with the principles, 15 of 1,280 plays were right
    [[ $size != tool-tiny ]] || return 0
    stage principles "$told" bash -c 'cat "$1" <(echo) "$2" > "$3"' _ "$DATA/system.txt" \
        $principles "$told"
    critic "told-s$1" "$plays/dpo-told-s$1" "$2" "$1" 1 "$told" $principles
    judged rl+dpo-told "$plays/dpo-told-s$1" dpo="$plays/dpo-told-s$1/dpo" "$1"
}

study() {
    local seed label made run
    for seed in $SEEDS; do
        judged sft "$plays/sft-s$seed" sft="$OUT/sft" "$seed"
        while read -r label made <&3; do
            run=$plays/grpo-${made// /-}-s$seed
            train "$run" "$seed" $made
            judged "$label" "$run" rl="$run/rl" "$seed"
        done 3< <(settings)
        [[ $axis != dpo ]] || critics "$seed" "$run/rl"
    done
}

# helpers   the policy is its own helper. Refining must begin within the context, so tiny sets where
helpers() {
    local x at=$OUT/axis/helpers more='' able=(debug rollback refine)
    [[ $size != tool-tiny ]] || more=,refine_at=$((room / 2)),reply=128
    # pages are summarised only where there are some
    [[ $size != tool-tiny ]] && ! grep -qs '"Browse"' "$held/tools.json" || able+=(summarise)
    stage rl "$OUT/rl/config.json" "${rl[@]}" "${first[@]}" --out "$OUT/rl"
    # the world's own tools.json may turn debug on
    judged none "$at/none" none="$OUT/rl" "$SEED" --helpers debug=0
    for x in "${able[@]}"; do
        judged $x "$at/$x" $x="$OUT/rl" "$SEED" --helpers debug=0,$x=1$more
    done
    judged all "$at/all" all="$OUT/rl" "$SEED" --helpers "$(printf '%s=1,' "${able[@]}")${more#,}"
}

if [[ $axis == helpers ]]; then helpers; else study; fi
table=$OUT/axis/tool-$axis.md sets=$OUT/axis/scores-$axis/table.md
[[ -n ${DRY:-} || $node != 0 ]] || rm -f "$table" "$sets"  # it may have another seed now
if [[ $size == tool-star-* ]]; then  # set by set beside the paper's, as in the recipe
    stage "scores-$axis" "$sets" python -m toolstar scores --tasks "$DATA/sets/tasks.jsonl" \
        --runs "${scored[@]}" ${JUDGE:+--judge "$JUDGE"} ${JUDGE_KEY:+--judge-key "$JUDGE_KEY"} \
        --out "${sets%/*}"
fi
stage "axis-$axis" "$table" python -m recipes.axes --axis "tool-$axis" \
    --runs "${runs[@]}" --tasks "${evaluate[3]}" --out "$OUT/axis"
finish "$table"
