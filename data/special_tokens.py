"""The added tokens of a tokenizer, special ones, BOS and EOS among them, as the JSON files of its folder list them."""

from tokenizers import AddedToken, Tokenizer

from errors import note

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FLAGS = ("special", "lstrip", "rstrip", "single_word")
# Those of conversations, in tokenizers that are trained here; no text gives them.
TURNS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")


def add_tokens(tokenizer: Tokenizer, config: dict, old_names: dict, old_ids: dict) -> tuple[dict, dict[str, str]]:
    """Add the tokens that only tokenizer_config.json has or, in old folders, special_tokens_map.json (`old_names`) and
    added_tokens.json (`old_ids`), with the next free ids, as in transformers. Returns the configuration with all added
    tokens, and the texts of those that have a name, such as eos_token."""
    before = added_tokens(tokenizer)
    listed = config.get("added_tokens_decoder")
    if listed is not None:  # no old folder
        old_names, old_ids = {}, {}
    old_tokens = {i: {"content": text} for text, i in old_ids.items()}
    tokens = by_text(before) | by_text(old_tokens | before) | by_text(listed or {})
    named, unnamed = special_tokens(config, old_names)
    for token in [*named.values(), *unnamed]:
        text = token["content"]
        tokens[text] = token | tokens.get(text, {}) | {"special": True}
    normalized = [text for text, token in tokens.items() if token.get("normalized") and not token.get("special")]
    if normalized and tokenizer.normalizer is not None:
        note(f"{', '.join(normalized)}: found before a text is normalized; ids beside may differ from transformers'")
    # Not normalized: text that a normalizer turns into a token, such as the same in capitals, is no token.
    flags = {text: {flag: token.get(flag, False) for flag in FLAGS} for text, token in tokens.items()}
    tokenizer.add_tokens([AddedToken(text, normalized=False, **flags[text]) for text in tokens])

    after = added_tokens(tokenizer)
    texts = {name: token["content"] for name, token in named.items()}
    if after != before or (listed is not None and len(listed) < len(after)):
        config = config | texts | {"added_tokens_decoder": after}
    return config, texts


def added_tokens(tokenizer: Tokenizer) -> dict[int, dict]:
    """The text and the flags of each added token, by its id."""
    return {i: token.__getstate__() for i, token in tokenizer.get_added_tokens_decoder().items()}


def by_text(tokens: dict[int | str, dict]) -> dict[str, dict]:
    """Tokens by their texts, in the order of their ids."""
    return {tokens[i]["content"]: tokens[i] for i in sorted(tokens, key=int)}


def special_tokens(config: dict, old_names: dict) -> tuple[dict[str, dict], list[dict]]:
    """The special tokens with a name, such as eos_token, by their names; and those without one."""
    fields = dict.fromkeys(NAMED) | config | old_names  # in the order in which transformers adds them
    named = {name: token for name, token in fields.items() if name.endswith("_token")}
    unnamed = config.get("extra_special_tokens") or {}
    if isinstance(unnamed, dict):  # these have names; in transformers 5 it is a list of those without one
        named |= unnamed
        unnamed = (old_names | config).get("additional_special_tokens") or []
    named = {name: as_dict(token) for name, token in named.items() if as_dict(token)}
    return named, [as_dict(token) for token in unnamed if as_dict(token)]


def as_dict(token: object) -> dict:
    """A token that may be given as its text; empty if it is none."""
    if isinstance(token, str):
        return {"content": token}
    return token if isinstance(token, dict) else {}


def find_bos(tokenizer: Tokenizer, config: dict, names: dict[str, str]) -> int | None:
    """The id of BOS: from the configuration or, if it does not say, what the post-processor puts before a text."""
    if "add_bos_token" not in config:
        plain, full = (tokenizer.encode("a", add_special_tokens=add).ids for add in (False, True))
        return full[0] if full[:1] != plain[:1] else None
    has_bos = config["add_bos_token"] and "bos_token" in names
    return tokenizer.token_to_id(names["bos_token"]) if has_bos else None


def find_eos(tokenizer: Tokenizer, names: dict[str, str], generation_config: dict) -> int:
    """The id of EOS: from the configuration, or the first of generation_config.json."""
    eos_id = tokenizer.token_to_id(names.get("eos_token", ""))
    if eos_id is None:
        ids = generation_config.get("eos_token_id")
        eos_id = ids[0] if isinstance(ids, list) else ids
    if eos_id is None:
        raise ValueError('it names no token that ends a text, as {"eos_token": "</s>"} does')
    return eos_id
