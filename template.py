"""
How a model frames a conversation: read off its own chat template, by looking at what it renders.

    <|im_start|>system\n S <|im_end|>\n<|im_start|>user\n Q <|im_end|>\n<|im_start|>assistant\n R
    <|im_end|> \n<|im_start|>user\n O <|im_end|>\n<|im_start|>assistant\n R ...
       end           before O            after O

Training and play append tokens and never render again, so a template has to put the same text
around every observation and to leave what was said before as it was. One that does otherwise is
refused with the reason: a policy would be trained on a form in which nobody plays.
"""
import re

from whole import check_model

SYSTEM, QUERY, REPLIES = "probe of a system turn", "probe of a query", ("first probe", "next probe")
THOUGHT, ACT = "probe of a thought", "probe of an act"
OBSERVATIONS = tuple(f"<tool_response>\n{n} probe of a tool</tool_response>" for n in (1, 2))
OPENED = "<think>\n"  # some templates open the reply's thought; ours begin with it themselves


class Template:
    """A tokenizer, and its chat template taken apart at the borders of the turns.

    end: id that replies are taught to end with; ends: all ids that end one, the model's too.
    """

    def __init__(self, tokenizer, path, stops=()):
        self.tokenizer, self.path = tokenizer, path
        if tokenizer.eos_token_id is None:
            self.refuse("its tokenizer has no end token (eos_token)")
        if not tokenizer.chat_template:
            self.refuse("its tokenizer has no chat template")
        talk = [("system", SYSTEM), ("user", QUERY), ("assistant", REPLIES[0]),
                ("user", OBSERVATIONS[0]), ("assistant", REPLIES[1]), ("user", OBSERVATIONS[1])]
        whole = self.render(talk)
        cuts = []
        for _, content in talk:
            if whole.count(content) != 1:
                self.refuse(f"its chat template renders {content!r} {whole.count(content)} times")
            cuts.append(whole.index(content))
        if cuts != sorted(cuts):
            self.refuse("its chat template changes the order of the turns")
        pieces = [whole[start + len(content):stop] for start, stop, (_, content)
                  in zip(cuts, [*cuts[1:], None], talk, strict=True)]
        _, opening, before, after, again, last = pieces
        if before != again or len({opening, after, last.removesuffix(OPENED)}) > 1:
            self.refuse("its chat template frames one turn unlike another")
        if self.render(talk[:2]).removesuffix(OPENED) != whole[:cuts[2]]:
            self.refuse("its chat template changes earlier turns when new ones come")
        thought = "assistant", f"<think>{THOUGHT}</think>\n{ACT}"
        thinks = self.render([*talk[:2], thought, talk[3]])
        if not 0 < thinks.find(THOUGHT) < thinks.find(ACT):
            self.refuse("its chat template strips thoughts from earlier replies")
        marks = {mark.content: id for id, mark in tokenizer.added_tokens_decoder.items()}
        found = max((mark for mark in marks if before.startswith(mark)), key=len, default=None)
        if found is None:
            self.refuse(f"its chat template ends a reply with {before[:20]!r}, not with a token")
        self.end, self.end_text = marks[found], found
        # what tells turns apart, in an observation: no page or program may end a turn or open one
        special = [mark.content for mark in tokenizer.added_tokens_decoder.values() if mark.special]
        literals = "|".join(re.escape(text[1:]) for text in {found, *special} if text[0] == "<")
        self.forged = re.compile(f"<(?={literals or '$^'})")
        self.before, self.after = before.removeprefix(found), after
        self.ends = {self.end, tokenizer.eos_token_id, *stops}

    def refuse(self, why):
        raise ValueError(f"{self.path}: {why}; use a copy of the folder with a chat_template.jinja "
                         "that can be cut into turns, ChatML's for instance")

    def render(self, talk):
        return self.text([{"role": role, "content": content} for role, content in talk])

    def text(self, messages):
        """The conversation as text, up to where the model speaks."""
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False,
                                                      add_generation_prompt=True)
        except TemplateError as error:
            self.refuse(f"its chat template refuses a {messages[0]['role']} turn ({error})")

    def encode(self, text):
        """Ids of a text as it stands: nothing is put before or behind it."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def prompt(self, messages):
        """Ids of the turns before the first reply, up to where the model speaks. A last message of
        the assistant is one that it goes on with."""
        begun = messages[-1]["content"] if messages[-1]["role"] == "assistant" else ""
        turns = messages[:-1] if begun else messages
        return self.encode(self.text(turns).removesuffix(OPENED)) + self.encode(begun)

    def between(self, message, closed=True):
        """Ids from the end of a reply to where the next one begins, a message between them.

        closed: the reply brought its own end token; where it did not, the ids begin with one.
        """
        content = self.forged.sub("‹", message["content"])
        if message["role"] == "result":  # stands within a reply, which goes on behind it
            return self.encode(content)
        end = "" if closed else self.end_text
        return self.encode(f"{end}{self.before}{content}{self.after}")

    def reply(self, ids):
        """(text, closed) of the ids that a model said: without its end token, if it has one."""
        closed = bool(ids) and ids[-1] in self.ends
        return self.tokenizer.decode(ids[:-1] if closed else ids), closed


def is_talk(messages):
    """Whether all have a role and a text, and from the first reply on every second is a reply."""
    roles = [message.get("role") for message in messages
             if isinstance(message, dict) and isinstance(message.get("content"), str)]
    first = roles.index("assistant") if "assistant" in roles else len(roles)
    known = [("system", "user")] * first + [("assistant",), ("user", "result")] * len(roles)
    return len(roles) == len(messages) and all(map(tuple.__contains__, known, roles))


def load_template(path):
    """The Template of a folder or hub name; ValueError says what keeps it from being used."""
    from transformers import AutoTokenizer, GenerationConfig

    check_model(path)
    try:
        stops = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # a model need not say how it is sampled
        stops = None
    stops = stops if isinstance(stops, list) else [] if stops is None else [stops]
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except OSError:
        raise ValueError(f"{path} is no folder here, and the hub does not give it: name a folder, "
                         f"or fetch it where it can be had (hf download {path})") from None
    return Template(tokenizer, path, stops)


def check_weights(lm, template):
    """Refuse a loaded model that cannot take its tokenizer's ids, or whose weights are broken."""
    rows, tokens = lm.get_input_embeddings().num_embeddings, len(template.tokenizer)
    if tokens > rows:
        raise ValueError(f"{template.path}: its tokenizer has {tokens} tokens, its embedding "
                         f"{rows} rows: take the tokenizer the model was saved with")
    odd = [name for name in ("logits_scaling", "logit_scale", "final_logit_softcapping")
           if getattr(lm.config, name, None) not in (None, 1)]
    if odd or getattr(lm.get_output_embeddings(), "bias", None) is not None:
        raise ValueError(f"{template.path}: its logits are more than a product with its head "
                         f"({', '.join(odd) or 'bias'}), which is all that the stages compute")
    for name, weight in lm.named_parameters():
        if not weight.isfinite().all():
            raise ValueError(f"{template.path}: {name} holds values that are no numbers; copy or "
                             "download it again")
