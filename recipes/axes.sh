# The paper's five axes [1 sec. 4]: bash run.sh SIZE axis NAME. run.sh sources this file once the
# SFT checkpoint is made. Every setting and seed starts there and runs the recipe's rl and evaluate
# commands with other flags appended; the last stage prints a table beside the paper's numbers.
# AXIS_STEPS: updates of each run. AXIS_TASKS: number of held-out tasks that judge a run.

if [[ $size == tiny ]]; then  # [2]
    AXIS_STEPS=${AXIS_STEPS:-$steps} AXIS_TASKS=${AXIS_TASKS:-400} apart=$DATA/val.jsonl best=''
    amounts=100,200,400 full=400 alone=200 scales="128 192 256"
    algorithms="grpo dapo arpo arpo-released aepo" failing="00 05 10 20"
else  # five epochs of 1,000 tasks at 32, whatever the amount [1]; all of the validation tasks
    AXIS_STEPS=${AXIS_STEPS:-157} AXIS_TASKS=${AXIS_TASKS:-180} apart=$DATA/sft-tasks.jsonl best=/best
    amounts=100,200,500,1000,2000 full=1000 alone=1000 scales="1.5b 3b 7b"
    algorithms="grpo dapo arpo arpo-released" failing="00 05 10"
fi
runs=() faulty=()

# Print a line per setting of the axis: its name, then the parts of its run: algorithm, reward,
# tasks, per cent of tool calls that fail. An axis changes one part, so that axes share the run in
# which they cross. Tools fail in training only; the axis of noise is also evaluated with 10%.
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
        noise)     for x in $failing; do
                       echo "${x#0}% grpo $reward $tasks fail-$x"
                   done ;;
        data)      for x in ${amounts//,/ }; do
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
        aepo)          script=arpo.py  # arXiv:2510.14545
                       more=(--branch-penalty 0.05 --keep-gradient --entropy-advantage 0.2) ;;
    esac
    [[ $5 != home-* ]] || more+=(--database "$database")
    words=("${rl[@]/#[ag]rpo.py/$script}")
    # all settings get the same number of updates: fewer tasks are repeated more often [1]
    change --reward "$4" --tasks "$DATA/subsets/$5.jsonl" --failure-rate "0.${6#fail-}" \
        "${more[@]}" --steps "$AXIS_STEPS" --seed "$1" --save-every 10 --out "$2/rl"
    stage "rl-${2##*/}" "$2/rl/config.json" "${words[@]}"
}

# train and evaluate every setting and seed from the one SFT checkpoint
study() {
    local seed label made run model
    words=("${tasks[@]}")
    change --levels 1:1:1 --split train --n $((3 * alone)) --seed 6 --prefix pool \
        --exclude "$apart" --out "$DATA/pool.jsonl"
    stage pool "$DATA/pool.jsonl" "${words[@]}"
    stage subsets "$DATA/subsets/hard-$alone.jsonl" python synth.py subsets \
        --tasks "$DATA/pool.jsonl" --sizes "$amounts" --alone "$alone" --seed 7 --out "$DATA/subsets"
    [[ $axis != memory ]] || stage home "$DATA/subsets/home-$full.jsonl" "${draw[@]}" --split train \
        --database "$database" --n "$full" --seed 2 --prefix home \
        --out "$DATA/subsets/home-$full.jsonl"
    for seed in $SEEDS; do
        while read -r label made <&3; do
            run=$OUT/axis/runs/${made// /-}-s$seed
            model=sft=$OUT/sft
            if [[ $made != sft ]]; then
                train "$seed" "$run" $made
                model=rl=$run/rl$best
            fi
            words=("${evaluate[@]}")
            change --model "$model" --limit "$AXIS_TASKS" --seed "$seed" --out "$run/eval"
            stage "eval-${run##*/}" "$run/eval/table.md" "${words[@]}"
            if [[ $axis == noise ]]; then
                change --failure-rate 0.10 --out "$run/eval-failing"
                stage "eval-failing-${run##*/}" "$run/eval-failing/table.md" "${words[@]}"
            fi
            [[ -n ${DRY:-} || $node != 0 ]] || rm -rf "$run/rl/checkpoints"
            runs+=("$label=$run/eval/${model%%=*}")
            faulty+=("$label=$run/eval-failing/${model%%=*}")
        done 3< <(settings)
    done
}

# the axis of scale: at tiny size three widths, each with its own base, sft and rl; else the runs in
# the folders of 1.5b, 3b and 7b
scale() {
    local x seed folder made
    for x in $scales; do
        if [[ $size == tiny ]]; then
            folder=$OUT/axis/scale/width-$x
            [[ $x != 192 ]] || folder=$OUT  # the recipe's own width
            MODEL='' FLAGS_init="--width $x" OUT=$folder DATA=$DATA bash run.sh tiny axis crossing
            for seed in $SEEDS; do
                runs+=("width-$x-sft=$folder/axis/runs/sft-s$seed/eval/sft")
                made=grpo-$reward-mixed-$full-fail-00-s$seed
                runs+=("width-$x=$folder/axis/runs/$made/eval/rl")
            done
        else
            folder=$(dirname "$OUT")/$x
            [[ $x != "$size" ]] || folder=$OUT
            runs+=("$x-sft=$folder/eval/sft" "$x=$folder/eval/rl")
        fi
    done
}

if [[ $axis == scale ]]; then scale; else study; fi
[[ $axis != crossing ]] || exit 0
# make the table again: it may have another seed now
[[ -n ${DRY:-} || $node != 0 ]] || rm -f "$OUT/axis/$axis.md" "$OUT/axis/failing/$axis.md"
[[ $axis != noise ]] || stage axis-noise-failing "$OUT/axis/failing/noise.md" \
    python -m recipes.axes --axis noise --runs "${faulty[@]}" --out "$OUT/axis/failing"
stage "axis-$axis" "$OUT/axis/$axis.md" python -m recipes.axes --axis "$axis" \
    --runs "${runs[@]}" --out "$OUT/axis"
finish "$OUT/axis/$axis.md"
