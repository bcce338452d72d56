"""
Rewrite an episode's messages as the helpers rollback and refine ask for (helpers.py).

    (1) rolled_back   where Tool-Star's backtracer cuts a text [1, its code]
    (2) rewrite       change the messages; the prompt and the last result stay as they are
    (3) tokens_again  the token ids of the changed messages. Nowhere else is a text of an episode
                      tokenised a second time
[1] Tool-Star, arXiv:2505.16410

Reads, writes   nothing
"""


def rolled_back(text):
    """The number of characters of a text that the backtracer keeps [1, its code].

    It drops the last <python> and the sentence or line before it; without a <python> it drops
    nothing. A </think> directly before the tag belongs to that sentence.
    """
    start = text.rfind("<python>")
    if start < 0:
        return len(text)
    before = text[:start].removesuffix("</think>").rstrip()
    sentence = before.rfind(". ")
    return max(before.rfind("\n") + 1, sentence + 2 if sentence >= 0 else 0)


def rewrite(episode):
    """Change an episode's messages by episode.rewritten, before the observation is added.

    Returns the helper's name, "rollback" or "refine".
    """
    messages, item = episode.messages, episode.rewritten
    last, calls = messages.pop()["content"], episode.sandbox.calls
    if item["helper"] == "rollback":
        # cut only the last reply, never the prompt or a result
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
        each["turn"] = 1  # the one reply that is left
    return "refine"


def tokens_again(episode, ids, template):
    """The token ids of a rewritten episode. ids: those before; the helper's item in the record gets
    the number of ids that were dropped."""
    messages, item, episode.rewritten = episode.messages, episode.rewritten, None
    if item["helper"] == "refine":  # the last message does not count, it is the new result
        item["dropped"] = max(0, len(ids) - len(ids_of(messages[:-1], template)))
        return ids_of(messages, template)
    # the ids before the reply stay as they are
    kept = messages[-1]["content"] if messages[-1]["role"] == "assistant" else ""
    again = ids[:episode.prompt_tokens] + encode(kept[episode.begun:], template)
    if len(kept) < episode.begun:  # the cut is before the reply, in text that a rollback had kept
        again = ids_of(messages, template)
    item["dropped"] = max(0, len(ids) - len(again))
    return again


def encode(text, template):
    """Token ids of a text by the policy or a helper, with its special tokens escaped."""
    return template.encode(template.forged.sub("‹", text))


def ids_of(messages, template):
    """The token ids of messages, up to where the model speaks next.

    They are the ids that play has produced, unless a tokenizer has two ways to encode a text.
    """
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
