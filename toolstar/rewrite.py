"""
What helpers do to an episode's messages: back to where a mistake began, or shorter (helpers.py).

    (1) rolled_back   where Tool-Star's backtracer cuts a text [1, its code]
    (2) rewrite       an episode's messages after a rollback or a refining; the prompt is never
                      touched, nor what a tool said last
    (3) tokens_again  the ids of what was rewritten. Only here is a text tokenised twice
[1] Tool-Star, arXiv:2505.16410

Reads, writes   nothing
"""


def rolled_back(text):
    """How many characters of a text the backtracer keeps: what stands before the last sentence or
    line that leads up to the last <python> [1, its code]; all, if there is none.

    A </think> is stepped over only where it touches the tag, and may be a sentence's whole rest.
    """
    start = text.rfind("<python>")
    if start < 0:
        return len(text)
    before = text[:start].removesuffix("</think>").rstrip()
    sentence = before.rfind(". ")
    return max(before.rfind("\n") + 1, sentence + 2 if sentence >= 0 else 0)


def rewrite(episode):
    """Change an episode's messages as a helper has it, before the observation comes -> its name."""
    messages, item = episode.messages, episode.rewritten
    last, calls = messages.pop()["content"], episode.sandbox.calls
    if item["helper"] == "rollback":
        # only what it said last: never into the prompt, and never into a result
        kept = last[:rolled_back(last)] if episode.tags else ""
        if kept:
            messages.append({"role": "assistant", "content": kept})
        calls[-1]["dropped"] = True
        return "rollback"
    text = item.pop("text")
    folded = (f"<think>{text}</think>\n{last}" if episode.tags else
              last.replace("<think>", f"<think>{text}\n", 1))
    messages[2:] = [{"role": "assistant", "content": folded}]
    for call in calls[:-1]:
        call["dropped"] = True
    for each in episode.helped:
        each["turn"] = 1  # the only reply that is left
    return "refine"


def tokens_again(episode, ids, template):
    """The ids of an episode that was rewritten; what is gone of `ids` is put down."""
    messages, item, episode.rewritten = episode.messages, episode.rewritten, None
    if item["helper"] == "refine":  # the last message is new
        item["dropped"] = max(0, len(ids) - len(ids_of(messages[:-1], template)))
        return ids_of(messages, template)
    # the tokens from which the reply went on stay as they were said
    kept = messages[-1]["content"] if messages[-1]["role"] == "assistant" else ""
    again = ids[:episode.asked] + encode(kept[episode.begun:], template)
    if len(kept) < episode.begun:  # it went on from what a rollback had kept, and that is cut, too
        again = ids_of(messages, template)
    item["dropped"] = max(0, len(ids) - len(again))
    return again


def encode(text, template):
    """Ids of what a policy or a helper said, in which no special token is one."""
    return template.encode(template.forged.sub("‹", text))


def ids_of(messages, template):
    """The ids of messages, up to where the model speaks. Said once more, they are what play makes
    of them token by token, but where a tokenizer has two ways to say a text."""
    ids = template.prompt(messages[:2])
    for i, message in enumerate(messages[2:], 3):
        if message["role"] == "assistant":
            ids += encode(message["content"], template)
        else:
            ids += template.between(message, closed=messages[i - 2]["role"] != "assistant")
    return ids


def replies(messages):
    return sum(message["role"] == "assistant" for message in messages)


def talk_of(messages):
    return "\n".join(message["content"].strip() for message in messages)
