# The paper's five axes [1 sec. 4]: bash run.sh SIZE axis NAME. run.sh sources this file once the
# SFT checkpoint is made. Every setting and seed starts from that checkpoint and runs the recipe's
# rl and evaluate commands with other flags appended; the last stage tabulates all of them beside
# the paper's numbers. With QA and RETRIEVER every checkpoint also answers the questions out of
# domain, and a second table has them [1 Tables 2, 9].
# AXIS_STEPS: updates of each run. AXIS_TASKS: number of held-out tasks that judge a run.

if [[ $size == tiny ]]; then  # [2]
    AXIS_STEPS=${AXIS_STEPS:-$steps} AXIS_TASKS=${AXIS_TASKS:-400} best=''
    apart=$DATA/val.jsonl
    amounts="100 200 400" full=400 alone=200 scales="128 192 256"
    algorithms="grpo dapo arpo arpo-released" failing="00 05 10 20"
else  # five epochs of 1,000 tasks at 32, whatever the amount [1]; all of the validation tasks
    AXIS_STEPS=${AXIS_STEPS:-157} AXIS_TASKS=${AXIS_TASKS:-180} best=/best
    apart=$DATA/sft-tasks.jsonl
    amounts="100 200 500 1000 2000" full=1000 alone=1000 scales="1.5b 3b 7b"
    algorithms="grpo dapo arpo arpo-released" failing="00 05 10"
fi
# for the table: the tasks that judge; the size, whose numbers of the paper stand beside ours; and
# the number of GPUs, from which it computes GPU hours
beside=(--tasks "${judge[1]}") sized=()
[[ $size == tiny ]] || sized=(--size "$size") beside+=(--gpus $((GPUS * NNODES)) --size "$size")
runs=() faulty=() asked=()

# Print a line per setting of the axis: its name, then the parts of its run: algorithm, reward,
# tasks, per cent of tool calls that fail. An axis changes one part, so axes share the run that they
# have in common. Tools fail in training only; the axis of noise is also evaluated with 10%.
settings() {
    local x tasks=mixed-$full plain=${reward/curriculum/macro}
    echo sft sft
    case $axis in
        crossing)  echo "grpo grpo $reward $tasks fail-00" ;;
        reward)    for x in sum macro success curriculum; do
                       echo "$x grpo $x $tasks fail-00"
                   done ;;
        algorithm) for x in $algorithms; do
                       echo "$x $x $plain $tasks fail-00"
                   done ;;
        noise)     for x in $failing; do  # macro at 3b [1 Fig. 6]
                       echo "${x#0}% grpo $plain $tasks fail-$x"
                   done ;;
        data)      for x in $amounts; do
                       echo "$x-prompts grpo $reward mixed-$x fail-00"
                   done
                   for x in easy medium hard mixed; do
                       echo "$x grpo $reward $x-$alone fail-00"
                   done ;;
        memory)    echo "other-worlds grpo $reward $tasks fail-00"
                   echo "world-of-the-test grpo $reward home-$full fail-00" ;;
    esac
}

# train SEED RUN ALGORITHM REWARD TASKS FAIL   RL of one setting, from the SFT checkpoint
train() {
    local script=grpo.py more=()
    case $3 in
        dapo)          more=(--drop-uniform) ;;
        arpo)          script=arpo.py more=(--branch paper) ;;
        arpo-released) script=arpo.py more=(--branch released) ;;
    esac
    [[ $5 != home-* ]] || more+=(--database "$database")
    words=("${rl[@]/#[ag]rpo.py/$script}" ${FLAGS_rl:-})
    # all settings get the same number of updates: fewer tasks are repeated more often [1]
    change --reward "$4" --tasks "$DATA/subsets/$5.jsonl" --failure-rate "0.${6#fail-}" \
        "${more[@]}" --steps "$AXIS_STEPS" --seed "$1" --save-every 10 --out "$2/rl"
    stage "rl-${2##*/}" "$2/rl/config.json" "${words[@]}"
}

# draw_sets   draw the tasks of an axis: nested sets of mixed levels; for data, sets of one level
# that share no task with these [1 app. D.3]; for memory, tasks in the cities of the evaluation
draw_sets() {
    local level levels=(easy "1 0 0" medium "0 1 0" hard "0 0 1")
    draw_tasks pool pool --levels 1 1 1 --split train --n $((3 * alone)) --seed 6 --prefix pool \
        --exclude "$apart"
    stage subsets "$DATA/subsets/mixed-${amounts%% *}.jsonl" python synth.py subsets \
        --tasks "$DATA/pool.jsonl" --sizes $amounts --seed 7 --out "$DATA/subsets"
    for level in $([[ $axis != data ]] || echo 0 2 4); do
        draw_tasks "${levels[level]}" "subsets/${levels[level]}-$alone" --split train --n "$alone" \
            --levels ${levels[level + 1]} --seed 8 --prefix "${levels[level]}" \
            --exclude "$apart" "$DATA/pool.jsonl"
    done
    [[ $axis != memory ]] || stage home "$DATA/subsets/home-$full.jsonl" "${draw[@]}" \
        --split train --database "$database" --n "$full" --seed 2 --prefix home \
        --out "$DATA/subsets/home-$full.jsonl"
}

# study   train and evaluate every setting and seed, all from the same SFT checkpoint
study() {
    local seed label made run model
    draw_sets
    for seed in $SEEDS; do
        while read -r label made <&3; do
            run=$OUT/axis/runs/${made// /-}-s$seed
            model=sft=$OUT/sft
            if [[ $made != sft ]]; then
                train "$seed" "$run" $made
                model=rl=$run/rl$best
            fi
            words=("${evaluate[@]}" ${FLAGS_eval:-})
            change --model "$model" --limit "$AXIS_TASKS" --seed "$seed" --out "$run/eval"
            stage "eval-${run##*/}" "$run/eval/table.md" "${words[@]}"
            if [[ $axis == noise ]]; then
                change --failure-rate 0.10 --out "$run/eval-failing"
                stage "eval-failing-${run##*/}" "$run/eval-failing/table.md" "${words[@]}"
            fi
            if [[ -n ${QA:-} ]]; then
                words=("${questions[@]}")
                change --model "$model" --seed "$seed" --out "$run/qa"
                stage "qa-${run##*/}" "$run/qa/tax.md" "${words[@]}"
            fi
            [[ -n ${DRY:-} || $node != 0 ]] || rm -rf "$run/rl/checkpoints"
            asked+=("$label=$run/qa/${model%%=*}")
            runs+=("$label=$run/eval/${model%%=*}")
            faulty+=("$label=$run/eval-failing/${model%%=*}")
        done 3< <(settings)
    done
}

# scale   the axis of scale. tiny: three widths with reward macro, each with its own base, sft and
# rl. Otherwise: the axis of reward at all three sizes, in the folders beside OUT
scale() {
    local x seed folder wide kind made
    for x in $scales; do
        if [[ $size == tiny ]]; then
            folder=$OUT/axis/scale/width-$x wide="--width $x"
            [[ $x != 192 ]] || folder=$OUT wide=''  # the recipe's own width
            MODEL='' FLAGS_init=$wide OUT=$folder DATA=$DATA DRY=${DRY:-} \
                bash run.sh tiny axis crossing
        else
            folder=$(scale_folder "$x")
            MODEL='' OUT=$folder DATA=$DATA DRY=${DRY:-} bash run.sh "$x" axis reward
        fi
        for seed in $([[ $size != tiny ]] || echo "$SEEDS"); do
            row "width-$x-sft" "$folder/axis/runs/sft-s$seed" sft
            row "width-$x" "$folder/axis/runs/grpo-$reward-mixed-$full-fail-00-s$seed" rl
        done
    done
    [[ $size != tiny ]] || return 0
    for kind in sft sum macro success curriculum; do
        for x in $scales; do
            for seed in $SEEDS; do
                made=grpo-$kind-mixed-$full-fail-00-s$seed
                [[ $kind != sft ]] || made=sft-s$seed
                row "$kind-$x" "$(scale_folder "$x")/axis/runs/$made" "${made%%-*}"
            done
        done
    done
}

scale_folder() { if [[ $1 == "$size" ]]; then echo "$OUT"; else echo "$(dirname "$OUT")/$1"; fi; }

# row LABEL RUN MODEL   a line of the table of scale
row() {
    runs+=("$1=$2/eval/${3/grpo/rl}")
    asked+=("$1=$2/qa/${3/grpo/rl}")
}

# reliability   success of a large model on 200 synthetic and on the published validation queries,
# which is equal if both are equally hard [1 app. C.1]. The model has 128K tokens and 100 calls
reliability() {
    local url=${endpoints[0]%=*} name=${endpoints[0]##*=} queries
    draw_tasks reliability-tasks reliability --split all --n 200 --levels 1 1 1 --seed 9 \
        --prefix reliability
    for queries in synthetic validation; do
        words=("${evaluate[@]}" ${FLAGS_eval:-})
        change --model "llm=$name" --url "$url" ${ENDPOINT_KEY:+--key "$ENDPOINT_KEY"} \
            --max-context 131072 --max-turns 100 --max-tokens 8192 --out "$OUT/reliability/$queries"
        if [[ $queries == synthetic ]]; then
            change --tasks "$DATA/reliability.jsonl"
        else
            change --tasks osunlp/TravelPlanner --split validation
        fi
        stage "eval-$queries" "$OUT/reliability/$queries/table.md" "${words[@]}"
        runs+=("$queries=$OUT/reliability/$queries/llm")
    done
    beside=()
}

case $axis in
    scale) scale ;;
    reliability) reliability ;;
    *) study ;;
esac
[[ $axis != crossing ]] || exit 0
tables=("$OUT/axis/$axis.md")
[[ -z ${QA:-} || $axis == reliability ]] || tables+=("$OUT/axis/$axis-questions.md")
# make the tables again, because there may be more seeds now
[[ -n ${DRY:-} || $node != 0 ]] || rm -f "${tables[@]}" "$OUT/axis/failing/$axis.md"
[[ $axis != noise ]] || stage axis-noise-failing "$OUT/axis/failing/noise.md" \
    python -m recipes.axes --axis noise --runs "${faulty[@]}" "${beside[@]}" \
    --out "$OUT/axis/failing"
stage "axis-$axis" "${tables[0]}" python -m recipes.axes --axis "$axis" --runs "${runs[@]}" \
    "${beside[@]}" --out "$OUT/axis"
[[ ${#tables[@]} == 1 ]] || stage "axis-$axis-questions" "${tables[1]}" python -m recipes.axes \
    --axis "$axis" --questions --runs "${asked[@]}" "${sized[@]}" --out "$OUT/axis"
finish "${tables[@]}"
