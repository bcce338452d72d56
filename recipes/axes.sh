# The paper's five axes [1 sec. 4]: bash run.sh SIZE axis NAME. run.sh sources this file once the
# SFT checkpoint is made. Every setting and seed starts from that checkpoint and runs the recipe's
# rl and evaluate commands with other flags appended, on the recipe's own tasks; the recipe's run
# itself is the row whose parts are the recipe's. The last stage tabulates all of them beside the
# paper's numbers. With QA and RETRIEVER every checkpoint also answers the questions out of domain,
# and a second table has them [1 Tables 2, 9].
# AXIS_STEPS: updates of each run. AXIS_TASKS: most held-out tasks that judge a run; by default all
# do. With either of them the recipe's run is no row.

own="$algorithm $reward rl fail-00"  # the recipe's run
[[ -z ${AXIS_STEPS:-}${AXIS_TASKS:-} ]] || own=none
if [[ $size == tiny ]]; then  # [2]
    updates=72 best=''
    [[ $axis != backtrack ]] || updates=24  # three hours, with plays twice as long
    AXIS_STEPS=${AXIS_STEPS:-$updates}
    apart=$DATA/val.jsonl
    amounts="100 200 1000" alone=200 scales="128 192 256"
    algorithms="grpo dapo arpo arpo-released" failing="00 05 10 20" trips="--days 5" held="all --n 300"
else  # five epochs of 1,000 tasks at 32, whatever the amount [1]
    AXIS_STEPS=${AXIS_STEPS:-157} best=/best
    apart=$DATA/sft-tasks.jsonl
    amounts="100 200 500 1000 2000" alone=1000 scales="1.5b 3b 7b"
    algorithms="grpo dapo arpo arpo-released" failing="00 05 10" trips="--days 5 7" held="val --n 900"
fi
if [[ $axis == backtrack ]]; then  # hardly any trip of another level has two dead ends
    trips+=" --levels 0 0 1 --dead-ends"
    words=("${evaluate[@]}")
    [[ $size != tiny ]] || database=$DATA/other-worlds  # mini has few such trips
    change --tasks "$DATA/subsets/dead-ends-val.jsonl" --database "$database"
    evaluate=("${words[@]}") judge[1]=$DATA/subsets/dead-ends-val.jsonl
fi
# for the table: the tasks that judge; the size, whose numbers of the paper stand beside ours; and
# the number of GPUs, from which it computes GPU hours
beside=(--tasks "${judge[1]}") sized=()
[[ $size == tiny ]] || sized=(--size "$size") beside+=(--gpus $((GPUS * NNODES)) --size "$size")
[[ $axis != backtrack ]] || beside+=(--database "$database")
runs=() faulty=() asked=()

# Print a line per setting of the axis: its name, then the parts of its run: algorithm, reward,
# tasks, per cent of tool calls that fail. An axis changes one part, so axes share the run that they
# have in common. Tools fail in training only; the axis of noise is also evaluated with 10%.
settings() {
    local x plain=${reward/curriculum/macro}
    echo sft sft
    case $axis in
        crossing)  echo "grpo grpo $reward rl fail-00" ;;
        reward)    for x in sum macro success curriculum; do
                       echo "$x grpo $x rl fail-00"
                   done ;;
        algorithm) for x in $algorithms; do
                       echo "$x $x $plain rl fail-00"
                   done ;;
        noise)     for x in $failing; do  # macro at 3b [1 Fig. 6]
                       echo "${x#0}% grpo $plain rl fail-$x"
                   done ;;
        data)      for x in $amounts; do
                       echo "$x-prompts grpo $reward $(mixed "$x") fail-00"
                   done
                   for x in easy medium hard; do
                       echo "$x grpo $reward $x-$alone fail-00"
                   done
                   echo "mixed grpo $reward $(mixed "$alone") fail-00" ;;
        backtrack) for x in 0 0-2; do
                       echo "trained-on-$x grpo $reward dead-ends-$x fail-00"
                   done ;;
        memory)    echo "other-worlds grpo $reward rl fail-00"
                   echo "world-of-the-test grpo $reward home-1000 fail-00" ;;
    esac
}

# mixed N   the name of N tasks of mixed levels: the recipe's are 1,000
mixed() { if [[ $1 == 1000 ]]; then echo rl; else echo "mixed-$1"; fi; }

# train SEED RUN ALGORITHM REWARD TASKS FAIL   RL of one setting, from the SFT checkpoint
train() {
    local script=grpo.py tasks=$DATA/rl.jsonl more=()
    case $3 in
        dapo)          more=(--drop-uniform) ;;
        arpo)          script=arpo.py more=(--branch paper) ;;
        arpo-released) script=arpo.py more=(--branch released) ;;
    esac
    [[ $5 != home-* ]] || more+=(--database "$database")
    words=("${rl[@]/#[ag]rpo.py/$script}" ${FLAGS_rl:-})
    # all settings get the same number of updates: fewer tasks are repeated more often [1]
    [[ $5 == rl ]] || tasks=$DATA/subsets/$5.jsonl
    change --reward "$4" --tasks "$tasks" --failure-rate "0.${6#fail-}" \
        "${more[@]}" --steps "$AXIS_STEPS" --seed "$1" --save-every 10 --out "$2/rl"
    stage "rl-${2##*/}" "$2/rl/config.json" "${words[@]}"
}

# draw_sets   for data, sets around the recipe's tasks and sets of one level that share no task with
# them [1 app. D.3]; for memory, tasks in the cities of the evaluation; for backtrack, trips on which
# a greedy traveller meets no dead end, or none, one or two
draw_sets() {
    local level levels=(easy "1 0 0" medium "0 1 0" hard "0 0 1") more=() others=("$DATA/rl.jsonl")
    if [[ $axis == memory ]]; then
        stage home "$DATA/subsets/home-1000.jsonl" "${draw[@]}" --split train \
            --database "$database" --n 1000 --seed 2 --prefix home \
            --out "$DATA/subsets/home-1000.jsonl"
    fi
    if [[ $axis == backtrack ]]; then
        [[ $size != tiny ]] || stage other-worlds "$database" python -m tiny world --worlds 24 \
            --seed 8 --out "$database"
        draw_tasks dead-ends-val subsets/dead-ends-val --split $held $trips 0 1 2 \
            --database "$database" --seed 10 --prefix dead-val
        draw_tasks dead-ends-0 subsets/dead-ends-0 --split train --n 1000 $trips 0 --seed 11 \
            --prefix dead --exclude "$apart"
        draw_tasks dead-ends-0-2 subsets/dead-ends-0-2 --split train --n 1000 $trips 0 1 2 \
            --seed 12 --prefix dead --exclude "$apart"
    fi
    [[ $axis == data ]] || return 0
    if [[ $amounts == *2000* ]]; then
        draw_tasks more more --levels 4 3 3 --split train --n 1000 --seed 6 --prefix more \
            --exclude "$apart" "${others[@]}"
        others+=("$DATA/more.jsonl") more=(--tasks "$DATA/more.jsonl")
    fi
    stage subsets "$DATA/subsets/mixed-100.jsonl" python synth.py subsets --base "$DATA/rl.jsonl" \
        "${more[@]}" --sizes ${amounts/ 1000/} --seed 7 --out "$DATA/subsets"
    for level in 0 2 4; do
        draw_tasks "${levels[level]}" "subsets/${levels[level]}-$alone" --split train --n "$alone" \
            --levels ${levels[level + 1]} --seed 8 --prefix "${levels[level]}" \
            --exclude "$apart" "${others[@]}"
    done
}

# study   train and evaluate every setting and seed, all from the same SFT checkpoint
study() {
    local seed label made run model
    draw_sets
    for seed in $SEEDS; do
        while read -r label made <&3; do
            run=$(run_of "$OUT" "$made" "$seed")
            model=sft=$OUT/sft
            [[ $made == sft ]] || model=rl=$run/rl$best
            if [[ $run == "$OUT" ]]; then
                stage rl "$OUT/rl/config.json" "${rl[@]}"
                stage eval "$OUT/eval/table.md" "${evaluate[@]}"
            elif [[ $made != sft ]]; then
                train "$seed" "$run" $made
            fi
            words=("${evaluate[@]}" ${FLAGS_eval:-})
            change --model "$model" ${AXIS_TASKS:+--limit "$AXIS_TASKS"} --seed "$seed" \
                --out "$run/eval"
            [[ $run == "$OUT" ]] || stage "eval-${run##*/}" "$run/eval/table.md" "${words[@]}"
            if [[ $axis == noise ]]; then
                change --failure-rate 0.10 --out "$run/eval-failing"
                stage "eval-failing-${run##*/}" "$run/eval-failing/table.md" "${words[@]}"
            fi
            if [[ -n ${QA:-} && $run == "$OUT" ]]; then
                stage qa "$OUT/qa/tax.md" "${questions[@]}"
            elif [[ -n ${QA:-} ]]; then
                words=("${questions[@]}")
                change --model "$model" --seed "$seed" --out "$run/qa"
                stage "qa-${run##*/}" "$run/qa/tax.md" "${words[@]}"
            fi
            [[ -n ${DRY:-} || $node != 0 || $run == "$OUT" ]] || rm -rf "$run/rl/checkpoints"
            asked+=("$label=$run/qa/${model%%=*}")
            runs+=("$label=$run/eval/${model%%=*}")
            faulty+=("$label=$run/eval-failing/${model%%=*}")
        done 3< <(settings)
    done
}

# run_of OUT PARTS SEED   the folder of a run, which is OUT if it is the recipe's
run_of() {
    if [[ $2-$3 == "$own-$SEED" ]]; then echo "$1"; else echo "$1/axis/runs/${2// /-}-s$3"; fi
}

# scale   the axis of scale. tiny: three widths with reward macro, each with its own base, sft and
# rl. Otherwise: the axis of reward at all three sizes, in the folders beside OUT
scale() {
    local x seed folder wide kind made
    local -A rewards=([3b]=curriculum [7b]=sum)  # of the recipes that run GRPO
    for x in $scales; do
        if [[ $size == tiny ]]; then
            folder=$OUT/axis/scale/width-$x wide="--width $x"
            [[ $x != 256 ]] || folder=$OUT wide=''  # the recipe's own width
            FLAGS_init=$wide OUT=$folder DATA=$DATA DRY=${DRY:-} \
                bash run.sh tiny axis crossing
        else
            folder=$(scale_folder "$x")
            MODEL='' OUT=$folder DATA=$DATA DRY=${DRY:-} bash run.sh "$x" axis reward
        fi
        for seed in $([[ $size != tiny ]] || echo "$SEEDS"); do
            row "width-$x-sft" "$folder/axis/runs/sft-s$seed" sft
            row "width-$x" "$(run_of "$folder" "grpo $reward rl fail-00" "$seed")" rl
        done
    done
    [[ $size != tiny ]] || return 0
    for kind in sft sum macro success curriculum; do
        for x in $scales; do
            [[ $own == none ]] || own="grpo ${rewards[$x]:-} rl fail-00"
            for seed in $SEEDS; do
                made="grpo $kind rl fail-00"
                [[ $kind != sft ]] || made=sft
                row "$kind-$x" "$(run_of "$(scale_folder "$x")" "$made" "$seed")" "${made%% *}"
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
