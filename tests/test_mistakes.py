"""Every mistake of a person is at most two lines that name the cause and the fix.

A row of the tables below is a command line, words that must be said, and that is all: no usage of
forty flags, no traceback, exit code 1 or 2. Most are called in this process, where that shows the
same; pipes, signals and run.sh need a process of their own.
"""
import contextlib
import importlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, witness

import evaluate
import qa_eval
import runtime
from runtime import write_jsonl

TOKENIZER = '{"model": {}, "added_tokens": []}'
LINES = 2  # at most, whoever says them
MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"},
            {"role": "assistant", "content": "a"}]

# ---------------------------------------------------------------------------------- command lines
# {program: [(its words, what must be said), ..]}. The files they name are made by `desk`.

MISTAKES = {
    "evaluate": [
        ("", "--tasks FILE.jsonl is needed"),
        ("--tasks none.jsonl --model m", "none.jsonl: No such file or directory; is the"),
        ("--tasks empty.jsonl --model m", "empty.jsonl: it holds no task; python synth.py tasks"),
        ("--tasks cut.jsonl --model m", "cut.jsonl, line 2: not JSON"),
        ("--tasks binary.jsonl --model m", "binary.jsonl, line 1: not JSON"),
        ("--tasks latin.jsonl --model m", "latin.jsonl, line 1: not JSON"),
        ("--tasks dangling.jsonl --model m", "dangling.jsonl: No such file or directory; is the"),
        ("--tasks dangling.csv --model m", "dangling.csv: No such file or directory; is the path"),
        ("--tasks blank.csv --model m", "blank.csv: it holds no task"),
        ("--tasks good.jsonl --model m --system-prompt folder", "folder: Is a directory"),
        ("--tasks good.jsonl --model shut", "shut/config.json: Is a directory"),
        ("--tasks list.jsonl --model m", "list.jsonl, row 1: a task is a JSON object"),
        ("--tasks number.jsonl --model m", "number.jsonl, row 1: a task is a JSON object"),
        ("--tasks lacking.jsonl --model m", "lacking.jsonl, row 1: "),
        ("--tasks types.jsonl --model m", "types.jsonl, row 1: 'days' is 'soon'"),
        ("--tasks wish.jsonl --model m", "wish.jsonl, row 1: 'local_constraint' must be a table"),
        ("--tasks never.jsonl --model m", "never.jsonl, row 1: 'days' is 0; it must be 1 or more"),
        ("--tasks dates.jsonl --model m", "'date' is [5], not days like 2022-03-01"),
        ("--tasks rule.jsonl --model m", "'house rule' is {'pets': 1}, which has the wrong type"),
        ("--tasks back.jsonl --model m", "not days in their order"),
        ("--tasks page.jsonl --model m", "the file is a web page: download the data itself"),
        ("--tasks words.jsonl --model m", "every line must be an object such as {"),
        ("--tasks long.jsonl --model m", "of the trip's 3 days"),
        ("--tasks twice.jsonl --model m", "two tasks have the id 'w'"),
        ("--tasks alike.jsonl --model m", "two tasks have the id '1'"),
        ("--tasks folder --model m", "folder is a data set: name one of its files, or a part"),
        ("--tasks folder --split test --model m", "folder holds neither test.csv nor test.jsonl"),
        ("--tasks latin.csv --model m", "latin.csv: not UTF-8 text"),
        ("--tasks binary.csv --model m", "binary.csv: "),
        ("--tasks columns.csv --model m", "columns.csv, row 1: "),
        ("--tasks nobody/none --split test --model m", "the hub provides no test.csv"),
        ("--tasks good.jsonl --samples 0", "--samples: '0' must be a whole number, 1 or more"),
        ("--tasks good.jsonl --limit -3", "--limit: '-3' must be a whole number, 1 or more"),
        ("--tasks good.jsonl --limit 1.5", "--limit: '1.5' must be a whole number"),
        ("--tasks good.jsonl --temperature -1", "--temperature: '-1' must be a number, 0 or more"),
        ("--tasks good.jsonl --temperature nan", "--temperature: 'nan' must be a number"),
        ("--tasks good.jsonl --top-p 2", "--top-p: '2' must be a number, more than 0, at most 1"),
        ("--tasks good.jsonl --gpu-memory 0", "--gpu-memory: '0' must be a number, more than 0"),
        ("--tasks good.jsonl --max-turns 0", "--max-turns: '0' must be"),
        ("--tasks good.jsonl --failure-rate 5", "--failure-rate: '5' must be a number"),
        ("--tasks good.jsonl --concurrency 0", "--concurrency: '0' must be"),
        ("--tasks good.jsonl --tp 0", "--tp: '0' must be"),
        ("--tasks good.jsonl --agent robot", "--agent: invalid choice: 'robot'"),
        ("--tasks good.jsonl --split dev", "--split: invalid choice: 'dev'"),
        ("--tasks good.jsonl --url localhost:8000", "is not an address like http://host:8000/v1"),
        ("--tasks good.jsonl --lmit 3", "unrecognized arguments: --lmit 3"),
        ("--tasks good.jsonl --agent solver --model m", "leave out --model and --url"),
        ("--tasks good.jsonl", "--model needs one or more checkpoints"),
        ("--tasks good.jsonl --model A=B=C", "B=C is not a folder; is the path right?"),
        ("--tasks good.jsonl --model 'my model=x'", "'my model=x' is not [NAME=]PATH"),
        ("--tasks good.jsonl --model ..=x", "'..=x' is not [NAME=]PATH"),
        ("--tasks good.jsonl --model a=", "'a=' is not [NAME=]PATH"),
        ("--tasks good.jsonl --model a=x a=y", "each with its own name"),
        ("--tasks good.jsonl --model folder", "folder/config.json is missing: is folder a model"),
        ("--tasks good.jsonl --model worded", "worded has no tokenizer"),
        ("--tasks good.jsonl --model broken", "broken/config.json is not JSON"),
        ("--tasks good.jsonl --model short", "short/model.safetensors is truncated or damaged"),
        ("--tasks good.jsonl --model m --env nowhere", "--env nowhere: No module named 'nowhere'"),
        ("--tasks good.jsonl --model m --env none.py", "none.py: No such file"),
        ("--tasks good.jsonl --model m --env bad.py", "--env bad.py: "),
        ("--tasks good.jsonl --model m --env exits.py", "SystemExit while it is imported: 0"),
        ("--tasks good.jsonl --model m --env json", "--env json: it has no function open_world"),
        ("--tasks good.jsonl --model m --env tools --database folder",
         "folder/tools.json is not there"),
        ("--tasks good.jsonl --model m --database none", "none"),
        ("--tasks good.jsonl --model m --database folder", "folder"),
        ("--tasks good.jsonl --model m --system-prompt none", "none: No such file"),
        ("--tasks good.jsonl --model m --system-prompt binary.jsonl", "binary.jsonl: not UTF-8"),
        ("--tasks good.jsonl --model m --out good.jsonl", "good.jsonl: "),
        ("--tasks good.jsonl --model m --out good.jsonl/x", "good.jsonl/x: Not a directory"),
        ("--tasks good.jsonl --model m --out played", "temperature was 0.1 and is 0.6"),
        ("--tasks good.jsonl --model m --out unknown", "unknown/m/settings.json is damaged"),
        ("--tasks good.jsonl --model m --out odd", "odd/m/episodes.jsonl, record 2: not an"),
        ("--tasks good.jsonl --model m --out torn", "torn/m/episodes.jsonl, line 1: not JSON"),
    ],
    "qa_eval": [
        ("", "--model needs one or more checkpoints"),
        ("--data none --model m", "none holds no question, of its own or of FlashRAG"),
        ("--data qa-empty --model m", "qa-empty holds no question, of its own or of FlashRAG"),
        ("--data qa-cut --model m", "qa-cut/questions.jsonl, line 1: not JSON"),
        ("--data qa-list --model m", "record 1: id, question and golden_answers are needed"),
        ("--data qa-twice --model m", "the id qa-twice/1 occurs twice"),
        ("--data qa-alone --model m", "corpus.jsonl is missing: see --corpus"),
        ("--model m --retriever none", "none/meta.json is missing: see --corpus"),
        ("--model m --corpus list.jsonl", "list.jsonl, line 1: it must have id and contents"),
        ("--model m --corpus empty.jsonl", "empty.jsonl"),
        ("--model m --sample 0", "--sample: '0' must be"),
        ("--model m --topk 0", "--topk: '0' must be"),
        ("--model m --rounds 0", "--rounds: '0' must be"),
        ("--model m --seed -1", "--seed: '-1' must be"),
        ("--model m --tries 0", "--tries: '0' must be"),
        ("--model m --devices gpu", "'gpu' must be a device such as"),
        ("--model m --url 127.0.0.1", "is not an address like"),
        ("--model m --system-prompt none.txt", "none.txt: No such file"),
        ("--model folder", "folder/config.json is missing"),
        ("--model a=b=c", "b=c is not a folder; is the path right?"),
        ("--model m --out good.jsonl", "good.jsonl: "),
        ("--model m --out qa-odd", "qa-odd/m/episodes.jsonl, line 1: not an episode"),
    ],
    "synth": [
        ("", "required: command"),
        ("taks --out x.jsonl", "invalid choice: 'taks'"),
        ("tasks", "required: --out"),
        ("tasks --out x.jsonl --n 0", "--n: '0' must be a whole number, 1 or more"),
        ("tasks --out x.jsonl --n -5", "--n: '-5' must be"),
        ("tasks --out x.jsonl --days 4", "'4' is not like 3,5,7"),
        ("tasks --out x.jsonl --days 3-5", "'3-5' is not like 3,5,7"),
        ("tasks --out x.jsonl --days 3,3", "'3,3' is not like 3,5,7"),
        ("tasks --out x.jsonl --levels 1:1", "'1:1' is not like 4:3:3"),
        ("tasks --out x.jsonl --levels 0:0:0", "'0:0:0' is not like 4:3:3"),
        ("tasks --out x.jsonl --workers 0", "--workers: '0' must be"),
        ("tasks --out x.jsonl --per-pair 0", "--per-pair: '0' must be"),
        ("tasks --out x.jsonl --split dev", "--split: invalid choice: 'dev'"),
        ("tasks --out x.jsonl --like big", "--like: invalid choice: 'big'"),
        ("tasks --out folder", "folder: Is a directory; this is a folder; name a file"),
        ("tasks --out good.jsonl/x.jsonl", "good.jsonl: "),
        ("tasks --out list.jsonl", "list.jsonl, record 1: not a row of this command"),
        ("tasks --out good.jsonl", "good.jsonl, record 1: not a row of this command"),
        ("tasks --out begun.jsonl --n 1 --days 7", "holds tasks that these flags do not ask for"),
        ("tasks --out numbered.jsonl", "numbered.jsonl, record 1: "),
        ("tasks --out cut.jsonl --n 1", "cut.jsonl, line 2: not JSON"),
        ("tasks --out x.jsonl --exclude none.jsonl", "none.jsonl: No such file"),
        ("tasks --out x.jsonl --database none", "none"),
        ("queries --tasks good.jsonl --out x.jsonl", "queries needs --endpoint URL=MODEL"),
        ("queries --tasks good.jsonl --out x.jsonl --endpoint a=b", "'a=b' is not like http://"),
        ("queries --tasks good.jsonl --out x.jsonl --endpoint http://a/v1", "is not like http://"),
        ("queries --tasks good.jsonl --out x.jsonl --endpoint http://a/v1=", "is not like http://"),
        ("queries --tasks good.jsonl --out x.jsonl --endpoint http://a/v1=m --key none.key",
         "none.key: No such file"),
        ("queries --tasks good.jsonl --out x.jsonl --endpoint http://a/v1=m --tries 0", "--tries"),
        ("episodes --tasks none.jsonl --out x.jsonl", "none.jsonl: No such file"),
        ("episodes --tasks lacking.jsonl --out x.jsonl", "lacking.jsonl, row 1"),
        ("episodes --tasks good.jsonl --out list.jsonl", "list.jsonl, record 1: not a row of this"),
        ("episodes --tasks good.jsonl --out x.jsonl --styles directt:1", "is not like direct:5"),
        ("episodes --tasks good.jsonl --out x.jsonl --styles direct:x", "is not like direct:5"),
        ("episodes --tasks good.jsonl --out x.jsonl --styles direct:0", "is not like direct:5"),
        ("subsets --tasks good.jsonl --out sets", "tasks after exclusion"),
        ("subsets --tasks good.jsonl --out sets --sizes 0", "'0' is not like 100,200"),
        ("tasks --out x.jsonl --month 2022-13", "--month: '2022-13' is not a month like 2022-03"),
        ("tasks --out x.jsonl --month June", "--month: 'June' is not a month like 2022-03"),
        ("subsets --tasks good.jsonl --out good.jsonl", "good.jsonl: "),
        ("convert --tasks lacking.jsonl --out x.jsonl", "lacking.jsonl, row 1"),
        ("convert --tasks good.jsonl --out good.jsonl", "good.jsonl exists; choose another --out"),
    ],
    "tiny.__main__": [
        ("", "required: command"),
        ("world", "required: --out"),
        ("world --out good.jsonl", "good.jsonl: "),
        ("drills --out x.jsonl --n 0", "--n: '0' must be"),
        ("drills --out x.jsonl --worlds 0", "--worlds: '0' must be"),
        ("drills --out folder", "folder: Is a directory"),
        ("model --out m --corpus good.jsonl --width 100", "100 must be a multiple of 64"),
        ("model --out m --corpus none.jsonl", "none.jsonl: No such file"),
        ("model --out m --corpus list.jsonl", "list.jsonl, record 1 must hold messages"),
        ("model --out m --corpus good.jsonl", "good.jsonl, record 1 must hold messages"),
        ("model --out m --corpus empty.jsonl", "empty.jsonl holds no messages"),
        ("model --out m --corpus cut.jsonl", "cut.jsonl, line 2: not JSON"),
        ("model --out good.jsonl --corpus talks.jsonl", "good.jsonl: "),
        ("model --out m --corpus talks.jsonl --phrases none", "none: No such file"),
    ],
    "look.report": [
        ("", "name the folder of a run, or an episode with --trace"),
        ("none", "none is not a folder; name the folder of a run, such as out/tiny"),
        ("folder", "folder: no log.jsonl, episodes.jsonl or rollouts/ anywhere below it; name the"),
        ("good.jsonl", "good.jsonl is not a folder"),
        ("run --curves", "no log.jsonl in run; name run/rl"),
        ("folder --curves", "no log.jsonl in folder; name the OUT of a training stage"),
        ("folder --to tensorboard", "no log.jsonl in folder"),
        ("run/rl --to paper", "--to: invalid choice: 'paper'"),
        ("listed --curves", "listed/log.jsonl is not a training log"),
        ("torn --episodes 0", "--episodes: '0' must be"),
        ("torn", "torn/m/episodes.jsonl, line 1: not JSON"),
        ("odd", "odd/m/episodes.jsonl: a line is not an episode"),
        ("run/rl --curves --out good.jsonl", "good.jsonl: "),
        ("run/rl --curves --out fullpicture", "curves.png: No space left on device; free some"),
        ("--trace none.jsonl", "none.jsonl: No such file"),
        ("--trace folder", "folder: Is a directory"),
        ("--trace dangling.jsonl", "dangling.jsonl: No such file"),
        ("--trace latin.jsonl", "latin.jsonl"),
        ("shutlog", "shutlog/log.jsonl: Is a directory"),
        ("--trace list.jsonl", "list.jsonl: no such episode"),
        ("--trace odd/m/episodes.jsonl:nobody", "odd/m/episodes.jsonl:nobody: no such episode"),
        ("--trace cut.jsonl", "cut.jsonl"),
    ],
    "recipes.axes": [
        ("--axis reward", "required: --runs"),
        ("--axis colour --runs a=b", "--axis: invalid choice: 'colour'"),
        ("--axis reward --runs sum", "--runs 'sum' is not NAME=OUT/eval/rl"),
        ("--axis reward --runs sum=none", "none of the --runs has judged episodes"),
        ("--axis reward --runs sum=torn/m", "torn/m/episodes.jsonl, line 1: not JSON"),
    ],
    "travel.leaderboard": [
        ("", "required: folder, --split"),
        ("odd/m --split dev", "--split: invalid choice: 'dev'"),
        ("none --split test", "none/episodes.jsonl is missing or empty; evaluate.py writes it"),
        ("odd/m --split test", "odd/m/episodes.jsonl, record 2: not an"),
        ("one --split test", "one/episodes.jsonl: task 'w' is not of the test split"),
    ],
    "look.memory": [
        ("dpoo", "invalid choice: 'dpoo'"),
        ("grpo --gpus 0", "--gpus: '0' must be"),
        ("grpo --gpu-memory 2", "--gpu-memory: '2' must be"),
        ("grpo --gpu-gib 0", "--gpu-gib: '0' must be"),
        ("sft --cutoff -1", "--cutoff: '-1' must be"),
        ("sft --model folder", "folder/config.json is missing"),
        ("sft --model nobody/none", "nobody/none is not a folder here, and the hub does"),
        ("sft --model shape --cutoff 99999", "has 32768 positions, --cutoff asks for 99999"),
        ("grpo --model shape --tp 5", "--tp 5 does not divide"),
        ("sft --model shape --gpu-gib 1", "this does not fit: "),
    ],
    "toolstar.retriever": [
        ("", "required: command"),
        ("index", "required: --corpus, --encoder, --out"),
        ("index --corpus none --encoder m --out i", "none: No such file"),
        ("index --corpus folder --encoder m --out i", "folder: Is a directory"),
        ("index --corpus list.jsonl --encoder m --out i", "list.jsonl, line 1: it must have"),
        ("index --corpus empty.jsonl --encoder m --out i", "empty.jsonl is empty; it must have"),
        ("index --corpus corpus.jsonl --encoder nobody/none --out i", "--encoder nobody/none is"),
        ("index --corpus corpus.jsonl --encoder m --out i --batch 0", "--batch: '0' must be"),
        ("serve --corpus none", "none is missing: see --corpus"),
        ("serve --corpus list.jsonl --port 0", "list.jsonl, line 1: it must have id and contents"),
        ("serve --retriever folder", "folder/meta.json is missing"),
        ("serve --retriever indexed --port 0", "indexed/meta.json is broken; remove indexed"),
        ("serve --port 99999", "--port: '99999' must be a whole number, 0 or more, at most 65535"),
        ("serve --topk 0", "--topk: '0' must be"),
        ("serve --devices cuda:x", "'cuda:x' must be a device such as"),
        ("serve --corpus corpus.jsonl --port {taken}", "another program listens there; choose"),
        ("serve --corpus corpus.jsonl --port 0 --host nowhere.invalid", "nowhere.invalid"),
    ],
    "format_plan": [
        ("", "required: file"),
        ("none.jsonl", "none.jsonl: No such file"),
        ("binary.jsonl", "binary.jsonl: not UTF-8 text"),
        ("list.jsonl", "list.jsonl, line 1: needs a JSON object with an answer or a text"),
        ("good.jsonl", "good.jsonl, line 1: needs a JSON object with an answer or a text"),
        ("folder", "folder: Is a directory"),
        ("texts.jsonl --reader http://a/v1", "is not like http://host:8000/v1=MODEL"),
        ("texts.jsonl --database none", "none"),
        ("texts.jsonl --reader http://a/v1=m --reader-key none.key", "none.key: No such"),
    ],
    "toolstar.tools": [
        ("", "required: command"),
        ("check --database none", "none/tools.json is not there"),
        ("check --database settings", "settings/tools.json: not JSON"),
        ("check --database unknowing", "unknown setting 'colour'"),
    ],
    "toolstar.tir": [
        ("", "required: command"),
        ("facts", "required: --out"),
        ("facts --out f --worlds 0", "--worlds: '0' must be"),
        ("facts --out f --worlds 1", "--worlds must be at least 2"),
        ("facts --out f --places 9999", "there are too few names"),
        ("facts --out f --port 70000", "--port: '70000' must be"),
        ("facts --out good.jsonl", "good.jsonl: "),
        ("episodes --tasks none.jsonl --database none --out x.jsonl", "none/tools.json is not"),
        ("episodes --tasks good.jsonl --database none --out folder", "folder: Is a directory"),
        ("drills --out x.jsonl --n 0", "--n: '0' must be"),
        ("pages --database none", "no pages/*.html in none; python -m toolstar.tir facts writes"),
        ("pages --database world --port {taken}", "another program listens there; choose another"),
    ],
    "toolstar.helpers": [
        ("", "required: command"),
        ("table", "required: [NAME=]FOLDER"),
        ("table none", "none"),
        ("table folder", "folder"),
        ("table torn/m", "torn/m/episodes.jsonl, line 1: not JSON"),
        ("table odd/m", "odd/m/episodes.jsonl, record 2: not an"),
        ("table one --out folder", "one/episodes.jsonl holds no judged episode"),
    ],
    "toolstar.scores": [
        ("", "required: --tasks, --runs, --out"),
        ("--tasks none.jsonl --runs one --out x", "none.jsonl: No such file"),
        ("--tasks empty.jsonl --runs one --out x", "empty.jsonl holds no task"),
        ("--tasks latin.jsonl --runs one --out x", "latin.jsonl, line 1: not JSON"),
        ("--tasks good.jsonl --runs none --out x", "none"),
        ("--tasks good.jsonl --runs one --out x --judge a", "'a'"),
    ],
    "toolstar.sets": [
        ("", "required: command"),
        ("read", "required: --sets, --out"),
        ("read --sets none --out x", "none"),
        ("read --sets folder --out x", "folder"),
        ("read --sets folder --out x --sample -1", "--sample: '-1' must be"),
    ],
    "toolstar.pairs": [
        ("", "required: --episodes, --out"),
        ("--episodes none.jsonl --out x", "none.jsonl"),
        ("--episodes folder --out x", "folder"),
        ("--episodes empty.jsonl --out x", "empty.jsonl holds no episode"),
        ("--episodes latin.jsonl --out x", "latin.jsonl"),
        ("--episodes list.jsonl --out x", "list.jsonl"),
        ("--episodes one/episodes.jsonl --out x --held-out 2", "--held-out: '2' must be"),
        ("--episodes one/episodes.jsonl --out x --per-question 0", "--per-question: '0' must be"),
        ("--episodes one/episodes.jsonl --out x --principles none.txt", "none.txt"),
    ],
    "toolstar.jail": [
        ("", "required: command"),
        ("run", "run needs the name of a file"),
        ("run none.py", "none.py"),
        ("check --seconds 0", "--seconds, --memory and --workers must be more than 0"),
        ("serve --port 99999", "--port 99999 must be from 0 to 65535"),
    ],
    "sft": [
        ("--batch 0", "--batch: '0' must be"),
        ("--epochs 0", "--epochs: '0' must be a number, more than 0"),
        ("--steps -1", "--steps: '-1' must be"),
        ("--lr -1", "--lr: '-1' must be"),
        ("--warmup 2", "--warmup: '2' must be"),
        ("--cutoff 0", "--cutoff: '0' must be"),
        ("--attn sdpa", "unrecognized arguments: --attn sdpa"),
        ("--lrr 1", "unrecognized arguments: --lrr 1"),
    ],
    "grpo": [
        ("--prompts 0", "--prompts: '0' must be"),
        ("--group 1.5", "--group: '1.5' must be a whole number"),
        ("--temperature 0", "--temperature: '0' must be a number, more than 0"),
        ("--clip-low 2", "--clip-low: '2' must be"),
        ("--failure-rate -0.1", "--failure-rate: '-0.1' must be"),
        ("--tp 3", "--tp 3 does not divide 1 ranks into engines"),
        ("--refill 2", "--refill replaces the groups that --drop-uniform drops"),
    ],
    "arpo": [
        ("--prompts 0", "--prompts: '0' must be"),
        ("--branch other", "--branch: invalid choice: 'other'"),
    ],
    "sandbox": [
        ("", "required: command, folder"),
        ("look folder", "invalid choice: 'look'"),
    ],
}


@pytest.fixture
def desk(tmp_path, mini, monkeypatch):
    """A folder with all kinds of wrong files, and a few right ones."""
    task, plan = witness(mini)
    episode = {"task": task, "model": "m", "messages": MESSAGES, "answer": "?", "stop": "answer",
               "calls": 0, "turns": 1, "failures": 0, "plan": plan}
    good, talk = json.dumps(task), json.dumps({"messages": MESSAGES})
    texts = {
        "good.jsonl": good, "empty.jsonl": "", "cut.jsonl": f"{good}\n{good[:40]}\n",
        "list.jsonl": "[1, 2]\n", "number.jsonl": "5\n", "lacking.jsonl": '{"id": "a-0000001"}\n',
        "types.jsonl": json.dumps(task | {"days": "soon"}),
        "wish.jsonl": json.dumps(task | {"local_constraint": ["pets"]}),
        "never.jsonl": json.dumps(task | {"days": 0}), "twice.jsonl": f"{good}\n{good}\n",
        "dates.jsonl": json.dumps(task | {"date": [5]}), "page.jsonl": "<!DOCTYPE html>",
        "back.jsonl": json.dumps(task | {"date": task["date"][::-1]}), "words.jsonl": "id,query",
        "long.jsonl": json.dumps(task | {"date": [*task["date"], "2022-03-30"]}),
        "alike.jsonl": "".join(json.dumps(task | {"id": i}) + "\n" for i in (1, "1")),
        "begun.jsonl": json.dumps(task | {"id": "a-0000001"}) + "\n",
        "rule.jsonl": json.dumps(task | {"local_constraint": {"house rule": {"pets": 1}}}),
        "numbered.jsonl": '{"id": "a-0000001", "level": "easy"}\n',
        "columns.csv": "name,age\nAnn,5\n", "bad.py": "def open_world(args:\n",
        "exits.py": "raise SystemExit(0)",
        "talks.jsonl": f"{talk}\n", "texts.jsonl": '{"text": "Day 1:"}\n',
        "corpus.jsonl": '{"id": "1", "contents": "\\"A\\"\\nb"}\n',
        "worded/config.json": '{"model_type": "qwen2"}', "broken/config.json": "{",
        "short/config.json": '{"model_type": "qwen2"}', "short/tokenizer.json": TOKENIZER,
        "qa-cut/questions.jsonl": "{\n", "qa-list/questions.jsonl": "[1]\n",
        "qa-twice/questions.jsonl": '{"id": 1, "question": "?", "golden_answers": ["a"]}\n' * 2,
        "qa-alone/questions.jsonl": '{"id": 1, "question": "?", "golden_answers": ["a"]}\n',
        "qa-odd/m/episodes.jsonl": "[]\n", "indexed/meta.json": "[]",
        "played/m/settings.json": '{"temperature": 0.1}', "unknown/m/settings.json": "{",
        "torn/m/episodes.jsonl": "{\n" + json.dumps(episode) + "\n",
        "odd/m/episodes.jsonl": json.dumps(episode) + "\n[1]\n",
        "one/episodes.jsonl": json.dumps(episode) + "\n",
        "run/rl/log.jsonl": '{"step": 1, "reward": 0.5}\n', "listed/log.jsonl": "[1]\n",
        "settings/tools.json": "{", "unknowing/tools.json": '{"colour": "red"}',
        "world/pages/a.html": "<p>a</p>",
    }
    for name in ("played", "unknown"):
        texts[f"{name}/m/episodes.jsonl"] = json.dumps(episode) + "\n"
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for name in ("folder", "qa-empty", "fullpicture", "shut/config.json", "shutlog/log.jsonl"):
        (tmp_path / name).mkdir(parents=True)
    # files that nobody can read, whoever asks: root may read what has no rights
    for name in ("dangling.jsonl", "dangling.csv"):
        (tmp_path / name).symlink_to("nowhere")
    (tmp_path / "latin.jsonl").write_bytes('{"id": "Zürich"}\n'.encode("latin-1"))
    (tmp_path / "blank.csv").touch()
    (tmp_path / "binary.jsonl").write_bytes(bytes(range(255, 0, -1)))
    (tmp_path / "binary.csv").write_bytes(b"org,dest\n\0\0\n" + bytes(range(255, 0, -1)))
    (tmp_path / "latin.csv").write_bytes("org,dest\nGenève,Zürich\n".encode("latin-1"))
    (tmp_path / "short/model.safetensors").write_bytes(b"\x10" + bytes(20))
    (tmp_path / "fullpicture/curves.png").symlink_to("/dev/full")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(program, words):
    """Call a program's main in this process -> (exit code, lines on stderr)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{program.split('.')[-1]}.py", *words])
        module = importlib.import_module(program)
        try:
            stage = program in ("sandbox", "sft", "grpo", "arpo")
            code = module.main() if stage else module.main(words)
        except SystemExit as error:
            code = error.code
    # the interpreter prints a text and exits with 1
    return (1, [code]) if isinstance(code, str) else (code or 0, [])


ROWS = [(program, *row) for program, rows in MISTAKES.items() for row in rows]


@pytest.mark.parametrize("program, words, said", ROWS,
                         ids=[f"{program} {words}" for program, words, _ in ROWS])
def test_a_mistake_is_a_line_that_names_cause_and_fix(desk, capfd, program, words, said):
    with contextlib.ExitStack() as stack:
        if "{taken}" in words:
            taken = stack.enter_context(socket.socket())
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            words = words.format(taken=taken.getsockname()[1])
        if "shape" in words:
            shape(desk)
        code, last = call(program, shlex.split(words))
    check(code, capfd.readouterr().err.splitlines() + last, said)


def check(code, lines, said, codes=(1, 2)):
    """Assert that there are at most two lines with these words, no traceback, and a failure's exit
    code."""
    lines = [line for text in lines for line in text.splitlines()]
    if lines and lines[0].startswith("usage:"):  # argparse's own, of the few flags of a lone file
        end = next(i for i, line in enumerate(lines) if ": error: " in line)
        lines = lines[end:]
    text = "\n".join(lines)
    assert said in text, text
    assert "Traceback" not in text and len(lines) <= LINES, text
    assert code in codes, f"exit code {code}"


def shape(desk):
    """A folder that says what a model is like, and is as whole as can be told without it."""
    folder = desk / "shape"
    folder.mkdir()
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 99,
             "intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 32768}
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"} | sizes))
    (folder / "tokenizer.json").write_text(TOKENIZER)
    head = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes(4))


def test_there_are_a_hundred_and_more():
    assert len(ROWS) >= 200


# ---------------------------------------------------------------------------- in their own process


def start(words, **how):
    """Start a program as a person does."""
    return subprocess.Popen([sys.executable, *shlex.split(words)], text=True, cwd=ROOT,
                            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | how)


def gone(group):
    """Whether all processes of a group end within a while."""
    for _ in range(300):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def test_a_reader_who_has_enough_is_no_error(desk):
    write_jsonl(desk / "long.jsonl", [{"task": {"id": 1}, "stop": "answer", "messages": [
        {"role": "user", "content": "word\n" * 100_000}]}])
    words = f"{sys.executable} -m look.report --trace {desk}/long.jsonl"
    done = subprocess.run(["bash", "-c", f"{words} | head -1; exit ${{PIPESTATUS[0]}}"], cwd=ROOT,
                          capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("--- user\n", "")
    assert done.returncode == 128 + signal.SIGPIPE


@pytest.mark.parametrize("words", ["-m look.report --trace {}/one/episodes.jsonl",
                                   "format_plan.py {}/texts.jsonl"])
def test_a_full_disk_is_reported_in_one_line(desk, words):
    with open("/dev/full", "w") as full:
        said = start(words.format(desk), stdout=full).communicate(timeout=600)
    check(1, said[1].splitlines(), "No space left on device; free some space")


@pytest.mark.parametrize("end, said", [(signal.SIGINT, "interrupted"),
                                       (signal.SIGTERM, "stopped by SIGTERM")])
def test_an_interrupted_synth_ends_in_one_line_and_leaves_no_process(desk, end, said):
    # a shell has its background commands ignore interrupts, and these tests may be in one
    running = start(f"synth.py tasks --n 100000 --out {desk}/new.jsonl --workers 2",
                    start_new_session=True,
                    preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    while not (desk / "new.jsonl").exists():
        time.sleep(0.1)
    workers = children(running)
    os.killpg(running.pid, end)  # as a terminal does
    _, lines = running.communicate(timeout=60)
    check(running.returncode, lines.splitlines(), f"synth.py: {said}; what was saved is kept",
          codes=(128 + end,))
    assert gone(running.pid) and all(map(gone, workers))
    assert not list(desk.glob(".new*"))
    assert runtime.read_jsonl(desk / "new.jsonl"), "every line is whole: the same command resumes"


def children(running):
    """The process ids of a program's two workers, once each leads a group of its own."""
    workers = []
    while len(workers) < 2:
        found = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
        workers = [int(pid) for pid in found if os.getpgid(int(pid)) == int(pid)]
    return workers


def test_a_killed_worker_of_synth_ends_it_in_one_line(desk):
    running = start(f"synth.py tasks --n 100000 --out {desk}/new.jsonl --workers 2")
    while not (desk / "new.jsonl").exists():
        time.sleep(0.1)
    workers = children(running)
    os.kill(workers[0], signal.SIGKILL)  # as the kernel does when memory runs out
    _, lines = running.communicate(timeout=60)
    check(running.returncode, lines.splitlines(), "a worker process was killed, perhaps")
    assert all(map(gone, workers))


def test_a_hub_name_offline_is_a_line_and_the_folder_can_be_used_for_another(desk):
    words = f"evaluate.py --tasks {desk}/good.jsonl --out {desk}/new --model a="
    done = start(f"{words}nobody/none")
    _, said = done.communicate(timeout=600)
    check(done.returncode, said.splitlines(), "nobody/none is not a folder here, and the hub does")
    assert not (desk / "new").exists(), "settings come with the first episode"


@pytest.mark.parametrize("path", sorted((ROOT / "bench").glob("*.py")), ids=lambda path: path.name)
def test_a_bench_lists_its_flags(path):
    said = start(f"{path} --help").communicate(timeout=600)
    assert "usage:" in said[0] and said[1] == ""
    done = start(f"{path} --wrong 1")
    said = done.communicate(timeout=600)[1].splitlines()
    check(done.returncode, said, path.name, codes=(2,))


# ------------------------------------------------------------------------------------------ run.sh


@pytest.mark.parametrize("words, variables, said", [
    ("8b", {}, "there is no size 8b: tiny, tool-tiny, 0.5b, 1.5b, 3b, 7b"),
    ("tiny evaluate", {}, "'evaluate' is nothing that tiny does"),
    ("tiny axis", {}, "name an axis of tiny: reward scale data algorithm noise"),
    ("tiny axis rewards", {}, "tiny has no axis rewards, but reward scale data algorithm noise"),
    ("tool-tiny axis scale", {}, "tool-tiny has no axis scale, but reward dpo helpers masking"),
    ("tiny preflight", {}, "tiny needs no preflight"),
    ("tiny", {"SEED": "one"}, "SEED=one must be a whole number"),
    ("tiny", {"GPUS": "two"}, "GPUS=two must be a whole number"),
    ("tiny", {"GPUS": "0"}, "GPUS must be 1 at least"),
    ("tiny axis noise", {"SEEDS": "0,1"}, "SEEDS='0,1' must be whole numbers, like '0 1'"),
    ("tiny axis reward", {"AXIS_STEPS": "few"}, "AXIS_STEPS=few must be a whole number"),
    ("tiny axis data", {"AXIS_TASKS": "1.5"}, "AXIS_TASKS=1.5 must be a whole number"),
    ("tiny axis reward noise", {}, "'noise' is a word too many"),
    ("tiny preflight now", {}, "'preflight now' is nothing that tiny does"),
    ("tiny", {"NNODES": "2"}, "NODE_RANK: several nodes need it, 0 on the first"),
    ("tiny", {"NNODES": "2", "NODE_RANK": "2"}, "NODE_RANK=2 less than NNODES=2: it counts"),
    ("tiny", {"NNODES": "2", "NODE_RANK": "0"}, "several nodes need MASTER_ADDR"),
    ("tiny", {"FLAGS_rl": "--lrr 1"}, "grpo.py: unrecognized arguments: --lrr 1"),
    ("tiny", {"FLAGS_eval": "--limit 0"}, "--limit: '0' must be a whole number, 1 or more"),
    ("tiny", {"FLAGS_rll": "--lr 1"}, "FLAGS_rll is of no stage that runs here: val-tasks, "),
    ("tool-tiny", {"FLAGS_facts": "--worlds x"}, " facts: argument --worlds: 'x' must be"),
    ("tiny", {"FLAGS_rl": "--lrr 1", "DRY": "1"}, "grpo.py: unrecognized arguments: --lrr 1"),
])
def test_run_sh_reports_a_mistake_before_its_first_stage(tmp_path, words, variables, said):
    for path in ROOT.iterdir():
        if path.name not in (".venv", ".git", "out", "data"):
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "run.sh").unlink()
    (tmp_path / "run.sh").write_bytes((ROOT / "run.sh").read_bytes())
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    pins = "requirements.txt" if shutil.which("nvidia-smi") else "requirements-cpu.txt"
    (tmp_path / ".venv" / "installed.txt").write_bytes((ROOT / pins).read_bytes())
    done = subprocess.run(["bash", "run.sh", *words.split()], cwd=tmp_path, capture_output=True,
                          text=True, env=os.environ | variables, timeout=120)
    check(done.returncode, done.stderr.splitlines(), said)
    assert not (tmp_path / "out").exists(), "nothing has run"


# --------------------------------------------------------------------------------- once, and alone


def test_a_play_that_is_twice_in_a_file_counts_once(desk, capsys):
    """As when a killed command's player went on beside the one that was started again."""
    words = ["--tasks", "good.jsonl", "--agent", "solver", "--out", "out"]
    evaluate.main(words)
    once, file = (desk / "out/table.md").read_text(), desk / "out/solver/episodes.jsonl"
    row = json.loads(file.read_text())
    row["score"]["success"] = 0.0
    file.write_text(file.read_text() + json.dumps(row) + "\n")
    evaluate.main(words)
    assert (desk / "out/table.md").read_text() == once
    assert "| episodes | 1 |" in once and "| success | 100.0" in once
    verdicts = [{"task": {"id": "a"}, "stop": "answer", "answer": "x", "calls": 0,
                 "score": {"em": em, "sub_em": em, "f1": em}} for em in (1.0, 0.0)]
    write_jsonl(desk / "twice", verdicts)
    assert qa_eval.read_verdicts(desk / "twice")["a"].em == 1.0


def test_players_die_with_whoever_started_them(desk):
    tasks = [json.loads((desk / "good.jsonl").read_text()) | {"id": f"w-{i}"} for i in range(9999)]
    write_jsonl(desk / "many.jsonl", tasks)
    running = start(f"evaluate.py --tasks {desk}/many.jsonl --agent solver --out {desk}/out "
                    "--processes 2", start_new_session=True)
    file = desk / "out/solver/episodes.jsonl"
    while not file.exists():
        assert running.poll() is None, running.communicate()
        time.sleep(0.1)
    running.kill()
    running.communicate(timeout=60)
    assert gone(running.pid)
    size = file.stat().st_size
    time.sleep(0.5)
    assert file.stat().st_size == size


def test_a_second_command_on_a_folder_is_refused(desk):
    runtime.lock_folder("out")
    done = start(f"evaluate.py --tasks {desk}/good.jsonl --agent solver --out {desk}/out")
    _, said = done.communicate(timeout=600)
    check(done.returncode, said.splitlines(), f"another run (pid {os.getpid()} on ")


def test_a_bar_in_a_log_is_a_few_lines(capfd):
    for _ in runtime.progress(range(100_000), "play", 100_000):
        pass
    assert capfd.readouterr().err == "", "nothing of what takes a moment"
    with runtime.progress(None, "play", 3) as bar:
        bar.start_t -= 100  # it began long ago
        bar.last_print_t = bar.start_t
        bar.update(3)
    said = capfd.readouterr().err
    assert "\r" not in said and "play: 100%" in said and said.endswith("\n")


def test_settings_come_with_the_first_episode_and_whole(desk):
    folder = evaluate.open_folder("new", "m", {"model": "typo"})
    assert not folder.exists(), "a wrong path, corrected later, was never played"
    folder = evaluate.open_folder("new", "m", {"model": "x"})
    evaluate.keep_play(folder, {"model": "x"}, {"task": {"id": "a"}})
    assert json.loads((folder / "settings.json").read_text()) == {"model": "x"}
    with pytest.raises(ValueError, match="model was 'x' and is 'y'"):
        evaluate.open_folder("new", "m", {"model": "y"})
