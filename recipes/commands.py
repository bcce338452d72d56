"""
OUT/run.json: the command that made each output of a recipe. run.sh asks here before it skips a
stage, so that it never shows the results of an old run as those of new settings.

    python -m recipes.commands keep  OUT/run.json OUTPUT COMMAND...
    python -m recipes.commands check OUT/run.json OUTPUT COMMAND...   exit 1 if another one made it
"""
import json
import sys
from pathlib import Path

import runtime

FREE = {"--gpu-memory", "--workers", "--save-every", "--resume"}  # these change no result


def given(words):
    """{flag: its values} of a command, without the words before the script (torchrun's)."""
    found, flag = {}, ""
    start = next((i for i, word in enumerate(words) if word.endswith(".py")), 0)
    for word in words[start:]:
        if word.startswith("--"):
            flag, found[word] = word, ""  # if a flag is given twice, the last one counts
        else:
            found[flag] = f"{found.get(flag, '')} {word}".strip()
    return {flag: values for flag, values in found.items() if flag not in FREE}


def difference(before, now):
    """How two commands differ, in a few words; "" if they differ only in flags of FREE."""
    old, new = given(before), given(now)
    changes = [f"{flag or 'the program'} was {old.get(flag, 'not given')}, is "
               f"{new.get(flag, 'not given')}" for flag in {**old, **new}
               if old.get(flag) != new.get(flag)]
    return "; ".join(changes[:3]) + f" and {len(changes) - 3} more" * (len(changes) > 3)


def main(task, file, output, *words):
    file = Path(file)
    commands = runtime.read_json(file) if file.exists() else {}
    if task == "keep":
        commands[output] = words
        runtime.write_text(file, json.dumps(commands, indent=1) + "\n")
    changed = task == "check" and output in commands and difference(commands[output], words)
    if changed:
        sys.exit(f"run.sh: {output} was made by another command: {changed}. Use another OUT, or "
                 "remove this output to make it again")


if __name__ == "__main__":
    runtime.run("recipes.commands", main, *sys.argv[1:])
